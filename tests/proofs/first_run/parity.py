"""Parity of every sharding preset on eight devices with one device."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from jaxllm.data import DataConfig
from jaxllm.models import functional
from jaxllm.optim import OptimConfig, ScheduleConfig, optimizer, schedule
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.train import RunConfig, TrainState, abstract_state, train_step
from jaxllm.train.run import build_value_and_grad
from jaxllm.train.step.routing_losses import RoutingConfig
from sharding import MeshSpec, shardings_of
from tests import environment, quick, tiny
from tests.proofs.harness import proof

PRESETS = ("dp", "fsdp", "tp", "fsdp_tp")
OPTIM = OptimConfig(schedule=ScheduleConfig(peak=1e-2, warmup=0.1))
ROUNDING = 1.5e-6
"""Of float32 on one device, against float64, by leaf norm: a draw above it sums numbers that cancel (the gains of a few
heads' norms do), and two orders of summation would differ by what either has lost."""


@st.composite
def runs(draw: st.DrawFn, float32: bool = False) -> dict[str, Any]:
    """A preset, an architecture that fits it, and a batch that divides over it."""
    preset = draw(st.sampled_from(PRESETS))
    sizes = dict(MeshSpec.parse(preset).resolve(8).axes)
    accumulate = draw(st.sampled_from([1, 2]))
    shards = sizes.get("data", 1) * sizes.get("fsdp", 1)
    return {
        "preset": preset,
        "model": draw(tiny.architectures(sizes.get("tensor", 1), sizes.get("fsdp", 1), float32)),
        "rows": shards * accumulate * draw(st.integers(1, 2)),
        "seq_len": draw(st.integers(2, 13)),
        "packed": draw(st.booleans()),
        "accumulate": accumulate,
        "z_loss": draw(st.sampled_from([0.0, 1e-2])),
        "seed": draw(st.integers(0, 2**16)),
    }


def run(example: dict[str, Any], preset: str | None, dtype: str, steps: int) -> tuple[Any, np.ndarray, str]:
    """Gradients of the first step, the loss of each step, and the devices' spec of one weight."""
    config = tiny.decoder(dtype=dtype, **example["model"])
    plan = ParallelConfig(**example.get("plan", {}))
    if preset is None:  # without stages there is nothing that these would divide or move
        plan = dataclasses.replace(plan, chunks=0, depths=(), offload=0.0, offload_chunks="all", experts="")
    model = functional(config, plan.rules())
    order = example.get("device_order", ()) if preset else ()
    mesh = MeshSpec.parse(preset or "dp").build(jax.devices() if preset else jax.devices()[:1], order)
    transform = optimizer(OPTIM, steps, model.logical_axes())
    abstract = abstract_state(model, transform, mesh)
    grads_of = build_value_and_grad(
        RunConfig(
            model=config,
            parallel=plan,
            z_loss=example["z_loss"],
            routing=RoutingConfig(**example.get("routing", {})),
            accumulate=example["accumulate"],
            data=DataConfig(batch_size=example["rows"], seq_len=example["seq_len"]),
        ),
        model,
        mesh,
    )

    def with_gradients(state: Any, batch: Any) -> Any:
        kept = {}

        def record(params: Any, batch: Any) -> Any:
            sums, kept["grads"] = grads_of(params, batch)
            return sums, kept["grads"]

        step = train_step(record, transform, schedule(OPTIM.schedule, steps))
        return *step(state, batch), kept["grads"]

    jitted = quick.jit(with_gradients, out_shardings=(shardings_of(abstract), None, shardings_of(abstract.params)))
    first, losses = None, []
    with jax.set_mesh(mesh):
        params = jax.device_put(quick.params(config), shardings_of(abstract.params))
        opt_state = quick.jit(transform.init, out_shardings=shardings_of(abstract.opt_state))(params)
        state = TrainState(params, opt_state, jnp.zeros((), jnp.int32), jax.random.key(0))
        for i in range(steps):
            batch = tiny.batch(
                example["seed"] + i,
                example["rows"],
                example["seq_len"],
                config.vocab_size,
                packed=example["packed"],
                padding=example["packed"],
            )
            spec = model.rules.spec(("batch", "seq"), mesh)
            state, metrics, grads = jitted(state, jax.device_put(batch, jax.NamedSharding(mesh, spec)))
            first = jax.device_get(grads) if first is None else first
            losses.append(float(metrics["loss"]))
    return first, np.array(losses), str(state.params["segments"]["0"]["0"]["attention"]["q"].sharding.spec)


def compare(example: dict[str, Any], dtype: str, steps: int) -> tuple[float, float, float]:
    """Errors of loss (first step), gradients (worst leaf) and curve."""
    grads_1, losses_1, _ = run(example, None, dtype, steps)
    if dtype == "float32":
        with environment.x64():
            hypothesis.assume(tiny.leaf_error(grads_1, run(example, None, "float64", 1)[0]) <= ROUNDING)
    grads_8, losses_8, spec = run(example, example["preset"], dtype, steps)
    for axis in ("fsdp", "tensor"):  # the eight-device run is really sharded
        used = axis in dict(MeshSpec.parse(example["preset"]).axes)
        assert (f"'{axis}'" in spec) == used, f"{example['preset']}: attention/q has spec {spec}"
    relative = np.abs(losses_8 - losses_1) / np.maximum(np.abs(losses_1), 1e-3)
    return relative[0], tiny.leaf_error(grads_8, grads_1), relative.max()


@proof(
    "first_run",
    count=40,
    sample=3,
    chunk=4,
    float64=True,
    strategy=runs(),
    bound={"loss": 1e-10, "gradient": 1e-10, "curve": 1e-8},
)
def parity_float64(example: dict[str, Any]) -> dict[str, float]:
    """Loss, each leaf's gradient and a 20-step AdamW curve."""
    loss, gradient, curve = compare(example, "float64", 20)
    return {"loss": loss, "gradient": gradient, "curve": curve}


@proof("first_run", count=20, sample=2, chunk=4, strategy=runs(float32=True), bound={"loss": 5e-6, "gradient": 5e-6})
def parity_float32(example: dict[str, Any]) -> dict[str, float]:
    """One step in float32."""
    loss, gradient, _ = compare(example, "float32", 1)
    return {"loss": loss, "gradient": gradient}
