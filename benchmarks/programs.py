"""Optimised programs of two commits, compared: recipes, pipeline schedules, engine steps, GPU kernels.

    python -m benchmarks.programs write FOLDER [--only PATTERN ...]
    python -m benchmarks.programs compare OLD NEW [--record FILE.json]

``write`` compiles each program in a process of its own: the training step of every recipe, training steps by pipeline
schedules, steps of the engine. For each it writes NAME.json (hashes, number of instructions, memory, seconds) and
NAME.hlo.gz, the normalised text that was hashed; programs that FOLDER has for the same commit are skipped. Nothing is
run. ``compare`` exits with 1 if a program differs or is missing.

The input of the compiler (StableHLO) and its output (optimised HLO) are normalised after compiling, see
``benchmarks.program_text``. Each of the three compilers is deterministic. StableHLO may differ where HLO does not, for
example in functions that are inlined; the comparison is of the optimised HLO.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import gzip
import importlib
import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.program_text import digest, normal_hlo, normal_stablehlo

MEMORY = ("argument", "output", "alias", "temp", "generated_code")
"""Fields kept from the compiler's memory analysis."""
RECIPES = {
    "deepseek_v3": "v5p:8x8x8",
    "gpt2_124m": "h100:1x8",
    "llama2_7b": "b200:1x1",
    "llama3_1b": "v5e:4x4",
    "llama3_8b": "v6e:8x8",
    "llama3_8b_128k": "v5p:4x4x4",
    "llama3_8b_1m": "v5p:4x4x8",
    "llama3_8b_1m_node": "h200:1x8",
    "llama3_70b": "v5p:4x8x8",
    "llama3_405b": "v5p:8x8x16",
    "mixtral_8x22b": "v5p:4x8x8",
    "qwen3_30b_a3b": "h100:8x8",
    "qwen3_235b_a22b": "v5p:4x8x8",
    "quickstart": "cpu:1",
    "sft_smollm2": "h100:1x1",
    "dpo_smollm2": "h100:1x1",
    "grpo_arith_smollm2": "h100:1x1",
    "grpo_tools_smollm2": "h100:1x1",
    "llama3_8b_grpo": "v6e:8x8",
    "ipo_smollm2": "h100:1x1",
    "kto_smollm2": "h100:1x1",
    "orpo_smollm2": "h100:1x1",
    "reward_smollm2": "h100:1x1",
    "simpo_smollm2": "h100:1x1",
    "pre_gated": "cpu:1",
}
"""Topology that each recipe is compiled for: one where it fits and compiles quickly."""
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
    "invariant@cpu:1": {"model": "latent", "sizes": {"batch_invariant": True, "preemption": "swap", "decode_steps": 1},
                        "decode": False, "full": True},
    "decode@v5e:1x1": {},
    "prompt@v5e:1x1": {"decode": False},
    "kv_int8@v5e:1x1": {"sizes": {"kv_dtype": "int8"}},
    "decode@h100:1x1": {},
}  # fmt: skip
"""Arguments of ``engine`` by program."""

KERNELS = ("flash_attention", "linear_cross_entropy", "grouped_matmul")
"""Kernels compiled for a GPU, where no recipe chooses them."""


class Made(NamedTuple):
    """Program to compile: a jitted function, abstract arguments, the mesh in scope (None: none), compiler options."""

    function: Any
    arguments: tuple[Any, ...]
    mesh: Any = None
    options: dict[str, str] | None = None


def recipe(topology: Any, name: str) -> Made:
    """The training step of a recipe."""
    from jaxllm.train.compile_step import compiler_options, step_on

    run = next(iter(entry_points(group="jaxllm.recipes", name=name))).load()()
    step, arguments, mesh = step_on(topology, run)
    return Made(step, arguments, mesh, compiler_options(topology, run))


