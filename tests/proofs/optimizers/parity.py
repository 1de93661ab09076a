"""Optimizers on a mesh equal themselves on one device, or are refused there."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.data import DataConfig
from jaxllm.models import functional
from jaxllm.optim import OPTIMIZERS, ScheduleConfig, optimizer
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.train import RunConfig, TrainState, abstract_state
from jaxllm.train.run import build_value_and_grad, fitting_mesh
from jaxllm.train.step.step_builder import build_step
from sharding import shardings_of
from tests import environment, quick, tiny
from tests.optim.kinds import WHOLE, named
from tests.proofs.harness import proof

MESHES = ("fsdp=8", "fsdp=2,tensor=4", "stage=2,fsdp=2,tensor=2")
STEPS, ROWS, LENGTH = 4, 8, 8
WIDE = {"dtype": "float32", "embed_dim": 128, "head_dim": 32, "mlp": 256, "layers": 4}


def trained(name: str, mesh: str | None, **sizes: Any) -> tuple[np.ndarray, Any]:
    """Losses, and the parameters after the last step."""
    config = tiny.decoder(**{"dtype": "float64", "kv_heads": 4, "remat": "full"} | sizes)
    of_kind = {"refresh": 2} if OPTIMIZERS[name.split()[0]].refresh else {}  # more than once in these steps
    optim = named(name, schedule=ScheduleConfig("constant", peak=1e-2, warmup=0.5), **of_kind)
    staged = mesh is not None and "stage" in mesh
    run = RunConfig(
        model=config,
        optim=optim,
        steps=STEPS,
        mesh=mesh or "dp",
        accumulate=2 if staged else 1,
        parallel=ParallelConfig(),
        data=DataConfig(batch_size=ROWS, seq_len=LENGTH),
    )
    model = functional(config, run.parallel.rules())
    devices = jax.devices() if mesh else jax.devices()[:1]
    spec = fitting_mesh(run, model, len(devices))
    here = spec.build(devices)
    transform = optimizer(optim, STEPS, model.logical_axes())
    abstract = abstract_state(model, transform, here)
    step = build_step(run, model, build_value_and_grad(run, model, here), transform)
    jitted = quick.jit(step, out_shardings=(shardings_of(abstract), None))
    losses = []
    with jax.set_mesh(here):
        params = jax.device_put(quick.params(config), shardings_of(abstract.params))
        opt_state = quick.jit(transform.init, out_shardings=shardings_of(abstract.opt_state))(params)
        state = TrainState(params, opt_state, jnp.zeros((), jnp.int32), jax.random.key(0))
        there = jax.NamedSharding(here, model.rules.spec(("batch", "seq"), here))
        for number in range(STEPS):
            batch = tiny.batch(number, ROWS, LENGTH, config.vocab_size, packed=True)
            state, metrics = jitted(state, jax.device_put(batch, there))
            losses.append(float(metrics["loss"]))
    return np.array(losses), jax.device_get(state.params)


alone = functools.cache(functools.partial(trained, mesh=None))


@proof(
    "optimizers",
    cases=[(name, mesh) for name in WHOLE for mesh in MESHES],
    sample=1,
    float64=True,
    bound={"loss": 1e-10, "parameters": 1e-10},
)
def parity_float64(case: tuple[str, str]) -> dict[str, float]:
    """Losses of four steps, and each parameter after them."""
    name, mesh = case
    if "stage" in mesh and OPTIMIZERS[name.split()[0]].why_not_staged:
        with pytest.raises(ConfigError, match=f'optim.kind = "{name}" .*leave stage out'):
            trained(name, mesh)
        return {"loss": 0.0, "parameters": 0.0}
    losses, params = trained(name, mesh)
    want, wanted = alone(name)
    assert np.ptp(want) > 1e-3
    return {"loss": float(np.abs(losses / want - 1).max()), "parameters": tiny.leaf_error(params, wanted)}


@proof("optimizers", cases=[(name, mesh) for name in ("soap", "galore") for mesh in MESHES[:2]], sample=1)
def wide_stacks_end(case: tuple[str, str]) -> None:
    """Steps of four layers whose matrices are 128 wide and more, decomposed on eight simulated devices, come to an end.

    XLA's CPU decompositions of several such matrices wait for each other for ever; hence a process of its own.
    """
    name, mesh = case
    program = f"import {__name__} as proofs; proofs.trained({name!r}, {mesh!r}, **proofs.WIDE)"
    subprocess.run([sys.executable, "-c", program], cwd=environment.ROOT, check=True, timeout=600)
