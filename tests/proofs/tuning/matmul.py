"""Tuning of measured matmuls on this machine's CPU: searches beside exhaustive ones, and a forest on unseen shapes."""

from __future__ import annotations

import functools

import jax
import numpy as np

from jaxllm.tune import matmul_cost, timing
from jaxllm.tune.matmul_cost import MatmulShape, MatmulTiles
from jaxllm.tune.trial_search import search
from tests import environment
from tests.proofs.harness import proof

SHAPES = (MatmulShape(384, 512, 384), MatmulShape(512, 256, 768), MatmulShape(256, 768, 512))
SEARCHES = 20
"""Searches with other random choices, whose median is bounded: one search may begin badly."""


@functools.cache
def measured(shape: MatmulShape) -> dict[MatmulTiles, float]:
    """Seconds of a matmul with every legal tile, the least of rounds spread over time, since others use the machine."""
    with environment.optimized():
        keys = jax.random.split(jax.random.key(0))
        x, w = (jax.random.normal(key, size) for key, size in zip(keys, (shape[:2], shape[1:]), strict=True))
        runs = {
            tiles: jax.jit(functools.partial(matmul_cost.tiled_matmul, tiles=tiles)).lower(x, w).compile()
            for tiles in matmul_cost.legal_tiles(shape)
        }
        rounds = [{tiles: timing.seconds(run, (x, w), 2) for tiles, run in runs.items()} for _ in range(3)]
    return {tiles: min(one[tiles] for one in rounds) for tiles in runs}


@proof("tuning", cases=SHAPES, sample=0, bound={"slower": 0.05}, parallel=False)
def search_is_nearly_exhaustive(shape: MatmulShape) -> dict[str, float]:
    """The median search of a tenth of the tiles finds tiles at most 5% slower than the fastest of all."""
    table = measured(MatmulShape(*shape))
    tiles = list(table)
    found = [search(tiles, lambda i: table[tiles[i]], len(tiles) // 10, seed=seed) for seed in range(SEARCHES)]
    times = [dict(one.trials)[one.best] for one in found if one.best is not None]
    assert len(tiles) >= 60
    assert len(times) == SEARCHES
    slower = float(np.median(times)) / min(table.values()) - 1
    drawn = np.random.default_rng(0)
    random = [min(table[tiles[i]] for i in drawn.choice(len(tiles), len(tiles) // 10, False)) for _ in range(SEARCHES)]
    assert np.median(times) <= np.median(random), "it is no worse than random trials"
    return {"slower": slower}


@proof("tuning", cases=(0, 1, 2), sample=0, bound={"1 - R2": 0.2}, parallel=False)
def forest_predicts_unseen_shapes(seed: int) -> dict[str, float]:
    """R2 of the logarithm of seconds on shapes held out, of 240 measured matmuls; better than FLOPs alone."""
    with environment.optimized():
        samples = [matmul_cost.measure_matmul(*case) for case in matmul_cost.sample_cases(240, seed)]
    error = matmul_cost.held_out(samples)
    assert error.r_squared > error.roofline_r_squared
    return {"1 - R2": 1 - error.r_squared}
