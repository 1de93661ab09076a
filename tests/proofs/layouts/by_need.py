"""Context parallelism by need: rings of as many devices as a document needs compute what padded rows compute."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.data import DataConfig
from jaxllm.data.context_by_need import ContextSlots
from jaxllm.models import functional
from jaxllm.optim import OptimConfig, ScheduleConfig, optimizer, schedule
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.train import RunConfig, TrainState, abstract_state, train_step
from jaxllm.train.run import build_value_and_grad, check_batch
from jaxllm.train.run_slots import context_slots, put_slotted
from pallas_kernels.ring_attention.layout import LAYOUTS
from sharding import MeshSpec, shardings_of
from tests import environment, quick, tiny
from tests.proofs.harness import proof
from tests.train import by_need

OPTIM = OptimConfig(schedule=ScheduleConfig(peak=1e-2, warmup=0.1))
STEPS, ROWS, SEQ_LEN = 20, 8, 32
KINDS = ("dense", "mixture", "shared expert", "latent attention")
AXES = ("data", "fsdp", "context", "expert", "ulysses", "tensor")
MESHES = [
    ",".join(f"{axis}={n}" for axis, n in zip(AXES, sizes, strict=True) if n > 1)
    for sizes in itertools.product([1, 2, 4, 8], repeat=len(AXES))
    if math.prod(sizes) == 8 and sizes[2] > 1
]
"""All meshes of eight devices with the axis context."""
CELLS = [(mesh, kind) for mesh in MESHES for kind in KINDS if kind != "dense" or "expert" not in mesh]


def example_of(mesh: str, kind: str) -> dict[str, Any]:
    """Rest of a case, from the seed: plan, architecture and length of slots, which few or all documents exceed."""
    rng = np.random.default_rng(environment.derive(environment.seed(), mesh, kind))

    def one(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    context = dict(MeshSpec.parse(mesh).axes)["context"]
    slots = [n for n in (4, 8, 16, 32) if n * context >= SEQ_LEN and n % (8 // context) == 0]
    return {
        "plan": {
            "context": "by_need",
            "slot": one(*slots),
            "zero": one(1, 2, 3),
            "sequence": one(False, True),
            "layout": one(*LAYOUTS),
        },
        "model": {
            "heads": 8,
            "kv_heads": 8 if kind == "latent attention" else one(2, 8),
            "head_dim": 4,
            "embed_dim": 16,
            "mlp": 8,
            "vocab_size": 16,
            "window": None if kind == "latent attention" else one(None, 11),
            "moe": None if kind == "dense" else (8, one(1, 2), 8, False, 8 if kind == "shared expert" else 0),
            "latent": 8 if kind == "latent attention" else 0,
            "remat": one("none", "full"),
        },
        "seed": int(rng.integers(2**16)),
    }


def run(example: dict[str, Any], mesh: str | None) -> tuple[Any, np.ndarray]:
    """Gradients of the first step and the loss of each; without a mesh, of padded rows on one device."""
    config = tiny.decoder(dtype="float64", **example["model"])
    plan = ParallelConfig(**example["plan"]) if mesh else ParallelConfig()
    model = functional(config, plan.rules())
    built = MeshSpec.parse(mesh or "dp").build(jax.devices() if mesh else jax.devices()[:1])
    transform = optimizer(OPTIM, STEPS, model.logical_axes())
    abstract = abstract_state(model, transform, built)
    whole = RunConfig(
        model=config, parallel=plan, mesh=mesh or "dp", z_loss=1e-2, data=DataConfig(batch_size=ROWS, seq_len=SEQ_LEN)
    )
    check_batch(whole, built, model.rules)
    grads_of, slots = build_value_and_grad(whole, model, built), context_slots(whole, built, model.rules)

    def with_gradients(state: Any, batch: Any) -> Any:
        kept = {}

        def record(params: Any, batch: Any) -> Any:
            sums, kept["grads"] = grads_of(params, batch)
            return sums, kept["grads"]

        step = train_step(record, transform, schedule(OPTIM.schedule, STEPS))
        return *step(state, batch), kept["grads"]

    jitted = quick.jit(with_gradients, out_shardings=(shardings_of(abstract), None, shardings_of(abstract.params)))
    first, losses = None, []
    with jax.set_mesh(built):
        params = jax.device_put(quick.params(config), shardings_of(abstract.params))
        opt_state = quick.jit(transform.init, out_shardings=shardings_of(abstract.opt_state))(params)
        state = TrainState(params, opt_state, jnp.zeros((), jnp.int32), jax.random.key(0))
        rows = jax.NamedSharding(built, model.rules.spec(("batch", "seq"), built))
        for i in range(STEPS):
            batch = by_need.mixed_batch(example["seed"] + i, ROWS, SEQ_LEN, config.vocab_size)
            placed = put_slotted(batch, slots, rows) if slots else jax.device_put(by_need.padded(batch), rows)
            state, metrics, grads = jitted(state, placed)
            first = jax.device_get(grads) if first is None else first
            losses.append(float(metrics["loss"]))
    return first, np.array(losses)


@proof(
    "layouts",
    cases=CELLS,
    sample=1,
    float64=True,
    bound={"loss": 1e-10, "gradient": 1e-10, "curve of 20 steps": 1e-7},
)
def context_by_need_float64(cell: tuple[str, str]) -> dict[str, float]:
    """Loss, each leaf's gradient and a 20-step AdamW curve of mixed lengths, every mesh with context."""
    example = example_of(*cell)
    (want, one), (got, many) = run(example, None), run(example, cell[0])
    relative = np.abs(many - one) / np.maximum(np.abs(one), 1e-3)
    return {
        "loss": float(relative[0]),
        "gradient": tiny.leaf_error(got, want),
        "curve of 20 steps": float(relative.max()),
    }


