"""Packed matmul in C++: codes and parameters as they are stored, against float64, and what it needs of a machine."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models.packed_weight import PackedWeight
from jaxllm.quant.codebooks import CodebookGrid
from jaxllm.quant.formats.code_groups import CodeGroups
from jaxllm.quant.formats.k_quants import BLOCK, KQuants
from jaxllm.quant.formats.mxfp4 import MXFP4
from jaxllm.quant.grids import IntGrid, MinimumGrid
from pallas_kernels import _dispatch, explain
from pallas_kernels._compat import processor_features
from pallas_kernels.packed_matmul import PackedCodes, native, packed_matmul
from tests import environment
from tests.kernels import packed_body
from tests.kernels.packed_body import CASES

TAKEN = {name: case for name, case in CASES.items() if case.form.bits < 8 or case.form.levels is None}
FORMATS = {
    "q4_0": CodeGroups(IntGrid(4), 32),
    "q4_1": CodeGroups(MinimumGrid(4, "float16"), 32),
    "q5_0": CodeGroups(IntGrid(5), 32),
    "q5_1": CodeGroups(MinimumGrid(5), 32),
    "q8_0": CodeGroups(IntGrid(8, scale_dtype="float16"), 32),
    "int3 with zero points": CodeGroups(IntGrid(3, False), 64),
    "int2 by channel": CodeGroups(IntGrid(2), None),
    "int6 in short groups": CodeGroups(IntGrid(6), 16),
    "int4, heads": CodeGroups(IntGrid(4), 32, -2, 2),
    "lut3": CodeGroups(CodebookGrid("nf3"), 64),
    "lut4": CodeGroups(CodebookGrid("nf4", "bfloat16"), 64),
    "mxfp4": MXFP4(),
}
K_QUANTS = {
    "q2_K": KQuants(MinimumGrid(2), 16),
    "q3_K": KQuants(IntGrid(3), 16, signed=True),
    "q4_K": KQuants(MinimumGrid(4), 32),
    "q5_K": KQuants(MinimumGrid(5), 32),
    "q6_K": KQuants(IntGrid(6), 16, signed=True),
}
BOUND = 1e-6
"""Of ``packed_body.error``: groups' sums of up to 256 float32 products, and then the sum of the groups."""


@pytest.fixture(autouse=True)
def _kernel():
    if why := native.missing():
        pytest.skip(f"the kernel {why}")


def stack_of(form, shape, rng, layers=3) -> PackedWeight:
    """Stack of matrices in a format; scales that it would store in a narrower dtype are in that."""
    packed = [form.pack(jnp.asarray(rng.normal(size=shape) + 0.2, jnp.float32)) for _ in range(layers)]
    values, scales = (jnp.stack(arrays) for arrays in zip(*packed, strict=True))
    if isinstance(form, CodeGroups):
        scales = scales.astype(getattr(form.grid, "scale_dtype", "float32"))
    return PackedWeight(values, scales, form)


