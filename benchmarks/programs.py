"""Optimised programs of a list, kept in a folder, so that those of two commits can be compared.

    python -m benchmarks.programs write FOLDER [--only PATTERN ...]
    python -m benchmarks.programs compare OLD NEW [--record FILE.json]

``write`` compiles, one after the other and each in a process of its own: the training step of every recipe, loss and
gradients by pipeline schedules, and steps of the engine. It keeps of each NAME.json (hashes, number of instructions,
memory, seconds) and NAME.hlo.gz, the text that was hashed, and skips what FOLDER has of the same commit. Nothing is
run. ``compare`` exits with 1 if a program differs or is missing.

The compiler is given what it is always given, and two texts are normalised afterwards: what it was given (StableHLO)
and what it made (HLO, large constants included). Normalised is what renaming and moving functions, modules, fields of
trees and lines changes, and names that ``jax.named_scope`` gives:

- metadata, locations, tables of files, the module's name and the names of arguments and results are left out;
- functions, computations and instructions have numbers, instructions those of their computation alone;
- a kernel (Mosaic's or Triton's bytecode in a custom call) is decoded and printed without locations; its functions have
  numbers too. It stands at the end of the text once, and where it is called there is its hash.

Opcodes, shapes, layouts, operands, attributes, constants, the order of instructions and backend configurations stay.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import difflib
import fnmatch
import gzip
import hashlib
import itertools
import json
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any, NamedTuple

RECIPES = {
    "deepseek_v3": "v5p:8x8x8",
    "gpt2_124m": "h100:1x8",
    "llama3_1b": "v5e:4x4",
    "llama3_8b": "v6e:8x8",
    "llama3_8b_128k": "v5p:4x4x4",
    "llama3_8b_1m": "v5p:4x4x8",
    "llama3_70b": "v5p:4x8x8",
    "llama3_405b": "v5p:8x8x16",
    "mixtral_8x22b": "v5p:4x8x8",
    "qwen3_30b_a3b": "h100:8x8",
    "qwen3_235b_a22b": "v5p:4x8x8",
    "quickstart": "cpu:1",
    "sft_smollm2": "h100:1x1",
}
"""Devices that a recipe's step is compiled for: such that it fits, and is compiled soon."""
SCHEDULES = {
    "gpipe": ("cpu:4",),
    "1f1b": ("cpu:4", "v5e:2x2", "h100:1x4"),
    "interleaved": ("cpu:4",),
    "zb_h1": ("cpu:4", "v5e:2x2"),
    "zb_h2": ("cpu:4",),
    "v_zb": ("cpu:4",),
}
ENGINES: dict[str, dict[str, Any]] = {
    "prompt@cpu:1": {"decode": False},
    "decode@cpu:1": {},
    "mixed_full@cpu:1": {"decode": False, "full": True},
    "decode_full@cpu:1": {"full": True},
    "kv_int8@cpu:1": {"sizes": {"kv_dtype": "int8"}},
    "kv_fp8@cpu:1": {"sizes": {"kv_dtype": "fp8"}, "decode": False},
    "latent@cpu:1": {"model": "latent"},
    "moe@cpu:1": {"model": "moe"},
    "window@cpu:1": {"model": "window", "decode": False},
    "tensor@cpu:4": {"mesh": "data=2,tensor=2"},
    "context@cpu:2": {"mesh": "context=2", "decode": False},
    "expert@cpu:2": {"model": "moe", "mesh": "expert=2"},
    "invariant@cpu:1": {"sizes": {"batch_invariant": True, "preemption": "swap", "loop": 1}, "decode": False,
                        "full": True},
    "decode@v5e:1x1": {},
    "prompt@v5e:1x1": {"decode": False},
    "kv_int8@v5e:1x1": {"sizes": {"kv_dtype": "int8"}},
    "decode@h100:1x1": {},
}  # fmt: skip
"""What a step is of, see ``engine``."""


class Made(NamedTuple):
    """A jitted function, arguments without values, the mesh in scope (None: none) and the compiler's options."""

    function: Any
    arguments: tuple[Any, ...]
    mesh: Any = None
    options: dict[str, str] | None = None


