"""Ahead-of-time compilation of the training step for devices that are not present."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxllm.compiler import aot
from jaxllm.config import ConfigError, from_dict, to_dict
from jaxllm.data import Batch
from jaxllm.models import Functional
from jaxllm.models.params import at_least_f32
from jaxllm.parallel.compiler_flags import options
from jaxllm.train.config import RunConfig
from jaxllm.train.disk.disk_step import compiled_programs, lowered_programs
from jaxllm.train.disk.saved_inputs import saved_host_bytes
from jaxllm.train.disk.state_files import StateFiles
from jaxllm.train.disk.step_bytes import disk_step_bytes, program_bytes, shard_bytes
from jaxllm.train.disk.streamed_bytes import device_peak
from jaxllm.train.run import batch_rows, build_value_and_grad, run_mesh
from jaxllm.train.run_model import run_model
from jaxllm.train.run_slots import abstract_slotted, context_slots
from jaxllm.train.step.objective import make_objective
from jaxllm.train.step.step_builder import (
    build_disk_step,
    build_optimizer,
    build_step,
    build_streamed_step,
    run_state,
    streamed_model,
)
from jaxllm.train.step.train_state import TrainState
from jaxllm.train.step.training_step import jit_step
from jaxllm.train.unequal.uneven_state import uneven_state
from sharding.isolate import IsolatedError, Progress, run_isolated, stage
from sharding.topology import Topology


def compile_for(
    config: RunConfig, on: str, *, progress: Progress | None = None, keep: Path | None = None, anyway: bool = False
) -> aot.CompileReport:
    """Compiles the run's step for a topology ("v6e:8x8", "h100:8x8") in a separate process; no data is opened.

    Args:
        config: the run; its mesh is laid over the topology's devices.
        on: the topology's name.
        progress: called about once a second.
        keep: file to write the compiled program to, for ``aot.kept``.
        anyway: let the TPU compiler compile a program that exceeds device memory, to see what takes the memory.

    Raises:
        ShardingError: the topology is unknown, or the run does not fit a mesh of its devices.
        OutOfDeviceMemory: the compiler says that the program exceeds device memory; with ``anyway``, that it does not
            finish it.
        CompilerMissing: the compiler is not installed; names the extra to install.
    """
    arguments = {"config": to_dict(step_settings(config)), "keep": None if keep is None else str(keep.absolute())}
    env = {"LIBTPU_INIT_ARGS": "--xla_tpu_no_crash_on_oom=true"} if anyway else None
    compile_isolated = functools.partial(
        run_isolated, "jaxllm.train.compile_step:compile_here", on, arguments, progress=progress
    )
    try:
        report = compile_isolated(env=env)
    except IsolatedError as error:
        if not anyway or "Invalid TPU program" not in str(error):
            raise
        report = compile_isolated()  # The compiler goes on with some programs only; of others it says what they need.
    return aot.CompileReport.from_json(report)


def step_settings(config: RunConfig) -> RunConfig:
    """The settings that a step depends on, of a configuration that has more (of post-training)."""
    return RunConfig(**{field.name: getattr(config, field.name) for field in fields(RunConfig)})


def compile_here(topology: Topology, config: dict[str, Any], keep: str | None = None) -> dict[str, Any]:
    """``compile_for`` in this process, which must be set up for the topology's compiler.

    Args:
        topology: the devices to compile for.
        config: the run, as JSON.
        keep: file to write the compiled program to.
    """
    run = from_dict(RunConfig, config)
    step, arguments, mesh = step_on(topology, run)
    report = aot.compile(
        step,
        *arguments,
        topology=topology,
        mesh=mesh,
        name=run.name,
        options=compiler_options(topology, run),
        progress=aot.to_stderr,
        keep=None if keep is None else Path(keep),
    )
    return report.to_json()


def step_on(topology: Topology, run: RunConfig) -> tuple[Any, tuple[Any, Any], Mesh]:
    """The run's jitted step, its abstract arguments (state and batch), and the mesh to trace it under.

    Raises:
        ConfigError: the optimizer state is on disk or in uneven shares, and the step is several programs.
    """
    if run.disk.directory:
        raise ConfigError(
            f'disk.directory = "{run.disk.directory}": the step is several programs, with files between them; leave it '
            "out to compile for devices that are not here, or give `jaxllm train` --within SIZE --disk DIR:SIZE."
        )
    if run.parallel.state_shares:
        raise ConfigError(
            f"parallel.state_shares = {' '.join(map(str, run.parallel.state_shares))}: the step is several programs; "
            "leave it out to compile for devices that are not here, or give --estimate for the memory of the largest "
            "share."
        )
    return _step_for(run, topology.devices())


class StateBytes(NamedTuple):
    """Bytes of parameters and optimizer state by tier.

    Attributes:
        device: of a device.
        host: of the host's memory, for a device.
        disk: of files, for a process.
    """

    device: int
    host: int
    disk: int


class StepMemory(NamedTuple):
    """Bytes that a run's compiled step takes, wherever its state is.

    Attributes:
        device: of a device.
        host: of the host's memory for a device, by what a step moves there: offloaded activations, or saved inputs of
            streamed layers.
        temporaries: of a device, of the largest program.
        programs: bytes of a device that each program takes by itself, by name; of one program: "step".
    """

    device: int
    host: int
    temporaries: int
    programs: dict[str, int]


def step_memory_here(run: RunConfig) -> tuple[int, int]:
    """Bytes that the run's step takes on each of the devices that are here, and in the host's memory.

    The step is compiled for them, and not run; the program is found again in the compilation cache.
    """
    devices = jax.devices()
    chosen = options(devices[0].platform, devices[0].device_kind, run.compiler_options) or None
    return _step_memory(step_settings(run), devices, chosen)[:2]


def step_memory_for(run: RunConfig, on: str, progress: Progress | None = None) -> StepMemory:
    """Bytes that the run's step takes on a topology, wherever its state is; compiled in a separate process.

    Args:
        run: the run; with ``disk.directory`` its step is several programs, and no file is made.
        on: the topology's name.
        progress: called about once a second.

    Raises:
        ShardingError: the topology is unknown, or the run does not fit a mesh of its devices.
        OutOfDeviceMemory: the compiler says that a program exceeds device memory.
        CompilerMissing: the compiler is not installed; names the extra to install.
    """
    arguments = {"config": to_dict(step_settings(run))}
    return StepMemory(**run_isolated("jaxllm.train.compile_step:step_memory_on", on, arguments, progress=progress))


def step_memory_on(topology: Topology, config: dict[str, Any]) -> dict[str, Any]:
    """``step_memory_for`` in this process, which must be set up for the topology's compiler.

    Args:
        topology: the devices to compile for.
        config: the run, as JSON.
    """
    run = from_dict(RunConfig, config)
    stage("compiling")
    return _step_memory(run, topology.devices(), compiler_options(topology, run))._asdict()


def _step_memory(run: RunConfig, devices: list[jax.Device], chosen: dict[str, str] | None) -> StepMemory:
    if run.disk.parameters:
        return _layer_stream_memory(run, devices, chosen)
    if run.disk.directory:
        return _disk_step_memory(run, devices, chosen)
    if run.parallel.state_shares:
        return _uneven_step_memory(run, devices, chosen)
    step, arguments, mesh = _step_for(run, devices)
    with jax.set_mesh(mesh):
        memory: Any = step.lower(*arguments).compile(compiler_options=chosen).memory_analysis()
    took = program_bytes(memory)
    return StepMemory(took, memory.host_temp_size_in_bytes, memory.temp_size_in_bytes, {"step": took})


def _disk_step_memory(run: RunConfig, devices: list[jax.Device], chosen: dict[str, str] | None) -> StepMemory:
    """Bytes of a step with its optimizer state on disk; no file is made."""
    model = run_model(run)
    mesh = run_mesh(run, model, devices)
    abstract = run_state(run, model, build_optimizer(run, model), mesh)
    files = StateFiles(run.disk, abstract.opt_state)
    abstract = replace(abstract, opt_state=files.leaves())
    programs = build_disk_step(run, model, build_value_and_grad(run, model, mesh), abstract, files)
    with jax.set_mesh(mesh):
        lowered = lowered_programs(programs, abstract, abstract_batch(run, model, mesh), files)
        compiled = compiled_programs(lowered, chosen)
    host: int = compiled.gradients.memory_analysis().host_temp_size_in_bytes
    return _of_programs(disk_step_bytes(compiled, abstract, files), host, compiled._asdict())


def _uneven_step_memory(run: RunConfig, devices: list[jax.Device], chosen: dict[str, str] | None) -> StepMemory:
    """Bytes of a step with uneven optimizer state, on the device that holds most of it."""
    model = run_model(run)
    mesh = run_mesh(run, model, devices)
    abstract = run_state(run, model, build_optimizer(run, model), mesh)
    held = uneven_state(run, mesh, abstract.opt_state)
    assert held is not None  # shares for other devices are refused with the mesh
    abstract = replace(abstract, opt_state=held.leaves())
    programs = build_disk_step(run, model, build_value_and_grad(run, model, mesh), abstract, held)
    with jax.set_mesh(mesh):
        lowered = lowered_programs(programs, abstract, abstract_batch(run, model, mesh), held)
        compiled = compiled_programs(lowered, chosen)
    state, resident = max(map(held.bytes_on, mesh.devices.flat)), shard_bytes((abstract.params, abstract.extras))
    gradients, finish = (one.memory_analysis() for one in (compiled.gradients, compiled.finish))
    update = max(one.working_bytes() for one in compiled.updates.values())
    device = state + max(
        program_bytes(gradients), resident + gradients.output_size_in_bytes + update, program_bytes(finish)
    )
    host: int = gradients.host_temp_size_in_bytes
    whole = {segment: one.whole for segment, one in compiled.updates.items()}
    return _of_programs(device, host, {**compiled._asdict(), "updates": whole})


def _layer_stream_memory(run: RunConfig, devices: list[jax.Device], chosen: dict[str, str] | None) -> StepMemory:
    """Bytes of a step with parameters and optimizer state on disk, by its formula; no file is made."""
    model = run_model(run)
    mesh = run_mesh(run, model, devices)
    abstract, files, params = _on_disk(run, run_state(run, model, build_optimizer(run, model), mesh))
    of = streamed_model(run, model, replace(abstract, params=params.leaves()), params)
    with jax.set_mesh(mesh):
        programs = build_streamed_step(run, of, files, abstract_batch(run, model, mesh), chosen)
    hidden: int = programs.embed.memory_analysis().output_size_in_bytes
    sizes = [hidden + shard_bytes([x for _, x in programs.values[of.kind_of(unit)]]) for unit in params.units]
    inputs = saved_host_bytes(run.disk, sizes, run.accumulate)
    return _of_programs(sum(device_peak(programs, of, files)), inputs, vars(programs))


def _of_programs(device: int, host: int, programs: Mapping[str, Any]) -> StepMemory:
    """Memory of a step of several programs, by name; those of kinds of layers are in dictionaries by segment."""
    named = {name: one if isinstance(one, dict) else {"": one} for name, one in programs.items()}
    found = {
        f"{name} {segment}".strip(): one.memory_analysis()
        for name, many in named.items()
        for segment, one in many.items()
        if hasattr(one, "memory_analysis")
    }
    temporaries = max(one.temp_size_in_bytes for one in found.values())
    return StepMemory(device, host, temporaries, {name: program_bytes(one) for name, one in found.items()})


def _on_disk(run: RunConfig, abstract: TrainState) -> tuple[TrainState, StateFiles, StateFiles]:
    """The train state with ``DiskLeaf`` for its optimizer state, and the files of that and of the parameters."""
    files = StateFiles(run.disk, abstract.opt_state)
    params = StateFiles(run.disk, abstract.params, "params")
    return replace(abstract, opt_state=files.leaves()), files, params


def state_bytes_here(run: RunConfig) -> StateBytes:
    """Bytes of the run's state between two steps by tier, on the devices that are here; nothing is compiled."""
    devices, model = jax.devices(), run_model(run)
    mesh = run_mesh(run, model, devices)
    abstract = run_state(run, model, build_optimizer(run, model), mesh)
    if run.disk.directory:
        _, files, params = _on_disk(run, abstract)
        if run.disk.parameters:
            return StateBytes(
                shard_bytes((params.kept_of(abstract.params), abstract.extras)), 0, files.bytes + params.bytes
            )
        return StateBytes(shard_bytes((abstract.params, abstract.extras)), 0, files.bytes)
    if (held := uneven_state(run, mesh, abstract.opt_state)) is not None:
        most = max(map(held.bytes_on, mesh.devices.flat))
        return StateBytes(shard_bytes((abstract.params, abstract.extras)) + most, 0, 0)
    leaves = jax.tree.leaves((abstract.params, abstract.opt_state, abstract.extras))
    away = [leaf for leaf in leaves if leaf.sharding.memory_kind == "pinned_host"]
    return StateBytes(shard_bytes(leaves) - shard_bytes(away), shard_bytes(away), 0)