def k_quants(form, inputs, outputs, rng, layers=2) -> PackedWeight:
    """Stack of random codes, and blocks' bytes with numbers that have no infinities."""
    grid, parts = form.grid, BLOCK // form.group
    minima = isinstance(grid, MinimumGrid)
    values = rng.integers(0, 256, (layers, inputs * grid.bits // 8, outputs), dtype=np.uint8)
    rows = []
    for _ in range(1 + minima):
        number = rng.uniform(0.001, 0.01, (layers, 1, inputs // BLOCK, outputs)).astype(np.float16)
        rows += [number.view(np.uint16).astype(np.uint8), (number.view(np.uint16) >> 8).astype(np.uint8)]
    rows += [rng.integers(0, 256 if form.signed else 64, (layers, parts * (1 + minima), inputs // BLOCK, outputs))]
    return PackedWeight(jnp.asarray(values), jnp.asarray(np.concatenate(rows, 1), jnp.uint8), form)


def check(weight: PackedWeight, contract: int, rng, m=5) -> jax.Array:
    """One layer of the stack, against its dequantised matrix in float64."""
    form, layer = weight.format, weight.values.shape[0] - 1
    dense = np.asarray(weight.dense(jnp.float32), np.float64)[layer]
    inputs = int(np.prod(dense.shape[:contract]))
    kernel = form.native_form(inputs, weight.scales.shape[1:], contract)
    x = jnp.asarray(rng.normal(size=(m, inputs)), jnp.float32)
    codes = weight.values.reshape(layer + 1, -1, dense[0].size if contract == 1 else dense[0, 0].size)
    scales = weight.scales.reshape(layer + 1, kernel.stored, -1, codes.shape[-1])
    got = jax.jit(lambda x, layer: native.stored_matmul(x, codes, scales, kernel, layer))(x, layer)
    assert packed_body.error(got, x, dense.reshape(inputs, -1)) <= BOUND
    return got


@pytest.mark.parametrize("case", TAKEN.values(), ids=TAKEN)
def test_is_the_dequantised_product(case, rng):
    packed_body.check("native", case, rng, bound=BOUND)


def test_bfloat16(rng):
    """Only the result is rounded."""
    packed_body.check("native", CASES["groups of 32"], rng, jnp.bfloat16, 2**-7)


@pytest.mark.parametrize("name", FORMATS)
def test_reads_one_layer_of_what_formats_store(name, rng):
    """Outputs that are no multiple of a vector."""
    form, heads = FORMATS[name], name == "int4, heads"
    check(stack_of(form, (3, 64, 72) if heads else (192, 83), rng), 1 + heads, rng)


@pytest.mark.parametrize("name", K_QUANTS)
def test_reads_blocks_of_k_quants(name, rng):
    check(k_quants(K_QUANTS[name], 512, 40, rng), 1, rng, m=2)


@pytest.mark.parametrize("group", [32, None])
@pytest.mark.parametrize("m", [1, 11])
def test_multiplies_rows_of_an_output_matrix(group, m, rng):
    form = CodeGroups(IntGrid(8, scale_dtype="float16"), group, -1)
    values, scales = form.pack(jnp.asarray(rng.normal(size=(203, 96)), jnp.float32))
    scales = scales.astype(jnp.float16)
    kernel = form.native_row_form(96, scales.shape)
    x = jnp.asarray(rng.normal(size=(m, 96)), jnp.float32)
    got = native.stored_row_matmul(x, values, scales, kernel)
    assert packed_body.error(got, x, np.asarray(form.unpack(values, scales, jnp.float32)).T) <= BOUND


@pytest.mark.parametrize(("bits", "group"), [(8, None), (8, 32), (4, 32), (3, None)])
def test_rows_as_kernels_for_gpus_read_them(bits, group, rng):
    form = CodeGroups(IntGrid(bits), group, -1)
    values, scales = form.pack(jnp.asarray(rng.normal(size=(203, 96)), jnp.float32))
    codes = form.row_codes(96, scales.shape)
    assert codes is not None
    x = jnp.asarray(rng.normal(size=(5, 96)), jnp.float32)
    got = packed_matmul(x, values, scales.reshape(203, -1), codes, implementation="reference")
    assert packed_body.error(got, x, np.asarray(form.unpack(values, scales, jnp.float32)).T) <= BOUND
    assert CodeGroups(IntGrid(bits, symmetric=False), group, -1).row_codes(96, scales.shape) is None
    assert form.row_codes(96, (203, 1, 12)) is None  # 8 inputs share a scale, fewer than a tile has


@pytest.mark.drawn(3)
def test_a_row_does_not_depend_on_the_others(rng):
    """Bit for bit, in tiles of 1, 4 and 16 rows, of one thread or two."""
    weight = stack_of(FORMATS["q4_1"], (512, 700), rng, 1)
    kernel = weight.format.native_form(512, weight.scales.shape[1:], 1)
    x = jnp.asarray(rng.normal(size=(33, 512)), jnp.float32)
    run = jax.jit(lambda x: native.stored_matmul(x, weight.values, weight.scales, kernel))
    whole = np.asarray(run(x))
    for rows in (1, 2, 13, 16, 20):
        np.testing.assert_array_equal(run(x[-rows:]), whole[-rows:])
    np.testing.assert_array_equal(jax.lax.map(lambda row: run(row[None])[0], x), whole)
    np.testing.assert_array_equal(jax.vmap(lambda row: run(row[None])[0])(x[:3]), whole[:3])


def test_what_it_does_not_take_is_named(float64):
    bytes_ = CASES["int8 by channel, levels"].form
    packed, scales = jnp.zeros((64, 8), jnp.uint8), jnp.ones((1, 8), jnp.float32)
    with pytest.raises(NotImplementedError, match="at most 16 levels, not 8 bits with 256 levels"):
        packed_matmul(jnp.ones((2, 64), jnp.float32), packed, scales, bytes_, implementation="native")
    with pytest.raises(NotImplementedError, match="activations in float32, bfloat16 and float16, not float64"):
        packed_matmul(jnp.ones((2, 64)), packed, scales, PackedCodes(8), implementation="native")


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize(
    "flags", [("-mavx2", "-mfma", "-mf16c"), ("-DPACKED_MATMUL_PLAIN",)], ids=["AVX2", "plain C++"]
)
def test_other_processors(flags, monkeypatch, rng):
    """Values of the kernel as it is built for processors that have less."""
    if len(flags) > 1 and "avx2" not in processor_features():
        pytest.skip("this processor has no AVX2.")
    monkeypatch.setattr(native, "PROCESSOR", flags)
    assert native.vectors() == ("AVX2" if len(flags) > 1 else "plain C++")
    for name in ("a table, no multiple of anything", "exponents of few groups", "int2"):
        packed_body.check("native", CASES[name], rng, bound=BOUND)
    for name in ("q4_1", "int6 in short groups", "lut4", "int3 with zero points"):
        check(stack_of(FORMATS[name], (192, 83), rng), 1, rng)
    check(k_quants(K_QUANTS["q5_K"], 512, 40, rng), 1, rng)
    check(k_quants(K_QUANTS["q6_K"], 512, 40, rng), 1, rng)


WITHOUT = """
import jax.numpy as jnp
from pallas_kernels import explain
from pallas_kernels.packed_matmul import PackedCodes, packed_matmul
print(explain("packed_matmul"))
for _ in range(2):
    print(packed_matmul(jnp.ones((1, 64)), jnp.full((32, 16), 153, jnp.uint8), jnp.ones((1, 16)), PackedCodes(4))[0, 0])
try:
    packed_matmul(jnp.ones((1, 64)), jnp.ones((32, 16), jnp.uint8), jnp.ones((1, 16)), PackedCodes(4),
                  implementation="native")
except NotImplementedError as error:
    print("refused:", error)
"""


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("compiler", "why"), [("no-such-compiler", "needs a C++ compiler, and no-such-compiler does not run here"),
                          ("c++ -include no-such-header", "cannot be built: ")]
)  # fmt: skip
def test_without_a_compiler_xla_is_used_and_it_is_said_once(compiler, why, tmp_path):
    variables = {"CXX": compiler, "JAXLLM_CACHE": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], cwd=environment.ROOT, env=os.environ | variables,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("packed_matmul on cpu: xla")
    assert f"native: not here: it {why}" in done.stdout
    assert done.stdout.count("64.0") == 2
    assert f"refused: native {why}" in done.stdout
    assert done.stderr.count(why) == 1


def test_it_is_the_default_where_it_is_fast(monkeypatch):
    assert explain("packed_matmul", platform="cpu").startswith("packed_matmul on cpu: native") == (
        native.vectors() != "plain C++"
    )
    monkeypatch.setattr(native, "vectors", lambda: "plain C++")
    native.not_by_default.cache_clear()
    try:
        assert "has no AVX2 here" in explain("packed_matmul", platform="cpu")
        assert not _dispatch.may_be_default("packed_matmul", "native")
    finally:
        native.not_by_default.cache_clear()
