"""Ahead-of-time compilation of a jitted function for a topology, with a report of memory and collectives.

    topology = Topology.parse("v6e:8x8")
    mesh = MeshSpec.parse("fsdp").build(topology.devices())
    report = compile(step, abstract_state, abstract_batch, topology=topology, mesh=mesh)

Arguments are ``jax.ShapeDtypeStruct`` with shardings on ``mesh``. The process must be set up for the topology's
compiler: run it through ``sharding.isolate.run_isolated``. A GPU program is compiled without its GPU, so its kernels
are chosen by rule instead of by autotuning, and its report is a plan.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxllm.compiler import collectives
from jaxllm.compiler.collectives import Collective
from jaxllm.compiler.host_transfers import Transfer, transfers
from jaxllm.compiler.replica_groups import Placement
from jaxllm.files import write_json
from sharding import isolate
from sharding.isolate import OutOfDeviceMemory, Progress
from sharding.topology import GIB, Topology

_COMPILERS = {"tpu": ("libtpu",), "gpu": ("jax-cuda13-plugin", "jax-cuda12-plugin"), "cpu": ("jaxlib",)}


@dataclass(frozen=True)
class CompileReport:
    """Memory, collectives and compile time of a compiled program; bytes are those of one device.

    Attributes:
        name: name of the function.
        topology: name of the topology.
        num_devices: number of devices that run the program together.
        jax: version of jax.
        compiler: package and version of the compiler.
        lower_seconds: seconds of tracing and lowering.
        compile_seconds: seconds of compiling.
        argument_bytes: bytes of the arguments.
        output_bytes: bytes of the results, including those in the memory of donated arguments.
        alias_bytes: bytes of the results that are in the memory of donated arguments.
        temp_bytes: bytes of the temporaries at their peak.
        code_bytes: bytes of the program itself.
        host_bytes: bytes of the temporaries at their peak in host memory, for what the device offloads.
        hbm_bytes: memory of the device; None where it is not known (CPU).
        collectives: collectives, largest total first.
        cycles: see ``jaxllm.compiler.collectives.ProgramWork``.
        unknown_loops: see ``jaxllm.compiler.collectives.ProgramWork``.
        transfers: copies between device and host, largest total first.
    """

    name: str
    topology: str
    num_devices: int
    jax: str
    compiler: str
    lower_seconds: float
    compile_seconds: float
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int
    host_bytes: int
    hbm_bytes: int | None
    collectives: tuple[Collective, ...]
    cycles: int | None
    unknown_loops: int
    transfers: tuple[Transfer, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of device memory that the program needs."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes + self.code_bytes

    @property
    def over_bytes(self) -> int:
        """Bytes by which the program exceeds device memory; 0 if it fits, or if that is not known.

        The TPU compiler refuses a program that does not fit (``OutOfDeviceMemory``), so whatever it compiled fits.
        The GPU compiler takes any size.
        """
        if self.hbm_bytes is None or Topology.parse(self.topology).platform == "tpu":
            return 0
        return max(0, self.total_bytes - self.hbm_bytes)

    @property
    def fits(self) -> bool:
        """Whether the program fits into device memory, as far as that is known."""
        return self.over_bytes == 0

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-able data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CompileReport:
        """Reads the data of ``to_json``.

        Raises:
            TypeError: a field is missing or unknown.
        """
        rows = tuple(Collective(**row) for row in data["collectives"])
        moved = tuple(Transfer(**row) for row in data.get("transfers", ()))
        return cls(**{**data, "collectives": rows, "transfers": moved})

    def __str__(self) -> str:
        kind = Topology.parse(self.topology).device_kind
        lines = [
            f"{self.name} on {self.topology} ({self.num_devices} x {kind}); jax {self.jax}, {self.compiler}",
            f"traced in {self.lower_seconds:.1f} s, compiled in {self.compile_seconds:.1f} s",
            "",
            "memory of one device, GiB",
            *(f"  {label:<33}{size / GIB:10.3f}" for label, size in self._memory()),
            f"  {'total':<33}{self.total_bytes / GIB:10.3f}{self._verdict()}",
            *([f"  {'of the host':<33}{self.host_bytes / GIB:10.3f}"] if self.host_bytes else []),
            "",
            f"{'collectives in one run':<25}{'devices':>8}{'times':>8}{'GiB':>12}",
            *(f"  {kind:<23}{group:>8}{count:>8}{size / GIB:12.3f}" for kind, group, count, size in self.by_kind()),
        ]
        if not self.collectives:
            lines.append("  none")
        for to, said in (("host", "copied to the host"), ("device", "copied from the host")):
            if rows := [row for row in self.transfers if row.to == to]:
                size = sum(row.total_bytes for row in rows)
                lines += [f"{said + ', in one run':<33}{sum(row.count for row in rows):>8}{size / GIB:12.3f}"]
        if self.cycles is not None:
            lines += ["", f"computing, by the compiler's estimate: {self.cycles / 1e6:,.1f} M cycles"]
        if self.unknown_loops:
            lines += ["", f"{self.unknown_loops} loops of unknown length are counted as one turn"]
        return "\n".join(lines)

    def _memory(self) -> list[tuple[str, int]]:
        return [
            ("arguments", self.argument_bytes),
            ("results outside donated arguments", self.output_bytes - self.alias_bytes),
            ("temporaries", self.temp_bytes),
            ("program", self.code_bytes),
        ]

    def _verdict(self) -> str:
        if self.hbm_bytes is None:
            return ""
        verdict = "fits" if self.fits else f"{self.over_bytes / GIB:.3f} too much"
        return f" of {self.hbm_bytes / GIB:.2f}: {verdict}"

    def by_kind(self) -> list[tuple[str, int, int, int]]:
        """Rows of (kind, devices, times, total bytes), largest first; a summed collective is marked "summed"."""
        counts: Counter[tuple[str, int]] = Counter()
        sizes: Counter[tuple[str, int]] = Counter()
        for row in self.collectives:
            key = f"{row.kind}, summed" if row.summed else row.kind, row.group_size
            counts[key] += row.count
            sizes[key] += row.total_bytes
        return [(*key, counts[key], size) for key, size in sizes.most_common()]


def compile(
    function: Any,
    *arguments: Any,
    topology: Topology,
    mesh: Mesh,
    name: str = "",
    options: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    keep: Path | None = None,
) -> CompileReport:
    """Compiles ``function(*arguments)`` for ``topology`` and returns the report.

    Args:
        function: the result of ``jax.jit``, with its donations and static arguments.
        arguments: trees of ``jax.ShapeDtypeStruct`` with shardings on ``mesh`` (static arguments as they are).
        topology: the topology to compile for.
        mesh: a mesh of the topology's devices; the function is traced and compiled under ``jax.set_mesh(mesh)``.
        name: name in the report; the function's own if empty.
        options: compiler options, such as ``{"xla_tpu_scoped_vmem_limit_kib": "65536"}``.
        progress: called about once a second, see ``to_stderr``.
        keep: file to write the program's text to, for ``kept``.

    Raises:
        OutOfDeviceMemory: the TPU compiler found that the program does not fit.
        TypeError: ``function`` is not jitted.
        ValueError: ``mesh`` does not consist of the topology's devices.
    """
    if not hasattr(function, "lower"):
        raise TypeError(f"{function!r} is not jitted: give jax.jit(function).")
    if set(mesh.devices.flat) != set(topology.devices()):
        raise ValueError(
            f"the mesh has {mesh.size} devices, {mesh.devices.flat[0].device_kind}, and they are not the "
            f"{topology.num_devices} of {topology}: build it with .build(topology.devices())."
        )
    with _stages(progress) as stage, jax.set_mesh(mesh):
        stage("tracing")
        started = time.monotonic()
        lowered = function.lower(*arguments)
        lower_seconds = time.monotonic() - started
        stage("compiling")
        started = time.monotonic()
        try:
            compiled = lowered.compile(compiler_options=None if options is None else dict(options))
        except jax.errors.JaxRuntimeError as error:
            if (memory := OutOfDeviceMemory.from_message(str(error), topology.name)) is None:
                raise
            raise memory from error
        compile_seconds = time.monotonic() - started
        stage("reading the program")
        if keep is not None:
            write_json(keep, {"text": compiled.as_text() or "", "placement": asdict(Placement.of(mesh))})
        return report(
            compiled,
            topology,
            name=name or getattr(function, "__name__", "function"),
            lower_seconds=lower_seconds,
            compile_seconds=compile_seconds,
        )


def report(
    compiled: jax.stages.Compiled,
    topology: Topology,
    *,
    name: str = "function",
    lower_seconds: float = 0.0,
    compile_seconds: float = 0.0,
) -> CompileReport:
    """The report on a program that was compiled for ``topology``."""
    memory: Any = compiled.memory_analysis()
    text = compiled.as_text() or ""
    work = collectives.read(text)
    return CompileReport(
        name=name,
        topology=topology.name,
        num_devices=topology.num_devices,
        jax=jax.__version__,
        compiler=_compiler(topology),
        lower_seconds=lower_seconds,
        compile_seconds=compile_seconds,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        host_bytes=memory.host_temp_size_in_bytes,
        hbm_bytes=topology.hbm_bytes,
        collectives=work.collectives,
        cycles=work.cycles,
        unknown_loops=work.unknown_loops,
        transfers=transfers(text),
    )


def kept(file: Path) -> tuple[str, Placement]:
    """Text and device placement of a program that ``compile`` wrote to a file."""
    data = json.loads(file.read_text())
    axes = tuple((name, size) for name, size in data["placement"]["axes"])
    return data["text"], Placement(axes, tuple(data["placement"]["islands"]))


def to_stderr(seconds: float, stage: str) -> None:
    """Progress callback: updates one line of a terminal's stderr; elsewhere, prints a line every half minute."""
    last = stage == "done"
    if sys.stderr.isatty():
        print(f"\r{seconds:6.0f} s  {stage:<24}", end="\n" if last else "", file=sys.stderr, flush=True)
    elif last or int(seconds) % 30 == 29:
        print(f"{seconds:6.0f} s  {stage}", file=sys.stderr, flush=True)


def _compiler(topology: Topology) -> str:
    for package in _COMPILERS[topology.platform]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{package} {importlib.metadata.version(package)}"
    return "unknown compiler"


@contextlib.contextmanager
def _stages(progress: Progress | None) -> Iterator[Any]:
    """Context that gives a function to name the current stage; a thread passes it to ``progress`` every second."""
    started, current, over = time.monotonic(), ["starting"], threading.Event()

    def stage(text: str) -> None:
        current[0] = text
        isolate.stage(text)

    if progress is None:
        yield stage
        return

    def tick() -> None:
        while not over.wait(1.0):
            progress(time.monotonic() - started, current[0])

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield stage
    finally:
        over.set()
        thread.join()
        progress(time.monotonic() - started, "done")
