"""Trains decoders on jaxllm and on transformers + torch, on one device, in turn: step time, tokens/s, MFU, memory.

    python -m benchmarks.train                                                  what is here: a CPU takes the smallest
    python -m benchmarks.train --precision bf16,fp8_current --torch compiled --out figures       on an H100 or H200
    python -m benchmarks.train --on h200:1x1 --shape 8b --dry-run               what would run, and what fits

    MFU = model FLOPs per token x tokens per second / peak FLOP/s
    model FLOPs per token = 3 x (2 x weights that a token meets + 4 x heads x head_dim x tokens it attends to)

Model FLOPs are those of ``jaxllm.train.model_flops`` (arXiv:2204.02311, appendix B), the same for both sides: causal
attention counts the positions attended to, recomputation counts nothing. The peak is the data sheet's for dense
bfloat16, also for fp8; on a CPU it is the rate of the fastest of the step's matmuls alone, in either library.

Models: ``124m``, ``1b`` and ``8b``, the recipes' architectures; of each as many layers as fit in every precision asked
for, by the memory that the device's compiler plans. A side that lacks memory for them takes all to fewer.

Sides: ours in each precision; torch with float32 parameters in float32 or autocast bf16, fused AdamW and
scaled_dot_product_attention, "eager" and "compiled" (torch.compile). All train on the same number of random tokens,
without clipping. On a CPU the sides live side by side and take a step each in turn; an accelerator cannot hold them at
once, and each turn is a process of its own that takes some steps to warm up and times as many again. A ratio is the
median over rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers.as_run import decoder
from benchmarks.peers.interleaved import (
    COMPILED,
    OURS,
    THEIRS,
    Contender,
    Failed,
    Restarted,
    cpu_name,
    in_turn,
    markdown,
    on_cores,
    ratio,
    versions,
)
from benchmarks.peers.setting import Setting
from benchmarks.train_plan import SHAPES, Planned, fitted, planned, topology_of
from jaxllm.compiler.device_peaks import peak_of
from jaxllm.train.model_flops import train_flops_per_token
from jaxllm.train.precision import PRECISIONS
from sharding.topology import GIB, Topology

TORCH = {"eager": THEIRS, "compiled": COMPILED}
PEERS = {"float32": "float32", "bf16": "bf16"}
"""Torch's precision for ours; others have no plain form in torch, and are compared with its bf16."""


def contenders(
    setting: Setting, precisions: Sequence[str], torch: Sequence[str], options: argparse.Namespace
) -> list[Contender]:
    """Ours in each precision, then torch's."""
    shared = {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".92", "JAX_COMPILATION_CACHE_DIR": options.cache}
    environment = {} if setting.device == "cpu" else shared
    of = lambda precision: dataclasses.replace(setting, precision=precision)  # noqa: E731
    sides = [Contender("jaxllm", sys.executable, OURS, of(p), options.threads, environment) for p in precisions]
    for precision in dict.fromkeys(PEERS.get(p, "bf16") for p in precisions):
        for how in torch:
            name = "torch" if how == "eager" else f"torch, {how}"
            sides.append(Contender(name, options.torch_python, TORCH[how], of(precision), options.threads, environment))
    return sides


def measure(sides: Sequence[Contender], rounds: int, steps: int) -> dict[str, Any]:
    """Steps of all sides in turn.

    Raises:
        Failed: a side could not.
    """
    here = sides[0].setting.device == "cpu"
    with contextlib.ExitStack() as stack:
        asked: list[Any] = [stack.enter_context(side.started()) if here else Restarted(side) for side in sides]
        answers = in_turn(asked, rounds, "train", warm=here, steps=steps)
        peak = max(side.ask("floor")["rate"] for side in asked) if here else None
        about = [side.about for side in asked]
    return {
        "about": about,
        "peak_flops": peak,
        "rows": [
            {
                "name": side.name,
                "precision": side.setting.precision,
                "seconds": [answer["seconds"] / steps for answer in given],
                "loss": given[-1]["loss"],
                "peak_bytes": max(answer["peak_bytes"] for answer in given),
            }
            for side, given in zip(sides, answers, strict=True)
        ],
    }


