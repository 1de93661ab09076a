"""Steps in two halves (ISO, nano-batches): the training forward on every mesh, and what an all-reduce delays."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
from hypothesis import strategies as st

from jaxllm.compiler import aot, hlo, program_walker
from jaxllm.compiler.timeline import timeline
from jaxllm.infer import EngineConfig
from jaxllm.infer.abstract_runner import AbstractRunner
from jaxllm.models import functional
from jaxllm.plan.hardware import Cluster
from jaxllm.plan.timeline_rates import rates_of
from sharding import MeshSpec
from sharding.isolate import run_isolated
from sharding.topology import Topology
from tests.infer import engines
from tests.infer.meshes import over
from tests.proofs.harness import proof
from tests.proofs.overlap.ladder import WIDE

MESHES = ("tensor=2", "tensor=4", "data=2,tensor=2", "fsdp=2,tensor=2", "expert=2,tensor=2")
MODELS = [name for name in (*engines.MODELS, *engines.MIXTURES) if name != "smollm2"]  # whose three heads are not split
WAYS = ("roomy", "tight, recompute", "tight, swap", "contiguous")


@st.composite
def served(draw: st.DrawFn) -> tuple[int, str, str, str, str]:
    """Seed, model, mesh, engine, overlap."""
    model = draw(st.sampled_from(MODELS))
    mixture = engines.model_of(model, "float64").mixtures
    meshes = [mesh for mesh in MESHES if "expert" not in mesh or mixture]
    heads = {block.attention.heads for block in engines.model_of(model, "float64").blocks}
    meshes = [mesh for mesh in meshes if all(count % int(mesh[-1]) == 0 for count in heads)]
    way = draw(st.sampled_from(WAYS))
    overlap = draw(st.sampled_from(["iso", "nano"]))
    return draw(st.integers(0, 2**31)), model, draw(st.sampled_from(meshes)), way, overlap


@proof("overlap", count=60, sample=1, strategy=served(), float64=True, bound=1e-10)
def halves_are_whole_steps(case: tuple[int, str, str, str, str]) -> float:
    """Random traffic of engines whose steps go through the layers in two halves, less the training forward."""
    seed, model, mesh, way, overlap = case
    config = dataclasses.replace(engines.ENGINES[way], overlap=overlap)
    engine = over(mesh, model, config, "float64")
    made = engines.serve(engine, engines.traffic(np.random.default_rng(seed), config, 8))
    return engines.error(model, "float64", made)


MATMULS = ("dot", "convolution")


def waited_for(text: str) -> float:
    """Share of a program's all-reduces that every matmul comes before or after: none runs beside them."""
    program = hlo.parse(text)
    matmuls = {
        name: any(one.opcode in MATMULS or "gemm" in one.attributes for one in computation.instructions.values())
        for name, computation in program.computations.items()
    }
    before: dict[str, set[str]] = {}
    entry = program.entry.instructions
    for one in entry.values():
        known = [name for name in one.operands if name in before]
        before[one.name] = set(known).union(*(before[name] for name in known))
    heavy = {
        one.name
        for one in entry.values()
        if one.opcode in MATMULS
        or (one.opcode == "custom-call" and "gemm" in one.attributes)
        or matmuls.get(one.callee("calls", "to_apply") or "", False)
    }
    reduces = [one.name for one in entry.values() if one.opcode in ("all-reduce", "all-reduce-start")]
    assert heavy
    assert reduces
    alone = [all(name in before[reduce] or reduce in before[name] for name in heavy) for reduce in reduces]
    return sum(alone) / len(alone)


ROWS = 8192


def step_here(topology: Topology, overlap: Literal["none", "iso", "nano"]) -> dict[str, Any]:
    """A step with prompts, all devices as tensor shards: share of all-reduces that nothing can run beside, times.

    In this process, which must be set up for the topology's compiler.
    """
    config = EngineConfig(
        max_sequences=8, max_batched_tokens=ROWS, buckets=(ROWS,), max_len=ROWS, page_size=128, pages=512,
        samplers=("plain",), overlap=overlap,
    )  # fmt: skip
    spec = MeshSpec.parse(f"tensor={topology.num_devices}")
    mesh, model = spec.build(topology.devices()), functional(WIDE)
    runner = AbstractRunner(model, model.abstract(), config, mesh)
    step = next(one for name, one in runner.largest_programs().items() if name.startswith("prompt"))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.json"
        aot.compile(step.jit(), *step.arguments.values(), topology=topology, mesh=mesh, keep=file)
        text, placement = aot.kept(file)
    played = timeline(program_walker.read(text, placement), rates_of(Cluster.parse(topology.name), spec))
    return {
        "waited for": waited_for(text),
        "exposed": sum(played.exposed.values()),
        "hidden": sum(played.hidden.values()),
        "seconds": played.seconds,
    }


@proof("overlap", cases=("h100:1x4", "v6e:2x2"), sample=1, bound={"exposed": 0.8, "seconds": 1.0})
def halves_hide_all_reduces(on: str) -> dict[str, float]:
    """Four layers of Llama 3 8B over four devices, prompts of 8,192 tokens in a step: seconds that wait for
    all-reduces, and seconds of the timeline, in two halves over those of the whole step. On GPUs nearly every
    all-reduce has a matmul that it can run beside; on TPUs some are fused with one.
    """
    whole, halves = (
        run_isolated(f"{__name__}:{step_here.__name__}", on, {"overlap": kind}) for kind in ("none", "iso")
    )
    print(on, whole, halves)
    assert whole["waited for"] == 1
    assert on.startswith("v6e") or halves["waited for"] < 0.1
    return {name: halves[name] / whole[name] for name in ("exposed", "seconds")}
