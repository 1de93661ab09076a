"""FLOPs, bytes and weights of serving steps by formula, and of programs compiled for a TPU and a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from benchmarks.engine_bytes import engine_program
from jaxllm.plan.formulas.serving_step import BatchWork, ServingStepModel
from jaxllm.plan.hardware import Cluster
from recipes.llama3 import llama3_8b
from sharding import MeshSpec
from sharding.isolate import run_isolated
from tests.proofs.harness import proof

PAGE, CONTEXT = 32, 1024
DEPTHS = (2, 4)
"""Layers of the compiled programs: each adds as much as another, so two depths say what all 32 move."""


class Shape(NamedTuple):
    """Step of an engine: decode of so many sequences, or so many prompt tokens of so many sequences."""

    on: str
    rows: int
    requests: int

    @property
    def decode(self) -> bool:
        """Each sequence has one row."""
        return self.rows == self.requests

    def __str__(self) -> str:
        return f"{self.on} {'decode' if self.decode else 'prefill'} {self.rows}/{self.requests}"


SHAPES = tuple(
    Shape(on, rows, requests)
    for on in ("v6e:1x1", "h100:1x1")
    for rows, requests in ((8, 8), (16, 16), (64, 64), (256, 1), (512, 4), (1024, 8))
)
DECODES = tuple(shape for shape in SHAPES if shape.decode)


@proof(
    "simulation",
    cases=SHAPES,
    sample=1,
    quick=(SHAPES[10],),
    bound={"flops": 1e-9, "one_row": 5e-3, "weights": 1e-6},
)
def steps_are_the_compiled_programs(shape: Shape) -> dict[str, float]:
    """Layers of 8B at their real widths, with embedding and head: matmul FLOPs, and bytes of weights.

    The paged attention kernel states no cost: its FLOPs are left out. Of a step with one sequence the head is a vector
    times a matrix, which the compiler of TPUs computes outside the matrix unit, where FLOPs are not counted: 0.5% of
    such a step's.
    """
    made = compiled_step(shape, DEPTHS[0])
    model, flops = _planned(shape, DEPTHS[0])
    error, alone = abs(flops / made["flops"] - 1), shape.requests == 1 and shape.on.startswith("v6e")
    return {
        "flops": 0.0 if alone else error,
        "one_row": error if alone else 0.0,
        "weights": abs(model.device_weight_bytes / made["weights"] - 1),
    }


@proof("simulation", cases=DECODES, sample=1, quick=(DECODES[3],), bound={"bytes": 0.1})
def decode_moves_the_compiled_bytes(shape: Shape) -> dict[str, float]:
    """Bytes of a decode step of all 32 layers with a KV cache of 1,024 tokens a sequence.

    From programs of few layers; the cache is added to what they move, since the attention kernel states no bytes.
    """
    made = {layers: compiled_step(shape, layers) for layers in DEPTHS}
    first, least = made[DEPTHS[0]], DEPTHS[0]
    every = llama3_8b().model.layers
    each = (made[DEPTHS[1]]["bytes"] - first["bytes"]) / (DEPTHS[1] - least)
    whole, _ = _planned(shape, every)
    batch = BatchWork.of([CONTEXT - 1] * shape.requests, [1] * shape.requests)
    moved = whole.step([batch], shape.rows, shape.requests).bytes
    cache = shape.requests * CONTEXT * whole.token_bytes
    return {"bytes": abs(moved / (first["bytes"] + (every - least) * each + cache) - 1)}


def _batch(shape: Shape) -> BatchWork:
    return BatchWork.of([0] * shape.requests, [shape.rows // shape.requests] * shape.requests)


def _planned(shape: Shape, layers: int) -> tuple[ServingStepModel, float]:
    """Step-time model of so many layers, and the FLOPs of a step without attention."""
    config = dataclasses.replace(llama3_8b().model, layers=layers)
    model = ServingStepModel(config, Cluster.parse(shape.on), MeshSpec.parse("tensor=1"))
    batch = _batch(shape)
    macs = config.blocks[0].attention.attention_macs
    attention = 2 * layers * macs * float(batch.pairs(None).sum())
    return model, model.step([batch], shape.rows, shape.requests).flops - attention


def compiled_step(shape: Shape, layers: int) -> dict[str, float]:
    """Compiles a step for a device that is not here."""
    arguments = {"rows": shape.rows, "requests": shape.requests, "layers": layers}
    return run_isolated("tests.proofs.simulation.compiled_steps:compiled", shape.on, arguments)


def compiled(topology: Any, rows: int, requests: int, layers: int) -> dict[str, float]:
    """In a child that is set up for the topology's compiler: FLOPs and bytes of the program, bytes of its weights.

    Layers are apart for GPUs, as the engine has them there.
    """
    from jaxllm.compiler import program_walker
    from jaxllm.infer.runner.step.step_shape import StepShape

    config = dataclasses.replace(llama3_8b().model, param_dtype="bfloat16", dtype="bfloat16", layers=layers)
    shape = StepShape(rows, requests, rows == requests, False, requests, 2 * CONTEXT // PAGE, 1, 8, 1, "float32")
    form = "apart" if topology.platform == "gpu" else "stacked"
    program, _, pool, others = engine_program(topology, config, shape, PAGE, form)
    memory: Any = program.memory_analysis()
    text = program.as_text() or ""
    flops, moved = (lambda read: (read.flops, read.bytes))(program_walker.read(text))
    if shape.decode:
        # A step of several tokens is a loop: what a second turn adds, without what a call does once.
        twice = program_walker.read(text, turns=2)
        flops, moved = twice.flops - flops, twice.bytes - moved
    weights = memory.argument_size_in_bytes - pool.data.size * 2 - 4 * sum(x.size for x in others)
    return {"flops": float(flops), "bytes": float(moved), "weights": float(weights)}
