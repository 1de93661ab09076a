"""Memory budgets of a run, ``--within 14GiB --host 64GiB --disk DIR:200GiB`` or ``--fit``.

The remat whose step takes no more is chosen, with the optimizer state on the device; where none fits, with the state in
the host's memory or on disk, or with the parameters of layers there too, whichever is faster by the plan; where the
rates of the devices are not known, in this order. With files, what the host's memory has left keeps parts of them.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jaxllm.cli.errors import UsageError

if TYPE_CHECKING:
    from jaxllm.plan.hardware import Cluster
    from jaxllm.plan.persistent_share import PersistentPlan
    from jaxllm.plan.remat_solver import HostTier, StepBytes
    from jaxllm.plan.tiers.limited_step import LimitedStep
    from jaxllm.train import RunConfig
    from jaxllm.train.compile_step import StateBytes
    from sharding.isolate import Progress

FIT_SHARE = 0.95
"""Share of a device's memory that ``--fit`` plans for: the rest is for fragments between arrays."""


class MemoryBudget(NamedTuple):
    """Budget of a step.

    Attributes:
        device: bytes of a device; None: of the devices that are here, what they have.
        host: bytes of the host's memory for each device, for activations and optimizer state; None: none.
        disk: directory and bytes of it for optimizer state and parameters; None: none.
        hardware: file that gives the rates of the devices (``jaxllm.plan.hardware``); None: their data sheets.
    """

    device: int | None
    host: int | None = None
    disk: tuple[str, int] | None = None
    hardware: Path | None = None


def budget_of(within: str, host: str | None) -> MemoryBudget:
    """Budget of ``--within`` and ``--host``.

    Raises:
        UsageError: one is not a size.
    """
    return MemoryBudget(size_of("--within", within), None if host is None else size_of("--host", host))


def without_budget(argv: list[str]) -> tuple[list[str], MemoryBudget | None]:
    """The arguments of `jaxllm train` without those of a budget, and the budget that they give.

    ``--disk DIR:SIZE``, with or without ``--host SIZE``, is replaced by the settings that it stands for where there is
    no budget, or settings say what is on disk (``--disk.parameters``).

    Raises:
        UsageError: a size is missing, or they do not go together.
    """
    rest: list[str] = []
    found: dict[str, str] = {}
    words: Iterator[str] = iter(argv)
    for word in words:
        name, _, value = word.partition("=")
        if word == "--fit":
            found[name] = "yes"
        elif name in ("--within", "--host", "--disk"):
            found[name] = value or next(words, "")
        else:
            rest.append(word)
    if "--fit" in found and "--within" in found:
        raise UsageError("--fit is the memory that the devices have; give it or --within SIZE.")
    within, fit, host = found.get("--within"), "--fit" in found, found.get("--host")
    if host is not None and within is None and not fit and "--disk" not in found:
        raise UsageError("--host SIZE needs --within SIZE, the memory budget of a device, --fit, or --disk DIR:SIZE.")
    disk = disk_of(found["--disk"]) if "--disk" in found else None
    settings = [] if disk is None else ["--disk.directory", disk[0], "--disk.bytes", str(disk[1])]
    if any(word.startswith(("--disk.parameters", "--disk.activations")) for word in rest):
        rest, disk, settings = [*rest, *settings], None, []  # the run says what is on disk
    if within is None and not fit:
        settings += [] if host is None else ["--disk.host", str(size_of("--host", host))]
        return [*rest, *settings], None
    budget = MemoryBudget(None, None if host is None else size_of("--host", host))
    budget = budget if within is None else budget_of(within, host)
    return rest, budget._replace(disk=disk)


def without_hardware(argv: list[str]) -> tuple[list[str], Path | None]:
    """The arguments of `jaxllm train` without ``--hardware FILE``, and the file with the rates of the devices.

    Raises:
        UsageError: the file is missing.
    """
    rest, file, words = [], None, iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name != "--hardware":
            rest.append(word)
        elif not (value := value if equals else next(words, "")):
            raise UsageError("--hardware: give the file with the rates of the devices, such as ours.toml.")
        else:
            file = Path(value)
    return rest, file


