"""Every optimizer with every way to adapt, on every kind of mesh, as on one device (CoLLiE's grid)."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax

import sharding
from jaxllm.data import DataConfig
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.optim.optimizer_table import OPTIMIZERS
from jaxllm.peft import AdapterConfig, start_params
from jaxllm.train import RunConfig, abstract_state, init_state
from jaxllm.train.run import build_value_and_grad, fitting_mesh
from jaxllm.train.run_model import base_model, run_model
from jaxllm.train.step.step_builder import build_optimizer, build_step
from tests import tiny
from tests.peft.adapter_meshes import rows_of
from tests.proofs.harness import proof

ADAPTERS = {
    "full": AdapterConfig(),
    "lora": AdapterConfig("lora", rank=3, alpha=5.0, targets=("*",)),
    "prefix": AdapterConfig("prefix", tokens=4),
    "prompt": AdapterConfig("prompt", tokens=4),
}
KINDS = ("adamw", "lion", "adan", "sophia", "lomo", "adalomo")
FURTHER = ("schedule_free", "mezo")
MESHES = ("data=2", "fsdp=2", "tensor=2", "stage=2")
MODEL = tiny.decoder(kv_heads=4, layers=2, tied=False, remat="full")


def cases(kinds: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """Each optimizer with each way to adapt on each mesh, without what is refused by name."""
    return [
        (kind, adapter, mesh)
        for kind in kinds
        for adapter in ADAPTERS
        for mesh in MESHES
        if "stage" not in mesh or not OPTIMIZERS[kind].why_not_staged
    ]


@functools.cache
def stepped(kind: str, adapter: str, mesh: str) -> tuple[Any, float]:
    """Parameters after two steps, and the loss of the second."""
    run = RunConfig(
        model=MODEL,
        mesh=mesh,
        data=DataConfig(batch_size=8, seq_len=8),
        adapter=ADAPTERS[adapter],
        accumulate=1 if kind in ("lomo", "adalomo", "mezo") else 2,
        optim=OptimConfig(ScheduleConfig("constant", 1e-2), kind=kind, clip_norm=None),
        steps=9,
    )
    model, base = run_model(run), base_model(run)
    devices = math.prod(dict(sharding.MeshSpec.parse(mesh).axes).values())
    built = fitting_mesh(run, model, devices).build(jax.devices()[:devices])
    optimizer = build_optimizer(run, model)
    abstract = sharding.abstract_params(base.abstract(), base.logical_axes(), built, model.rules)
    rows = jax.NamedSharding(built, model.rules.spec(("batch", "seq"), built))
    with jax.set_mesh(built):
        params = base.init(jax.random.key(0), sharding.shardings_of(abstract))
        if run.adapter:
            params = start_params(model, run.adapter, params, built, 1)
        state = init_state(model, optimizer, built, 0, abstract_state(model, optimizer, built), params)
        step = jax.jit(build_step(run, model, build_value_and_grad(run, model, built), optimizer))
        batch = jax.device_put(rows_of(run), rows)
        for _ in range(2):
            state, metrics = step(state, batch)
    return jax.device_get(state.params), float(metrics["loss"])


@proof("adapters", cases=cases(KINDS), sample=1, float64=True, bound=1e-9)
def optimizers_on_meshes(case: tuple[str, str, str]) -> float:
    """Parameters and loss after two steps on a mesh, less those of one device."""
    (params, loss), (params_1, loss_1) = stepped(*case), stepped(*case[:2], "data=1")
    return max(abs(loss / loss_1 - 1), tiny.leaf_error(params, params_1))


@proof("adapters", cases=cases(FURTHER), sample=1, float64=True, bound=1e-9)
def further_optimizers_on_meshes(case: tuple[str, str, str]) -> float:
    """The same of schedule-free AdamW and MeZO."""
    (params, loss), (params_1, loss_1) = stepped(*case), stepped(*case[:2], "data=1")
    return max(abs(loss / loss_1 - 1), tiny.leaf_error(params, params_1))