def recipe(topology: Any, name: str) -> Made:
    """The training step of a recipe."""
    from jaxllm.train.compile import compiler_options, step_on

    run = next(iter(entry_points(group="jaxllm.recipes", name=name))).load()()
    step, arguments, mesh = step_on(topology, run)
    return Made(step, arguments, mesh, compiler_options(topology, run))


def pipeline(topology: Any, schedule: str) -> Made:
    """The training step of a small model with a layer a virtual stage, by a schedule."""
    from jaxllm.data import DataConfig
    from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig
    from jaxllm.parallel.pipeline.generators import default_chunks
    from jaxllm.parallel.plan import ParallelConfig
    from jaxllm.train import RunConfig
    from jaxllm.train.compile import compiler_options, step_on

    block = BlockConfig(AttentionConfig(2, 2, 128), MlpConfig(256))
    layers = 4 * default_chunks(schedule)
    run = RunConfig(
        model=DecoderConfig(vocab_size=1024, embed_dim=256, layers=layers, pattern=(block,), remat="full"),
        mesh="stage=4",
        parallel=ParallelConfig(schedule=schedule),  # type: ignore[arg-type]
        accumulate=8,
        data=DataConfig(batch_size=16, seq_len=256),
    )
    step, arguments, mesh = step_on(topology, run)
    return Made(step, arguments, mesh, compiler_options(topology, run))


def served(kind: str) -> Any:
    """A small model's configuration: "plain", "latent" (latent attention), "moe" or "window"."""
    from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, LatentConfig, MlpConfig, MoeConfig

    attention: Any = AttentionConfig(4, 2, 128)
    mlp: Any = MoeConfig(4, 2, 128) if kind == "moe" else MlpConfig(256)
    if kind == "latent":
        attention = LatentConfig(4, latent=256, q_latent=128, nope_dim=128, rope_dim=64, value_dim=128)
    pattern = (BlockConfig(attention, mlp),)
    if kind == "window":
        pattern = (BlockConfig(dataclasses.replace(attention, window=24), mlp), *pattern)
    return DecoderConfig(1024, 256, 2, pattern=pattern, dtype="bfloat16", param_dtype="bfloat16")


