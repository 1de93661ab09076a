"""Grouped matmul of real models by the Mosaic-GPU kernels, forward and backward, compiled for absent H100s."""

from __future__ import annotations

import dataclasses

from sharding.isolate import run_isolated
from tests.kernels.grouped_aot import SHAPES, TEMPORARIES

__all__ = ["CELLS", "EXEMPT", "TEMPORARIES", "compile_cell"]

CELLS = tuple(
    (name, "h100:1x2") for name, shape in SHAPES.items() if shape.m % 128 == shape.k % 64 == shape.n % 64 == 0
)
"""Shapes that the kernels take."""
EXEMPT: dict[tuple[str, str], str] = {}


def compile_cell(shape: str, topology: str) -> dict[str, float]:
    """Compiles a cell in a child process; raises what the compiler says."""
    arguments = {"shape": dataclasses.asdict(SHAPES[shape]), "implementation": "mosaic_gpu"}
    return run_isolated("tests.kernels.grouped_aot:compile_on", topology, arguments)
