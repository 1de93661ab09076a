"""Pairs of settings of a tiny run, and one step of it: what no row of the combination table names goes together."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import random
import re
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.checkpoint.config import MemoryConfig
from jaxllm.config import ConfigError
from jaxllm.data import DataConfig
from jaxllm.models import MLAConfig, MoeConfig, RopeConfig, RouterConfig
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.peft import AdapterConfig
from jaxllm.train import RunConfig
from jaxllm.train.combinations import refused
from jaxllm.train.disk.config import DiskConfig
from jaxllm.train.disk.disk_step import DiskStep, compiled_programs, lowered_programs
from jaxllm.train.disk.layer_stream_step import LayerStreamStep
from jaxllm.train.disk.saved_inputs import HostInputs
from jaxllm.train.disk.state_files import StateFiles
from jaxllm.train.host_offload import HostConfig
from jaxllm.train.outer.compressed_gradients import GradsConfig
from jaxllm.train.outer.config import OuterConfig
from jaxllm.train.outer.dedloc import PeersConfig
from jaxllm.train.run import build_value_and_grad, fitting_mesh
from jaxllm.train.run_features import FEATURES
from jaxllm.train.run_model import run_model
from jaxllm.train.run_slots import context_slots, put_slotted
from jaxllm.train.step.loss_spikes import SpikeConfig
from jaxllm.train.step.param_average import EmaConfig
from jaxllm.train.step.routing_losses import RoutingConfig
from jaxllm.train.step.step_builder import (
    build_disk_step,
    build_optimizer,
    build_step,
    build_streamed_step,
    init_run_state,
    run_state,
    streamed_model,
)
from jaxllm.train.unequal.unequal_rows import unequal_rows
from jaxllm.train.unequal.uneven_state import uneven_state
from sharding import MeshSpec
from tests import quick, tiny

CONSTANT = ScheduleConfig("constant", peak=1e-2)
BASE = RunConfig(
    model=tiny.decoder(dtype="float32", kv_heads=4, layers=4, remat="full"),
    data=DataConfig(batch_size=8, seq_len=16),
    optim=OptimConfig(CONSTANT, clip_norm=None),
    steps=4,
    mesh="fsdp=4",
    parallel=ParallelConfig(layout="contiguous"),
)
Setting = Callable[[RunConfig], RunConfig]


def _model(**fields: Any) -> Setting:
    return lambda run: dataclasses.replace(run, model=dataclasses.replace(run.model, **fields))


def _block(**fields: Any) -> Setting:
    def changed(run: RunConfig) -> RunConfig:
        return _model(pattern=(dataclasses.replace(run.model.pattern[0], **fields),))(run)

    return changed


def _optim(**fields: Any) -> Setting:
    return lambda run: dataclasses.replace(run, optim=dataclasses.replace(run.optim, **fields))


def _parallel(**fields: Any) -> Setting:
    return lambda run: dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, **fields))


def _run(**fields: Any) -> Setting:
    return lambda run: dataclasses.replace(run, **fields)


def _pipeline(run: RunConfig) -> RunConfig:
    return dataclasses.replace(run, mesh="stage=2,fsdp=2", accumulate=max(4, run.accumulate))


def _axis(name: str) -> Setting:
    def changed(run: RunConfig) -> RunConfig:
        return dataclasses.replace(run, mesh=f"stage=2,{name}=2" if "stage" in run.mesh else f"fsdp=2,{name}=2")

    return changed


def _all(*settings: Setting) -> Setting:
    return lambda run: functools.reduce(lambda made, setting: setting(made), settings, run)


def _uneven_rows(run: RunConfig) -> RunConfig:
    others = [axis for axis in sizes_of(run) if axis not in ("data", "fsdp", "replica")]
    made = dataclasses.replace(run, mesh=f"data=2,{(*others, 'fsdp')[0]}=2", accumulate=max(2, run.accumulate))
    return _parallel(micro_batches=(2 * made.accumulate - 1, 1))(made)


def _uneven_state(run: RunConfig) -> RunConfig:
    others = [axis for axis in sizes_of(run) if axis not in ("data", "fsdp", "replica")]
    return _parallel(state_shares=(3, 1))(dataclasses.replace(run, mesh=f"data=2,{(*others, 'fsdp')[0]}=2"))


SETTINGS: dict[str, Setting] = {
    "replicas": _run(mesh="replica=2,fsdp=2", outer=OuterConfig("diloco", every=1)),
    "no replicas": _run(mesh="fsdp=4"),
    "outer step": _run(mesh="replica=2,fsdp=2", outer=OuterConfig("sparseloco", every=1)),
    "compressed gradients": _run(mesh="data=2,fsdp=2", grads=GradsConfig("int8")),
    "fixed global batch": _run(mesh="data=2,fsdp=2", peers=PeersConfig(batch=12, away=0.5)),
    "adaptive ranks": _run(mesh="data=2,fsdp=2", grads=GradsConfig("lgreco:0.5")),
    "local axis": _axis("local"),
    "two-level sums": _all(_run(mesh="data=2,local=2"), _parallel(reduce="two_level")),
    "no data axis": _run(mesh="fsdp=4"),
    "no outer step": _run(outer=OuterConfig()),
    "uneven rows": _uneven_rows,
    "uneven optimizer state": _uneven_state,
    "pipeline": _pipeline,
    "virtual stages": _parallel(schedule="interleaved", chunks=2),
    "depths of stages": _parallel(depths=(1, 3)),
    "pipeline offload": _parallel(offload=0.5),
    "ZeRO 1 or 2": _parallel(zero=1),
    "3-level ZeRO": _all(_axis("data"), _parallel(zero="3level")),
    "2D tensor parallelism": _axis("features"),
    "layouts by layer": _all(_axis("tensor"), _parallel(layers="tensor=2,fsdp")),
    "int8 gathers": _parallel(gather="int8"),
    "context parallelism": _axis("context"),
    "rings": _axis("context"),
    "ring matmuls": _all(_axis("tensor"), _parallel(sequence=True, overlap="ring")),
    "tokens out of order": _all(_axis("context"), _parallel(layout="zigzag")),
    "context by need": _all(_axis("context"), _parallel(context="by_need")),
    "slots by number of tokens": _all(_axis("context"), _parallel(context="by_need", slot=8)),
    "loss scaling": _model(dtype="float16"),
    "delayed fp8 scaling": _model(matmul_precision="fp8_delayed"),
    "FP4 matmuls": _model(matmul_precision="mxfp4"),
    "low-precision matmuls": _model(matmul_precision="int8"),
    "experts": _block(mlp=MoeConfig(4, 2, 16, router=RouterConfig(balance_bias=True))),
    "latent attention": _block(attention=MLAConfig(4, 16, None, 8, 4, 8, rope=RopeConfig(interleaved=True))),
    "scaled embedding gradient": _model(embed_grad=0.1),
    "partial recomputation": _model(remat="elementwise"),
    "selective recomputation": _model(remat="attention"),
    "layerwise recomputation": _model(remat="none=2,full=2"),
    "offloaded or compact activations": _model(remat="offload"),
    "compact activations": _model(remat="compact:0.5"),
    "ladder residual": _model(residual="ladder"),
    "layerwise optimizer": _optim(kind="adalomo"),
    "optimizer without backward pass": _optim(kind="mezo"),
    "optimizer without stages": _optim(kind="sophia"),
    "projected gradients": _optim(kind="compact"),
    "averaging optimizer": _optim(kind="schedule_free"),
    "optimizer that is not streamed": _optim(kind="muon"),
    "optimizer that is not elementwise": _optim(kind="adafactor"),
    "rounded updates": _all(_model(param_dtype="bfloat16"), _optim(rounding="stochastic")),
    "narrow moments": _optim(moments="8bit"),
    "gradient accumulation": _run(accumulate=2),
    "reaction to spikes": _run(spikes=SpikeConfig("skip", window=4)),
    "lowered rate": _run(spikes=SpikeConfig("lower_rate", window=4)),
    "rollback": _run(spikes=SpikeConfig("rollback", window=4)),
    "parameter average": _run(ema=EmaConfig(0.9)),
    "routing losses": _all(
        _block(mlp=MoeConfig(4, 2, 16, router=RouterConfig(balance_bias=True))),
        _run(routing=RoutingConfig(balance_loss=0.1, bias_rate=0.01)),
    ),
    "losses of routers": _all(
        _block(mlp=MoeConfig(4, 2, 16, router=RouterConfig(balance_bias=True))), _run(routing=RoutingConfig(z_loss=0.1))
    ),
    "balance biases that move": _all(
        _block(mlp=MoeConfig(4, 2, 16, router=RouterConfig(balance_bias=True))),
        _run(routing=RoutingConfig(bias_rate=0.01)),
    ),
    "absent experts": _all(
        _block(mlp=MoeConfig(4, 2, 16, router=RouterConfig(balance_bias=True))),
        _run(routing=RoutingConfig(absent=0.25, absent_steps=1)),
    ),
    "norms by layer": lambda run: dataclasses.replace(run, observe=dataclasses.replace(run.observe, layers_every=1)),
    "optimizer offload": _run(host=HostConfig(optimizer=True)),
    "optimizer state on the host": _run(host=HostConfig(optimizer=True)),
    "optimizer state on disk": _run(disk=DiskConfig(tempfile.gettempdir())),
    "parameters on disk": _run(disk=DiskConfig(tempfile.gettempdir(), parameters=True)),
    "updates on the host": _run(host=HostConfig(optimizer=True, device_every=2)),
    "update of the next step": _all(_optim(kind="mezo"), _run(host=HostConfig(params=True))),
    "parameter offload": _run(host=HostConfig(params=True)),
    "overlapped saves": lambda run: dataclasses.replace(
        run, checkpoint=dataclasses.replace(run.checkpoint, saving="overlapped")
    ),
    "checkpoints in memory": lambda run: dataclasses.replace(
        run, checkpoint=dataclasses.replace(run.checkpoint, memory=MemoryConfig())
    ),
    "trainable subset": _run(trainable=("attention",)),
    "adapter": _run(adapter=AdapterConfig("lora", rank=2, targets=("*",))),
    "shifted groups": _run(adapter=AdapterConfig("longlora", rank=2, targets=("*",))),
    "frozen balance biases": _all(
        _block(mlp=MoeConfig(4, 2, 16, router=RouterConfig(balance_bias=True))), _run(trainable=("attention",))
    ),
}
"""How a run gets each feature. Those left out are the opposite of another, or need more than a step: a data source that
gives scores, a reference model."""

BESIDE_THE_STEP = {"rollback", "checkpoints in memory", "overlapped saves"}
"""Features that change what the host does between steps, and not the step's program."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """Outcome of a pair: the rows that name it, or the digest of its step's program and the loss."""

    run: RunConfig
    rows: int
    program: str = ""
    loss: float = 0.0


def sizes_of(run: RunConfig) -> dict[str, int]:
    return dict(MeshSpec.parse(run.mesh).axes)


def put_rows(run: RunConfig, model: Any, mesh: Any, batch: Any) -> Any:
    """A batch on the devices of a run; in slots or uneven rows, where it has them."""
    rows = jax.NamedSharding(mesh, model.rules.spec(("batch", "seq"), mesh))
    slots, uneven = context_slots(run, mesh, model.rules), unequal_rows(run, mesh)
    batch = batch if uneven is None else uneven.arrange(batch)
    return jax.device_put(batch, rows) if slots is None else put_slotted(batch, slots, rows)


BY_THE_OPTIMIZER = r'^optim: .* does not (use moments; it uses |support rounding = ")'
"""How an optimizer's row in its own table refuses a setting of its own."""


