"""Paged attention over quantised pages, compiled for TPUs and GPUs that are not there: memory.

Plain pages are compiled by tests/proofs, a rotating sample of them by tests/proofs/test_sample.py.
"""

from __future__ import annotations

import pytest

from tests import environment
from tests.kernels.paged_aot import QUANTISED, TOPOLOGIES, compile_cell


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_quantised_pages_compile_and_are_updated_in_place(platform):
    """No copy of the pool is made: it is nearly half of what goes in and out."""
    named = [name for name in TOPOLOGIES if name.startswith(("h", "b")) == (platform == "gpu")]
    drawn = environment.derive(environment.seed(), platform)
    decodes = [name for name in QUANTISED if "decode" in name]
    found = compile_cell(decodes[drawn % len(decodes)], named[drawn // 2 % len(named)])
    assert found["temp_bytes"] <= found["bytes"] / 10
