"""What the compilers say of flash attention: every shape compiles for every kind of device, in memory linear in S."""

from __future__ import annotations

import re

import pytest
from hypothesis import strategies as st

from sharding.isolate import IsolatedError, OutOfDeviceMemory
from tests.kernels.flash_aot import CELLS, EXEMPT, compile_cell
from tests.proofs.harness import proof

TEMPORARIES = 2.0
"""Bytes of temporaries for each byte of arguments and results, which are linear in the sequence; scores are not."""


@proof(
    "kernels",
    count=len(CELLS),
    sample=2,
    chunk=len(CELLS),  # only one run of Hypothesis finds every cell
    strategy=st.sampled_from(CELLS),
    bound={"temporaries": TEMPORARIES},
)
def flash_attention_compiles(cell: tuple[str, str]) -> dict[str, float]:
    """Forward and backward compile; what a compiler refuses is exempt by name, with its reason."""
    assert len(EXEMPT) <= 0.1 * len(CELLS)
    if cell in EXEMPT:
        with pytest.raises((IsolatedError, OutOfDeviceMemory), match=re.escape(EXEMPT[cell])):
            compile_cell(*cell)
        return {"temporaries": 0.0}
    result = compile_cell(*cell)
    return {"temporaries": result["temp_bytes"] / result["bytes"]}