def window_bytes_here(run: RunConfig) -> int:
    """Bytes of the host's memory for each device that layers in the window take, of a run with its optimizer state on
    disk, or its parameters too, on the devices that are here; nothing is compiled."""
    model = run_model(run)
    mesh = run_mesh(run, model, jax.devices())
    _, files, params = _on_disk(run, run_state(run, model, build_optimizer(run, model), mesh))
    size = files.window_bytes + (params.window_bytes if run.disk.parameters else 0)
    return -(-size // jax.local_device_count())


def _step_for(run: RunConfig, devices: list[jax.Device]) -> tuple[Any, tuple[Any, Any], Mesh]:
    model = run_model(run)
    mesh = run_mesh(run, model, devices)
    transform = build_optimizer(run, model)
    abstract = run_state(run, model, transform, mesh)
    own = build_step(run, model, build_value_and_grad(run, model, mesh), transform)
    return jit_step(own, abstract), (abstract, abstract_batch(run, model, mesh)), mesh


def abstract_batch(run: RunConfig, model: Functional, mesh: Mesh | AbstractMesh) -> Any:
    """Shapes and shardings of a batch of the run's step."""
    shape = (batch_rows(run, mesh, model.rules), run.data.seq_len)
    spec = model.rules.spec(("batch", "seq"), mesh, shape, what="batch")
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, spec))
    values = jax.ShapeDtypeStruct(shape, at_least_f32(jnp.dtype(run.model.dtype)), sharding=tokens.sharding)
    read = dict.fromkeys(make_objective(run.objective, run.z_loss).required, values)
    batch = Batch(tokens, tokens, tokens, tokens, **read)  # type: ignore[arg-type]
    slots = context_slots(run, mesh, model.rules)
    return batch if slots is None else abstract_slotted(batch, slots)


def compiler_options(topology: Topology, run: RunConfig) -> dict[str, str] | None:
    """The run's options for the topology's compiler; None for the compiler's defaults."""
    return options(topology.platform, topology.device_kind, run.compiler_options) or None
