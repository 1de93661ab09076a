"""Flash attention of real models by the Mosaic-GPU kernels, forward and backward, compiled for absent H100s."""

from __future__ import annotations

import dataclasses

from sharding.isolate import run_isolated
from tests.kernels.flash_aot import Shape

__all__ = ["CELLS", "EXEMPT", "SHAPES", "TEMPORARIES", "compile_cell"]

SHAPES = {
    "Llama-3.1-8B, packed": Shape(8192, 32, 8, 128, packed=True),
    "Llama-3.3-70B, an eighth of the heads": Shape(4096, 8, 1, 128, b=2),
    "Mistral-7B, 32k": Shape(32768, 32, 8, 128, window=4096),
    "gpt-oss-20b": Shape(4096, 64, 8, 64, window=128, sinks=True),
    "odd length, float16": Shape(1001, 9, 3, 64, dtype="float16"),
    "everything": Shape(900, 4, 1, 64, v=128, t=1500, packed=True, positions=True, sinks=True, window=99, softcap=30.0),
}
CELLS = tuple((name, "h100:1x2") for name in SHAPES)
EXEMPT: dict[tuple[str, str], str] = {}
TEMPORARIES = 1.0
"""Copies padded to whole blocks included; see tests/proofs/kernels/aot.py."""


def compile_cell(shape: str, topology: str) -> dict[str, float]:
    """Compiles a cell in a child process; raises what the compiler says."""
    arguments = {"shape": dataclasses.asdict(dataclasses.replace(SHAPES[shape], kernel="mosaic_gpu"))}
    return run_isolated("tests.kernels.flash_aot:compile_on", topology, arguments)
