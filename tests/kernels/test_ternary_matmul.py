"""Matmul with ternary codes: the reference in float64, the GPU kernel interpreted, beside codewords read one by one."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import explain
from pallas_kernels._compat import interpreting
from pallas_kernels.ternary_matmul import TernaryCode, pallas_gpu, ternary_matmul
from pallas_kernels.ternary_matmul.api import IMPLEMENTATIONS
from pallas_kernels.ternary_matmul.check_samples import drawn_code
from tests.kernels import ternary_aot

CASES = {
    "one output": (1, 1, 9, 1),
    "an odd number of inputs": (2, 5, 31, 4),
    "outputs of more than one tile": (3, 77, 64, 5),
    "more rows than experts": (2, 33, 130, 9),
    "long outputs": (1, 4, 700, 2),
    "more than 2^16 codewords": (1, 300, 4000, 1),
}
"""(experts, outputs, inputs, rows)."""


def draw(case: tuple[int, int, int, int], dtype: Any) -> tuple[Any, ...]:
    """Rows, a code, scales, and an expert of each row; some have none."""
    experts, outputs, inputs, rows = case
    rng = np.random.default_rng(list(case))
    own = rng.integers(0, experts + 1, rows)
    own[0] = experts - 1
    scales = jnp.asarray(rng.uniform(0.5, 2, (experts, outputs)), jnp.promote_types(dtype, jnp.float32))
    x = jnp.asarray(rng.normal(size=(rows, inputs)), dtype)
    return x, drawn_code(len(x), experts, outputs, inputs), scales, jnp.asarray(own, jnp.int32)


def oracle(x: Any, code: TernaryCode, scales: Any, experts: Any) -> np.ndarray:
    """Codeword after codeword of each output, in float64."""
    words, runs = (np.asarray(array).astype(int) for array in code)
    x, scales = np.asarray(x, np.float64), np.asarray(scales, np.float64)
    out = np.zeros((x.shape[0], scales.shape[1]))
    for e in range(scales.shape[0]):
        for n in range(scales.shape[1]):
            values, at = list[int](), 2 * scales.shape[1] + words[e, 2 * n] + 2**16 * words[e, 2 * n + 1]
            while len(values) < x.shape[1]:
                low, high = (int(half) for half in runs[:, words[e, at]])
                pairs = [(low if i < 7 else high) >> 4 * (i % 7) & 15 for i in range(high >> 28)]
                values += [value for pair in pairs for value in (pair % 3 - 1, pair // 3 - 1)]
                at += 1
            mine = np.asarray(experts) == e
            out[mine, n] = x[mine] @ np.asarray(values[: x.shape[1]]) * scales[e, n]
    return out


def error(implementation: str, case: tuple[int, int, int, int], dtype: Any) -> float:
    """||got - want|| / ||want||; rows without expert are exactly zero."""
    arguments = draw(case, dtype)
    with interpreting() if implementation == "pallas_gpu" else contextlib.nullcontext():
        got = np.asarray(jax.jit(lambda *a: ternary_matmul(*a, implementation=implementation))(*arguments))
    want = oracle(*arguments)
    assert (case[1] == 300) == (arguments[1].words.shape[1] > 2**16 + 2 * case[1])
    assert got.dtype == arguments[0].dtype
    assert not got[np.asarray(arguments[3]) == case[0]].any()
    return float(np.linalg.norm(got.astype(np.float64) - want) / (np.linalg.norm(want) or 1.0))


def test_every_implementation_is_tested():
    assert set(IMPLEMENTATIONS) == {"reference", "pallas_gpu"}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_reference_is_the_definition(case, float64):
    assert error("reference", case, np.float64) <= 1e-14


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_kernel_is_the_definition(case):
    assert error("pallas_gpu", case, np.float32) <= 1e-6


def test_bfloat16():
    assert error("pallas_gpu", CASES["an odd number of inputs"], jnp.bfloat16) <= 2**-7


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        ("2 * (place + i) + j", "2 * (place + i)"),
        ("(i < length) & (value != 0)", "value != 0"),
        ("at + 1, place + length", "at + 1, place + LONGEST"),
        ("load(words, (expert, 2 * outputs + i), own)", "load(words, (0 * expert, 2 * outputs + i), own)"),
        ("load(scales, (expert, outputs), own)", "load(scales, (0 * expert, outputs), own)"),
        ("load(words, (expert, at), here)", "load(words, (0 * expert, at), here)"),
        ("& (expert < count)", ""),
    ],
)
def test_a_kernel_with_a_mistake_is_another(edit, text, monkeypatch):
    source = inspect.getsource(pallas_gpu)
    assert edit in source
    scope: dict[str, Any] = {"__name__": "a_mistake"}
    exec(compile(source.replace(edit, text), "a_mistake", "exec"), scope)
    monkeypatch.setattr(pallas_gpu, "ternary_matmul_pallas_gpu", scope["ternary_matmul_pallas_gpu"])
    arguments = draw(CASES["more rows than experts"], np.float32)
    with interpreting():
        got = jax.jit(lambda *a: ternary_matmul(*a, implementation="pallas_gpu"))(*arguments)
    want = oracle(*arguments)
    assert not np.linalg.norm(got - want) / np.linalg.norm(want) < 0.02


def test_gradients_are_those_of_the_decoded_matrix(float64):
    x, code, scales, experts = draw(CASES["more rows than experts"], np.float64)
    loss = lambda x: jnp.sum(jnp.sin(ternary_matmul(x, code, scales, experts)))  # noqa: E731
    step = 1e-6 * np.random.default_rng(0).normal(size=x.shape)
    slope = float(loss(x + step) - loss(x - step)) / 2
    assert np.vdot(jax.grad(loss)(x), step) == pytest.approx(slope, rel=1e-7)


def test_gradients_through_the_kernel():
    x, code, scales, experts = draw(CASES["more rows than experts"], np.float32)

    def found(implementation: str) -> Any:
        def loss(x: Any) -> Any:
            return jnp.sum(jnp.sin(ternary_matmul(x, code, scales, experts, implementation=implementation)))

        with interpreting() if implementation == "pallas_gpu" else contextlib.nullcontext():
            return np.asarray(jax.jit(jax.grad(loss))(x))

    np.testing.assert_allclose(found("pallas_gpu"), found("reference"), rtol=0, atol=2e-4)


def test_what_cannot_be_is_refused(monkeypatch):
    x, code, scales, experts = draw(CASES["more rows than experts"], np.float32)
    plain = inspect.unwrap(ternary_matmul)
    with pytest.raises(ValueError, match=r"rows \[9, 130\] with 8 experts, codewords"):
        plain(x, code, scales, experts[1:])
    with pytest.raises(NotImplementedError, match="pallas_gpu needs a GPU, not cpu"):
        ternary_matmul(x, code, scales, experts, implementation="pallas_gpu")
    monkeypatch.setattr(pallas_gpu, "MAX_ELEMENTS", 20)
    with interpreting(), pytest.raises(NotImplementedError, match=r"fewer than 2\^31 elements: x \[9, 130\]"):
        ternary_matmul(x, code, scales, experts, implementation="pallas_gpu")
    assert explain("ternary_matmul", platform="gpu").startswith("ternary_matmul on gpu: pallas_gpu")
    assert explain("ternary_matmul", platform="tpu").startswith("ternary_matmul on tpu: reference")


def test_it_compiles_for_a_gpu_without_a_dense_matrix():
    found = ternary_aot.compile_cell("Qwen3-30B-A3B, one token", "h100:1x2")
    assert found["temp_bytes"] <= ternary_aot.TEMPORARIES * found["bytes"]
