"""Cost of a matmul by its shape and tiles: a forest fitted to measurements, which predicts time, power and energy.

After GPPerf (arXiv:2411.16954): a multi-output forest over dimensions, tile sizes and what follows from them (FLOPs,
bytes, number of tiles). The measured kernel is plain JAX, so that it runs on every device: a loop over tiles of the
result, each of which sums over slices of the contracted dimension. Power is a target only where the device reports it
(``timing.power_source``): NVIDIA's GPUs do, CPUs only to the superuser, TPUs do not.

Legend: M rows, K contracted dimension, N columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxllm.tune import timing
from jaxllm.tune.block_solver import BlockProblem, SumLimit
from jaxllm.tune.forest import Predict, fit_forest, r_squared
from jaxllm.tune.trial_search import SearchResult, search

SIZES = (16, 32, 64, 128, 256, 512)
"""Candidate tile sizes, besides whole dimensions."""
MAX_TILES = 4096
"""Most tile matmuls of one call: finer tiles are never the fastest, and take long to measure."""


class MatmulShape(NamedTuple):
    """Shape of a matmul ``[m, k] @ [k, n]`` of float32."""

    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        """FLOPs of the matmul."""
        return 2 * self.m * self.k * self.n

    @property
    def bytes(self) -> int:
        """Bytes of its operands and its result."""
        return 4 * (self.m * self.k + self.k * self.n + self.m * self.n)


class MatmulTiles(NamedTuple):
    """Tile sizes of a matmul: rows, slice of the contracted dimension, columns."""

    m: int
    k: int
    n: int


@dataclass(frozen=True)
class MatmulSample:
    """Measured matmul.

    Attributes:
        shape, tiles: of the matmul.
        seconds: of a call.
        watts: mean power of the device; None where it does not report it.
    """

    shape: MatmulShape
    tiles: MatmulTiles
    seconds: float
    watts: float | None = None


def legal_tiles(shape: MatmulShape, fast_bytes: int = 2**20) -> list[MatmulTiles]:
    """Tiles that divide a matmul and whose operands and result fit the fast memory.

    Args:
        shape: of the matmul.
        fast_bytes: bytes of the cache (or VMEM, shared memory) that the tiles of one step may take.
    """
    names = MatmulTiles._fields
    domains = {a: sorted({*(s for s in SIZES if s < size), size}) for a, size in zip(names, shape, strict=True)}
    tile = SumLimit(((4, ("m", "k")), (4, ("k", "n")), (4, ("m", "n"))), fast_bytes, "bytes of a tile")
    problem = BlockProblem(domains, (tile,), tuple(zip(names, shape, strict=True)))
    found = (MatmulTiles(**values) for values in problem.solutions())
    return [t for t in found if _steps(shape, t) <= MAX_TILES]


def tiled_matmul(x: Float[Array, "M K"], w: Float[Array, "K N"], tiles: MatmulTiles) -> Float[Array, "M N"]:
    """Matmul by tiles, whose sizes divide the dimensions; sums over K are in float32."""
    (m, k), n = x.shape, w.shape[1]
    tm, tk, tn = tiles

    def tile(index: Array) -> Float[Array, "tm tn"]:
        row, column = index // (n // tn) * tm, index % (n // tn) * tn

        def add(step: Array, total: Array) -> Array:
            a = jax.lax.dynamic_slice(x, (row, step * tk), (tm, tk))
            b = jax.lax.dynamic_slice(w, (step * tk, column), (tk, tn))
            return total + jnp.dot(a, b, preferred_element_type=jnp.float32)

        return jax.lax.fori_loop(0, k // tk, add, jnp.zeros((tm, tn), jnp.float32))

    def write(index: Array, out: Array) -> Array:
        place = index // (n // tn) * tm, index % (n // tn) * tn
        return jax.lax.dynamic_update_slice(out, tile(index), place)

    return jax.lax.fori_loop(0, (m // tm) * (n // tn), write, jnp.zeros((m, n), jnp.float32)).astype(x.dtype)


def measure_matmul(shape: MatmulShape, tiles: MatmulTiles, repeats: int = 3) -> MatmulSample:
    """Measures a tiled matmul on the default device, with its power where the device reports it."""
    keys = jax.random.split(jax.random.key(0))
    x, w = jax.random.normal(keys[0], (shape.m, shape.k)), jax.random.normal(keys[1], (shape.k, shape.n))
    run = jax.jit(lambda x, w: tiled_matmul(x, w, tiles))
    took = timing.seconds(run, (x, w), repeats)
    source = timing.power_source()
    drawn = None if source is None else timing.watts(lambda: jax.block_until_ready(run(x, w)), source)
    return MatmulSample(shape, tiles, took, drawn)


def roofline(shape: MatmulShape, peak: float, bandwidth: float) -> float:
    """Seconds of a matmul by its FLOPs and bytes alone."""
    return max(shape.flops / peak, shape.bytes / bandwidth)


@dataclass(frozen=True)
class MatmulCostModel:
    """Forest that predicts a matmul's seconds, and watts where it was fitted to them.

    Attributes:
        predict_targets: features -> logarithms of FLOP/s, and of watts.
        has_power: whether there are watts.
    """

    predict_targets: Predict
    has_power: bool

    @classmethod
    def fit(cls, samples: Sequence[MatmulSample], seed: int = 0) -> MatmulCostModel:
        """Model fitted to measurements; it predicts power if every one of them has it."""
        has_power = all(sample.watts is not None for sample in samples)
        targets = [
            [math.log(s.shape.flops / s.seconds), *([math.log(s.watts)] if has_power and s.watts else [])]
            for s in samples
        ]
        return cls(
            fit_forest(_features([(s.shape, s.tiles) for s in samples]), np.asarray(targets), seed=seed), has_power
        )

    def seconds(self, cases: Sequence[tuple[MatmulShape, MatmulTiles]]) -> np.ndarray:
        """Predicted seconds of each matmul."""
        rates = np.exp(self.predict_targets(_features(cases))[:, 0])
        return np.asarray([shape.flops for shape, _ in cases]) / rates

    def watts(self, cases: Sequence[tuple[MatmulShape, MatmulTiles]]) -> np.ndarray:
        """Predicted watts of each matmul; times seconds, its energy in joules.

        Raises:
            ValueError: the measurements had no power.
        """
        if not self.has_power:
            raise ValueError("matmul cost: the device that was measured does not report its power.")
        return np.exp(self.predict_targets(_features(cases))[:, 1])


class HeldOut(NamedTuple):
    """Error of a model on shapes that it was not fitted to.

    Attributes:
        r_squared: coefficient of determination of the logarithm of seconds.
        error: mean of the relative errors of seconds.
        roofline_r_squared: the same of the roofline, fitted by one factor.
    """

    r_squared: float
    error: float
    roofline_r_squared: float


def held_out(samples: Sequence[MatmulSample], share: float = 0.25, seed: int = 0) -> HeldOut:
    """Error of a model that is fitted to all shapes but a share of them, on the others."""
    shapes = sorted({sample.shape for sample in samples})
    np.random.default_rng(seed).shuffle(shapes)
    away = {tuple(shape) for shape in shapes[: max(1, round(share * len(shapes)))]}
    seen = [sample for sample in samples if tuple(sample.shape) not in away]
    rest = [sample for sample in samples if tuple(sample.shape) in away]
    model = MatmulCostModel.fit(seen, seed)
    want = np.log([sample.seconds for sample in rest])
    got = np.log(model.seconds([(sample.shape, sample.tiles) for sample in rest]))
    # The roofline has one factor too, the mean share of it that the measured shapes reach; it does not see tiles.
    ideal = lambda of: np.log([sample.shape.flops for sample in of])  # noqa: E731
    plain = ideal(rest) + float(np.mean(np.log([sample.seconds for sample in seen]) - ideal(seen)))
    return HeldOut(r_squared(got, want), float(np.mean(np.abs(np.exp(got - want) - 1))), r_squared(plain, want))


def best_tiles(
    shape: MatmulShape, trials: int, *, model: MatmulCostModel | None = None, measure: Any = measure_matmul
) -> tuple[MatmulTiles | None, SearchResult]:
    """Fastest tiles of a matmul by a search of so many trials.

    Args:
        shape: of the matmul.
        trials: tiles to measure.
        model: predictions to begin with; None begins without.
        measure: ``(shape, tiles) -> MatmulSample``.
    """
    tiles = legal_tiles(shape)
    prior = None if model is None else list(model.seconds([(shape, t) for t in tiles]))
    found = search(list(tiles), lambda i: measure(shape, tiles[i]).seconds, trials, prior=prior)
    return None if found.best is None else tiles[found.best], found


def sample_cases(count: int, seed: int = 0) -> list[tuple[MatmulShape, MatmulTiles]]:
    """Random matmuls with random legal tiles, each shape with four of them."""
    rng, cases = np.random.default_rng(seed), []
    while len(cases) < count:
        shape = MatmulShape(*(int(n) for n in rng.choice((32, 64, 96, 128, 192, 256, 384, 512, 768), 3)))
        tiles = legal_tiles(shape)
        cases += [(shape, tiles[i]) for i in rng.permutation(len(tiles))[:4]]
    return cases[:count]


def _steps(shape: MatmulShape, tiles: MatmulTiles) -> int:
    return math.prod(size // tile for size, tile in zip(shape, tiles, strict=True))


def _features(cases: Sequence[tuple[MatmulShape, MatmulTiles]]) -> np.ndarray:
    """Logarithms of sizes, FLOPs, bytes, steps, FLOPs and bytes of a step, and arithmetic intensities."""
    rows = []
    for shape, tiles in cases:
        step = MatmulShape(*tiles)
        numbers = (*shape, *tiles, shape.flops, shape.bytes, _steps(shape, tiles), step.flops, step.bytes)
        ratios = (shape.flops / shape.bytes, step.flops / step.bytes)
        pairs = (a * b for a, b in itertools.combinations(tiles, 2))
        rows.append([math.log2(x) for x in (*numbers, *ratios, *pairs)])
    return np.asarray(rows)