def completed(setting: Setting, result: dict[str, Any], peak: float) -> dict[str, Any]:
    """The result with what follows from the seconds: tokens/s, MFU, and ratios of speed.

    ``of_torch``: to torch's fastest in the nearest precision it has; ``of_first``: to the first of our rows.
    """
    flops = train_flops_per_token(decoder(setting), setting.seq_len)
    rows = result["rows"]
    theirs = [row for row in rows if row["name"] != "jaxllm"]
    for row in rows:
        row["step_seconds"] = median(row["seconds"])
        row["tokens_per_second"] = setting.tokens / row["step_seconds"]
        row["mfu"] = utilisation(flops, row["tokens_per_second"], peak)
    for row in rows:
        near = [peer for peer in theirs if peer["precision"] == PEERS.get(row["precision"], "bf16")]
        if row["name"] == "jaxllm" and near:
            best = min(near, key=lambda peer: peer["step_seconds"])
            row["of_torch"] = ratio(best["seconds"], row["seconds"])
        if row["name"] == "jaxllm" and row is not rows[0]:
            row["of_first"] = ratio(rows[0]["seconds"], row["seconds"])
    return {**result, "setting": dataclasses.asdict(setting), "flops_per_token": flops, "peak_flops": peak}


def utilisation(flops_per_token: float, tokens_per_second: float, peak_flops: float) -> float:
    """MFU."""
    return flops_per_token * tokens_per_second / peak_flops


def table(results: Sequence[dict[str, Any]]) -> str:
    """All results as a Markdown table."""
    first = results[0]["rows"][0]["precision"]
    head = ("model", "side", "precision", "s/step", "tokens/s", "MFU", "peak GiB", "planned GiB")
    rows: list[Sequence[str]] = [(*head, "of torch", f"of {first}")]
    for result in results:
        s = result["setting"]
        for row in result["rows"]:
            rows.append(
                (
                    f"{result['shape']}, {s['layers']} layers, {s['batch']} x {s['seq_len']}",
                    row["name"],
                    row["precision"],
                    f"{row['step_seconds']:.3f}",
                    f"{row['tokens_per_second']:,.0f}",
                    f"{row['mfu']:.1%}",
                    f"{row['peak_bytes'] / GIB:.1f}",
                    gib(row.get("planned_bytes")),
                    *(_ratio(row.get(name)) for name in ("of_torch", "of_first")),
                )
            )
    return markdown(rows)


def _ratio(found: Sequence[float] | None) -> str:
    return "" if found is None else "**{:.2f}** ({:.2f}-{:.2f})".format(*found)


def gib(size: int | None) -> str:
    """For a table; nothing where it is not known."""
    return "" if size is None else f"{size / GIB:.1f}"


def plan_table(shape: str, setting: Setting, asked: dict[tuple[str, int], Planned]) -> str:
    """Table of predicted memory by number of layers."""
    rows: list[Sequence[str]] = [("model", "precision", "layers", "formula GiB", "compiled GiB", "of", "fits")]
    for (precision, layers), plan in sorted(asked.items(), key=lambda item: item[0][1]):
        sizes = gib(plan.formula_bytes), gib(plan.compiled_bytes), gib(plan.budget)
        verdict = "yes" if plan.fits else "no"
        batch = f"{shape}, {setting.batch} x {setting.seq_len}"
        rows.append((batch, precision, str(layers), *sizes, verdict if plan.budget is not None else "not planned"))
    return markdown(rows)