def engine(
    topology: Any,
    model: str = "plain",
    sizes: dict[str, Any] | None = None,
    mesh: str = "",
    decode: bool = True,
    full: bool = False,
) -> Made:
    """A step of an engine, as the engine makes it (``jaxllm.infer.device``), for devices that may be far away.

    Args:
        topology: whose devices it is for.
        model: see ``served``.
        sizes: fields of the engine's configuration.
        mesh: its text, for several devices.
        decode: eight sequences that make tokens; otherwise 64 tokens of prompts and of sequences that make tokens.
        full: with all that a request may ask for.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    import sharding
    from jaxllm.infer import EngineConfig, shaping
    from jaxllm.infer.grammar import mask_width
    from jaxllm.infer.paged import POOL_AXES, layer_groups
    from jaxllm.infer.placing import serving_model
    from jaxllm.infer.step import Shape, Step, empty_pools
    from jaxllm.models import functional

    settings = EngineConfig(sequences=8, budget=64, max_len=128, page_size=32, samplers=("full",), **(sizes or {}))
    config, columns, rows = served(model), 4, 8 if decode else 64
    made, reader = serving_model(functional(config)), serving_model(functional(config), split="context" in mesh)
    groups = layer_groups(config, settings.kv_dtype)
    shape = Shape(
        tokens=rows, requests=8, decode=decode, full=full, slots=8, columns=columns, groups=len(groups),
        loop=settings.loop, top=5, real="float32",
    )  # fmt: skip
    if mesh:
        where = sharding.MeshSpec.parse(mesh).build(topology.devices())
    else:  # with nothing to track: as an engine on one device is, but for this one
        auto = (jax.sharding.AxisType.Auto,)
        where = jax.sharding.Mesh(np.array(topology.devices()), ("data",), axis_types=auto)
    with jax.set_mesh(where), sharding.use_rules(made.rules):
        replicas = sharding.axis_size("batch")
        each, pool = (jax.NamedSharding(where, sharding.spec(*axes)) for axes in (("batch",), POOL_AXES))
        pools = jax.eval_shape(lambda: empty_pools(made.rules, groups, (8 * columns + 1,) * len(groups), 32))
        state = jax.eval_shape(lambda: shaping.empty_state(8, config.vocab_size))

    def placed(tree: Any, place: Any, *replicated: int) -> Any:
        one = lambda x: jax.ShapeDtypeStruct((*replicated, *x.shape), x.dtype, sharding=place)  # noqa: E731
        return jax.tree.map(one, tree)

    def ints(*of: int) -> Any:
        return jax.ShapeDtypeStruct((replicas, *of), jnp.int32, sharding=each)

    params = sharding.abstract_params(made.abstract(), made.logical_axes(), where, made.rules)
    arguments = [params, placed(pools, pool), ints(8), ints(shape.inputs.size)]
    if full:
        arguments += [tuple(placed(state, each, replicas)), ints(8, mask_width(config.vocab_size))]
    step = Step(made, reader, groups, shape, config.vocab_size, settings.batch_invariant)
    donated = (1, 2, 4) if full else (1, 2)
    return Made(jax.jit(step.__call__, donate_argnums=donated, keep_unused=True), tuple(arguments), where)


def programs() -> dict[str, tuple[str, Callable[..., Made], dict[str, Any]]]:
    """By name: the topology, what makes it, and with which arguments."""
    found: dict[str, Any] = {}
    for name, settings in ENGINES.items():
        found[f"engine/{name}"] = name.rpartition("@")[2], engine, settings
    for schedule, each in SCHEDULES.items():
        found |= {f"pipeline/{schedule}@{on}": (on, pipeline, {"schedule": schedule}) for on in each}
    return found | {f"recipe/{name}@{on}": (on, recipe, {"name": name}) for name, on in RECIPES.items()}


def compiled(topology: Any, name: str, file: str) -> dict[str, Any]:
    """In a process that is set up for the topology's compiler: compiles, writes the text, gives the rest."""
    import contextlib

    import jax
    from jaxlib import _hlo

    _, make, arguments = programs()[name]
    made = make(topology, **arguments)
    options = _hlo.HloPrintOptions()
    options.print_large_constants, options.print_metadata = True, False
    with jax.set_mesh(made.mesh) if made.mesh is not None else contextlib.nullcontext():
        lowered = made.function.lower(*made.arguments)
        given = normal_stablehlo(lowered.as_text())
        started = time.monotonic()
        program = lowered.compile(compiler_options=made.options)
    seconds = time.monotonic() - started
    modules = program.runtime_executable().hlo_modules()
    text = normal_hlo("\n".join(module.to_string(options) for module in modules))
    memory: Any = program.memory_analysis()
    Path(file).write_bytes(gzip.compress(text.encode(), mtime=0))
    return {
        "stablehlo": digest(given),
        "hlo": digest(text),
        "instructions": len(re.findall(r"(?m)^  (?:ROOT )?%\d+ = ", text)),
        **{f"{what}_bytes": getattr(memory, f"{what}_size_in_bytes") for what in ("argument", "temp", "alias")},
        "compile_seconds": round(seconds, 1),
    }


_QUOTED = r'"(?:[^"\\]|\\.)*"'
_NESTED = rf'\{{(?:[^{{}}"]|{_QUOTED}|\{{(?:[^{{}}"]|{_QUOTED}|\{{(?:[^{{}}"]|{_QUOTED})*\}})*\}})*\}}'
_DROPPED = re.compile(rf", (?:metadata|origin)={_NESTED}")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|select|scatter|true_computation|false_computation|branch_computations"
    r"|called_computations)=(\{[^}]*\}|%[\w.\-]+)"
)
_NAMED = re.compile(rf"({_QUOTED})|%([\w.\-]+)")
_MOSAIC = re.compile(r'(body(?:"|\\22): ?(?:"|\\22))([A-Za-z0-9+/=]+)')
_TRITON = re.compile(rf'\bir = ({_QUOTED}), name = {_QUOTED}')