def pipeline(topology: Any, schedule: str) -> Made:
    """The training step of a small model with a layer a virtual stage, by a schedule."""
    from jaxllm.data import DataConfig
    from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig
    from jaxllm.parallel.parallel_config import ParallelConfig
    from jaxllm.parallel.pipeline.schedule_generators import default_chunks
    from jaxllm.train import RunConfig
    from jaxllm.train.compile_step import compiler_options, step_on

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
    from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MLAConfig, MlpConfig, MoeConfig

    attention: Any = AttentionConfig(4, 2, 128)
    mlp: Any = MoeConfig(4, 2, 128) if kind == "moe" else MlpConfig(256)
    if kind == "latent":
        attention = MLAConfig(4, latent=256, q_latent=128, nope_dim=128, rope_dim=64, value_dim=128)
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
    """An engine step, built as ``jaxllm.infer.runner.model_runner`` builds it, for any topology.

    Args:
        topology: the topology to compile for.
        model: see ``served``.
        sizes: fields of the engine's configuration.
        mesh: mesh axes, for several devices.
        decode: eight decoding sequences; otherwise 64 tokens of prefill chunks and decoding sequences.
        full: with logits processors and all samplers.
    """
    import jax
    import jax.numpy as jnp

    import sharding
    from jaxllm.infer import EngineConfig
    from jaxllm.infer.grammar import mask_width
    from jaxllm.infer.runner import logits_processors
    from jaxllm.infer.runner.page_programs import empty_pools
    from jaxllm.infer.runner.paged_cache import POOL_AXES, layer_groups
    from jaxllm.infer.runner.serving_mesh import serving_model
    from jaxllm.infer.runner.step.engine_step import EngineStep
    from jaxllm.infer.runner.step.step_shape import StepShape
    from jaxllm.models import functional

    settings = EngineConfig(
        max_sequences=8, max_batched_tokens=64, max_len=128, page_size=32, samplers=("full",), **(sizes or {})
    )
    config, columns, rows = served(model), 4, 8 if decode else 64
    made, reader = serving_model(functional(config)), serving_model(functional(config), split="context" in mesh)
    groups = layer_groups(config, settings.kv_dtype)
    shape = StepShape(
        tokens=rows, requests=8, decode=decode, full=full, slots=8, columns=columns, groups=len(groups),
        decode_steps=settings.decode_steps, top_logprobs=5, logprob_dtype="float32",
    )  # fmt: skip
    where = sharding.MeshSpec.parse(mesh).build(topology.devices()) if mesh else one_device(topology)
    with jax.set_mesh(where), sharding.use_rules(made.rules):
        replicas = sharding.axis_size("batch")
        each, pool = (jax.NamedSharding(where, sharding.spec(*axes)) for axes in (("batch",), POOL_AXES))
        pools = jax.eval_shape(lambda: empty_pools(made.rules, groups, (8 * columns + 1,) * len(groups), 32, 8))
        state = jax.eval_shape(lambda: logits_processors.empty_state(8, config.vocab_size))

    def placed(tree: Any, place: Any, *replicated: int) -> Any:
        one = lambda x: jax.ShapeDtypeStruct((*replicated, *x.shape), x.dtype, sharding=place)  # noqa: E731
        return jax.tree.map(one, tree)

    def ints(*of: int) -> Any:
        return jax.ShapeDtypeStruct((replicas, *of), jnp.int32, sharding=each)

    params = sharding.abstract_params(made.abstract(), made.logical_axes(), where, made.rules)
    arguments = [params, placed(pools, pool), ints(8), ints(shape.inputs.size)]
    if full:
        arguments += [tuple(placed(state, each, replicas)), ints(8, mask_width(config.vocab_size))]
    step = EngineStep(made, reader, groups, shape, config.vocab_size, settings.batch_invariant)
    donated = (1, 2, 4) if full else (1, 2)
    return Made(jax.jit(step.__call__, donate_argnums=donated, keep_unused=True), tuple(arguments), where)


