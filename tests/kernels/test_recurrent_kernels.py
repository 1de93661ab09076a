"""Head-wise recurrent network by the shared test body: plain JAX in float64, Pallas kernels interpreted."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import pytest

from jaxllm.tune.block_solver import BlockProblem
from jaxllm.tune.kernel_tuning import CASES as TUNED
from pallas_kernels import explain
from pallas_kernels._compat import interpreting
from pallas_kernels._self_check import BOUNDS as CHECKED
from pallas_kernels._self_check import SAMPLES
from pallas_kernels.recurrent import recurrent
from pallas_kernels.recurrent.api import IMPLEMENTATIONS
from pallas_kernels.recurrent.check_samples import samples
from pallas_kernels.recurrent.config import VMEM_BYTES, tpu_blocks, vmem_terms
from tests.kernels import recurrent_body
from tests.kernels.recurrent_body import CASES, PALLAS, PLAIN


def test_every_implementation_is_tested():
    assert {*PLAIN, *PALLAS} == set(IMPLEMENTATIONS)


@pytest.mark.parametrize("implementation", PLAIN)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_is_the_loop(implementation, case, rng):
    recurrent_body.check(implementation, case._replace(dtype="float64"), rng)


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("implementation", ["xla", *PALLAS])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernels_are_the_loop(implementation, case, rng):
    recurrent_body.check(implementation, case, rng)


def operands(b: int, s: int, n: int, g: int, h: int) -> tuple[jax.Array, ...]:
    return jnp.zeros((b, s, n, g, h)), jnp.zeros((n, g, h, h))


def test_what_is_not_supported_is_said():
    x, matrices = operands(2, 3, 2, 4, 8)
    with pytest.raises(ValueError, match=r"no cell 'rnn'; there are lstm, gru, slstm"):
        inspect.unwrap(recurrent)(x, matrices, cell="rnn")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"does not go with x .2, 3, 2, 4, 8. and the gates r, z, n"):
        recurrent(x, matrices, cell="gru")
    with pytest.raises(ValueError, match="1 initial states; a cell 'lstm' has h, c"):
        recurrent(x, matrices, cell="lstm", initial=[jnp.zeros((2, 2, 8))])
    with pytest.raises(NotImplementedError, match="needs a TPU"):
        recurrent(x, matrices, cell="lstm", implementation="pallas_tpu")
    with interpreting(), pytest.raises(NotImplementedError, match=r"head dims of 16, 32, 64.*not 8"):
        recurrent(x, matrices, cell="lstm", implementation="pallas_gpu")
    with interpreting(), pytest.raises(NotImplementedError, match=r"128 KiB.*not 256 with 1024 KiB in float32"):
        recurrent(*operands(1, 2, 1, 4, 256), cell="lstm", implementation="pallas_gpu")
    with pytest.raises(NotImplementedError, match="matrices of a head in VMEM, and those of 2048 x 2048"):
        tpu_blocks("lstm", 16, 64, 2048, 2)


def test_order_of_implementations():
    for platform in ("tpu", "gpu"):
        assert explain("recurrent", platform=platform).startswith(f"recurrent on {platform}: pallas_{platform}")
    assert explain("recurrent", platform="cpu").startswith("recurrent on cpu: xla")


def test_default_blocks_are_solutions_of_the_solver():
    """The rule of ``tpu_blocks`` keeps the limit that the tuner gives the solver, and halves only what does not fit."""
    for cell in ("lstm", "gru", "slstm"):
        for head_dim in (64, 128, 256, 512):
            each, matrices = vmem_terms(cell, head_dim, 2)
            found = tpu_blocks(cell, 256, 4096, head_dim, 2)
            assert each * found.rows * found.tokens + matrices <= VMEM_BYTES
            assert found.tokens == 32 or each * found.rows * 2 * found.tokens + matrices > VMEM_BYTES
    for case in TUNED["recurrent"]("tpu", "TPU v6 lite"):
        (part,) = case.parts
        assert isinstance(part.problem, BlockProblem)
        values = {"rows": case.default.rows, "tokens": case.default.tokens}
        assert values in list(part.problem.solutions())


@pytest.mark.drawn(0.3)
def test_samples_of_the_self_check_pass_for_plain_jax():
    assert SAMPLES["recurrent"] == samples.__module__
    for dtype in (jnp.float32, jnp.bfloat16):
        for sample in samples(dtype):
            wanted, found = (sample.run(name, *sample.arrays).astype(jnp.float32) for name in ("reference", "xla"))
            error = float(jnp.abs(found - wanted).max() / jnp.abs(wanted).max())
            assert error <= CHECKED[jnp.dtype(dtype).name]
