"""Flash attention compiled for TPUs and GPUs: memory.

A rotating sample of the cells themselves is compiled by tests/proofs/test_sample.py.
"""

from __future__ import annotations

import dataclasses

import pytest

from sharding.isolate import run_isolated
from tests import environment
from tests.kernels.flash_aot import TOPOLOGIES, Shape


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_memory_is_linear_in_the_sequence(platform):
    named = [name for name in TOPOLOGIES if name.startswith(("h", "b")) == (platform == "gpu")]
    topology = named[environment.derive(environment.seed(), platform) % len(named)]

    length, heads, kv_heads, size = 8192, 8, 2, 128
    shape = dataclasses.asdict(Shape(length, heads, kv_heads, size, packed=True, positions=True))
    temporary = run_isolated("tests.kernels.flash_aot:compile_on", topology, {"shape": shape})["temp_bytes"]
    # q, k, v, the output, and the gradient of each, in bfloat16. Two lengths are not compared: of a short one some
    # generations keep all in fast memory, which is not counted.
    in_and_out = 2 * length * size * (4 * heads + 4 * kv_heads)
    assert temporary <= 2 * in_and_out
    assert 2 * in_and_out < 4 * length * length, "one head's scores would be more"
