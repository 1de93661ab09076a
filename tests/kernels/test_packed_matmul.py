"""Packed matmul by the shared test body: plain JAX in float64, Pallas kernels interpreted."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import explain
from pallas_kernels._compat import interpreting
from pallas_kernels._dispatch import may_be_default
from pallas_kernels.packed_matmul import PackedCodes, packed_matmul
from pallas_kernels.packed_matmul.api import IMPLEMENTATIONS
from pallas_kernels.packed_matmul.config import tpu_tiles
from tests.kernels import packed_body
from tests.kernels.packed_body import CASES, NATIVE, PALLAS, PLAIN


def test_every_implementation_is_tested():
    assert {*PLAIN, *PALLAS, *NATIVE} == set(IMPLEMENTATIONS)
    assert explain("packed_matmul", platform="tpu").startswith("packed_matmul on tpu: pallas_tpu")


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("implementation", PLAIN)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_is_the_dequantised_product(implementation, case, rng, float64):
    """Values of levels are stored in float32, in which scales in blocks are multiplied and added, too."""
    bound = 4e-7 if case.block else 1e-7 if case.form.levels else 1e-14
    packed_body.check(implementation, case, rng, np.float64, bound)


@pytest.mark.drawn(0.2)
@pytest.mark.parametrize("implementation", PALLAS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernels_are_the_dequantised_product(implementation, case, rng):
    packed_body.check(implementation, case, rng)


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("implementation", PALLAS)
def test_small_tiles(implementation, rng):
    """Many tiles of rows, bytes and outputs, whose edges are cut."""
    with packed_body.small_pieces():
        packed_body.check(implementation, CASES["a table, no multiple of anything"], rng)


@pytest.mark.parametrize("implementation", PALLAS)
def test_bfloat16(implementation, rng):
    """Weights are rounded to bfloat16, and the sum once more."""
    packed_body.check(implementation, CASES["groups of 32"], rng, jnp.bfloat16, 2**-7)


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("case", ["wide, groups of 32", "wide int8 over many tiles"])
@pytest.mark.parametrize("implementation", [*PALLAS, *PLAIN, *NATIVE])
def test_wide_weights_are_not_rounded(implementation, case, rng):
    """Activations of bfloat16 meet weights and sums of float32, for which they are twice as long as bfloat16 is."""
    if implementation == "native" and not may_be_default("packed_matmul", "native"):
        pytest.skip("no compiler")
    packed_body.check(implementation, CASES[case], rng, jnp.bfloat16, 2e-5)


@pytest.mark.parametrize(("implementation", "device"), [("pallas_tpu", "TPU"), ("pallas_gpu", "GPU")])
def test_a_kernel_that_the_device_lacks_is_named(implementation, device):
    """Asked for by name on a CPU it is refused, and never replaced."""
    arguments = jnp.ones((2, 64)), jnp.zeros((32, 8), jnp.uint8), jnp.ones((1, 8)), PackedCodes(4)
    with pytest.raises(NotImplementedError, match=f"{implementation} needs a {device}, not cpu"):
        packed_matmul(*arguments, implementation=implementation)


def test_what_does_not_fit_is_named():
    x, packed, scales = jnp.ones((2, 48)), jnp.zeros((24, 8), jnp.uint8), jnp.ones((3, 8))
    with pytest.raises(ValueError, match="5 bits; codes have 2, 3, 4, 6 or 8 bits"):
        packed_matmul(x, packed, scales, PackedCodes(5))
    with pytest.raises(ValueError, match="wide codes are integers"):
        packed_matmul(x, packed, scales, PackedCodes(2, (0.0, 1.0, 2.0, 3.0), wide=True))
    with pytest.raises(ValueError, match=r"rows of 48 inputs, bytes \[24, 8\] with 1 codes in 1 and"):
        packed_matmul(x, packed, scales, PackedCodes(8))
    with interpreting():
        with pytest.raises(NotImplementedError, match="pallas_gpu takes wide codes in groups of a multiple of 16"):
            packed_matmul(x, packed, scales, PackedCodes(4, wide=True), implementation="pallas_gpu")
        with pytest.raises(NotImplementedError, match="1560 tuples in groups of 12 have none"):
            packed_matmul(
                jnp.ones((2, 3120)), jnp.zeros((1560, 8), jnp.uint8), jnp.ones((130, 8)), PackedCodes(4),
                implementation="pallas_tpu",
            )  # fmt: skip
    tiles = tpu_tiles("TPU v6 lite", 7, 64, 2048, 11008, 2)
    assert tiles is not None
    assert (tiles.rows, tiles.inner, tiles.columns) == (16, 512, 512)
