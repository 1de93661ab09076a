"""What a step needs at its peak where gradients never live all at once, as the GPU compiler has it."""

from __future__ import annotations

import functools
import math

import jax

from jaxllm.data import DataConfig
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig, functional
from jaxllm.train import RunConfig
from jaxllm.train.compile import compile_for
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
