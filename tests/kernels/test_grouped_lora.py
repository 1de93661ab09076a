"""Grouped low-rank matmul by the shared test body: plain JAX in float64, Pallas kernels interpreted."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import explain
from pallas_kernels._compat import interpreting
from pallas_kernels.grouped_lora import grouped_lora, pallas_gpu, pallas_tpu, xla
from pallas_kernels.grouped_lora.api import IMPLEMENTATIONS
from tests.kernels import lora_body
from tests.kernels.lora_body import CASES, PALLAS, PLAIN, Case, draw, error, oracle, program


def test_every_implementation_is_tested():
    assert {*PLAIN, *PALLAS} == set(IMPLEMENTATIONS)


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("implementation", PLAIN)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_is_the_loop(implementation, case, rng, float64):
    lora_body.check(implementation, case, rng, np.float64, 1e-14)


@pytest.mark.drawn(0.2)
@pytest.mark.parametrize("implementation", PALLAS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernels_are_the_loop(implementation, case, rng):
    lora_body.check(implementation, case, rng)


@pytest.mark.parametrize("implementation", PALLAS)
def test_bfloat16(implementation, rng):
    """The product with the left factor is rounded to bfloat16, as a low-rank layer's is."""
    lora_body.check(implementation, CASES["mixed ranks"], rng, jnp.bfloat16, 2**-7)


def test_one_program_serves_any_assignment_of_rows(rng, float64):
    """Only values change with the adapters of a batch: a step compiles once."""
    run = program("xla")
    for _ in range(6):
        case = Case((4, 40, 16, 0), tuple(rng.integers(-1, 3, 37).tolist()))
        arguments = draw(rng, case)
        assert error(run(*arguments), oracle(*arguments)) <= 1e-14
    assert run._cache_size() == 1


@pytest.mark.drawn(1)
@pytest.mark.parametrize("cost", [0, 10**6])
def test_row_by_row_is_tile_by_tile(rng, float64, monkeypatch, cost):
    """Both ways of the plain implementation give the result of every small case; pages have any number of ranks."""
    monkeypatch.setattr(xla, "ROW_COST", cost)
    for name, case in CASES.items():
        if len(case.rows) <= xla.TILE_ROWS:
            lora_body.check("xla", case, rng, np.float64, 1e-14)
            x, a, b, rows = draw(rng, case)
            assert error(program("xla")(x, a[:, :3], b[:, :3], rows), oracle(x, a[:, :3], b[:, :3], rows)) <= 1e-14, (
                name
            )


def test_what_cannot_be_is_refused(rng, monkeypatch):
    x, a, b, rows = draw(rng, CASES["mixed ranks"], np.float32)
    plain = inspect.unwrap(grouped_lora)
    with pytest.raises(ValueError, match=r"rows \[11, 69\] with 11 slots, and pages"):
        plain(x[:, 1:], a, b, rows)
    with pytest.raises(NotImplementedError, match="pallas_tpu needs a TPU, not cpu"):
        grouped_lora(x, a, b, rows, implementation="pallas_tpu")
    with interpreting():
        monkeypatch.setattr(pallas_tpu, "VMEM_BYTES", 2**10)
        with pytest.raises(NotImplementedError, match="MiB of VMEM for tiles of rows of 70 and 150 columns"):
            grouped_lora(x, a, b, rows, implementation="pallas_tpu")
        monkeypatch.setattr(pallas_gpu, "MAX_ELEMENTS", 20)
        with pytest.raises(NotImplementedError, match=r"fewer than 2\^31 elements: x \[11, 70\]"):
            grouped_lora(x, a, b, rows, implementation="pallas_gpu")
        monkeypatch.undo()
        with pytest.raises(NotImplementedError, match=r"pallas_tpu takes pages of 16, 32, 48, \.\.\. ranks, not 8"):
            grouped_lora(x, a[:, :8], b[:, :8], rows, implementation="pallas_tpu")
        with pytest.raises(NotImplementedError, match=r"pages of 16, 32, 64, \.\.\. ranks, not 8"):
            grouped_lora(x, a[:, :8], b[:, :8], rows, implementation="pallas_gpu")


def test_none_chooses_the_kernel_of_the_platform():
    for platform in ("tpu", "gpu"):
        assert explain("grouped_lora", platform=platform).startswith(f"grouped_lora on {platform}: pallas_{platform}")
    assert explain("grouped_lora", platform="cpu").startswith("grouped_lora on cpu: xla")
    assert jax.default_backend() == "cpu"
