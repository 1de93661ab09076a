"""Program cache: compiles the engine's programs ahead of time, in threads, and keeps the executables on disk.

Nothing is compiled while serving. An executable is native code, so a file of one is as dangerous as a library: whoever
writes it can run anything. Each file is therefore signed, see ``executable_signature``. A folder is for one key: the
programs' source, versions of jax and of the compiler's runtime, the device, and the model's architecture and weights'
shapes; weights are arguments of the programs, so models of one architecture share them. A file is for one program and
the shapes of its arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

import sharding
from jaxllm.files import atomic, digest, read_json, write_json
from jaxllm.infer.runner.executable_signature import opened, sealed
from jaxllm.infer.runner.program_loader import ProgramLoader
from jaxllm.models.layers.residual_stream import GatedStream
from pallas_kernels.paged_attention import Slots

NAMED = {"slots": Slots, "gated": GatedStream}
"""Kinds of tuples that results of programs have, by their names in files."""
SOURCES = ("jaxllm.models", "jaxllm.infer", "pallas_kernels", "sharding")
"""Packages whose source the programs are compiled from."""


class RecompileError(RuntimeError):
    """A program was called with arguments that it was not compiled for, after the engine was ready."""


@dataclass(frozen=True)
class EngineProgram:
    """Program of the engine, to be compiled.

    Attributes:
        name: name, of its file too.
        function: pure function.
        arguments: trees of ``jax.ShapeDtypeStruct`` with shardings, by parameter name.
        donated: names of the donated parameters.
        key: JSON-able value of what the function depends on besides its arguments and the key of the cache.
        devices: devices that run it; empty: those of the cache.
        options: of the compiler.
    """

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    donated: tuple[str, ...] = ()
    key: Any = None
    devices: tuple[Any, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)

    def jit(self) -> Any:
        """Jitted function, to be lowered."""
        donated = tuple(i for i, name in enumerate(self.arguments) if name in self.donated)
        return jax.jit(
            self.function, donate_argnums=donated, keep_unused=True, compiler_options=dict(self.options) or None
        )


@dataclass
class CompileCounts:
    """Counts of compiled and loaded programs.

    Attributes:
        compiled, loaded: programs that were compiled, or found on disk, ahead of their use.
        late: programs that a step had to compile, because it was called with arguments that none is compiled for.
        seconds: time until the first programs were ready, or all if none are left to the background.
    """

    compiled: int = 0
    loaded: int = 0
    late: int = 0
    seconds: float = 0.0


class Executable:
    """Compiled program that checks its arguments: a call with others is an error or is counted.

    Args:
        program: source of the executable.
        compiled: executable.
        counts: counts recompilations.
        strict: a recompilation raises; otherwise it happens.
    """

    def __init__(self, program: EngineProgram, compiled: Any, counts: CompileCounts, strict: bool):
        self.program, self.compiled, self.counts, self.strict = program, compiled, counts, strict
        self._late: Any = None

    def __call__(self, *arguments: Any) -> Any:
        """Runs the program.

        Raises:
            RecompileError: the arguments differ from those it was compiled for; names those that differ.
        """
        try:
            return self.compiled(*arguments)
        except (TypeError, ValueError) as error:
            wrong = differences(self.program.arguments, arguments)
            if not wrong:
                raise
            self.counts.late += 1
            if self.strict:
                raise RecompileError(
                    f"program {self.program.name} would be compiled again: {'; '.join(wrong)}. Call it with the "
                    "arguments it was compiled for, or build the engine with strict=False."
                ) from error
            self._late = self._late or self.program.jit()
            return self._late(*arguments)

    @property
    def memory(self) -> Any:
        """Memory analysis of the compiler."""
        return self.compiled.memory_analysis()


def differences(expected: Mapping[str, Any], arguments: Sequence[Any]) -> list[str]:
    """Differences of the arguments from the expected ones, by path: structure, shape, dtype, sharding."""
    found = []
    for (name, want), got in zip(expected.items(), arguments, strict=True):
        wants, gots = (jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (want, got))
        if [path for path, _ in wants] != [path for path, _ in gots]:
            found.append(f"{name} has another structure")
            continue
        for (path, w), (_, g) in zip(wants, gots, strict=True):
            where = f"{name}{jax.tree_util.keystr(path)}"
            if (w.shape, w.dtype) != (g.shape, g.dtype):
                found.append(f"{where} is {g.dtype}{list(g.shape)}, compiled for {w.dtype}{list(w.shape)}")
            elif isinstance(g, jax.Array) and not g.sharding.is_equivalent_to(w.sharding, g.ndim):
                found.append(f"{where} lies as {g.sharding}, compiled for {w.sharding}")
    return found


class ProgramCache:
    """Cache of the compiled programs of one engine, in memory and on disk.

    Args:
        folder: where executables are kept; None: nowhere.
        key: JSON-able value of everything that determines the programs besides sources and versions.
        devices: devices that run them.
        strict: see ``Executable``.
        shipped: folder of executables that came with a checkpoint, in the layout of ``folder``; None: none.
        trusted: open executables of ``shipped`` that somebody else has compiled, see ``executable_signature``.
    """

    def __init__(
        self,
        folder: Path | None,
        key: Any,
        devices: Sequence[Any],
        strict: bool,
        *,
        shipped: Path | None = None,
        trusted: bool = False,
    ):
        self.devices, self.strict, self._trusted = list(devices), strict, trusted
        name = digest([key, compile_environment(self.devices)])[:32]
        self.folder = None if folder is None else folder / name
        self._shipped = None if shipped is None else shipped / name
        self.counts = CompileCounts()
        self.loader: ProgramLoader[Executable] | None = None

    @property
    def ready(self) -> bool:
        """Whether all programs are loaded."""
        return self.loader is not None and self.loader.complete

    def compile_all(self, programs: Sequence[EngineProgram]) -> dict[str, Executable]:
        """Loads the programs that are on disk; compiles and saves the others, one per core at a time."""
        return dict(self.load(programs, len(programs)))

    def load(
        self, programs: Sequence[EngineProgram], first: int, progress: Callable[[str, int, int], None] | None = None
    ) -> ProgramLoader[Executable]:
        """Loads or compiles the first programs; ``start`` of the loader does the others in the background.

        Args:
            programs: all programs of the engine, the most useful first.
            first, progress: see ``ProgramLoader``.
        """
        started = time.monotonic()
        self.loader = ProgramLoader(programs, self._compile_or_load, first, progress)
        self.counts.seconds += time.monotonic() - started
        return self.loader

    def wait(self) -> None:
        """Waits until all programs are loaded.

        Raises:
            Exception: a program could not be compiled.
        """
        if self.loader is not None:
            self.loader.wait()

    def saved_value(self, name: str, value: Any = None) -> Any:
        """Saves a JSON value under a name, or without a value returns the saved one; None if there is none."""
        if value is not None:
            if self.folder is not None:
                write_json(self.folder / f"{name}.json", value)
            return value
        for folder in (self.folder, self._shipped):
            if folder is not None and (path := folder / f"{name}.json").exists():
                return read_json(path)
        return None

    def _compile_or_load(self, program: EngineProgram) -> Executable:
        for folder, trusted in ((self.folder, False), (self._shipped, self._trusted)):
            if folder is not None and (compiled := self._load(folder, program, trusted)) is not None:
                self.counts.loaded += 1
                return Executable(program, compiled, self.counts, self.strict)
        cached = contextlib.nullcontext() if self.folder is None else _without_jax_cache()
        with cached, _mesh_of(program):
            compiled = program.jit().lower(*program.arguments.values()).compile()
        self.counts.compiled += 1
        if self.folder is not None:
            self._save(self.folder, program, compiled)
        return Executable(program, compiled, self.counts, self.strict)

    def _path(self, folder: Path, program: EngineProgram) -> Path:
        options = [sorted(program.options.items())] if program.options else []
        key = digest([program.key, *options, describe(dict(program.arguments))])
        return folder / f"{program.name}-{key[:8]}.xla"

    def _save(self, folder: Path, program: EngineProgram, compiled: Any) -> None:
        data, _, out = serialize_executable.serialize(compiled)
        with _mesh_of(program):
            shape = jax.eval_shape(program.function, *program.arguments.values())
        stored = _to_json(shape)
        assert jax.tree.structure(shape) == jax.tree.structure(_from_json(stored)) == out
        path = self._path(folder, program)
        write_json(path.with_suffix(".out.json"), stored)
        with atomic(path) as file:
            file.write(sealed(path.name, data))

    def _load(self, folder: Path, program: EngineProgram, trusted: bool) -> Any:
        path = self._path(folder, program)
        out = path.with_suffix(".out.json")
        if not path.exists() or not out.exists() or (data := opened(path, trusted=trusted)) is None:
            return None
        in_tree = jax.tree.structure((tuple(program.arguments.values()), {}))
        out_tree = jax.tree.structure(_from_json(read_json(out)))
        devices = program.devices or self.devices
        return serialize_executable.deserialize_and_load(data, in_tree, out_tree, execution_devices=devices)


def compile_environment(devices: Sequence[Any]) -> list[Any]:
    """Everything besides its source that a compiled program depends on: versions, devices, settings."""
    first = devices[0]
    settings = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion")
    return [
        jax.__version__,
        importlib.metadata.version("jaxlib"),
        [first.platform, first.device_kind, first.client.platform_version, len(devices), _instructions(first.platform)],
        [str(getattr(jax.config, name)) for name in settings],
        [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
        source_digest(),
    ]


@functools.cache
def _instructions(platform_name: str) -> list[str]:
    """Machine and instruction sets of a CPU that compiles for itself; empty for other devices."""
    if platform_name != "cpu":
        return []
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return [platform.machine(), platform.processor()]
    names = ("flags", "Features", "model name")
    return [platform.machine(), *sorted({line for line in lines if line.split("\t")[0].strip() in names})]


@functools.cache
def source_digest() -> str:
    """Hash of the source files that programs are compiled from."""
    found = hashlib.sha256()
    for name in SOURCES:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        for place in spec.submodule_search_locations or ():
            for path in sorted(Path(place).rglob("*.py")):
                found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def source_of(row: Any) -> str:
    """Hash of a row of an open table and of the file that defines it, which ``SOURCES`` may lack; empty for None."""
    if row is None:
        return ""
    kind, fields = type(row), getattr(row, "__dict__", {})
    return digest([kind.__qualname__, str(fields), Path(inspect.getfile(kind)).read_text(encoding="utf-8")])


def describe(tree: Any) -> Any:
    """JSON-able description of abstract arrays, and of what their tree says beside them, such as a packed format."""
    leaves, structure = jax.tree.flatten(tree)
    return [
        str(structure),
        *([str(x.dtype), list(x.shape), str(getattr(x, "sharding", "")), *_own_layout(x)] for x in leaves),
    ]


def _own_layout(x: Any) -> list[str]:
    layout = x.format.layout if isinstance(x, jax.ShapeDtypeStruct) else None
    return [] if layout is None else [str(layout)]


def _to_json(tree: Any) -> Any:
    """Structure of a tree of tuples, those of ``NAMED`` and arrays, as lists, objects and zeros."""
    for name, kind in NAMED.items():
        if isinstance(tree, kind):
            return {name: [_to_json(x) for x in tree]}
    return [_to_json(x) for x in tree] if isinstance(tree, tuple) else None if tree is None else 0


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        ((name, parts),) = value.items()
        return NAMED[name](*map(_from_json, parts))
    return tuple(map(_from_json, value)) if isinstance(value, list) else value


def _mesh_of(program: EngineProgram) -> Any:
    for x in jax.tree.leaves(dict(program.arguments)):
        mesh = getattr(getattr(x, "sharding", None), "mesh", None)
        if mesh is not None and not mesh.empty and mesh.size > 1:
            return sharding.use_mesh(mesh)
    return sharding.use_mesh(None)


_switch = threading.Lock()
_disabled: list[bool] = []
"""Whether the cache was enabled, once for every thread that has disabled it."""


@contextlib.contextmanager
def _without_jax_cache() -> Iterator[None]:
    """Disables jax's compilation cache: an executable from it cannot be serialised again (CPU, jax 0.10).

    The setting is of the whole process, so other programs that are compiled meanwhile are not cached either.
    """
    with _switch:
        enabled = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
        if not _disabled:
            jax.config.update("jax_enable_compilation_cache", False)
            compilation_cache.reset_cache()
        _disabled.append(_disabled[0] if _disabled else enabled)
    try:
        yield
    finally:
        with _switch:
            enabled = _disabled.pop()
            if not _disabled:
                jax.config.update("jax_enable_compilation_cache", enabled)
                compilation_cache.reset_cache()


def config_key(*configs: Any) -> list[Any]:
    """JSON-able values of frozen configurations."""
    return [json.loads(json.dumps(dataclasses.asdict(c), sort_keys=True, default=str)) for c in configs]