def kernel(topology: Any, name: str) -> Made:
    """Pallas kernels of an operation, with its gradients."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels._dispatch import OPERATIONS

    operation = getattr(importlib.import_module(OPERATIONS[name]), name)

    def array(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P()))

    mesh, half = one_device(topology), jnp.bfloat16
    arguments = {
        "flash_attention": [array(half, 2, 256, n, 64) for n in (4, 2, 2)],
        "linear_cross_entropy": [array(half, 256, 128), array(half, 1024, 128), array(jnp.int32, 256),
                                 array(jnp.float32, 256)],
        "grouped_matmul": [array(half, 256, 128), array(half, 4, 128, 128), array(jnp.int32, 4)],
    }[name]  # fmt: skip

    def total(*given: Any) -> Any:
        out = operation(*given, implementation=f"pallas_{topology.platform}")
        return (out[0] if isinstance(out, tuple) else out).astype(jnp.float32).sum()

    inputs = tuple(i for i, x in enumerate(arguments) if x.dtype == half)
    return Made(jax.jit(jax.value_and_grad(total, inputs)), tuple(arguments), mesh)


def one_device(topology: Any) -> Any:
    """Mesh of one device with an automatic axis: the program is the same as without a mesh."""
    import jax
    import numpy as np

    return jax.sharding.Mesh(np.array(topology.devices()), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def programs() -> dict[str, tuple[str, Callable[..., Made], dict[str, Any]]]:
    """Programs by name: topology, function that builds it, arguments of that function."""
    found: dict[str, Any] = {}
    for name, settings in ENGINES.items():
        found[f"engine/{name}"] = name.rpartition("@")[2], engine, settings
    for schedule, each in SCHEDULES.items():
        found |= {f"pipeline/{schedule}@{on}": (on, pipeline, {"schedule": schedule}) for on in each}
    found |= {f"kernel/{name}@h100:1x1": ("h100:1x1", kernel, {"name": name}) for name in KERNELS}
    return found | {f"recipe/{name}@{on}": (on, recipe, {"name": name}) for name, on in RECIPES.items()}


def compiled(topology: Any, name: str, file: str) -> dict[str, Any]:
    """Compiles a program and writes its text; runs in a process set up for the topology's compiler."""
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
        **{f"{what}_bytes": getattr(memory, f"{what}_size_in_bytes") for what in MEMORY},
        "compile_seconds": round(seconds, 1),
    }


def commit() -> str:
    """Commit of the working tree, with a hash of uncommitted changes."""

    def git(*command: str) -> str:
        here = Path(__file__).parent
        return subprocess.run(["git", *command], cwd=here, capture_output=True, text=True, check=True).stdout

    changed = git("diff", "HEAD")
    return git("rev-parse", "HEAD").strip() + (f"+{digest(changed)[:12]}" if changed else "")


def write(folder: Path, only: list[str]) -> int:
    """Compiles the programs that the folder lacks for this commit; returns 1 if one does not compile."""
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
        except Exception as error:  # the next may compile
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
    """Prints the differences; returns 1 if a program differs or is missing."""
    before, after = (
        {p.relative_to(root).with_suffix("").as_posix(): p for p in root.rglob("*.json")} for root in (old, new)
    )
    rows: list[dict[str, Any]] = []
    for name in sorted(before | after):
        if name not in before or name not in after:
            rows.append({"name": name, "equal": False})
            print(f"{name:36} only in {old if name in before else new}")
            continue
        a, b = (json.loads(side[name].read_text()) for side in (before, after))
        keys = ("hlo", "stablehlo", "instructions", *(f"{what}_bytes" for what in MEMORY))
        differing = [key for key in keys if a[key] != b[key]]
        equal = not set(differing) - {"stablehlo"}
        rows.append(
            {key: [a[key], b[key]] if key in differing else a[key] for key in ("name", *keys)} | {"equal": equal}
        )
        rows[-1]["commits"], rows[-1]["versions"] = [a["commit"], b["commit"]], [a["versions"], b["versions"]]
        print(f"{name:36} {'equal' if equal else 'DIFFERENT'}", f"({', '.join(differing)})" if differing else "")
        if "hlo" in differing:
            texts = (gzip.decompress((root / f"{name}.hlo.gz").read_bytes()).decode() for root in (old, new))
            print(*(f"    {line}" for line in itertools.islice(differences(*texts), 12)), sep="\n")
    same = sum(row["equal"] for row in rows)
    print(f"{same} of {len(rows)} equal")
    if record is not None:
        record.write_text(json.dumps({"programs": rows}, indent=1) + "\n")
    return int(same < len(rows) or not rows)


def differences(old: str, new: str) -> Iterator[str]:
    """Differing lines, cut to a little before the place where they differ."""
    for pair in itertools.zip_longest(old.splitlines(), new.splitlines(), fillvalue=""):
        if pair[0] != pair[1]:
            shared = sum(1 for _ in itertools.takewhile(lambda both: both[0] == both[1], zip(*pair, strict=False)))
            begin = max(0, shared - 60)
            yield from (
                f"{sign} {'...' if begin else ''}{x[begin : shared + 140]}" for sign, x in zip("-+", pair, strict=True)
            )


def main() -> int:
    """Entry point of ``python -m benchmarks.programs``."""
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