def check_hardware_used(file: Path | None, budget: MemoryBudget | None, *, plans: bool) -> None:
    """Checks that something of a run asks for the rates of devices.

    Args:
        file: of ``--hardware``; None: none was given.
        budget: of the run.
        plans: whether its layout is searched.

    Raises:
        UsageError: nothing does.
    """
    if file is not None and not plans and budget is None:
        raise UsageError(
            "--hardware FILE gives the rates of the devices, by which --mesh auto plans, and steps under --within are "
            "predicted; it needs --mesh auto, or --within SIZE (or --fit)."
        )


def fitted_here(config: RunConfig, budget: MemoryBudget) -> RunConfig:
    """The run with the remat that fits the budget on the devices that are here; prints the candidates, and by the rates
    of the devices, where they are known, the seconds of a step and what the limit costs.

    Raises:
        UsageError: nothing fits, and what the least takes; the devices do not say how much memory they have, or have no
            host memory apart from it.
    """
    import jax

    device = jax.local_devices()[0]  # of another process's devices nothing is known
    limit = budget.device
    if limit is None:
        there = (device.memory_stats() or {}).get("bytes_limit")
        if there is None:
            raise UsageError(f"--fit: {device.device_kind} does not say how much memory it has; give --within SIZE.")
        limit = int(FIT_SHARE * there)
    if budget.disk is not None and _placed(config):
        raise UsageError(
            "--disk: the run says where its optimizer state is (host.optimizer, disk.directory); leave one out."
        )
    cluster = _known_here(budget.hardware) if budget.host is None else _cluster_here(budget.hardware)
    run, sent = _searched(config, budget._replace(device=limit), cluster)
    print(_cost_of(run, sent, cluster), end="\n\n", flush=True)
    return run


def _searched(config: RunConfig, budget: MemoryBudget, cluster: Cluster | None) -> tuple[RunConfig, int]:
    """The run with the place for its state and the remat that fit the budget, and the bytes of activations that a
    micro-batch moves to the host.

    Args:
        config: the run.
        budget: with the bytes of a device.
        cluster: the devices; None: their rates are not known.

    Raises:
        UsageError: nothing fits.
    """
    from jaxllm.config import ConfigError
    from jaxllm.models.remat import RematError
    from jaxllm.train.compile_step import state_bytes_here

    problem: Exception | None = None
    places = _places(config, budget)

    for number, run in enumerate(places):
        try:
            state = state_bytes_here(with_remat(run, "full"))
        except ConfigError as error:  # the run's settings do not go with this place
            print(f"  not with this run: {error}\n", flush=True)
            problem = problem or error
            continue
        if budget.host is not None and state.host > budget.host and not _placed(config):
            run, state = _rest_in_host_memory(run, state, budget.host)
        print(_by_tier(state), flush=True)
        host = None if budget.host is None else budget.host - state.host
        if host is not None and host < 0:
            print(f"  more than the {(budget.host or 0) / 2**30:.3f} GiB of --host\n", flush=True)
            continue
        try:
            found = _fitted_place(run, budget._replace(host=host), cluster)
        except (RematError, ConfigError) as error:
            print(f"  nothing fits: {error}\n", flush=True)
            if isinstance(error, RematError) or not isinstance(problem, RematError):
                problem = error
            continue
        return _faster_place(found, places[number + 1 :], budget, cluster) if number else found
    raise UsageError(str(problem)) from problem


