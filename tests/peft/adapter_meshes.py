"""Adapters on meshes: loss, gradients of the adapter and its fresh values, less those of one device."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import numpy as np

import sharding
from jaxllm.data import DataConfig
from jaxllm.models.param_subset import merge, select
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.peft import AdapterConfig, start_params
from jaxllm.peft.method_table import ADAPTER_METHODS
from jaxllm.train import RunConfig
from jaxllm.train.run import build_value_and_grad, fitting_mesh
from jaxllm.train.run_model import base_model, run_model, saved_params
from tests import tiny

SIZES: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 64, "embed_dim": 128, "mlp": 256, "layers": 2}
DENSE = tiny.decoder(bias="all", **SIZES)
EXPERTS = tiny.decoder(moe=(4, 2, 32, True), **SIZES | {"embed_dim": 256})
ZERO = {"fsdp=2": 1}
"""ZeRO stage on a mesh, 3 elsewhere."""


def adapter(kind: str, mesh: str) -> AdapterConfig:
    if kind in ("prefix", "prompt"):
        return AdapterConfig(kind, tokens=4)
    more = {"experts": 4, "width": 6} if kind == "pesc" else {"experts": 4} if kind == "mixlora" else {}
    targets = ("*",) if "expert" not in mesh or ADAPTER_METHODS[kind].experts else ("attention",)
    return AdapterConfig(kind, rank=3, alpha=5.0, targets=targets, **more)  # type: ignore[arg-type]


def run_on(kind: str, mesh: str) -> RunConfig:
    model = EXPERTS if "expert" in mesh and kind not in ("mixlora", "pesc") else DENSE
    return RunConfig(
        model=model,
        mesh=mesh.removesuffix(" of experts"),
        parallel=ParallelConfig(zero=ZERO.get(mesh, 3)),  # type: ignore[arg-type]
        data=DataConfig(batch_size=8, seq_len=8),
        adapter=adapter(kind, mesh),
        accumulate=2,
    )


def rows_of(run: RunConfig) -> Any:
    """A batch; with places for virtual tokens at the start of each row where the adapter has them."""
    virtual = run.adapter.virtual_tokens
    batch = tiny.batch(3, 8, 8 - virtual, 64, packed=True)
    if not virtual:
        return batch

    def widen(x: np.ndarray, fill: int) -> np.ndarray:
        return np.pad(x, [(0, 0), (virtual, 0)], constant_values=fill)

    tokens, targets, segments, positions = map(widen, batch.arrays, (0, -1, 0, 0))
    positions = np.where(segments > 0, positions + virtual, 0)
    positions[:, :virtual] = np.arange(virtual)
    return batch._replace(tokens=tokens, targets=targets, segment_ids=segments, positions=positions)


@functools.cache
def trained(kind: str, mesh: str) -> tuple[float, Any, Any]:
    """Loss, gradients and fresh adapters on a mesh; gradients are taken after the adapters have moved."""
    run = run_on(kind, mesh)
    model, base = run_model(run), base_model(run)
    spec = sharding.MeshSpec.parse(run.mesh)
    devices = math.prod(dict(spec.axes).values())
    built = fitting_mesh(run, model, devices).build(jax.devices()[:devices])
    rows = jax.NamedSharding(built, model.rules.spec(("batch", "seq"), built))
    batch = jax.device_put(rows_of(run), rows)
    abstract = sharding.abstract_params(base.abstract(), base.logical_axes(), built, model.rules)
    saved = saved_params(run, model)

    def moved(path: Any, x: jax.Array) -> jax.Array:
        noise = jax.random.normal(jax.random.key(len(str(path))), x.shape, x.dtype, out_sharding=x.sharding)
        return x + 0.1 * noise

    with jax.set_mesh(built):
        start = base.init(jax.random.key(0), sharding.shardings_of(abstract))
        grads = None
        if kind == "lora_ga":
            paths = tuple(path for path in base.linears() if "expert" not in mesh or "attention" in path)
            plain = RunConfig(**{**vars(run), "adapter": AdapterConfig(), "trainable": paths})
            grads = jax.jit(build_value_and_grad(plain, base, built))(start, batch)[1]
        params = start_params(model, run.adapter, start, built, 1, grads)
        fresh = jax.device_get(select(saved, params))
        params = merge(jax.tree.map_with_path(moved, select(saved, params)), params)
        sums, grads = jax.jit(build_value_and_grad(run, model, built))(params, batch)
        return float(sums.loss), jax.device_get(grads), fresh


def sharded_error(kind: str, mesh: str) -> float:
    """Largest error of loss, gradients and fresh adapters on a mesh, less those of one device."""
    alone = "data=1 of experts" if "expert" in mesh else "data=1"
    (loss, grads, fresh), (loss_1, grads_1, fresh_1) = trained(kind, mesh), trained(kind, alone)
    assert any(np.abs(leaf).max() > 1e-6 for leaf in jax.tree.leaves(grads_1))
    return max(abs(loss / loss_1 - 1), tiny.leaf_error(grads, grads_1), tiny.leaf_error(fresh, fresh_1))
