"""Packed documents and cached decode against the plain forward pass of one document."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import sharding
from jaxllm.infer import empty_cache
from jaxllm.models import Segments, functional
from tests import quick, tiny
from tests.proofs.harness import proof


def logits_alone(model: Any, params: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits of one document in a row of its own."""
    positions = jnp.arange(len(tokens), dtype=jnp.int32)[None]
    hidden, _ = quick.jit(model.forward)(params, jnp.asarray(tokens)[None], positions, Segments())
    return np.asarray(model.head(params, hidden)[0])


@st.composite
def packings(draw: st.DrawFn) -> dict[str, Any]:
    """An architecture and a row of documents, perhaps followed by padding."""
    return {
        "model": draw(tiny.architectures()),
        "documents": draw(st.lists(st.integers(1, 9), min_size=1, max_size=5)),
        "padding": draw(st.integers(0, 4)),
        "seed": draw(st.integers(0, 2**16)),
    }


@proof("first_run", count=50, sample=5, chunk=10, float64=True, strategy=packings(), bound=1e-10)
def packed_equals_alone(example: dict[str, Any]) -> float:
    """A packed row gives each document the logits it has in a row of its own."""
    config = tiny.decoder(**example["model"])
    model = functional(config)
    params = jax.tree.map(jnp.asarray, quick.params(config, example["seed"]))
    rng = np.random.default_rng(example["seed"])
    documents = [rng.integers(0, config.vocab_size, n, dtype=np.int32) for n in example["documents"]]
    pad = np.zeros(example["padding"], np.int32)
    tokens = np.concatenate([*documents, rng.integers(0, config.vocab_size, len(pad), dtype=np.int32)])
    segments = np.concatenate([*(np.full(len(d), i + 1, np.int32) for i, d in enumerate(documents)), pad])
    positions = np.concatenate([*(np.arange(len(d), dtype=np.int32) for d in documents), pad])
    row, ids, places = (jnp.asarray(x)[None] for x in (tokens, segments, positions))
    hidden, _ = quick.jit(model.forward)(params, row, places, Segments(ids))
    packed = np.asarray(model.head(params, hidden)[0])
    assert np.isfinite(packed).all()
    alone = np.concatenate([logits_alone(model, params, d) for d in documents])
    return tiny.leaf_error(packed[: len(alone)], alone)


@st.composite
def decodings(draw: st.DrawFn) -> dict[str, Any]:
    """An architecture, a mesh it fits, and prompts of different lengths in chunks."""
    mesh = draw(st.sampled_from(["data=1", "data=1", "tensor=2", "data=2,tensor=2", "fsdp=2"]))
    sizes = dict(sharding.MeshSpec.parse(mesh).axes)
    rows = sizes.get("data", 1) * sizes.get("fsdp", 1) * draw(st.integers(1, 2))
    return {
        "mesh": mesh,
        "model": draw(tiny.architectures(sizes.get("tensor", 1), sizes.get("fsdp", 1))),
        "prompts": draw(st.lists(st.integers(1, 8), min_size=rows, max_size=rows)),
        "pieces": draw(st.lists(st.integers(1, 4), min_size=1, max_size=5)),
        "spare": draw(st.integers(0, 9)),
        "seed": draw(st.integers(0, 2**16)),
    }


@proof("first_run", count=50, sample=4, chunk=5, float64=True, strategy=decodings(), bound=1e-10)
def cached_equals_full(example: dict[str, Any]) -> float:
    """Prefill of padded prompts, then decode in chunks, gives the full forward's logits at every position."""
    config = tiny.decoder(**example["model"])
    model = functional(config)
    lengths = np.array(example["prompts"])
    rows, pieces = len(lengths), example["pieces"]
    rng = np.random.default_rng(example["seed"])
    texts = rng.integers(0, config.vocab_size, (rows, lengths.max() + sum(pieces)), dtype=np.int32)
    spec = sharding.MeshSpec.parse(example["mesh"])
    mesh = spec.build(jax.devices()[: np.prod([size for _, size in spec.axes])])
    abstract = sharding.abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
    got: list[list[np.ndarray]] = [[] for _ in range(rows)]
    with jax.set_mesh(mesh):
        params = jax.device_put(quick.params(config, example["seed"]), sharding.shardings_of(abstract))
        token_sharding = jax.NamedSharding(mesh, model.rules.spec(("batch", "seq"), mesh))

        @quick.jit
        def step(params: Any, tokens: Any, positions: Any, cache: Any) -> Any:
            hidden, cache = model.forward(params, tokens, positions, cache)
            return model.head(params, hidden), cache

        make = quick.jit(lambda: empty_cache(config, rows, texts.shape[1] + example["spare"]))
        cache = make()
        begin = np.zeros(rows, np.int32)
        for count in (int(lengths.max()), *pieces):
            positions = begin[:, None] + np.arange(count, dtype=np.int32)
            tokens = np.take_along_axis(texts, np.minimum(positions, texts.shape[1] - 1), axis=1)
            placed = jax.device_put((tokens, positions), token_sharding)
            logits, cache = step(params, *placed, cache)
            host = np.asarray(logits)
            # The first piece is the prompt, padded on the right: a row's own length is what counts.
            real = lengths if not begin.any() and not got[0] else np.full(rows, count)
            for row in range(rows):
                got[row].append(host[row, : real[row]])
            begin = (begin + real).astype(np.int32)
    whole = jax.tree.map(jnp.asarray, jax.device_get(params))
    errors = []
    for row in range(rows):
        made = np.concatenate(got[row])
        errors.append(tiny.leaf_error(made, logits_alone(model, whole, texts[row, : len(made)])))
    return max(errors)
