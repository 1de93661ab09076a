"""Parity of every mesh of eight devices, in every mode, with one device."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jaxtyping import Array

from jaxllm.data import Batch
from jaxllm.models import Segments, functional
from jaxllm.models.moe.router import Routing
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.train.step.loss import permute_sequence
from pallas_kernels.ring_attention.layout import LAYOUTS, order
from sharding import MeshSpec, shardings_of, use_rules
from sharding.state import abstract_params
from tests import environment, quick, tiny
from tests.proofs.first_run.parity import compare
from tests.proofs.harness import proof

AXES = ("data", "fsdp", "context", "expert", "ulysses", "tensor")
MESHES = [
    {axis: n for axis, n in zip(AXES, sizes, strict=True) if n > 1}
    for sizes in itertools.product([1, 2, 4, 8], repeat=len(AXES))
    if math.prod(sizes) == 8
]
"""All there are: 6 of one axis, 30 of two, 20 of three."""
MARGIN = 1e-4
"""Between the shares of the last expert chosen and the first that is not, where rounding could swap them."""


def text(mesh: dict[str, int]) -> str:
    return ",".join(f"{axis}={n}" for axis, n in mesh.items())


MATRIX = [
    (text(mesh), kind, rows)
    for mesh in MESHES
    for kind in ("dense", "mixture")
    for rows in ("packed", "one document a row")
    if kind == "mixture" or mesh.keys() != {"expert"}
]


def size(mesh: dict[str, int], *axes: str) -> int:
    return math.prod(mesh.get(axis, 1) for axis in axes)


@st.composite
def runs(draw: st.DrawFn, float32: bool = False) -> dict[str, Any]:
    """A mesh, a plan, an architecture that fits them, and a batch that divides over it."""
    mesh = draw(st.sampled_from(MESHES))
    of = functools.partial(size, mesh)
    accumulate = draw(st.sampled_from([1, 2]))
    model = draw(tiny.architectures(of("tensor", "ulysses"), of("fsdp", "expert", "context", "ulysses"), float32))
    if draw(st.booleans()):
        experts = max(2, of("expert")) * draw(st.sampled_from([1, 2]))
        chosen = draw(st.integers(1, min(3, experts - 1)))  # the margin is to one that is not
        # The weight of one expert alone, made to sum to one, is one: its router has no gradient.
        normalize = chosen > 1 and draw(st.booleans())
        model["moe"] = (experts, chosen, of("tensor") * draw(st.integers(1, 3)), normalize)
    # Zigzag cuts a row into twice as many parts as there are shards.
    parts = 2 * of("context", "ulysses", "tensor")
    example = {
        "preset": text(mesh),
        "plan": {
            "zero": draw(st.sampled_from([1, 2, 3])),
            "sequence": draw(st.booleans()),
            "context": draw(st.sampled_from(["ring", "all_gather"])),
            "layout": draw(st.sampled_from(LAYOUTS)),
        },
        "model": model,
        "rows": of("data", "fsdp", "expert") * accumulate * draw(st.integers(1, 2)),
        "seq_len": parts * draw(st.integers(1, max(1, 12 // parts))),
        "packed": draw(st.booleans()),
        "accumulate": accumulate,
        "z_loss": draw(st.sampled_from([0.0, 1e-2])),
        "seed": draw(st.integers(0, 2**16)),
    }
    hypothesis.assume(attends(batch_of(example)))
    return example


def batch_of(example: dict[str, Any]) -> Batch:
    """The first batch of a run."""
    packed = example["packed"]
    rows, seq_len, vocab_size = example["rows"], example["seq_len"], example["model"]["vocab_size"]
    return tiny.batch(example["seed"], rows, seq_len, vocab_size, packed=packed, padding=packed)


def attends(batch: Batch) -> bool:
    """Whether a token with a target follows a different one of its document.

    Where all tokens of each document are the same, so are the values, and no query and no key has a part in the
    mean of them: their gradients are zero but for rounding, which a relative error would compare.
    """
    pairs = (batch.segment_ids[:, 1:] == batch.segment_ids[:, :-1]) & (batch.segment_ids[:, 1:] > 0)
    pairs &= (batch.tokens[:, 1:] != batch.tokens[:, :-1]) & (batch.targets[:, 1:] >= 0)
    return bool(pairs.any())


def example_of(mesh: str, kind: str, rows: str) -> dict[str, Any]:
    """The rest of a cell of the matrix, from the seed; sizes that fit every mesh, few architectures for many meshes."""
    cell = np.random.default_rng(environment.derive(environment.seed(), mesh, kind, rows))
    few = np.random.default_rng(environment.derive(environment.seed(), kind, int(cell.integers(3))))

    def one(rng: np.random.Generator, *values: Any) -> Any:
        return values[rng.integers(len(values))]

    return {
        "preset": mesh,
        "plan": {
            "zero": one(cell, 1, 2, 3),
            "sequence": one(cell, False, True),
            "context": one(cell, "ring", "all_gather"),
            "layout": one(cell, *LAYOUTS),
        },
        "model": {
            "heads": 8,
            "kv_heads": one(few, 1, 2, 8),
            "head_dim": 4,
            "embed_dim": 16,
            "mlp": 8,
            "vocab_size": 16,
            "qk_norm": one(few, "none", "head", "all"),
            "bias": one(few, "none", "qkv", "all"),
            "norm": one(few, "rms", "layer"),
            "norms": one(few, "pre", "post", "sandwich"),
            "window": one(few, None, 5),
            "softcap": one(few, None, 1.5),
            "tied": one(few, False, True),
            "remat": one(few, "none", "elementwise", "full"),
            "moe": one(few, (8, 1, 8, False), (8, 2, 8, False), (8, 2, 8, True)) if kind == "mixture" else None,
        },
        "rows": 16,
        "seq_len": 16,
        "packed": rows == "packed",
        "accumulate": one(few, 1, 2),
        "z_loss": 1e-2,
        "seed": int(cell.integers(2**16)),
    }


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["segment_ids", "ring", "chosen", "shares"],
    meta_fields=["layout", "ring_sizes"],
)
@dataclass(frozen=True)
class Watching(Segments):
    """Keeps what each layer's router chose, and its shares."""

    chosen: Any = None
    shares: Any = None

    def record_routing(self, layer: Array, routing: Routing) -> Watching:
        chosen, shares = self.chosen.at[layer].set(routing.experts), self.shares.at[layer].set(routing.shares)
        return replace(self, chosen=chosen, shares=shares)


