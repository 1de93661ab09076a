"""Flash attention compiled for TPUs and GPUs: memory, and the page that lists what compiles.

A rotating sample of the cells themselves is compiled by tests/proofs/test_sample.py.
"""

from __future__ import annotations

import dataclasses

import pytest

from sharding.isolate import run_isolated
from tests import environment
from tests.kernels.flash_aot import BEGIN, END, EXEMPT, PAGE, SHAPES, TOPOLOGIES, Shape


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


def test_the_page_lists_every_cell():
    page = PAGE.read_text()
    table = page[page.index(BEGIN) + len(BEGIN) : page.index(END)].strip().splitlines()
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    assert header == ["shape", *(name.partition(":")[0] for name in TOPOLOGIES)]
    assert [row[0] for row in rows] == list(SHAPES)
    for row in rows:
        for topology, cell in zip(TOPOLOGIES, row[1:], strict=True):
            if (row[0], topology) in EXEMPT:
                assert EXEMPT[row[0], topology] in cell
            else:
                assert float(cell) >= 0, f"{row[0]} on {topology}"
