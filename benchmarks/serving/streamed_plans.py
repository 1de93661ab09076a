"""Plans of models that do not fit one device: solved placements, and their programs compiled for a device that is not
here.

    python -m benchmarks.serving.streamed_plans [--on h100:1x1,v6e:1x1] [--models llama3_70b,mixtral_8x22b]
        [--modes throughput,latency] [--weights int4] [--host 256] [--length 2048] [--json FILE]

Rates are those of data sheets. The placement with the most tokens/s is taken, of one sequence where latency counts, and
the programs of its steps are compiled: for tokens that decode, and for prompts. Mixtures may have experts in slots.
"compiled" is what the largest of the programs needs beside what stays on the device or comes ahead, and that; "planned"
the bytes of the plan. "step" is its time by the timeline, in which copies and computing overlap as the window allows;
"copies" and "computing" are what each of them takes alone, copies of experts by chance, and these overlap with nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import jax

from jaxllm.cli.recipe_arguments import configure, find_recipe
from jaxllm.compiler import aot
from jaxllm.infer import EngineConfig
from jaxllm.infer.runner.model_runner import ACCELERATOR_MEMORY_SHARE
from jaxllm.infer.streaming.abstract_streamed import AbstractStreamedRunner
from jaxllm.infer.streaming.open_streamed import mixture_bytes, model_bytes
from jaxllm.infer.streaming.placement_fit import FittedPlacement, ModelBytes, TierLimits, fit
from jaxllm.infer.streaming.tier_rates import TierRates, roofline_rates
from jaxllm.models import DecoderConfig, functional
from jaxllm.plan.hardware import TABLE
from jaxllm.quant.packing import packed_shapes
from sharding import MeshSpec
from sharding.isolate import run_isolated
from sharding.topology import Topology

ON = ("h100:1x1", "v6e:1x1")
MODELS = ("llama3_70b", "mixtral_8x22b")
MODES = {"throughput": (1, 4, 16, 64, 128), "latency": (1,)}
"""Batch sizes to choose from."""
PROMPT_ROWS, PAGE = 512, 64
HELD = ("params", "pools", "weights", "slots", "experts")
"""Arguments of programs that stay on the device, or are in the window."""


def served_config(recipe: str) -> DecoderConfig:
    """The model of a recipe, as it is served."""
    model = configure(find_recipe(recipe), []).model
    return dataclasses.replace(model, dtype="bfloat16", param_dtype="bfloat16", remat="none")


def rates_by_data_sheet(on: str, model: ModelBytes) -> TierRates:
    """Rates of a device kind for a model; layers that are not on the device are in host memory."""
    one = TABLE[on.partition(":")[0]]
    return roofline_rates(
        on, sum(model.units), model.parameters, flops=one.flops, bandwidth=one.bandwidth, host=one.host,
        disk=one.host, expert_parameters=model.expert_parameters, routed=model.routed,
    )  # fmt: skip


def bytes_of(tree: Any) -> int:
    """Bytes of arrays of these shapes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def engine_config(batch: int, window: int, length: int) -> EngineConfig:
    """Sizes of an engine for so many sequences; prompts are computed in pieces."""
    rows = max(PROMPT_ROWS, batch)
    return EngineConfig(
        max_sequences=batch, max_batched_tokens=rows, buckets=(batch, rows) if batch < rows else (rows,),
        max_len=length, page_size=PAGE, pages=batch * -(-length // PAGE) + 1, samplers=("plain",), decode_steps=1,
        layer_window=window,
    )  # fmt: skip


def plan_here(topology: Topology, recipe: str, mode: str, weights: str, host: float, length: int) -> dict[str, Any]:
    """Best placement and its compiled programs, in this process, which must be set up for the topology's compiler."""
    model = functional(served_config(recipe))
    params, mesh = packed_shapes(model, weights), MeshSpec.parse("tensor=1").build(topology.devices())
    ends = {name: x for name, x in params.items() if name != "segments"}
    probe = AbstractStreamedRunner(model, params, engine_config(1, 2, length), mesh)
    hbm = topology.hbm_bytes
    assert hbm is not None, "a topology of an accelerator"
    limit = int(ACCELERATOR_MEMORY_SHARE * hbm)

    def compiled(placement: FittedPlacement) -> dict[str, tuple[aot.CompileReport, int]]:
        config = engine_config(placement.batch, placement.budget.window, length)
        slots = placement.budget.experts
        runner = AbstractStreamedRunner(model, params, config, mesh, expert_slots=slots)
        found = dict[str, tuple[aot.CompileReport, int]]()
        for rows in config.prompt_buckets:
            for name, one in runner.programs_of(rows).items():
                held = sum(bytes_of(one.arguments[kind]) for kind in HELD if kind in one.arguments)
                report = aot.compile(one.jit(), *one.arguments.values(), topology=topology, mesh=mesh, name=name)
                found[name] = report, held
        return found

    units = probe.unit_bytes()
    sizes = model_bytes(model, [one.whole for one in units], ends, mixture_bytes(model, units))
    rates = rates_by_data_sheet(str(topology), sizes)
    # What programs need beside weights and KV cache is known when they are compiled: the plan is made again with it.
    beside, reports = 0, dict[str, tuple[aot.CompileReport, int]]()
    for _ in range(2):
        limits = TierLimits(limit - beside, host * 2**30, None, length, page=PAGE)
        every = fit(sizes, rates, limits, MODES[mode])
        best = max(every, key=lambda one: one.tokens_per_second)
        reports = compiled(best)
        beside = max(one.temp_bytes + one.output_bytes - one.alias_bytes for one, _ in reports.values())
    pool, slots = engine_config(best.batch, 1, length).pages, best.budget.experts
    assert pool is not None
    layers = max(one.rest if slots else one.whole for one in units)
    planned = sizes.ends + best.bytes["device"] + best.budget.window * layers + pool * PAGE * sizes.token
    # What is held, among it the arguments of a program that are, and what the program needs besides.
    needed = max(planned + one.total_bytes - held for one, held in reports.values())
    mixtures, streamed, loads = sizes.mixtures, best.bytes["host"], 0.0
    if slots and mixtures is not None:
        streamed = sum(mixtures.rest) + slots * mixtures.slot - best.bytes["device"]
        loads = mixtures.missing(slots, best.batch) * mixtures.slot / mixtures.layers / rates.host
    return {
        "model": recipe, "mode": mode, "weights": weights, "on": str(topology), "batch": best.batch,
        "window": best.budget.window, "slots": slots,
        "layer_bytes": sum(sizes.units), "device": best.bytes["device"], "host": best.bytes["host"],
        "kv": pool * PAGE * sizes.token, "planned": planned, "compiled": needed, "beside": beside,
        "limit": limit, "seconds": best.seconds, "copies": streamed / rates.host + loads, "loads": loads,
        "computing": rates.layers(best.batch) + rates.ends(best.batch),
        "tokens_per_second": best.tokens_per_second, "bound_by": best.limit,
        "programs": {n: {"arguments": one.argument_bytes, "temp": one.temp_bytes} for n, (one, _) in reports.items()},
    }  # fmt: skip


def plan_on(
    on: str, recipe: str, mode: str = "throughput", weights: str = "int4", host: float = 256.0, length: int = 2048
) -> dict[str, Any]:
    """``plan_here`` in a process that is set up for the compiler of ``on``."""
    arguments = {"recipe": recipe, "mode": mode, "weights": weights, "host": host, "length": length}
    return run_isolated("benchmarks.serving.streamed_plans:plan_here", on, arguments)


def row(plan: dict[str, Any]) -> str:
    """Row of the table."""
    gib = (f"{plan[name] / 2**30:.1f}" for name in ("device", "host", "kv", "planned", "compiled"))
    seconds = (f"{1e3 * plan[name]:.0f}" for name in ("seconds", "copies", "computing"))
    said = plan["model"], plan["on"], *(str(plan[name]) for name in ("batch", "window", "slots"))
    return " | ".join(["", *said, *gib, *seconds, f"{plan['tokens_per_second']:.1f}", plan["bound_by"], ""]).strip()


def main() -> None:
    """Prints the table as its rows come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", default=",".join(ON))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--weights", default="int4")
    parser.add_argument("--host", type=float, default=256.0, help="GiB of host memory")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = []
    head = ("model", "on", "batch", "window", "slots", "here GiB", "host", "KV", "planned", "compiled")
    print(" | ".join(["", *head, "step ms", "copies", "computing", "tokens/s", "limited by", ""]).strip())
    every = itertools.product(args.models.split(","), args.on.split(","), args.modes.split(","))
    for recipe, on, mode in every:
        found.append(plan_on(on, recipe, mode, args.weights, args.host, args.length))
        print(row(found[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