def normal_hlo(text: str) -> str:
    """The text of HLO modules, normalised."""
    text, kernels = with_kernels_apart(text)
    out: list[str] = []
    computations: dict[str, int] = defaultdict(itertools.count().__next__)
    instructions: dict[str, int] = {}
    tables = False

    def called(found: re.Match[str]) -> str:
        return f"{found[1]}=" + re.sub(r"%([\w.\-]+)", lambda name: f"@{computations[name[1]]}", found[2])

    def named(found: re.Match[str]) -> str:
        return found[1] or f"%{instructions[found[2]]}"

    for line in text.splitlines():
        if line.startswith("HloModule "):
            line = re.sub(r'fingerprint_before_lhs="\w*"', "", re.sub(r"^HloModule [^,]*", "HloModule", line))
        elif line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            tables = True
        elif head := re.match(r"(ENTRY )?%?([\w.\-]+) (\(.*\{)$", line):
            tables, instructions = False, defaultdict(itertools.count().__next__)
            signature = re.sub(r"([(,] ?)[\w.\-]+: ", r"\1", head[3])
            line = f"{head[1] or ''}@{computations[head[2]]} {signature}"
        elif line.startswith(" "):
            line = _NAMED.sub(named, _CALLED.sub(called, _DROPPED.sub("", line)))
        if line and not tables:
            out.append(line)
    return "\n".join([*out, *kernels, ""])


def normal_stablehlo(text: str) -> str:
    """The text of a StableHLO module, normalised."""
    text, kernels = with_kernels_apart(text)
    names = re.findall(r"func\.func (?:public |private )?@([\w.\-]+)", text)
    numbers = {name: f"@{i}" for i, name in enumerate(names)}
    text = re.sub(r"^module @[\w.\-]+", "module", text)
    text = re.sub(rf"(?:jax\.result_info|jax\.arg_info|kernel_name) = {_QUOTED}(?:, )?", "", text)
    return "\n".join([re.sub(r"@([\w.\-]+)", lambda name: numbers.get(name[1], name[0]), text), *kernels, ""])


def with_kernels_apart(text: str) -> tuple[str, list[str]]:
    """The text with a hash in the place of each kernel, and the kernels' own texts."""
    kernels: dict[str, str] = {}

    def kept(code: bytes) -> str:
        own = kernel(code)
        kernels.setdefault(digest(own), own)
        return digest(own)

    text = _MOSAIC.sub(lambda found: found[1] + kept(base64.b64decode(found[2])), text)
    text = _TRITON.sub(lambda found: f"ir = {kept(unescaped(found[1][1:-1]))}", text)
    return text, [f"kernel {name}\n{own}" for name, own in kernels.items()]


def unescaped(text: str) -> bytes:
    r"""What MLIR prints as \XX or \\."""
    return re.sub(rb"\\([0-9A-F]{2}|\\)", lambda x: x[1] if x[1] == b"\\" else bytes.fromhex(x[1].decode()), text.encode())


def kernel(code: bytes) -> str:
    """The text of a kernel's bytecode without locations, its functions numbered."""
    from jax._src.lib import tpu, triton
    from jax.interpreters import mlir
    from jaxlib.mlir import ir

    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    tpu.register_dialect(context)
    triton.dialect.register_dialect(context)
    with context:
        text = ir.Module.parse(code).operation.get_asm(enable_debug_info=False)
    numbers: dict[str, int] = defaultdict(itertools.count().__next__)
    text = re.sub(r"^module @[\w.\-]+", "module", text)
    text = re.sub(r'sym_name = "([^"]*)"', lambda name: f"sym_name = @{name[1]}", text)
    return re.sub(r"@([\w.\-]+)", lambda name: f"@{numbers[name[1]]}", text)


