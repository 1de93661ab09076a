"""Plans of models that do not fit one device: solved placements, and their programs compiled for a device that is not
here.

    python -m benchmarks.serving.streamed_plans [--on h100:1x1,v6e:1x1] [--models llama3_70b,mixtral_8x22b]
        [--weights int4] [--host 256] [--length 2048] [--json FILE]

Rates are those of data sheets. The placement with the most tokens/s is taken, and the programs of its steps are
compiled: for tokens that decode, and for prompts. "compiled" is what the largest of them needs beside layers that stay
or come ahead, and these; "planned" the bytes of the plan. "step" is
its time by the timeline, in which copies and computing overlap as the window allows; "copies" and "computing" are what
each of them takes alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxllm.cli.recipe_arguments import configure, find_recipe
from jaxllm.compiler import aot
from jaxllm.infer import EngineConfig
from jaxllm.infer.runner.model_runner import ACCELERATOR_MEMORY_SHARE
from jaxllm.infer.streaming.abstract_streamed import AbstractStreamedRunner
from jaxllm.infer.streaming.open_streamed import model_bytes
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
BATCHES = (1, 4, 16, 64, 128)
PROMPT_ROWS, PAGE = 512, 64


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


def engine_config(batch: int, window: int, length: int) -> EngineConfig:
    """Sizes of an engine for so many sequences; prompts are computed in pieces."""
    rows = max(PROMPT_ROWS, batch)
    return EngineConfig(
        max_sequences=batch, max_batched_tokens=rows, buckets=(batch, rows) if batch < rows else (rows,),
        max_len=length, page_size=PAGE, pages=batch * -(-length // PAGE) + 1, samplers=("plain",), decode_steps=1,
        layer_window=window,
    )  # fmt: skip


def plan_here(topology: Topology, recipe: str, weights: str, host: float, length: int) -> dict[str, Any]:
    """Best placement and its compiled programs, in this process, which must be set up for the topology's compiler."""
    model = functional(served_config(recipe))
    params, mesh = packed_shapes(model, weights), MeshSpec.parse("tensor=1").build(topology.devices())
    ends = {name: x for name, x in params.items() if name != "segments"}
    probe = AbstractStreamedRunner(model, params, engine_config(1, 2, length), mesh)
    hbm = topology.hbm_bytes
    assert hbm is not None, "a topology of an accelerator"
    limit = int(ACCELERATOR_MEMORY_SHARE * hbm)

    def compiled(placement: FittedPlacement) -> dict[str, aot.CompileReport]:
        config = engine_config(placement.batch, placement.budget.window, length)
        runner, found = AbstractStreamedRunner(model, params, config, mesh), dict[str, aot.CompileReport]()
        for rows in config.prompt_buckets:
            for name, one in runner.programs_of(rows).items():
                found[name] = aot.compile(one.jit(), *one.arguments.values(), topology=topology, mesh=mesh, name=name)
        return found

    sizes = model_bytes(model, probe.unit_bytes(), ends)
    rates = rates_by_data_sheet(str(topology), sizes)
    # What programs need beside weights and KV cache is known when they are compiled: the plan is made again with it.
    beside, reports = 0, dict[str, aot.CompileReport]()
    for _ in range(2):
        limits = TierLimits(limit - beside, host * 2**30, None, length, page=PAGE)
        every = fit(sizes, rates, limits, BATCHES)
        best = max(every, key=lambda one: one.tokens_per_second)
        reports = compiled(best)
        beside = max(one.temp_bytes + one.output_bytes - one.alias_bytes for one in reports.values())
    largest = max(sizes.units)
    pool = engine_config(best.batch, 1, length).pages
    assert pool is not None
    planned = sizes.ends + best.bytes["device"] + best.budget.window * largest + pool * PAGE * sizes.token
    held = best.bytes["device"] + best.budget.window * largest
    # A layer that computes is among the arguments of its program.
    needed = max(one.total_bytes + held - largest * ("-layers-" in name) for name, one in reports.items())
    copied = best.bytes["host"] / rates.host
    return {
        "model": recipe, "weights": weights, "on": str(topology), "batch": best.batch, "window": best.budget.window,
        "layer_bytes": sum(sizes.units), "device": best.bytes["device"], "host": best.bytes["host"],
        "kv": pool * PAGE * sizes.token, "planned": planned, "compiled": needed, "beside": beside,
        "limit": limit, "seconds": best.seconds, "copies": copied,
        "computing": rates.layers(best.batch) + rates.ends(best.batch),
        "tokens_per_second": best.tokens_per_second, "bound_by": best.limit,
        "programs": {name: {"arguments": one.argument_bytes, "temp": one.temp_bytes} for name, one in reports.items()},
    }  # fmt: skip


def plan_on(on: str, recipe: str, weights: str = "int4", host: float = 256.0, length: int = 2048) -> dict[str, Any]:
    """``plan_here`` in a process that is set up for the compiler of ``on``."""
    arguments = {"recipe": recipe, "weights": weights, "host": host, "length": length}
    return run_isolated("benchmarks.serving.streamed_plans:plan_here", on, arguments)


def row(plan: dict[str, Any]) -> str:
    """Row of the table."""
    gib = (f"{plan[name] / 2**30:.1f}" for name in ("device", "host", "kv", "planned", "compiled"))
    seconds = (f"{1e3 * plan[name]:.0f}" for name in ("seconds", "copies", "computing"))
    said = plan["model"], plan["on"], str(plan["batch"]), str(plan["window"])
    return " | ".join(["", *said, *gib, *seconds, f"{plan['tokens_per_second']:.1f}", plan["bound_by"], ""]).strip()


def main() -> None:
    """Prints the table as its rows come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", default=",".join(ON))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--weights", default="int4")
    parser.add_argument("--host", type=float, default=256.0, help="GiB of host memory")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = []
    head = ("model", "on", "batch", "window", "here GiB", "host", "KV", "planned", "compiled")
    print(" | ".join(["", *head, "step ms", "copies", "computing", "tokens/s", "limited by", ""]).strip())
    for recipe in args.models.split(","):
        for on in args.on.split(","):
            found.append(plan_on(on, recipe, args.weights, args.host, args.length))
            print(row(found[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
