"""Steps that store bfloat16 only: no float32 array of a parameter's size in programs compiled for TPUs."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxllm.compiler import aot, hlo
from jaxllm.data import DataConfig
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig, functional
from jaxllm.optim import OptimConfig
from jaxllm.train import RunConfig
from jaxllm.train.compile_step import compile_for
from tests.proofs.harness import proof

BLOCK = BlockConfig(AttentionConfig(4, 2, 128), MlpConfig(1280))
MODEL = DecoderConfig(
    vocab_size=4224, embed_dim=640, layers=3, pattern=(BLOCK,), dtype="bfloat16", param_dtype="bfloat16", remat="full"
)
"""No stack of its matrices has as many elements as an activation or a chunk of the logits."""


def float32_sizes(text: str) -> Iterator[int]:
    """Elements of every float32 array that a kernel of a program writes; values inside of kernels are in registers."""
    computations = hlo.parse(text).computations
    every = [instruction for one in computations.values() for instruction in one.instructions.values()]
    inside = {one.callee("calls", "to_apply") for one in every if one.opcode not in hlo.CALLS}
    for name, computation in computations.items():
        for instruction in computation.instructions.values() if name not in inside else ():
            if instruction.opcode not in ("parameter", "get-tuple-element", "tuple", "bitcast", "while"):
                for dims in re.findall(r"\bf32\[([\d,]+)\]", instruction.shape):
                    yield math.prod(map(int, dims.split(",")))


@proof(
    "policies",
    cases=[(rounding, on) for rounding in ("collage", "stochastic") for on in ("v5e:1x1", "v6e:1x1")],
    sample=1,
    bound=0,
)
def no_float32_between_kernels(case: tuple[str, str]) -> float:
    """Arrays of float32 with the elements of a stack of matrices, or of the embedding, in a whole step of AdamW."""
    rounding, on = case
    run = RunConfig(
        model=MODEL,
        optim=OptimConfig(rounding=rounding),  # type: ignore[arg-type]
        steps=10,
        data=DataConfig(batch_size=2, seq_len=128),
        mesh="dp",
    )
    leaves = jax.tree.leaves(functional(MODEL).abstract())
    sizes = {leaf.size for leaf in leaves if leaf.ndim > 2 or leaf.shape[0] == MODEL.vocab_size}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step.txt"
        compile_for(run, on, keep=file)
        found = list(float32_sizes(aot.kept(file)[0]))
    assert found, "there are float32 arrays, such as the softmax's"
    return float(sum(size in sizes for size in found))
