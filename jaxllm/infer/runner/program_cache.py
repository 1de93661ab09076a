"""Program cache: compiles the engine's programs ahead of time, in threads, and keeps the executables on disk.

Nothing is compiled while serving. An executable is native code, so a file of one is as dangerous as a library: whoever
writes it can run anything. Each file is therefore signed with a key that only this user can read (HMAC-SHA256), and a
file without a valid signature is not opened; see docs/decisions/0006-engine.md. A folder is for one key: the programs'
source, versions of jax and of the compiler's runtime, the device, the model and the engine's sizes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import importlib.metadata
import importlib.util
import inspect
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from jaxllm.files import atomic, cache_root, digest, read_json, sync, write_json
from pallas_kernels.paged_attention import Slots

SOURCES = ("jaxllm.models", "jaxllm.infer", "pallas_kernels", "sharding")
"""Packages whose source the programs are compiled from."""
KEY_BYTES = 32
"""Bytes of the key that signs executables."""


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
    """

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    donated: tuple[str, ...] = ()

    def jit(self) -> Any:
        """Jitted function, to be lowered."""
        donated = tuple(i for i, name in enumerate(self.arguments) if name in self.donated)
        return jax.jit(self.function, donate_argnums=donated, keep_unused=True)


@dataclass
class CompileCounts:
    """Counts of compiled and loaded programs.

    Attributes:
        compiled, loaded: programs, before the engine was ready.
        late: programs that were compiled after that.
        seconds: time until all were ready.
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
    """

    def __init__(self, folder: Path | None, key: Any, devices: Sequence[Any], strict: bool):
        self.devices, self.strict = list(devices), strict
        self.folder = None if folder is None else folder / digest([key, compile_environment(self.devices)])[:32]
        self.counts = CompileCounts()
        self.ready = False

    def compile_all(self, programs: Sequence[EngineProgram]) -> dict[str, Executable]:
        """Loads the programs that are on disk; compiles and saves the others, one per core at a time."""
        started = time.monotonic()
        cached = contextlib.nullcontext() if self.folder is None else _without_jax_cache()
        with cached, ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
            executables = list(pool.map(self._compile_or_load, programs))
        self.counts.seconds += time.monotonic() - started
        return {program.name: one for program, one in zip(programs, executables, strict=True)}

    def saved_value(self, name: str, value: Any = None) -> Any:
        """Saves a JSON value under a name, or without a value returns the saved one; None if there is none."""
        if self.folder is None:
            return None
        path = self.folder / f"{name}.json"
        if value is not None:
            write_json(path, value)
            return value
        return read_json(path) if path.exists() else None

    def _compile_or_load(self, program: EngineProgram) -> Executable:
        compiled = None if self.folder is None else self._load(program)
        if compiled is None:
            with _mesh_of(program):
                compiled = program.jit().lower(*program.arguments.values()).compile()
            self.counts.compiled += 1
            if self.folder is not None:
                self._save(program, compiled)
        else:
            self.counts.loaded += 1
        return Executable(program, compiled, self.counts, self.strict)

    def _path(self, program: EngineProgram) -> Path:
        assert self.folder is not None
        return self.folder / f"{program.name}-{digest(describe(dict(program.arguments)))[:8]}.xla"

    def _save(self, program: EngineProgram, compiled: Any) -> None:
        data, _, out = serialize_executable.serialize(compiled)
        with _mesh_of(program):
            shape = jax.eval_shape(program.function, *program.arguments.values())
        stored = _to_json(shape)
        assert jax.tree.structure(shape) == jax.tree.structure(_from_json(stored)) == out
        write_json(self._path(program).with_suffix(".out.json"), stored)
        with atomic(self._path(program)) as file:
            file.write(_sign(self._path(program).name, data) + data)

    def _load(self, program: EngineProgram) -> Any:
        path = self._path(program)
        out = path.with_suffix(".out.json")
        if not path.exists() or not out.exists():
            return None
        content = path.read_bytes()
        signature, data = content[:32], content[32:]
        if not hmac.compare_digest(signature, _sign(path.name, data)):
            return None
        in_tree = jax.tree.structure((tuple(program.arguments.values()), {}))
        out_tree = jax.tree.structure(_from_json(read_json(out)))
        return serialize_executable.deserialize_and_load(data, in_tree, out_tree, execution_devices=self.devices)


def compile_environment(devices: Sequence[Any]) -> list[Any]:
    """Everything besides its source that a compiled program depends on: versions, devices, settings."""
    first = devices[0]
    settings = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion")
    return [
        jax.__version__,
        importlib.metadata.version("jaxlib"),
        [first.platform, first.device_kind, first.client.platform_version, len(devices)],
        [str(getattr(jax.config, name)) for name in settings],
        [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
        source_digest(),
    ]


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
    """JSON-able description of abstract arrays."""
    return [
        [jax.tree_util.keystr(path), str(x.dtype), list(x.shape), str(getattr(x, "sharding", ""))]
        for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]


def _to_json(tree: Any) -> Any:
    """Structure of a tree of tuples, slots and arrays, as lists, objects and zeros."""
    if isinstance(tree, Slots):
        return {"slots": [_to_json(x) for x in tree]}
    return [_to_json(x) for x in tree] if isinstance(tree, tuple) else None if tree is None else 0


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return Slots(*map(_from_json, value["slots"]))
    return tuple(map(_from_json, value)) if isinstance(value, list) else value


def _mesh_of(program: EngineProgram) -> Any:
    for x in jax.tree.leaves(dict(program.arguments)):
        mesh = getattr(getattr(x, "sharding", None), "mesh", None)
        if mesh is not None and not mesh.empty and mesh.size > 1:
            return jax.set_mesh(mesh)
    return contextlib.nullcontext()


_switch = threading.Lock()


@contextlib.contextmanager
def _without_jax_cache() -> Iterator[None]:
    """Disables jax's compilation cache: an executable from it cannot be serialised again (CPU, jax 0.10)."""
    with _switch:
        before = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        try:
            yield
        finally:
            jax.config.update("jax_enable_compilation_cache", before)
            compilation_cache.reset_cache()


def _sign(name: str, data: bytes) -> bytes:
    return hmac.digest(_signing_key(), name.encode() + b"\0" + data, "sha256")


def _signing_key() -> bytes:
    """Signing key: random bytes that only this user can read; created on first use.

    Raises:
        PermissionError: others can read the key, or it is damaged.
    """
    path = cache_root("") / "engine.key"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        part.touch(mode=0o600)
        part.write_bytes(secrets.token_bytes(KEY_BYTES))
        sync(part)
        with contextlib.suppress(FileExistsError):
            os.link(part, path)  # another process may have been first
        part.unlink()
    held = path.stat()
    if held.st_uid != os.getuid() or held.st_mode & 0o077:
        raise PermissionError(
            f"{path} can be read by others than you, so its signatures prove nothing. Delete it; a new key is created."
        )
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise PermissionError(
            f"{path} has {len(key)} bytes instead of {KEY_BYTES}, so its signatures prove nothing. Delete it; a new "
            "key is created."
        )
    return key


def config_key(*configs: Any) -> list[Any]:
    """JSON-able values of frozen configurations."""
    return [json.loads(json.dumps(dataclasses.asdict(c), sort_keys=True, default=str)) for c in configs]
