"""Random models of every family, made by transformers: equal outputs here, and equal files back."""

from __future__ import annotations

import functools
import itertools
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sharding
from jaxllm.data import Batch
from jaxllm.hub import export_hf, load_hf
from jaxllm.hub.huggingface import load_tensors
from jaxllm.infer import empty_cache
from jaxllm.models import MoeConfig, Segments, functional
from jaxllm.models.moe.router import Routing
from jaxllm.train import value_and_grad
from tests import quick
from tests.hub import peers
from tests.hub.test_huggingface import same_files
from tests.proofs.harness import proof

GAP = 1e-4
"""Between the reference's best two logits of every position; rounding may swap closer ones."""
ROUNDING = 3e-6
MARGIN = 2e-5
"""Of routers, between the last expert chosen and the first that is not; float32 is wrong by some 1e-6 of it."""
ROWS = 20


def positions_of(tokens: np.ndarray) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)


def full(config: Any, params: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits of the whole text at once."""
    model = functional(config)
    positions = positions_of(tokens)
    run = quick.jit(lambda p, t: model.head(p, model.forward(p, t, positions, Segments())[0]))
    return np.asarray(run(params, jnp.asarray(tokens)))


def cached(config: Any, params: Any, tokens: np.ndarray, prefill: tuple[int, ...] = (9,)) -> np.ndarray:
    """Logits of prefills that end at these places and of one token after the other, against a cache."""
    model = functional(config)
    step = quick.jit(lambda p, t, at, cache: (lambda h: (model.head(p, h[0]), h[1]))(model.forward(p, t, at, cache)))
    cache, parts, at = empty_cache(config, *tokens.shape), [], positions_of(tokens)
    cuts = [0, *prefill, *range(prefill[-1] + 1, tokens.shape[1] + 1)]
    for begin, end in itertools.pairwise(cuts):
        logits, cache = step(params, jnp.asarray(tokens[:, begin:end]), at[:, begin:end], cache)
        parts.append(np.asarray(logits))
    return np.concatenate(parts, axis=1)


def packed(config: Any, params: Any, documents: list[np.ndarray]) -> list[np.ndarray]:
    """Logits of documents packed in one row, padding at its end."""
    model = functional(config)
    tokens = np.concatenate([*documents, np.zeros(3, np.int32)])[None]
    at = np.concatenate([*(np.arange(len(d)) for d in documents), np.zeros(3)]).astype(np.int32)[None]
    segments = np.concatenate([*(np.full(len(d), i + 1) for i, d in enumerate(documents)), np.zeros(3)])
    segments = segments.astype(np.int32)[None]
    run = quick.jit(lambda p, t, at, ids: model.head(p, model.forward(p, t, at, Segments(ids))[0]))
    logits = np.asarray(run(params, *map(jnp.asarray, (tokens, at, segments))))[0]
    ends = np.cumsum([len(d) for d in documents])
    return np.split(logits, ends)[:-1]


def error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference, by the largest logit."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    return float(np.abs(got - want).max() / np.abs(want).max())


def gradient_error(got: Any, want: Any) -> float:
    """The largest ``||got - want|| / ||want||`` of a leaf.

    A key's bias without rotation moves all scores of a query alike: its gradient is zero but for rounding. Such leaves
    are measured by a millionth of the whole gradient's norm.
    """
    norms = [float(np.linalg.norm(x)) for x in jax.tree.leaves(want)]
    least = 1e-6 * float(np.linalg.norm(norms))
    apart = [float(np.linalg.norm(x)) for x in jax.tree.leaves(jax.tree.map(lambda a, b: a - b, got, want))]
    return max(a / max(n, least) for a, n in zip(apart, norms, strict=True))


def equal_in_float64(name: str, seed: int) -> dict[str, float]:
    """Full forward, prefill and cached decode, packing with padding, gradients of the loss by leaf."""
    peer = peers.peer(name, seed)
    tokens, short = peer.tokens, peer.tokens[:, : peers.SHORT]
    documents = [tokens[0, :9], tokens[1, : peers.SHORT], tokens[0, 5:6]]
    with peers.float64():
        model = peer.wide()
        want, want_short = peers.logits_of(model, tokens), peers.logits_of(model, short)
        alone = [peers.logits_of(model, d[None])[0] for d in documents]
        gradients = peers.gradients_of(model, tokens)
    assert want.dtype == np.float64
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_hf(peer.save(Path(folder) / "model"), dtype="float64")
    config, params = loaded.config, loaded.params
    targets = np.concatenate([tokens[:, 1:], np.full_like(tokens[:, :1], -1)], axis=1)
    batch = Batch(tokens, targets, np.ones_like(tokens), np.asarray(positions_of(tokens)))
    with quick.mesh_of(params):
        _, ours = quick.jit(value_and_grad(functional(config)))(params, jax.tree.map(jnp.asarray, batch))
    theirs = load_tensors(loaded.source, gradients, dtype="float64").params
    rows = packed(config, params, documents)
    return {
        "forward": error(full(config, params, tokens), want),
        "decode": error(cached(config, params, short), want_short),
        "packed": max(error(got, one) for got, one in zip(rows, alone, strict=True)),
        "gradient": gradient_error(ours, theirs),
    }


def well_conditioned(name: str, seed: int) -> tuple[peers.Peer, np.ndarray]:
    """Random model and texts with float32-stable logits: transformers' own are within ROUNDING of its float64 ones.

    And no router and no choice of the best token is so undecided that rounding could change it, here or there.

    Others would compare the rounding of two programs. Whole draws are left out, not positions: with a window of one
    token the logits depend on that token alone, and a near tie is at every place where it stands.
    """
    for attempt in range(seed, seed + 100_000, 1000):  # the next case may have the next seed
        peer = peers.peer(name, attempt)
        shape = ROWS, peers.LENGTH
        tokens = np.random.default_rng(attempt).integers(1, peer.model.config.vocab_size, shape, np.int32)
        with peers.float64():
            wide = peer.wide()
            exact = peers.logits_of(wide, tokens)
            margin = peers.chosen_of(wide, tokens).margin if name in peers.MIXTURES else np.inf
        best = np.sort(exact, axis=-1)
        decided = margin > MARGIN and (best[..., -1] - best[..., -2]).min() > GAP
        if decided and error(peer.logits(tokens).astype(np.float64), exact) < ROUNDING:
            return peer, tokens
    raise AssertionError(f"100 ill-conditioned draws of {name} in a row from seed {seed}")


def equal_in_float32(name: str, seed: int) -> dict[str, float]:
    """The logits as people compute them; the likeliest token equal everywhere."""
    peer, tokens = well_conditioned(name, seed)
    short = tokens[:2, : peers.SHORT]
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_hf(peer.save(Path(folder) / "model"))
    want, want_short = peer.logits(tokens), peer.logits(short)
    got = full(loaded.config, loaded.params, tokens)
    for ours, theirs in zip(*chosen(loaded.config, loaded.params, peer.model, tokens), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(got.argmax(-1), want.argmax(-1))
    return {
        "forward": error(got, want),
        "decode": error(cached(loaded.config, loaded.params, short), want_short),
    }


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["segment_ids", "ring", "experts"],
    meta_fields=["layout", "ring_sizes"],
)
@dataclass(frozen=True)
class Listening(Segments):
    """Keeps what each layer's router chose; of fewer than there is room for, -1 behind."""

    experts: Any = None

    def record_routing(self, layer: jax.Array, routing: Routing) -> Listening:
        rest = self.experts.shape[-1] - routing.experts.shape[-1]
        padded = jnp.pad(routing.experts, ((0, 0), (0, 0), (0, rest)), constant_values=-1)
        return replace(self, experts=self.experts.at[layer].set(padded))

    def attend(self, *args: Any, **more: Any) -> tuple[jax.Array, Listening]:
        return super().attend(*args, **more)[0], self


def chosen(config: Any, params: Any, theirs: Any, tokens: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Experts of each token in each mixture layer, by number: jaxllm's and transformers'."""
    mixtures = {i: block.mlp.top_k for i, block in enumerate(config.blocks) if isinstance(block.mlp, MoeConfig)}
    if not mixtures:
        return [], []
    model, most = functional(config), max(mixtures.values())
    empty = jnp.full((config.layers, *tokens.shape, most), -1, jnp.int32)
    run = quick.jit(lambda p, t: model.forward(p, t, positions_of(tokens), Listening(experts=empty))[1].experts)
    heard = np.asarray(run(params, jnp.asarray(tokens)))
    ours = [np.sort(heard[layer, ..., :count], axis=-1) for layer, count in mixtures.items()]
    return ours, peers.chosen_of(theirs, tokens).experts


def round_trip(name: str, seed: int) -> None:
    """In and out, on one device or split over several: the same bytes and fields, and transformers reads them."""
    rng = np.random.default_rng(seed)
    peer = peers.peer(name, seed)
    with tempfile.TemporaryDirectory() as folder:
        before, after = peer.save(Path(folder) / "before"), Path(folder) / "after"
        loaded = load_hf(before, mesh=_some_mesh(rng, peer.config))
        export_hf(loaded, after, shard_bytes=int(rng.choice([3000, 10**6])))
        same_files(before, after)
        np.testing.assert_array_equal(peers.logits_of(peers.opened(after), peer.tokens), peer.logits())


SPLIT = {
    "tensor": (
        "num_attention_heads",
        "num_key_value_heads",
        "n_head",
        "intermediate_size",
        "moe_intermediate_size",
        "n_inner",
        "vocab_size",
    ),
    "fsdp": ("hidden_size", "n_embd", "kv_lora_rank", "q_lora_rank"),
}
"""Sizes that an axis splits."""


def _some_mesh(rng: np.random.Generator, config: dict[str, Any]) -> Any:
    """One device, or two or four where they divide the sizes."""
    axes = {
        axis: 2 if all((config.get(name) or 2) % 2 == 0 for name in names) else 1
        for axis, names in SPLIT.items()
        if rng.integers(2)
    }
    spec = sharding.MeshSpec.parse(",".join(f"{a}={n}" for a, n in axes.items()) or "data=1")
    return spec.build(jax.devices()[: int(np.prod(list(axes.values()), initial=1))])


def register(name: str) -> None:
    """The three proofs of one family."""

    @proof(
        "real_models",
        name=f"{name}_float64",
        count=30,
        sample=1,
        bound={"forward": 1e-9, "decode": 1e-9, "packed": 1e-9, "gradient": 1e-9},
        float64=True,
    )
    def in_float64(seed: int) -> dict[str, float]:
        return equal_in_float64(name, seed)

    @proof(
        "real_models",
        name=f"{name}_float32",
        count=30,
        sample=1,
        bound={"forward": 1e-5, "decode": 1e-5},
    )
    def in_float32(seed: int) -> dict[str, float]:
        return equal_in_float32(name, seed)

    @proof("real_models", name=f"{name}_round_trip", count=30, sample=1)
    def both_ways(seed: int) -> None:
        round_trip(name, seed)


for _name in peers.FAMILIES:
    register(_name)
