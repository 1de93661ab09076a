"""What a step needs at its peak where gradients never live all at once, as the GPU compiler has it."""

from __future__ import annotations

import functools
import math

import jax

from jaxllm.compiler import aot
from jaxllm.data import DataConfig
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig, functional
from jaxllm.train import RunConfig
from jaxllm.train.compile import compile_for, step_on
from jaxllm.train.loss import loss_sums
from sharding.isolate import run_isolated
from sharding.topology import Topology
from tests.optim.kinds import named
from tests.proofs.harness import proof

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
    """Of a device, beside parameters and optimizer state, which are donated."""
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
    costly=True,
    bound={"gradients of a layer more": 0.05, "sgd": 0.05},
)
def gradients_of_one_layer(kind: str) -> dict[str, float]:
    """Each layer more needs its input, and none of its gradients; of plain descent it needs all of them.

    The errors are shares of a layer's gradients.
    """
    gradients, kept = of_a_layer()
    grown = (temporaries(kind, MANY) - temporaries(kind, FEW)) / (MANY - FEW)
    plain = (temporaries("sgd", MANY) - temporaries("sgd", FEW)) / (MANY - FEW)
    return {
        "gradients of a layer more": max(0.0, grown - kept) / gradients,
        "sgd": max(0.0, 1 - plain / gradients),
    }


def forward_here(topology: Topology, layers: int) -> dict:
    """The forward pass and its loss alone, compiled; in a process of its own."""
    run = config("mezo", layers)
    model = functional(run.model, run.parallel.rules())
    _, (state, batch), mesh = step_on(topology, run)
    loss = jax.jit(lambda params, batch: loss_sums(model, params, batch).loss)
    return aot.compile(loss, state.params, batch, topology=topology, mesh=mesh, name="forward").to_json()


@proof("optimizers", cases=["mezo"], sample=1, costly=True, bound={"over the forward pass": 1.0, "a layer more": 0.01})
def forward_pass_only(kind: str) -> dict[str, float]:
    """A step's peak is the forward pass's and less than one layer's direction and update; no layer more adds to it.

    The first error is of a layer's parameters, three of which a layer's draw, shifted copy and update may be.
    """
    forward = aot.CompileReport.from_json(run_isolated(f"{__name__}:forward_here", ON, {"layers": MANY})).temp_bytes
    gradients, _ = of_a_layer()
    whole = temporaries(kind, MANY)
    grown = (whole - temporaries(kind, FEW)) / (MANY - FEW)
    return {
        "over the forward pass": max(0.0, whole - forward) / (3 * gradients),
        "a layer more": max(0.0, grown) / gradients,
    }