def _fitted_place(run: RunConfig, budget: MemoryBudget, cluster: Cluster | None) -> tuple[RunConfig, int]:
    """The run with the remat that fits and chunks of its files, and the bytes of activations that a micro-batch moves
    to the host; 0 of streamed layers, whose inputs are copied beside the passes.

    Args:
        run: with its optimizer state in its place.
        budget: of a device, and of the host without that state.
        cluster: the devices; needed with ``budget.host`` alone.

    Raises:
        RematError: nothing fits.
    """
    import jax

    from jaxllm.models.remat import RematError
    from jaxllm.plan.capacity_table import with_windows
    from jaxllm.train.compile_step import window_bytes_here

    _check_files(run)
    if run.disk.parameters:
        return _streamed_within(run, budget, cluster), 0
    problem: RematError | None = None
    for tried in with_windows(run):
        window = 0 if budget.host is None or not run.disk.directory else window_bytes_here(tried)
        left = None if budget.host is None else budget.host - window
        took: dict[str, StepBytes] = {}
        here, measure = (jax.device_count(), jax.default_backend()), functools.partial(_measured_here, took)
        try:
            if left is not None and left < 0:
                raise RematError(f"layers in the window take {window / 2**30:.3f} GiB of the host, more than --host.")
            fitted = within_budget(tried, MemoryBudget(budget.device, left), measure, here, cluster)
        except RematError as error:
            problem = error
            continue
        sent = took[fitted.model.remat].host
        return fitted if left is None or not window else _with_chunks(fitted, left - sent, window), sent
    assert problem is not None
    raise problem


def _check_files(run: RunConfig, inputs: int = 0) -> None:
    """Checks that the files of a run are within ``disk.bytes``.

    Args:
        run: the run.
        inputs: bytes of a process of what layers save in files.

    Raises:
        RematError: they are not.
    """
    from jaxllm.models.remat import RematError
    from jaxllm.train.compile_step import state_bytes_here

    if not run.disk.directory or not run.disk.bytes:
        return
    state = state_bytes_here(with_remat(run, "full")).disk
    if 2 * state + inputs > run.disk.bytes:
        raise RematError(
            f"files take {(2 * state + inputs) / 2**30:.3f} GiB while a checkpoint is written, of which "
            f"{inputs / 2**30:.3f} are inputs of layers; --disk has {run.disk.bytes / 2**30:.3f} GiB."
        )


def _faster_place(
    found: tuple[RunConfig, int], others: list[RunConfig], budget: MemoryBudget, cluster: Cluster | None
) -> tuple[RunConfig, int]:
    """A run whose optimizer state has left the device, or the fastest one by the plan with it, or with the parameters
    too, in another place; with the bytes of activations that it moves.

    On disk the state leaves more of the host's memory to activations, and of the device's where a part of it would have
    to be persistent; streamed layers are updated beside the backward pass. Each place is tried where it would be faster
    if all that is recomputed fitted, or with streamed layers.

    Args:
        found: the run, and the bytes of activations that it moves to the host.
        others: with their state on disk.
        budget: with the bytes of a device.
        cluster: the devices; None: their rates are not known, and the first place that fits is taken.
    """
    from jaxllm.config import ConfigError
    from jaxllm.models.remat import RematError

    if cluster is None:
        return found
    for other in others:
        if not other.disk.directory:
            continue
        what = "parameters and optimizer state" if other.disk.parameters else "optimizer state"
        try:
            here = _step_by_plan(*found, cluster).seconds
            best = _step_by_plan(other if other.disk.parameters else with_remat(other, "none"), 0, cluster)
            saves = other.disk.parameters and budget.host is not None  # named values, and computes less again
            if (least := best.seconds - best.recomputed * saves) >= here:
                continue
            print(f"{here * 1e3:.1f} ms by the plan; with {what} on disk, {least * 1e3:.1f} or more:", flush=True)
            tried = _fitted_place(other, budget, cluster)
            there = _step_by_plan(*tried, cluster).seconds
        except (RematError, ConfigError, NotImplementedError) as error:
            print(f"  not so: {error}\n", flush=True)
            continue
        print(f"{there * 1e3:.1f} ms by the plan on disk, {here * 1e3:.1f} otherwise\n", flush=True)
        found = tried if there < here else found
    return found


