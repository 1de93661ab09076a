"""Cost model of matmuls: the tiled kernel's values, legal tiles, and a forest fitted to known costs."""

from __future__ import annotations

import numpy as np
import pytest

from jaxllm.cli.main import main
from jaxllm.tune import matmul_cost
from jaxllm.tune.matmul_cost import MatmulCostModel, MatmulSample, MatmulShape, MatmulTiles
from tests import quick


@pytest.mark.parametrize("tiles", [(12, 40, 18), (4, 8, 6), (12, 10, 9)])
def test_tiles_do_not_change_the_product(tiles, float64, rng):
    x, w = rng.normal(size=(12, 40)), rng.normal(size=(40, 18))
    got = quick.jit(lambda x, w: matmul_cost.tiled_matmul(x, w, MatmulTiles(*tiles)))(x, w)
    # Sums over the contracted dimension are in float32.
    assert np.linalg.norm(got - x @ w) < 3e-7 * np.linalg.norm(x @ w)


def test_tiles_divide_the_shape_and_fit():
    shape = MatmulShape(192, 96, 48)
    found = matmul_cost.legal_tiles(shape, 2**15)
    assert MatmulTiles(192, 96, 48) not in found
    assert MatmulTiles(64, 32, 48) in found
    assert all(s % t == 0 for tiles in found for s, t in zip(shape, tiles, strict=True))
    assert all(4 * (t.m * t.k + t.k * t.n + t.m * t.n) <= 2**15 for t in found)


def synthetic(shape: MatmulShape, tiles: MatmulTiles) -> MatmulSample:
    """Known costs: the FLOPs at a rate that small tiles do not reach, and the power of large ones."""
    filled = np.prod([t / (t + 32) for t in tiles])
    return MatmulSample(shape, tiles, shape.flops / (1e11 * filled) + 1e-6, 50 + 100 * float(filled))


def test_the_forest_predicts_shapes_that_it_has_not_seen_and_power():
    samples = [synthetic(*case) for case in matmul_cost.sample_cases(200, 1)]
    error = matmul_cost.held_out(samples)
    assert error.r_squared > 0.97
    assert error.r_squared > error.roofline_r_squared
    model = MatmulCostModel.fit(samples)
    cases = matmul_cost.sample_cases(40, 2)
    want = np.asarray([synthetic(*case).watts for case in cases])
    assert np.mean(np.abs(model.watts(cases) / want - 1)) < 0.1
    silent = MatmulCostModel.fit([MatmulSample(s.shape, s.tiles, s.seconds) for s in samples])
    with pytest.raises(ValueError, match="does not report its power"):
        silent.watts(cases)
    tiles, found = matmul_cost.best_tiles(MatmulShape(384, 256, 384), 6, model=model, measure=synthetic)
    assert len(found.trials) == 6
    costs = [
        synthetic(MatmulShape(384, 256, 384), t).seconds for t in matmul_cost.legal_tiles(MatmulShape(384, 256, 384))
    ]
    assert synthetic(MatmulShape(384, 256, 384), tiles).seconds <= 1.05 * min(costs)


def test_too_few_samples_are_refused(capsys):
    assert main(["tune", "matmul", "--samples", "3"]) != 0
    assert "--samples of 40 or more" in capsys.readouterr().err
