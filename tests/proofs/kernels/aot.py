"""Compiled operations: real models' shapes compile for every kind of device, without stored scores.

A matrix is tests/kernels/OP_aot.py with

    CELLS           (shape, ..., topology), all of them text
    EXEMPT          cell -> a part of the compiler's reason for refusing it; at most a tenth of the cells
    compile_cell    (*cell) -> {"bytes": of arguments and results, "temp_bytes": of temporaries}, of one device
    TEMPORARIES     optional: the most temporaries may be of arguments and results, which are linear in what grows
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest

from sharding.isolate import IsolatedError, OutOfDeviceMemory
from tests import environment
from tests.kernels import cross_entropy_aot
from tests.proofs.harness import proof

ALSO_COVERS = ("tests/kernels/*_aot.py",)

TEMPORARIES = 2.0
"""Bytes of temporaries for each byte of arguments and results, where a matrix does not say."""
LEAST_MEMORY = 15.75
"""GiB that a program can have on the smallest of the devices, a TPU v5e."""


def matrices() -> dict[str, Any]:
    """The modules of tests/kernels that have cells, by operation."""
    files = sorted((environment.ROOT / "tests" / "kernels").glob("*_aot.py"))
    files = [file for file in files if not file.name.startswith("test_")]
    return {f.stem.removesuffix("_aot"): importlib.import_module(f"tests.kernels.{f.stem}") for f in files}


def _register(name: str, matrix: Any) -> None:
    def compiles(cell: tuple[str, ...]) -> dict[str, float]:
        """Forward and backward compile; what a compiler refuses is exempt by name, with its reason."""
        assert set(matrix.EXEMPT) <= set(matrix.CELLS)
        assert len(matrix.EXEMPT) <= 0.1 * len(matrix.CELLS)
        if cell in matrix.EXEMPT:
            with pytest.raises((IsolatedError, OutOfDeviceMemory), match=re.escape(matrix.EXEMPT[cell])):
                matrix.compile_cell(*cell)
            return {"temporaries": 0.0, "temp_gib": 0.0}
        result = matrix.compile_cell(*cell)
        return {"temporaries": result["temp_bytes"] / result["bytes"], "temp_gib": result["temp_bytes"] / 2**30}

    bounds = {"temporaries": getattr(matrix, "TEMPORARIES", TEMPORARIES), "temp_gib": LEAST_MEMORY}
    proof("kernels", name=f"{name}_compiles", cases=matrix.CELLS, sample=1, bound=bounds)(compiles)


for _name, _matrix in matrices().items():
    _register(_name, _matrix)


@proof("kernels", cases=cross_entropy_aot.TOPOLOGIES, sample=1, bound=0.05)
def cross_entropy_grows_linearly(topology: str) -> float:
    """Temporaries of twice the tokens and twice the vocabulary are twice the bytes; logits would be four times."""
    return cross_entropy_aot.growth(topology)