def _step_by_plan(run: RunConfig, sent: int, cluster: Cluster) -> LimitedStep:
    """Predicted step of a run on the devices that are here.

    Args:
        run: the run.
        sent: bytes of activations that a micro-batch moves to the host.
        cluster: the devices that are here.

    Raises:
        ConfigError, NotImplementedError: there is no formula for it.
    """
    import jax

    from jaxllm.plan.tiers.limited_step import MovedBytes, limited_step
    from jaxllm.train.compile_step import state_bytes_here
    from jaxllm.train.run import fitting_mesh
    from jaxllm.train.run_model import run_model

    mesh, there = fitting_mesh(run, run_model(run), jax.device_count(), jax.default_backend()), state_bytes_here(run)
    return limited_step(run, MovedBytes(sent, there.host, there.disk / jax.local_device_count()), mesh, cluster)


def _cost_of(run: RunConfig, sent: int, cluster: Cluster | None) -> str:
    """Cost of a limit: seconds of a step and of one without it; FLOPs, where the rates of the devices are not known.

    Args:
        run: the run that fits.
        sent: bytes of activations that a micro-batch moves to the host.
        cluster: the devices; None: not known.
    """
    import jax

    from jaxllm.config import ConfigError
    from jaxllm.train.model_flops import hardware_flops_per_token, train_flops_per_token

    length, why = run.data.seq_len, ""
    if cluster is not None:
        try:
            return str(_step_by_plan(run, sent, cluster))
        except (ConfigError, NotImplementedError) as error:
            why = str(error)
    why = why or f"the rates of {jax.devices()[0].device_kind} are not known: --hardware FILE gives them."
    ratio = hardware_flops_per_token(run.model, length) / train_flops_per_token(run.model, length)
    return f"a step has {ratio:.2f} times the FLOPs of one without a limit; no seconds are predicted: {why}"


def _places(config: RunConfig, budget: MemoryBudget) -> list[RunConfig]:
    """The run with its optimizer state on the device, in the host's memory, and on disk, with its parameters there as
    well, and last with the inputs of layers too, as far as the budget has them.

    A state that the host or the disk has is copied there and back in each step, so it leaves the device only where no
    remat fits beside it.
    """
    if _placed(config):
        return [with_remat(config, "full") if config.disk.parameters else config]
    places = [config]
    if budget.host is not None and config.optim.spec.streamable:
        places.append(dataclasses.replace(config, host=dataclasses.replace(config.host, optimizer=True)))
    if budget.disk is not None:
        directory, size = budget.disk
        disk = dataclasses.replace(config.disk, directory=directory, bytes=size)
        places.append(dataclasses.replace(config, disk=disk))
        for activations in (False, True):
            streamed = dataclasses.replace(disk, parameters=True, activations=activations)
            places.append(with_remat(dataclasses.replace(config, disk=streamed), "full"))
    return places


def _rest_in_host_memory(run: RunConfig, state: StateBytes, most: int) -> tuple[RunConfig, StateBytes]:
    """The run with the least persistent share beside which the rest of its optimizer state fits into the host's memory,
    and the bytes of its state; as given, if there is none.

    Args:
        run: with all its optimizer state in the host's memory.
        state: its bytes.
        most: bytes of the host's memory.
    """
    from jaxllm.plan.persistent_share import SHARES
    from jaxllm.train.compile_step import state_bytes_here

    for share in SHARES:
        one = dataclasses.replace(run, host=dataclasses.replace(run.host, persistent=share))
        if (found := state_bytes_here(one)).host <= most:
            return one, found
    return run, state


