"""Lookup tables with learned scales: never worse than NormalFloat, stationary, and read as they were written."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.hub import HubError
from jaxllm.hub.lookup_codes import lookup_codes, lookup_entry, lookup_tensors
from jaxllm.quant.codebooks import CODEBOOKS, CodebookGrid
from jaxllm.quant.grids import IntGrid
from jaxllm.quant.lookup_tables import LearnedScaleGrid
from jaxllm.quant.methods.gptq import gptq
from jaxllm.quant.methods.learned_scales import DAMPING, learned_scales, refitted_scales
from jaxllm.quant.methods.nearest import round_to_nearest, spread
from jaxllm.quant.methods.rounding_table import METHODS
from tests.quant.test_gptq import drawn


def errors(weight, gram, grid, codes, params, size):
    """Squared errors of columns, by the Gram matrix."""
    off = np.asarray(weight - grid.decode(codes, spread(params, size, weight.shape[0])))
    return (off * (gram @ off)).sum(0)


@pytest.mark.parametrize("table", ["nf4", "nf3"])
def test_learned_scales_are_never_worse_than_the_largest_magnitude(table, rng, float64):
    weight = rng.standard_t(4, size=(3, 32, 40))
    weight[0, :, 0] = 0
    found = []
    for grid in (CodebookGrid(table), LearnedScaleGrid(table)):
        params = grid.fit(jnp.asarray(weight))
        own = grid.params([params.scale[:, None]])
        found.append(np.square(weight - grid.decode(grid.encode(jnp.asarray(weight), own), own)).sum(1))
    assert (found[1] <= found[0]).all()
    assert found[1].sum() < 0.95 * found[0].sum()


@pytest.mark.drawn(0.5)
def test_scales_solve_the_least_squares_of_their_codes(rng, float64):
    """Each column's scales are numpy's solution for its codes, and no error is above that of NormalFloat."""
    weight, x = drawn(rng, 40)
    gram = x.T @ x
    damped = gram + np.eye(40) * DAMPING * np.diag(gram).mean()
    grid = CodebookGrid("nf3")
    codes, params = learned_scales(jnp.asarray(weight), jnp.asarray(gram), grid, 16)
    start = round_to_nearest(jnp.asarray(weight), grid, 16)
    before, after = errors(weight, damped, grid, *start, 16), errors(weight, damped, grid, codes, params, 16)
    assert (after <= before * (1 + 1e-12)).all()
    assert after.sum() < 0.97 * before.sum()
    units = CODEBOOKS["nf3"].astype(np.float64)[np.asarray(codes)]
    solved = 0
    for o in np.flatnonzero(after < before):
        basis = np.stack([np.where(np.arange(40) // 16 == g, units[:, o], 0) for g in range(3)], axis=1)
        want = np.linalg.solve(basis.T @ damped @ basis, basis.T @ damped @ weight[:, o])
        solved += bool((want > 0).all())
        if (want > 0).all():
            np.testing.assert_allclose(params.scale[:, o], want, rtol=1e-8)
    assert solved
    with pytest.raises(ValueError, match="no zero points; int4 with zero points is another grid"):
        learned_scales(jnp.asarray(weight), jnp.asarray(gram), IntGrid(4, False), 16)


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize(("grid", "size"), [(CodebookGrid("nf4"), 16), (IntGrid(3), 12)])
def test_gptq_for_learned_scales_is_below_both(grid, size, rng, float64):
    """Errors of the results of eight matrices: below those of either method; scales of codes lower the error only.

    Over 30 draws of one matrix, the ratio was 0.87 and 0.82 with a deviation of 0.08 and 0.10.
    """
    found: dict[str, float] = {}
    for _ in range(8):
        weight, x = drawn(rng, 40)
        gram, given = jnp.asarray(x.T @ x), jnp.asarray(weight)
        damped = x.T @ x + np.eye(40) * DAMPING * np.diag(x.T @ x).mean()
        for name in ("learned_scales", "gptq_act_order", "gptq_learned_scales"):
            codes, params, _ = METHODS[name].round(given, gram, grid, size)
            found[name] = found.get(name, 0) + errors(weight, damped, grid, codes, params, size).sum()
    assert found["gptq_learned_scales"] < 1.02 * min(found["learned_scales"], found["gptq_act_order"])
    static = learned_scales(given, gram, grid, size)[1]
    codes, kept = gptq(given, gram, grid, size, act_order=True, static=static)
    np.testing.assert_array_equal(kept.scale, static.scale)
    again = refitted_scales(given, gram, grid, size, codes, static)
    before, after = (errors(weight, damped, grid, codes, own, size) for own in (static, again))
    assert (after <= before * (1 + 1e-12)).all()
    assert after.sum() < before.sum()


@pytest.mark.parametrize("table", ["nf4", "nf3"])
def test_files_are_read_as_they_were_written(table, rng):
    bits = CodebookGrid(table).bits
    codes = rng.integers(0, 2**bits, (5, 48), dtype=np.uint8)
    scale = rng.uniform(0.1, 1, (5, 3)).astype(np.float32)
    tensors = lookup_tensors("layer.weight", codes, scale, bits)
    assert tensors["layer.weight_packed"].nbytes == 5 * 48 * bits // 8
    one = lookup_codes(lookup_entry(table, 16), tensors)["layer.weight"]
    np.testing.assert_array_equal(one.codes(slice(None)), codes)
    want = CODEBOOKS[table][codes] * np.repeat(scale, 16, axis=1)
    np.testing.assert_array_equal(one.dense(slice(1, 4), slice(3, None)), want[1:4, 3:])
    with pytest.raises(HubError, match="those of no table that is known here: nf4, nf3"):
        lookup_codes({**lookup_entry(table, 16), "levels": [0.0, 1.0]}, tensors)
    with pytest.raises(HubError, match=r"groups of 32 are uint8, and scales \[5, 2\]"):
        lookup_codes(lookup_entry(table, 32), tensors)
    with pytest.raises(HubError, match=r"weight_packed is there, and no layer\.weight_scale"):
        lookup_codes(lookup_entry(table, 16), {"layer.weight_packed": tensors["layer.weight_packed"]})
