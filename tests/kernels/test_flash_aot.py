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

    def temporary(s: int) -> float:
        shape = dataclasses.asdict(Shape(s, 8, 2, 128, packed=True, positions=True))
        return run_isolated("tests.kernels.flash_aot:compile_on", topology, {"shape": shape})["temp_bytes"]

    small, large = temporary(2048), temporary(8192)
    assert large <= 5 * small + 2**20  # S x S would be 16
    assert large < 8192 * 8192 * 4  # one head's scores in float32


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