def _streamed_within(config: RunConfig, budget: MemoryBudget, cluster: Cluster | None) -> RunConfig:
    """The run with its parameters on disk, if its step fits; prints what it takes.

    Where the budget's disk has inputs of layers, they are those of the fewest layers with which the others' fit into
    the host's memory. The window of layers is that of the run, or the largest smaller one with which the step fits.
    With a budget of the host's memory, layers save the named values with which the step is fastest by the plan
    (``jaxllm.plan.tiers.saved_choice``).

    Args:
        config: with parameters on disk.
        budget: with the bytes of a device.
        cluster: the devices; None: their rates are not known, and layers save their inputs alone.

    Raises:
        RematError: it does not fit.
        ConfigError: the run's settings do not go with parameters on disk.
    """
    import jax

    from jaxllm.models.remat import RematError
    from jaxllm.plan.capacity_table import with_windows
    from jaxllm.train.compile_step import step_memory_here, window_bytes_here
    from jaxllm.train.disk.saved_inputs import host_inputs, layers_in_files
    from jaxllm.train.disk.state_file import padded

    assert budget.device is not None
    device = inside = window = 0
    left = None
    for tried in with_windows(config):
        config, (device, inside) = tried, step_memory_here(tried)
        window = 0 if budget.host is None else window_bytes_here(config)
        left = None if budget.host is None else budget.host - window
        if config.disk.activations and budget.disk is not None and left is not None:
            config, inside = _fewest_in_files(config, inside, left)
        if device <= budget.device and (left is None or inside <= left):
            break
    inputs = "inputs of layers in the host memory"
    if config.disk.activations:
        inputs = f"inputs of layers, those of {config.disk.activation_layers or 'all'} on disk"
    said = f"{device / 2**30:.3f} GiB on the device, {inside / 2**30:.3f} of the host for {inputs}"
    print(f"layers streamed from disk, {config.disk.window} of them in memory: {said}", flush=True)
    for name, found, most in (
        ("--within", device, budget.device),
        (f"--host, without {window / 2**30:.3f} for layers in memory,", inside, left),
    ):
        if most is not None and found > most:
            raise RematError(f"layers streamed from disk take {said}; {name} is {most / 2**30:.3f} GiB.")
    layers = sum(repeats for _, repeats in config.model.segments)
    largest = hidden = -(-inside // host_inputs(config.disk, layers, config.accumulate))
    files = layers_in_files(config.disk, layers) * config.accumulate
    _check_files(config, files * padded(hidden) * jax.local_device_count())
    if left is None:
        return config
    if cluster is not None:
        found = _with_saved_values(config, budget._replace(host=left), cluster, device)
        config, inside, largest = found or (config, inside, largest)
    others = inside + 2 * config.accumulate * hidden + 2 * config.disk.window * largest
    return _with_chunks(config, left, window, others)


def _with_saved_values(
    config: RunConfig, budget: MemoryBudget, cluster: Cluster, device: int
) -> tuple[RunConfig, int, int] | None:
    """The streamed run with the named values that its layers save in the least time, their bytes in the host's memory,
    and the most bytes that a layer saves; None: it is fastest with the layers' inputs alone, or does not fit as
    compiled. Prints what is saved where.

    Args:
        config: the run, whose layers save their inputs alone.
        budget: of a device, of the host for what layers save, and of the disk.
        cluster: the devices.
        device: bytes that the step takes on a device.
    """
    import jax

    from jaxllm.config import ConfigError
    from jaxllm.plan.tiers.saved_choice import SavedRoom, saved_choice
    from jaxllm.train.compile_step import state_bytes_here, step_memory_here
    from jaxllm.train.disk.streamed_bytes import value_copies
    from jaxllm.train.run import fitting_mesh
    from jaxllm.train.run_model import run_model

    assert budget.device is not None
    assert budget.host is not None
    disk = 0 if budget.disk is None else budget.disk[1] - 2 * state_bytes_here(config).disk
    room = SavedRoom(budget.host, disk / jax.local_device_count(), (budget.device - device) / value_copies())
    mesh = fitting_mesh(config, run_model(config), jax.device_count(), jax.default_backend())
    try:
        choice = saved_choice(config, mesh, cluster, room)
    except (ConfigError, NotImplementedError) as error:
        print(f"  layers save their inputs alone: {error}", flush=True)
        return None
    if choice is None or set(choice.policies) == {"full"}:
        return None
    print(f"  {choice}", flush=True)
    run = choice.of(config)
    there, inside = step_memory_here(run)
    if there > budget.device or inside > budget.host:
        took = f"{there / 2**30:.3f} GiB on the device, {inside / 2**30:.3f} of the host"
        print(f"  as compiled: {took}, which is too much: they save their inputs alone", flush=True)
        return None
    return run, inside, choice.largest


def _with_chunks(config: RunConfig, most: int, window: int, others: int = 0) -> RunConfig:
    """The run with chunks of its files in the host's memory, where that has room for any.

    So a part of the state is in the host's memory and the rest on disk.

    Args:
        config: with files.
        most: bytes of the host's memory for each device, beside the window.
        window: such bytes of the window.
        others: such bytes that the step counts against ``disk.host`` besides (of a streamed step, saved inputs).
    """
    if config.disk.host or most - others < config.disk.chunk:
        return config
    print(f"  {(most - others) / 2**30:.3f} GiB of the host for chunks of the files", flush=True)
    return dataclasses.replace(config, disk=dataclasses.replace(config.disk, host=most + window))


def _fewest_in_files(config: RunConfig, host: int, most: int) -> tuple[RunConfig, int]:
    """The run with inputs of the fewest layers in files, and their bytes in the host's memory.

    Args:
        config: the run, with the inputs of all layers in files.
        host: its bytes of inputs in the host's memory.
        most: such bytes that the host has.
    """
    from jaxllm.train.disk.saved_inputs import host_inputs

    layers = sum(repeats for _, repeats in config.model.segments)
    one = host // host_inputs(config.disk, layers, config.accumulate)
    for count in range(1, layers):
        disk = dataclasses.replace(config.disk, activation_layers=count)
        there = one * host_inputs(disk, layers, config.accumulate)
        if there <= most:
            return dataclasses.replace(config, disk=disk), there
    return config, host


def _by_tier(state: StateBytes) -> str:
    """Bytes of a run's state by tier, and what they are."""
    parts = [f"{state.device / 2**30:.3f} GiB on the device"]
    parts += [f"{state.host / 2**30:.3f} in the host's memory"] if state.host else []
    parts += [f"{state.disk / 2**30:.3f} on disk, twice that while a checkpoint is written"] if state.disk else []
    return f"parameters and optimizer state: {', '.join(parts)}; the step as compiled:"


def _placed(config: RunConfig) -> bool:
    """Whether the run says where its optimizer state is."""
    return config.host.optimizer or bool(config.disk.directory)


def _measured_here(took: dict[str, StepBytes], run: RunConfig) -> StepBytes:
    """Bytes of the step of a run on the devices that are here, which are added to ``took`` by its remat."""
    from jaxllm.plan.remat_solver import StepBytes
    from jaxllm.train.compile_step import step_memory_here

    took[run.model.remat] = StepBytes(*step_memory_here(run))
    return took[run.model.remat]


def measured_for(run: RunConfig, on: str, progress: Progress | None = None) -> StepBytes:
    """Bytes of the step of a run, compiled for a topology.

    Of a step that exceeds device memory, the bytes that the compiler says it would need; it stops there, early. Some
    programs that it is told to go on with (``anyway``) end as "Invalid TPU program", so this is done only where bytes
    of the host are wanted too.
    """
    from jaxllm.models.remat import on_host
    from jaxllm.plan.remat_solver import StepBytes
    from jaxllm.train.compile_step import compile_for
    from sharding.isolate import OutOfDeviceMemory

    try:
        report = compile_for(run, on, progress=progress)
    except OutOfDeviceMemory as over:
        if not on_host(run.model.remat):
            return StepBytes(over.need)
        report = compile_for(run, on, progress=progress, anyway=True)
    return StepBytes(report.total_bytes, report.host_bytes)


def within_budget(
    config: RunConfig,
    budget: MemoryBudget,
    measure: Callable[[RunConfig], StepBytes],
    devices: tuple[int, str],
    cluster: Cluster | None = None,
) -> RunConfig:
    """The run with the remat that fits; prints the candidates, and beside each policy of the chosen one the least
    recomputation by any values of the block in the same bytes.

    Where the optimizer state is in host memory and the budget has that, a part of it may be persistent, with another
    remat beside it (``jaxllm.plan.persistent_share``).

    Args:
        budget: with the bytes of a device.
        measure: compiles the step of a run.
        devices: number of devices, and their platform.
        cluster: the devices, by which copies to the host take time; needed with ``budget.host`` alone.

    Raises:
        RematError: nothing fits; says what the least takes.
    """
    from jaxllm.parallel.sharding_table_view import columns
    from jaxllm.plan.graphs.block_graph import block_graphs, value_bytes
    from jaxllm.plan.graphs.block_placement import placed_policies
    from jaxllm.plan.graphs.remat_report import compare_remat, remat_table
    from jaxllm.plan.persistent_share import persistent_plans
    from jaxllm.plan.remat_solver import HostTier, solve
    from jaxllm.train.run import fitting_mesh
    from jaxllm.train.run_model import run_model

    assert budget.device is not None
    plain = with_remat(config, "full")
    mesh = fitting_mesh(plain, run_model(plain), *devices)
    tier = None
    if budget.host is not None:
        assert cluster is not None
        in_memory = dataclasses.replace(config, disk=dataclasses.replace(config.disk, directory="", bytes=0))
        tier = HostTier.of(in_memory, cluster, mesh, budget.host)
    blocks = block_graphs(config, mesh)
    widths, placed = value_bytes(blocks) if blocks else None, [] if tier is None else placed_policies(blocks)
    alike = _alike(config, dict(mesh.axes), devices[1])
    solved = solve(config, budget.device, lambda remat: measure(with_remat(config, remat)), tier, widths, placed, alike)
    candidates = {**solved.named, **solved.tried}
    least = min(one.flops for one in candidates.values())
    rows = [
        (
            remat,
            f"{one.bytes / 2**30:.3f}",
            *([f"{one.host / 2**30:.3f}", f"{one.exposed * 1e3:.1f}"] if tier is not None else []),
            f"{100 * (one.flops / least - 1):.1f}%",
            "chosen" if remat == solved.remat else "",
        )
        for remat, one in candidates.items()
    ]
    of_host = ("of the host", "ms exposed") if tier is not None else ()
    head = ("model.remat", "GiB", *of_host, "extra FLOPs", "")
    print(columns(head, rows, f"<>{'>>' if of_host else ''}><"), end="\n\n", flush=True)
    chosen = with_remat(config, solved.remat)
    whole = config.host.optimizer and not config.host.persistent and config.host.device_every == 1
    if tier is not None and not alike and whole:
        plans_of = functools.partial(persistent_plans, config, budget.device, solved, tier, mesh, widths, placed)
        chosen = _with_persistent_share(config, budget.device, plans_of, tier, measure)
    if compared := remat_table(compare_remat(chosen, blocks)):
        print(compared, end="\n\n", flush=True)
    return chosen


def _alike(config: RunConfig, sizes: dict[str, int], platform: str) -> tuple[str, ...]:
    """The policies for all layers that a run on a mesh can have, where some of those without the host's memory are
    refused there, as pipelines refuse "attention"; empty where none is."""
    from jaxllm.plan.remat_solver import NAMED
    from jaxllm.train.combinations import refused

    legal = tuple(name for name in NAMED if not refused(with_remat(config, name), sizes, platform))
    return () if legal == NAMED else legal


def _with_persistent_share(
    config: RunConfig,
    budget: int,
    plans_of: Callable[[int], list[PersistentPlan]],
    tier: HostTier,
    measure: Callable[[RunConfig], StepBytes],
) -> RunConfig:
    """The run with the persistent share of its optimizer state and the remat of the least time; prints the plans."""
    from jaxllm.parallel.sharding_table_view import columns
    from jaxllm.plan.persistent_share import fastest_that_fits

    def run_of(plan: PersistentPlan) -> RunConfig:
        return with_remat(replace(config, host=replace(config.host, persistent=plan.share)), plan.remat)

    took: dict[tuple[float, str], int] = {}

    def compiled(plan: PersistentPlan) -> StepBytes:
        found = measure(run_of(plan))
        took[plan.share, plan.remat] = found.device
        return found

    def row(plan: PersistentPlan) -> tuple[str, ...]:
        size = took.get((plan.share, plan.remat), plan.bytes)
        said = "chosen" if plan == chosen else "too large, as compiled" if size > budget else ""
        gib = (f"{one / 2**30:.3f}" for one in (plan.stays, plan.streamed, size))
        return f"{plan.share:g}", plan.remat, *gib, f"{plan.seconds * 1e3:.1f}", said

    replace, plans = dataclasses.replace, plans_of(0)
    chosen = fastest_that_fits(plans, budget, tier, compiled, plans_of)
    rows = [row(plan) for _, plan in sorted({plan.share: plan for plan in (*plans, chosen)}.items())]
    head = ("host.persistent", "model.remat", "GiB persistent", "streamed", "of the step", "ms by the plan", "")
    print(columns(head, rows, "<<>>>><"), end="\n\n", flush=True)
    return run_of(chosen)


def _known_here(file: Path | None) -> Cluster | None:
    """The devices that are here, by their data sheet or an entry of a file; None: neither knows them.

    Raises:
        HardwareError: the file is illegal.
    """
    from jaxllm.plan import hardware
    from jaxllm.plan.automatic_layout import cluster_here

    return cluster_here(hardware.TABLE if file is None else hardware.read(file))


def _cluster_here(file: Path | None) -> Cluster:
    """The devices that are here, by their data sheet or an entry of a file.

    Raises:
        UsageError: neither knows them.
        HardwareError: the file is illegal.
    """
    import jax

    from jaxllm.plan import hardware

    if (found := _known_here(file)) is None:
        kind = jax.devices()[0].device_kind
        key = kind if re.fullmatch(r"[A-Za-z0-9_-]+", kind) else f'"{kind}"'
        table = hardware.TABLE if file is None else hardware.read(file)
        raise UsageError(
            f"--host: how long copies to the host take is known of {', '.join(table)}, not of {jax.device_count()} "
            f"times {kind}{'' if file is None else f', and {file} has no entry for them'}: give --hardware FILE whose "
            f'entry [{key}] has like = "h100" and the rates that differ (flops, bandwidth, host), or leave --host out.'
        )
    print(f"copies to the host by the rates of {found.name}: {found.hardware.host / 1e9:g} GB/s each way", flush=True)
    return found


def with_remat(config: RunConfig, remat: str) -> RunConfig:
    """The run with another ``model.remat``."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, remat=remat))


def disk_of(text: str) -> tuple[str, int]:
    """Directory and bytes of ``--disk DIR:SIZE``.

    Raises:
        UsageError: it is not that.
    """
    directory, _, size = text.rpartition(":")
    if not directory:
        raise UsageError(f"--disk {text}: give DIR:SIZE, such as /mnt/nvme:200GiB.")
    return directory, size_of("--disk", size)


def size_of(name: str, text: str) -> int:
    """Bytes of a size such as 14GiB, of the option ``name``.

    Raises:
        UsageError: it is not one.
    """
    number = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([GMT])iB)?", text, re.IGNORECASE)
    if number is None or float(number[1]) == 0:
        raise UsageError(f"{name} {text}: give a size, such as 14GiB or 800MiB; a number alone is in GiB.")
    return int(float(number[1]) * 2 ** {"M": 20, "G": 30, "T": 40}[(number[2] or "G").upper()])