def routing(example: dict[str, Any], preset: str | None, dtype: str) -> tuple[np.ndarray, float]:
    """Experts of every layer and token of the first batch, in the rows' order; and the smallest margin."""
    config = tiny.decoder(dtype=dtype, **example["model"])
    plan = ParallelConfig(**example["plan"])
    model = functional(config, plan.rules())
    mesh = MeshSpec.parse(preset or "dp").build(jax.devices() if preset else jax.devices()[:1])
    batch = batch_of(example)
    experts, top_k, _, _ = example["model"]["moe"]

    def forward(params: Any, batch: Any) -> Any:
        with use_rules(model.rules):
            batch = permute_sequence(batch, plan.layout)
        shape = (config.layers, *batch.tokens.shape)
        empty = jnp.zeros((*shape, top_k), jnp.int32), jnp.zeros((*shape, experts), jnp.dtype(dtype))
        if preset:
            there = model.rules.spec((None, "batch", "seq", None), mesh)
            empty = jax.tree.map(lambda x: jax.sharding.reshard(x, there), empty)
        ctx = Watching(batch.segment_ids, plan.layout, chosen=empty[0], shares=empty[1])
        _, ctx = model.forward(params, batch.tokens, batch.positions, ctx)
        return ctx.chosen, ctx.shares

    with jax.set_mesh(mesh):
        abstract = abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
        params = jax.device_put(quick.params(config), shardings_of(abstract))
        spec = model.rules.spec(("batch", "seq"), mesh)
        placed = jax.device_put(batch, jax.NamedSharding(mesh, spec))
        chosen, shares = jax.device_get(quick.jit(forward)(params, placed))
    shards = mesh.shape.get("context", 1)
    if shards > 1:
        chosen = chosen[:, :, np.argsort(order(plan.layout, shards, example["seq_len"]))]
    ranked = np.sort(shares, axis=-1)
    return chosen, float(np.min(ranked[..., -top_k] - ranked[..., -top_k - 1]))


def compare_all(example: dict[str, Any], dtype: str, steps: int) -> tuple[float, float, float]:
    """``compare``, and for a mixture the same experts for every token."""
    if example["model"].get("moe"):
        one, margin = routing(example, None, dtype)
        if dtype == "float32":
            hypothesis.assume(margin > MARGIN)
        many, _ = routing(example, example["preset"], dtype)
        np.testing.assert_array_equal(many, one)
    return compare(example, dtype, steps)


CURVES = {"dense": 1e-8, "mixture": 1e-7}
"""Bounds of 20 steps."""


@proof(
    "parallelism",
    cases=MATRIX,
    sample=2,
    float64=True,
    bound={"loss": 1e-10, "gradient": 1e-10, **{f"curve of 20 steps, {kind}": b for kind, b in CURVES.items()}},
)
def matrix_float64(cell: tuple[str, str, str]) -> dict[str, float]:
    """Loss, each leaf's gradient, routing and a 20-step AdamW curve, of every mesh."""
    loss, gradient, curve = compare_all(example_of(*cell), "float64", 20)
    curves = {f"curve of 20 steps, {kind}": curve if kind == cell[1] else 0.0 for kind in CURVES}
    return {"loss": loss, "gradient": gradient, **curves}


@proof(
    "parallelism",
    cases=[cell for cell in MATRIX if "tensor" in cell[0] and cell[2] == "packed"],
    sample=1,
    float64=True,
    bound={"loss": 1e-10, "gradient": 1e-10},
)
def products_in_a_ring_float64(cell: tuple[str, str, str]) -> dict[str, float]:
    """One step with sequence parallelism whose collectives run around a ring beside the matmuls."""
    example = example_of(*cell)
    example["plan"] |= {"sequence": True, "overlap": "ring"}
    loss, gradient, _ = compare_all(example, "float64", 1)
    return {"loss": loss, "gradient": gradient}


@proof(
    "parallelism",
    count=40,
    sample=1,
    chunk=2,
    float64=True,
    strategy=runs(),
    bound={"loss": 1e-10, "gradient": 1e-10},
)
def drawn_float64(example: dict[str, Any]) -> dict[str, float]:
    """One step of sizes of all kinds."""
    loss, gradient, _ = compare_all(example, "float64", 1)
    return {"loss": loss, "gradient": gradient}


@proof("parallelism", count=50, sample=1, chunk=2, strategy=runs(float32=True), bound={"loss": 5e-6, "gradient": 5e-6})
def drawn_float32(example: dict[str, Any]) -> dict[str, float]:
    """One step in float32."""
    loss, gradient, _ = compare_all(example, "float32", 1)
    return {"loss": loss, "gradient": gradient}