def digest(text: str) -> str:
    """Its SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()


def commit() -> str:
    """Of the working tree; with a hash of what was changed since."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], capture_output=True, text=True, check=True).stdout

    changed = git("diff", "HEAD")
    return git("rev-parse", "HEAD").strip() + (f"+{digest(changed)[:12]}" if changed else "")


def write(folder: Path, only: list[str]) -> int:
    """Compiles what the folder does not have of this commit. 1 if anything does not compile."""
    from sharding.isolate import run_isolated

    failed, at = 0, commit()
    wanted = [name for name in programs() if any(fnmatch.fnmatch(name, pattern) for pattern in only or ["*"])]
    for number, name in enumerate(wanted, 1):
        on, report = programs()[name][0], folder / f"{name}.json"
        if report.exists() and json.loads(report.read_text())["commit"] == at:
            continue
        report.parent.mkdir(parents=True, exist_ok=True)
        print(f"{number}/{len(wanted)} {name}", end="", flush=True)
        started = time.monotonic()
        try:
            arguments = {"name": name, "file": str((folder / f"{name}.hlo.gz").absolute())}
            found = run_isolated("benchmarks.programs:compiled", on, arguments)
        except Exception as error:  # noqa: BLE001 (the next may compile)
            failed += 1
            print(f": {type(error).__name__}: {error}", flush=True)
            continue
        seconds = round(time.monotonic() - started, 1)
        versions = {package: version(package) for package in ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin")}
        record = {"name": name, "commit": at, **found, "seconds": seconds, "versions": versions}
        report.write_text(json.dumps(record, indent=1) + "\n")
        print(f": {found['instructions']} instructions, {seconds} s", flush=True)
    return int(failed > 0)


def compare(old: Path, new: Path, record: Path | None) -> int:
    """Prints what differs. 1 if anything does."""
    sides = [{p.relative_to(root).with_suffix("").as_posix(): p for p in root.rglob("*.json")} for root in (old, new)]
    rows = []
    for name in sorted(set(sides[0]) | set(sides[1])):
        if not all(name in side for side in sides):
            rows.append({"name": name, "equal": False})
            print(f"{name:40} only in {old if name in sides[0] else new}")
            continue
        a, b = (json.loads(side[name].read_text()) for side in sides)
        keys = ("hlo", "stablehlo", "instructions", "argument_bytes", "temp_bytes", "alias_bytes")
        differing = [key for key in keys if a[key] != b[key]]
        # What was given may differ, in what is a function of its own for one: what was made of it counts.
        equal = not set(differing) - {"stablehlo"}
        verdict = "equal" if equal else "DIFFERENT"
        print(f"{name:40} {verdict}{': ' + ', '.join(differing) if differing else ''}")
        if a["hlo"] != b["hlo"]:
            lines = [gzip.decompress(Path(root, f"{name}.hlo.gz").read_bytes()).decode().splitlines() for root in (old, new)]
            changes = (x for x in difflib.unified_diff(*lines, n=0, lineterm="") if not x.startswith(("---", "+++")))
            for line in itertools.islice(changes, 12):
                print(f"    {line[:200]}")
        both = {key: a[key] if a[key] == b[key] else [a[key], b[key]] for key in (*keys, "commit", "versions")}
        rows.append({"name": name, "equal": equal} | both)
    same = sum(row["equal"] for row in rows)
    print(f"{same} of {len(rows)} equal")
    if record is not None:
        record.write_text(json.dumps({"programs": rows}, indent=1) + "\n")
    return int(same < len(rows) or not rows)


def main() -> int:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writing, comparing = commands.add_parser("write"), commands.add_parser("compare")
    writing.add_argument("folder", type=Path)
    writing.add_argument("--only", nargs="*", default=[], help="patterns of names, such as 'engine/*@cpu:*'")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    comparing.add_argument("--record", type=Path)
    options = parser.parse_args()
    if options.command == "write":
        return write(options.folder, options.only)
    return compare(options.old, options.new, options.record)


if __name__ == "__main__":
    sys.exit(main())
