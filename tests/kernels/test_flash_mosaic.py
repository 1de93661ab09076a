"""Mosaic-GPU kernels of flash attention: values in a simulation of warpgroups, copies and barriers, races as failures;
and compiled for an absent H100.

The simulation multiplies what lies in shared memory; that wgmma takes the operands is what the compiler checks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _mosaic_gpu, _pallas, _self_check, explain
from pallas_kernels._compat import TargetDevice, interpreting
from pallas_kernels.flash_attention import flash_attention
from tests.kernels import gpu_simulation
from tests.kernels.flash_body import Case, draw, error, forward_and_vjp
from tests.kernels.flash_hopper_aot import TEMPORARIES, compile_cell
from tests.kernels.flash_hopper_body import CASES, check, small_pieces


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("name", CASES)
def test_is_the_formula(name, rng):
    """Output, logsumexp and gradients in float32 against float64, twice the same bits, without a race."""
    with small_pieces():
        check("mosaic_gpu", CASES[name], rng)


@pytest.mark.drawn(0.2)
@pytest.mark.parametrize("dtype", _mosaic_gpu.DTYPES)
def test_blocks_of_a_device(dtype, rng):
    """Head dim and blocks as on a device, in its dtypes: results keep the dtype, and differ by its rounding."""
    inputs, extra = draw(rng, Case(1, 200, 200, 1, 1, 64, "packed"))
    low = [x.astype(dtype) for x in inputs]
    with interpreting(), gpu_simulation.no_races():
        got = jax.block_until_ready(forward_and_vjp("mosaic_gpu", low, extra))
    want = forward_and_vjp("reference", [x.astype(np.float32) for x in low], extra)
    bound = 2**-7 if dtype == "bfloat16" else 2**-10
    assert all(x.dtype == dtype for x in jax.tree.leaves(got))
    assert all(error(a, b) <= bound for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))


@pytest.mark.drawn(0.2)
def test_self_check_takes_the_dtypes_that_the_kernel_takes():
    with interpreting(), gpu_simulation.no_races():
        verdict = _self_check.check("flash_attention", "mosaic_gpu", jax.devices()[0])
    assert verdict.passed, verdict
    assert set(verdict.errors) == {"bfloat16"}


def test_self_check_does_not_pass_a_kernel_that_takes_nothing():
    verdict = _self_check.check("flash_attention", "mosaic_gpu", jax.devices()[0])
    assert not verdict.passed
    assert not verdict.errors
    assert verdict.why.startswith("it takes none of the samples: mosaic_gpu needs a GPU")


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("name", ["Llama-3.1-8B, packed", "odd length, float16", "everything"])
def test_compiles_for_hopper(name):
    """Forward and backward: operands of wgmma and the size of shared memory are legal; temporaries, copies padded to
    whole blocks included, are smaller than arguments and results.
    """
    found = compile_cell(name, "h100:1x2")
    assert found["temp_bytes"] <= TEMPORARIES * found["bytes"]


def test_limits_are_named(monkeypatch):
    q = jnp.zeros((1, 3, 1, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="mosaic_gpu needs a GPU, not cpu"):
        flash_attention(q, q, q, implementation="mosaic_gpu")
    with interpreting():
        with pytest.raises(NotImplementedError, match="all in bfloat16 or all in float16, not q float32"):
            flash_attention(*[q.astype(jnp.float32)] * 3, implementation="mosaic_gpu")
        wide = jnp.zeros((1, 3, 1, 96), jnp.bfloat16)
        with pytest.raises(NotImplementedError, match="head dims 64 or 128, not 96"):
            flash_attention(wide, wide, wide, implementation="mosaic_gpu")
    for module in (_pallas, _mosaic_gpu):
        monkeypatch.setattr(module, "target_device", lambda: TargetDevice("gpu", "NVIDIA A100-SXM4-40GB"))
    with pytest.raises(NotImplementedError, match=r"needs a Hopper GPU \(H100, .*\), not NVIDIA A100"):
        flash_attention(q, q, q, implementation="mosaic_gpu")


def test_is_used_where_it_is_named():
    on_gpu = explain("flash_attention", platform="gpu")
    assert "mosaic_gpu: used where it is named: no device has measured it beside pallas_gpu" in on_gpu