def run_shape(shape: str, setting: Setting, layers: int, options: argparse.Namespace) -> dict[str, Any] | None:
    """Measures with so many layers, or with as many as all sides have memory for; None if that is none."""
    tried = []
    while layers > 0:
        setting = dataclasses.replace(setting, layers=layers)
        sides = contenders(setting, options.precision, options.torch, options)
        try:
            result = measure(sides, options.rounds, options.steps)
        except Failed as failure:
            if not failure.of_memory:
                raise
            tried.append({"layers": layers, "failed": str(failure)})
            print(f"{shape}: {layers} layers are too many: {str(failure)[:200]}", file=sys.stderr)
            layers -= max(1, layers // 8)
            continue
        known = peak_of(Topology.parse(options.on).device_kind)
        peak = known.flops if known is not None else result["peak_flops"]
        return {"shape": shape, "tried": tried, **completed(setting, result, peak)}
    return None


def local_topology() -> str:
    """Topology of the local device, found in a process that releases it."""
    code = "import jax; d = jax.devices()[0]; print(d.platform); print(d.device_kind)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return topology_of(*found.stdout.splitlines()[-2:])


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, its defaults filled in from the device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", help=f"of {', '.join(SHAPES)}; default: all, on a CPU 124m")
    parser.add_argument("--precision", help=f"of {', '.join(PRECISIONS)}; default: bf16, on a CPU float32")
    parser.add_argument("--torch", default="eager,compiled", help='of eager, compiled; "" for none')
    parser.add_argument("--torch-python", default=os.environ.get("TORCH_PYTHON", sys.executable))
    parser.add_argument("--on", help="one device by its topology's name, such as h100:1x1; default: that which is here")
    parser.add_argument("--layers", type=int, help="default: as many as fit")
    parser.add_argument("--batch", type=int, help="rows; default: 32 of 124m, else 1; on a CPU 1")
    parser.add_argument("--seq-len", type=int, help="default: 1024 of 124m, else 8192; on a CPU 512")
    parser.add_argument("--remat", default="elementwise", help="or none, full; torch: full, or nothing done again")
    parser.add_argument("--rounds", type=int, help="default: 3, on a CPU 5")
    parser.add_argument("--steps", type=int, help="of a turn; default: 10, on a CPU 1")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dry-run", action="store_true", help="say what would run and what fits, and end")
    parser.add_argument("--no-compile", action="store_true", help="plan memory by formula alone")
    parser.add_argument("--out", type=Path, help="directory for train.json and train.md")
    options = parser.parse_args(arguments)
    options.on = options.on or local_topology()
    cpu = Topology.parse(options.on).platform == "cpu"
    options.shape = _listed(parser, "--shape", options.shape or ("124m" if cpu else ",".join(SHAPES)), SHAPES)
    options.precision = _listed(parser, "--precision", options.precision or ("float32" if cpu else "bf16"), PRECISIONS)
    options.torch = _listed(parser, "--torch", options.torch, TORCH)
    if cpu:
        options.batch, options.seq_len = options.batch or 1, options.seq_len or 512
    options.rounds = options.rounds or (5 if cpu else 3)
    options.steps = options.steps or (1 if cpu else 10)
    if not 1 <= options.threads <= len(os.sched_getaffinity(0)):
        parser.error("--threads: no more than there are cores, and one at least.")
    if options.layers is not None and options.layers < 1:
        parser.error("--layers: one at least.")
    return options


def _listed(parser: argparse.ArgumentParser, name: str, given: str, legal: Any) -> list[str]:
    names = [part for part in given.split(",") if part]
    for part in names:
        if part not in legal:
            parser.error(f"{name}: {part!r} is none of {', '.join(legal)}.")
    return names


def setting_of(shape: str, options: argparse.Namespace) -> Setting:
    """A model with the batch that is asked for, on the device."""
    setting = dataclasses.replace(SHAPES[shape], device=Topology.parse(options.on).platform, remat=options.remat)
    changes = {name: getattr(options, name) for name in ("batch", "seq_len", "layers") if getattr(options, name)}
    return dataclasses.replace(setting, **changes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plans, measures, prints, and writes if asked to."""
    options = options_of(arguments)
    device = Topology.parse(options.on)
    if device.platform == "cpu":
        on_cores(options.threads)
    print(f"{options.on}; precisions {', '.join(options.precision)}; torch {', '.join(options.torch) or 'none'}")
    results, plans = [], {}
    with tempfile.TemporaryDirectory() as options.cache:
        for shape in options.shape:
            setting = setting_of(shape, options)
            compiling = not options.no_compile
            if options.layers:
                layers, asked = options.layers, {}
                for precision in options.precision:
                    of = dataclasses.replace(setting, precision=precision)
                    asked[precision, layers] = planned(of, options.on, compiling)
            else:
                layers, asked = fitted(setting, options.precision, options.on, compiling)
            print(f"\n{plan_table(shape, setting, asked)}\n", flush=True)
            plans[shape] = layers
            if options.dry_run:
                continue
            result = run_shape(shape, setting, layers, options)
            if result is None:
                print(f"{shape}: not one layer fits.")
                continue
            for row in result["rows"]:
                of = asked.get((row["precision"], result["setting"]["layers"]))
                if row["name"] == "jaxllm" and of is not None:
                    row["planned_bytes"] = of.compiled_bytes or of.formula_bytes
            results.append(result)
            print(table([result]), flush=True)
    if options.dry_run:
        print(", ".join(f"{shape}: {layers} of {SHAPES[shape].layers} layers" for shape, layers in plans.items()))
    elif results:
        finish(results, options)
    return 0


def finish(results: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    """Says on what it ran, and writes all results if asked to."""
    device = Topology.parse(options.on)
    name = f"{cpu_name()}, {options.threads} threads" if device.platform == "cpu" else device.device_kind
    about = [side for result in results for side in result.pop("about")]
    told = f"{name}; Python {platform.python_version()}, {versions(about)}; {options.rounds} rounds in turn."
    print(f"\n{told}")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        report = {"command": shlex.join(sys.argv), "machine": told, "results": results}
        (options.out / "train.json").write_text(json.dumps(report, indent=1) + "\n")
        (options.out / "train.md").write_text(f"{table(results)}\n\n{told}\n")


if __name__ == "__main__":
    sys.exit(main())
