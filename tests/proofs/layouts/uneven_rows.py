"""Uneven rows: devices with different numbers of micro-batches compute what one device does of the same rows."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.data import DataConfig
from jaxllm.models import functional
from jaxllm.optim import OptimConfig, ScheduleConfig, optimizer, schedule
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.train import RunConfig, TrainState, abstract_state, train_step
from jaxllm.train.run import build_value_and_grad, check_batch
from jaxllm.train.unequal.unequal_rows import unequal_rows
from sharding import MeshSpec, shardings_of
from tests import environment, quick, tiny
from tests.proofs.harness import proof
from tests.train.unequal_programs import joined_axes

OPTIM = OptimConfig(schedule=ScheduleConfig(peak=1e-2, warmup=0.1))
STEPS, SEQ_LEN = 10, 16
KINDS = ("dense", "mixture", "shared expert", "latent attention")
AXES = ("data", "fsdp", "context", "expert", "tensor")
MESHES = [
    ",".join(f"{axis}={n}" for axis, n in zip(AXES, sizes, strict=True) if n > 1)
    for sizes in itertools.product([1, 2, 4, 8], repeat=len(AXES))
    if math.prod(sizes) == 8 and max(sizes[:2]) > 1
]
"""All meshes of eight devices with the axis data or fsdp."""
CELLS = [
    (mesh, kind)
    for mesh in MESHES
    for kind in (KINDS if "data" in mesh else ("mixture", "dense"))
    if kind != "dense" or "expert" not in mesh
]


def example_of(mesh: str, kind: str) -> dict[str, Any]:
    """Rest of a case, from the seed: counts of micro-batches, plan, architecture, whether rows are packed."""
    rng = np.random.default_rng(environment.derive(environment.seed(), mesh, kind, "uneven"))

    def one(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    sizes = dict(MeshSpec.parse(mesh).axes)
    accumulate, fsdp = one(2, 3), sizes.get("fsdp", 1)
    zero = one(1, 2, 3) if "data" in mesh else 1
    over_fsdp = fsdp > 1 and zero == 1 and one(True, "data" not in mesh)
    devices = sizes.get("data", 1) * (fsdp if over_fsdp else 1)
    counts = 1 + rng.multinomial((accumulate - 1) * devices, rng.dirichlet([0.5] * devices))
    if len(set(counts.tolist())) == 1:
        counts[0], counts[1] = counts[0] + 1, counts[1] - 1
    each = (1 if over_fsdp else fsdp) * sizes.get("expert", 1) * one(1, 2)
    return {
        "counts": tuple(counts.tolist()),
        "accumulate": accumulate,
        "rows": int(each * sum(counts)),
        "packed": one(False, True),
        "plan": {
            "context": "all_gather",
            "zero": zero,
            "sequence": one(False, True),
            "layout": one("contiguous", "zigzag", "striped"),
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


def run(example: dict[str, Any], mesh: str | None) -> tuple[Any, np.ndarray, Any]:
    """Gradients of the first step, the loss of each and the last parameters; without a mesh, of one device."""
    config = tiny.decoder(dtype="float64", **example["model"])
    plan = ParallelConfig(**example["plan"], micro_batches=example["counts"]) if mesh else ParallelConfig()
    model = functional(config, plan.rules())
    built = MeshSpec.parse(mesh or "dp").build(jax.devices() if mesh else jax.devices()[:1])
    transform = optimizer(OPTIM, STEPS, model.logical_axes())
    abstract = abstract_state(model, transform, built)
    whole = RunConfig(
        model=config,
        parallel=plan,
        mesh=mesh or "dp",
        z_loss=1e-2,
        accumulate=example["accumulate"] if mesh else 1,
        data=DataConfig(batch_size=example["rows"], seq_len=SEQ_LEN),
    )
    check_batch(whole, built, model.rules)
    grads_of, uneven = build_value_and_grad(whole, model, built), unequal_rows(whole, built)
    assert (uneven is None) == (mesh is None)

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
            packed, seed = example["packed"], example["seed"] + i
            batch = tiny.batch(seed, example["rows"], SEQ_LEN, config.vocab_size, packed=packed, padding=packed)
            batch = batch if uneven is None else uneven.arrange(batch)
            state, metrics, grads = jitted(state, jax.device_put(batch, rows))
            first = jax.device_get(grads) if first is None else first
            losses.append(float(metrics["loss"]))
    return first, np.array(losses), jax.device_get(state.params)


@proof(
    "layouts",
    cases=CELLS,
    sample=1,
    float64=True,
    bound={"loss": 1e-10, "gradient": 1e-10, "curve of 10 steps": 1e-10, "parameters after 10 steps": 1e-10},
)
def uneven_rows_float64(cell: tuple[str, str]) -> dict[str, float]:
    """Loss, each leaf's gradient and a 10-step AdamW curve, every mesh with data or fsdp, drawn counts."""
    example = example_of(*cell)
    (want, one, last), (got, many, ended) = run(example, None), run(example, cell[0])
    relative = np.abs(many - one) / np.maximum(np.abs(one), 1e-3)
    return {
        "loss": float(relative[0]),
        "gradient": tiny.leaf_error(got, want),
        "curve of 10 steps": float(relative.max()),
        "parameters after 10 steps": tiny.leaf_error(ended, last),
    }


PROGRAMS = [
    (mesh, over)
    for mesh in MESHES
    for over in ("data", "data x fsdp")
    if ("data" in mesh if over == "data" else "fsdp" in mesh)
]
"""Mesh, and the axes whose devices have numbers of their own."""


@proof("layouts", cases=PROGRAMS, sample=1)
def no_collective_of_uneven_rows_in_the_loop(case: tuple[str, str]) -> None:
    """The compiled step: collectives in the loop over micro-batches join every other axis, the uneven ones after it."""
    mesh, over = case
    sizes = dict(MeshSpec.parse(mesh).axes)
    uneven = {axis for axis in ("data", "fsdp") if axis in sizes and axis in over}
    devices = math.prod(sizes[axis] for axis in uneven)
    counts = (3, *(2,) * (devices - 2), 1)
    config = tiny.decoder(
        heads=8,
        kv_heads=8,
        head_dim=4,
        embed_dim=16,
        mlp=8,
        vocab_size=16,
        dtype="float32",
        moe=(8, 2, 8, False) if "expert" in sizes else None,
    )
    plan = ParallelConfig(micro_batches=counts, context="all_gather", zero=1 if "fsdp" in uneven else 3)
    model = functional(config, plan.rules())
    built = MeshSpec.parse(mesh).build(jax.devices())
    each = math.prod(sizes.get(axis, 1) for axis in {"fsdp", "expert"} - uneven)
    data = DataConfig(batch_size=each * sum(counts), seq_len=SEQ_LEN)
    whole = RunConfig(model=config, parallel=plan, mesh=mesh, accumulate=2, data=data)
    grads_of, arranged = build_value_and_grad(whole, model, built), unequal_rows(whole, built)
    assert arranged is not None
    abstract = abstract_state(model, optimizer(OPTIM, STEPS, model.logical_axes()), built)
    rows = jax.NamedSharding(built, model.rules.spec(("batch", "seq"), built))
    batch = arranged.arrange(tiny.batch(1, data.batch_size, SEQ_LEN, config.vocab_size, packed=True))
    with jax.set_mesh(built):
        given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), batch)
        text = jax.jit(grads_of).lower(abstract.params, given).compile(environment.AS_EVER).as_text()
    inside, outside = joined_axes(str(text), built)
    assert inside == set(sizes) - uneven
    assert uneven <= outside