def with_features(*names: str) -> RunConfig | None:
    """The run with these features; None if one setting undoes another, as two optimizers do.

    Raises:
        ValueError: the optimizer's row does not have the setting.
    """
    run = BASE
    for name in names:
        run = SETTINGS[name](run)
    return run if all(FEATURES[name].on(run, sizes_of(run)) for name in names) else None


@functools.lru_cache(512)
def outcome(*names: str) -> Pair | None:
    """Refuses or runs one step of the run with these features, and holds that it is one or the other by the table."""
    try:
        run = with_features(*names)
    except ValueError as refusal:
        if not re.search(BY_THE_OPTIMIZER, str(refusal)):
            raise
        return Pair(BASE, 1)
    if run is None:
        return None
    rows = refused(run, sizes_of(run), "cpu")
    model = run_model(run)
    if rows:
        with pytest.raises(ConfigError, match="does not go with"):
            fitting_mesh(run, model, 4, "cpu")
        return Pair(run, len(rows))
    mesh = fitting_mesh(run, model, 4, "cpu").build(jax.devices()[:4])
    transform = build_optimizer(run, model)
    abstract = run_state(run, model, transform, mesh)
    grads = build_value_and_grad(run, model, mesh)
    files = StateFiles(run.disk, abstract.opt_state) if run.disk.directory else None
    param_files = StateFiles(run.disk, abstract.params, "params") if run.disk.parameters else None
    if files is not None:
        abstract = dataclasses.replace(abstract, opt_state=files.leaves())
    if param_files is not None:
        abstract = dataclasses.replace(abstract, params=param_files.leaves())
    if (uneven := uneven_state(run, mesh, abstract.opt_state)) is not None:
        abstract = dataclasses.replace(abstract, opt_state=uneven.leaves())
    batch = tiny.batch(7, 8, 16, run.model.vocab_size, packed=True)
    with jax.set_mesh(mesh):
        state = init_run_state(run, model, transform, mesh, abstract, None, files, param_files, uneven)
        batch = put_rows(run, model, mesh, batch)
        if files is None and uneven is None:
            jitted = quick.jit(build_step(run, model, grads, transform, layers=run.observe.layers_every > 0))
            text = jitted.lower(state, batch).as_text()
            after, metrics = jitted(state, batch)
        elif files is not None and param_files is not None:
            of = streamed_model(run, model, abstract, param_files)
            programs = build_streamed_step(run, of, files, batch, quick.OPTIONS)
            parts = (programs.embed, programs.head, *programs.forward.values(), *programs.update.values())
            text = "".join(one.as_text() for one in (*parts, *programs.backward.values()))
            after, metrics = LayerStreamStep(programs, of, files, HostInputs())(state, batch)
        else:
            units = uneven or files
            assert units is not None
            lowered = lowered_programs(build_disk_step(run, model, grads, abstract, units), abstract, batch, units)
            text = "".join(one.as_text() for one in (lowered.gradients, *lowered.updates.values(), lowered.finish))
            after, metrics = DiskStep(compiled_programs(lowered, quick.OPTIONS), units)(state, batch)
        loss = float(np.mean(jax.device_get(metrics["loss"])))
    assert np.isfinite(loss)
    assert 2 < loss < 8
    assert int(after.step) == 1
    return Pair(run, 0, hashlib.sha256(text.encode()).hexdigest(), loss)


def check_pair(seed: int) -> int:
    """Draws two features that one run can have; returns the number of rows that refuse it.

    A pair that runs has another program than a run with either feature alone: none is ignored.
    """
    rng = random.Random(seed)
    while True:
        one, other = rng.sample(sorted(SETTINGS), 2)
        found = outcome(one, other)
        if found is not None:
            break
    if found.rows == 0:
        for kept, added in ((one, other), (other, one)):
            alone = outcome(kept)
            if alone is None or alone.rows or FEATURES[added].on(alone.run, sizes_of(alone.run)):
                continue
            if added not in BESIDE_THE_STEP:
                assert alone.program != found.program, f"{added} changes nothing beside {kept}"
    return found.rows