PROGRAMS = [mesh for mesh in MESHES if dict(MeshSpec.parse(mesh).axes)["context"] >= 4]
"""Meshes with three and more ring sizes, whose choice is seen in the program."""


@proof("layouts", cases=PROGRAMS, sample=1)
def short_rows_send_nothing(mesh: str) -> None:
    """The compiled step: collective-permutes are in rings of two and more alone, more bytes in larger ones."""
    config = tiny.decoder(heads=8, kv_heads=8, head_dim=4, embed_dim=16, mlp=8, vocab_size=16, dtype="float32")
    plan = ParallelConfig(context="by_need", slot=SEQ_LEN // dict(MeshSpec.parse(mesh).axes)["context"])
    model = functional(config, plan.rules())
    built = MeshSpec.parse(mesh).build(jax.devices())
    whole = RunConfig(model=config, parallel=plan, mesh=mesh, data=DataConfig(batch_size=ROWS, seq_len=SEQ_LEN))
    grads_of, slots = build_value_and_grad(whole, model, built), context_slots(whole, built, model.rules)
    assert slots is not None
    abstract = abstract_state(model, optimizer(OPTIM, STEPS, model.logical_axes()), built)
    with jax.set_mesh(built):
        params = jax.device_put(quick.params(config), shardings_of(abstract.params))
        rows = jax.NamedSharding(built, model.rules.spec(("batch", "seq"), built))
        batch = put_slotted(by_need.mixed_batch(1, ROWS, SEQ_LEN, config.vocab_size), slots, rows)
        text = jax.jit(grads_of).lower(params, batch).compile(environment.AS_EVER).as_text()
    sent, outside = by_need.ring_bytes(text, len(slots.sizes))
    assert outside == 0
    assert sent[0] == 0
    assert all(less < more for less, more in itertools.pairwise(sent))


EVEN = [
    (rows, slot, spread, seed)
    for rows, slot in ((2, 512), (2, 1024), (2, 2048), (8, 512), (8, 1024), (8, 2048), (16, 1024), (16, 2048))
    for spread in (0.6, 1.2, 2.0)
    for seed in range(3)
]
"""Rows of devices of 64, tokens of a slot, standard deviation of the logarithm of lengths, seed."""


@proof(
    "layouts", cases=EVEN, sample=2, bound={"imbalance over the static mesh's": 1.0, "micro-steps over the least": 1.5}
)
def work_by_need_is_even(cell: tuple[int, int, float, int]) -> dict[str, float]:
    """Quadratic work on drawn lengths, rows of at most 4,096 tokens: busiest device over the mean, by a static mesh's.

    The static mesh has the same axes and tokens in a micro-batch. More micro-steps than full slots would take are
    padding.
    """
    rows, slot, spread, seed = cell
    tokens, accumulate = 256 * 4096, 256 * 4096 // (64 * slot)
    batch = by_need.drawn_batch(seed, 256, 4096, spread)
    slots = ContextSlots(rows, 64 // rows, slot, 4096, tokens)
    work, static = by_need.slot_work(slots, batch), by_need.static_work(batch, rows, 64 // rows, accumulate)
    assert work.sum() == static.sum()
    return {
        "imbalance over the static mesh's": by_need.imbalance(work) / by_need.imbalance(static),
        "micro-steps over the least": len(work) / accumulate,
    }
