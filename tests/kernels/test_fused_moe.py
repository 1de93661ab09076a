"""Fused mixture of experts by the shared test body: plain JAX in float64, the Pallas kernel interpreted."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import explain
from pallas_kernels._compat import TargetDevice, interpreting
from pallas_kernels.fused_moe import config, fused_moe
from pallas_kernels.fused_moe.api import IMPLEMENTATIONS
from tests.kernels import fused_moe_body
from tests.kernels.fused_moe_body import CASES, PALLAS, PLAIN, Case, draw, error, oracle


def test_every_implementation_is_tested():
    assert {*PLAIN, *PALLAS} == set(IMPLEMENTATIONS)


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("implementation", PLAIN)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_is_the_loop_over_tokens(implementation, case, rng, float64):
    fused_moe_body.check(implementation, case, rng, np.float64, 1e-14)


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_kernel_is_the_loop_over_tokens(case, rng):
    with fused_moe_body.small_pieces():
        fused_moe_body.check("pallas_tpu", case, rng)


def test_bfloat16(rng):
    """Inner activations are rounded to bfloat16 before the down projection, as a grouped matmul's are."""
    fused_moe_body.check("pallas_tpu", CASES["two of eight"], rng, jnp.bfloat16, 2**-7)


@pytest.mark.parametrize("implementation", [*PLAIN, *PALLAS])
def test_gradients_are_those_of_finite_differences(implementation, rng):
    """Along a random direction of the tokens, the matrices and the weights."""
    arguments = draw(rng, Case(6, 2, 4, none=3), np.float32)
    ways = [rng.normal(size=one.shape) for one in arguments[:4]] + [rng.normal(size=arguments[5].shape)]
    out = rng.normal(size=arguments[0].shape)

    def loss(*trained):
        rest = arguments[4], trained[4], jax.nn.silu
        return jnp.sum(fused_moe(*trained[:4], *rest, implementation=implementation) * out)

    trained = (*arguments[:4], arguments[5])
    with interpreting():
        grads = jax.grad(loss, argnums=tuple(range(5)))(*trained)
    slope = sum(float(np.vdot(np.asarray(g, np.float64), way)) for g, way in zip(grads, ways, strict=True))

    def moved(step: float) -> float:
        some = [np.asarray(one, np.float64) + step * way for one, way in zip(trained, ways, strict=True)]
        return float(np.sum(oracle(*some[:4], arguments[4], some[4]) * out))

    assert slope == pytest.approx((moved(1e-5) - moved(-1e-5)) / 2e-5, rel=1e-4)


def test_one_program_serves_any_choice_of_experts(rng):
    """Which experts are chosen, and how many, are values: a decode step compiles once."""
    run = fused_moe_body.program("reference")
    for seen in ((0, 1), (2, 5), (0, 1, 2, 3, 4, 5)):
        arguments = draw(rng, Case(6, 2, 6, seen=seen), np.float32)
        assert error(run(*arguments), oracle(*arguments)) <= 1e-6
    assert run._cache_size() == 1


def test_widths_pass_in_whole_lanes():
    assert config.part_of_width(4096, 14336, 2) == 512
    assert config.part_of_width(2048, 768, 2) == 768
    assert config.part_of_width(7168, 2048, 2) == 256
    assert config.part_of_width(2880, 2880, 2) == 2880, "no divisor in whole lanes: all of it"


def test_a_device_with_little_vmem_sorts_rows(rng, monkeypatch):
    """A v4 has 16 MiB, in which the parts of an expert for 128 tokens were 21."""
    arguments = draw(rng, CASES["two of eight"], np.float32)
    for kind, has_room in (("TPU v4", False), ("TPU v5 lite", True), ("TPU v6 lite", True), ("TPU7x", True)):
        monkeypatch.setattr(config, "target_device", lambda kind=kind: TargetDevice("tpu", kind))
        assert (not config.refusal(128, 2048, 768, 2)) == has_room
        if not has_room:
            with interpreting(), pytest.raises(NotImplementedError, match="48 MiB of VMEM; a TPU v4 has 16"):
                fused_moe(*arguments, jax.nn.silu, implementation="pallas_tpu")


def test_what_cannot_be_is_refused(rng, monkeypatch):
    x, gate, up, down, experts, weights = draw(rng, CASES["two of eight"], np.float32)
    plain = inspect.unwrap(fused_moe)
    with pytest.raises(ValueError, match=r"tokens \[13, 23\], matrices \[8, 24, 20\]"):
        plain(x[:, 1:], gate, up, down, experts, weights, jax.nn.silu)
    with pytest.raises(ValueError, match=r"experts \[13, 1\] and weights \[13, 2\]"):
        plain(x, gate, up, down, experts[:, 1:], weights, jax.nn.silu)
    with pytest.raises(NotImplementedError, match="pallas_tpu needs a TPU, not cpu"):
        fused_moe(x, gate, up, down, experts, weights, jax.nn.silu, implementation="pallas_tpu")
    with interpreting():
        monkeypatch.setattr(config, "MAX_TOKENS", 12)
        with pytest.raises(NotImplementedError, match="takes 12 tokens at most, not 13"):
            fused_moe(x, gate, up, down, experts, weights, jax.nn.silu, implementation="pallas_tpu")
        monkeypatch.undo()
        monkeypatch.setattr(config, "VMEM_BYTES", 2**10)
        with pytest.raises(NotImplementedError, match="MiB of VMEM for 13 tokens of 24 columns and 20 of an"):
            fused_moe(x, gate, up, down, experts, weights, jax.nn.silu, implementation="pallas_tpu")


def test_none_chooses_the_kernel_on_tpus_alone():
    assert explain("fused_moe", platform="tpu").startswith("fused_moe on tpu: pallas_tpu")
    assert explain("fused_moe", platform="gpu").startswith("fused_moe on gpu: reference")
    assert jax.default_backend() == "cpu"
