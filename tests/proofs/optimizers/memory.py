"""Peak memory of a step whose gradients never exist all at once, or not at all, by the compilers."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax

from jaxllm.compiler import aot
from jaxllm.config import from_dict, to_dict
from jaxllm.data import DataConfig
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig, functional
from jaxllm.train import RunConfig
from jaxllm.train.compile_step import compile_for, compiler_options, step_on
from sharding.isolate import run_isolated
from sharding.topology import Topology
from tests.optim.kinds import named
from tests.proofs.harness import proof
from tests.proofs.moe_models.pods import forward_of

ON, ROWS, LENGTH, WIDTH = "h100:1x8", 8, 64, 256
FEW, MANY = 4, 12


def config(kind: str, layers: int) -> RunConfig:
    """A model whose layers' weights are far larger than their inputs, so that gradients would show."""
    block = BlockConfig(AttentionConfig(4, 4, WIDTH // 4), MlpConfig(4 * WIDTH))
    model = DecoderConfig(vocab_size=256, embed_dim=WIDTH, layers=layers, pattern=(block,), remat="full")
    more = {"b1": 0.0} if kind == "sgd" else {}
    data = DataConfig(batch_size=ROWS, seq_len=LENGTH)
    return RunConfig(model=model, optim=named(kind, **more), data=data, mesh="fsdp=8", steps=10)


@functools.cache
def temporaries(kind: str, layers: int) -> int:
    """Temporary bytes of a device, beside parameters and optimizer state, which are donated."""
    report = compile_for(config(kind, layers), ON)
    assert report.output_bytes - report.alias_bytes < 1024  # all in the arguments' own memory
    return report.temp_bytes


def of_a_layer() -> tuple[int, int]:
    """(bytes of a layer's gradients, of its input), of a device."""
    found = functional(config("sgd", 1).model).abstract()["segments"]
    gradients = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(found)) * 4 // 8
    return gradients, ROWS * LENGTH * WIDTH * 4 // 8


@proof(
    "optimizers",
    cases=["lomo", "adalomo"],
    sample=1,
    bound={"gradients of a layer more": 0.05, "sgd": 0.25},
)
def gradients_of_one_layer(kind: str) -> dict[str, float]:
    """Each layer more needs its input, and none of its gradients; of plain descent it needs most of them.

    Most, since the compiler writes some into the arguments' own memory. The errors are shares of a layer's gradients.
    """
    gradients, kept = of_a_layer()
    grown = (temporaries(kind, MANY) - temporaries(kind, FEW)) / (MANY - FEW)
    plain = (temporaries("sgd", MANY) - temporaries("sgd", FEW)) / (MANY - FEW)
    return {
        "gradients of a layer more": max(0.0, grown - kept) / gradients,
        "sgd": max(0.0, 1 - plain / gradients),
    }


SLICE, CHIPS, DEEP = "v5e:2x2", 4, 24
"""So deep that where the compiler places buffers, which differs by 1 MB from depth to depth (4 layers to 36) and does
not grow with them, is little beside what the layers would keep: twenty inputs are 42 MB."""


def of_long_rows(kind: str, layers: int) -> RunConfig:
    """A model for TPUs, twice as wide, of rows so long that layers' inputs would show."""
    run = config(kind, layers)
    block = BlockConfig(AttentionConfig(4, 4, WIDTH // 2), MlpConfig(8 * WIDTH))
    model = dataclasses.replace(run.model, vocab_size=1024, embed_dim=2 * WIDTH, pattern=(block,), dtype="bfloat16")
    data = DataConfig(batch_size=ROWS, seq_len=16 * LENGTH)
    return dataclasses.replace(run, model=model, data=data, mesh=f"fsdp={CHIPS}")


def temporaries_here(topology: Topology, programs: list[tuple[str, dict[str, Any]]]) -> list[int]:
    """Temporary bytes of steps and forward passes, compiled in this process, set up for the topology's compiler."""
    found = []
    for program, fields in programs:
        run = from_dict(RunConfig, fields)
        step, (state, batch), mesh = step_on(topology, run)
        arguments = (state, batch)
        if program == "forward":
            step, arguments = jax.jit(forward_of(run)), (state.params, batch)
        options = compiler_options(topology, run)
        found.append(aot.compile(step, *arguments, topology=topology, mesh=mesh, options=options).temp_bytes)
    return found


@proof(
    "optimizers",
    cases=["mezo"],
    sample=1,
    bound={"over the forward pass and a direction": 0.05, "of a layer more": 0.02},
)
def peak_of_the_forward(kind: str) -> dict[str, float]:
    """Beside the forward pass's own temporaries the step has one direction, however many layers there are.

    The direction is of one layer's feed-forward matrices, 4 * 3 * hidden * width / chips bytes in float32: attention's
    are fewer, and are not drawn at the same time. The first error is what the step takes over the sum of both, as a
    share of the direction, at the worse of two depths. The second is what a layer more takes, as a share of its input,
    2 * tokens * width / chips bytes, which a backward pass would need. Plain descent, which computes layers again from
    their inputs, has to be over the sum by more than ten directions.
    """
    programs = [(name, layers) for layers in (FEW, DEEP) for name in ("forward", kind)] + [("sgd", DEEP)]
    fields = [(name, to_dict(of_long_rows(kind if name == "forward" else name, layers))) for name, layers in programs]
    target = f"{__name__}:{temporaries_here.__name__}"
    found = dict(zip(programs, run_isolated(target, SLICE, {"programs": fields}), strict=True))
    width, hidden = 2 * WIDTH, 8 * WIDTH
    direction, kept = 4 * 3 * hidden * width // CHIPS, 2 * ROWS * 16 * LENGTH * width // CHIPS
    over = {(name, layers): found[name, layers] - found["forward", layers] - direction for name, layers in programs}
    assert over["sgd", DEEP] > 10 * direction, found
    return {
        "over the forward pass and a direction": max(0, over[kind, FEW], over[kind, DEEP]) / direction,
        "of a layer more": max(0, found[kind, DEEP] - found[kind, FEW]) / (DEEP - FEW) / kept,
    }
