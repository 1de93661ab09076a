"""L-GreCo: layerwise ranks of PowerSGD, chosen for the fewest bytes under an error budget (arXiv:2210.17357).

Of the mean of all devices' gradients, the best approximation of a layer's matrix by rank r has the error

    e(r)^2 = the sum of its squared singular values but the r largest

Ranks r_l of all layers are chosen so that sum e_l(r_l)^2 <= ERROR^2 sum |M_l|^2 and the bytes that a device sends are
the fewest: a knapsack problem over layers, solved by dynamic programming over the budget in equal steps. The paper
measures errors of gradients that are added up over many steps, and takes its budget from one rank for all layers; here
they are those of one step, with what error feedback kept, and the budget is given.

Legend: L stacked layers, C candidates of a rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

import sharding
from jaxllm.optim.matrix_params import decompose_each
from jaxllm.train.outer.power_sgd import PowerSgd

RANKS = (1, 2, 4, 8, 16, 32, 64)
"""Candidates of a layer's rank, of which those are taken that send less than the layer."""
WHOLE = 0
"""Choice of a layer that is averaged whole, without an error."""
STEPS = 1 << 14
"""Equal steps of the error budget; errors are rounded up to them, so that a choice is always within the budget."""


def candidates(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Candidates of the ranks of a parameter's layers, the last of which is ``WHOLE``; () for one without matrices.

    Args:
        shape: of the parameter.
    """
    found = tuple(rank for rank in RANKS if PowerSgd(rank).shape(shape) is not None)
    return (*found, WHOLE) if found else ()


def layers_of(shape: tuple[int, ...]) -> int:
    """Number of matrices that a parameter is a stack of."""
    return shape[0] if len(shape) > 2 else 1


@dataclass(frozen=True)
class LayerRanks:
    """Low-rank mean of a stack of matrices, each with a rank of its own.

    Attributes:
        ranks: of each layer; ``WHOLE``: it is averaged whole.
    """

    ranks: tuple[int, ...]

    def basis(self, shape: tuple[int, ...], seed: int) -> Float[Array, "L N K"] | None:
        """First basis of an array, wide enough for every candidate; None where it has none."""
        found = candidates(shape)
        return PowerSgd(found[-2]).basis(shape, seed) if found else None

    def mean(self, x: Array, basis: Float[Array, "L N K"], axis: str) -> tuple[Array, Float[Array, "L N K"]]:
        """Mean over a mesh axis, and the next basis, of which a layer changes the columns of its rank.

        Inside a ``jax.shard_map`` that is manual over the axis.

        Args:
            x: array of this device.
            basis: the same on all devices.
            axis: the mesh axis.
        """
        means, bases = [], []
        for rank, first, last in self._runs():
            part = x[first:last] if x.ndim > 2 else x
            columns = basis[first:last]
            if rank == WHOLE:
                means.append(jax.lax.pmean(part, axis))
                bases.append(columns)
                continue
            mean, new = PowerSgd(rank).mean(part, columns[:, :, :rank], axis)
            means.append(mean)
            bases.append(jnp.concatenate([new.astype(basis.dtype), columns[:, :, rank:]], axis=2))
        return (jnp.concatenate(means) if x.ndim > 2 else means[0]), jnp.concatenate(bases)

    def sent(self, leaf: jax.ShapeDtypeStruct) -> int:
        """Bytes of the arrays of one device that are all-reduced in a step, for a parameter with a sharding."""
        costs = dict(zip(candidates(leaf.shape), layer_bytes(leaf), strict=True))
        return sum(costs[rank] for rank in self.ranks)

    @property
    def whole(self) -> np.ndarray:
        """Bool[L]: layers that are averaged whole."""
        return np.array(self.ranks) == WHOLE

    def _runs(self) -> Iterator[tuple[int, int, int]]:
        """Ranks of consecutive layers that have the same, with the first layer and the one after the last."""
        first = 0
        for rank, run in itertools.groupby(self.ranks):
            last = first + len(list(run))
            yield rank, first, last
            first = last


@dataclass(frozen=True)
class LayerwiseRanks:
    """Low-rank means of all parameters, with ranks that are chosen layer by layer.

    Attributes:
        error: budget: relative error of all matrices together, above 0 and below 1.
        choice: ranks of the layers of each parameter; None: the largest candidate for all, as before the first choice.
    """

    error: float
    choice: tuple[tuple[int, ...], ...] | None = None

    def of(self, number: int, shape: tuple[int, ...]) -> LayerRanks | None:
        """Low-rank mean of a parameter; None: it has no matrices, or they would not be smaller as factors.

        Args:
            number: of the parameter, in the order of the tree.
            shape: of the parameter.
        """
        if not (found := candidates(shape)):
            return None
        return LayerRanks((found[-2],) * layers_of(shape) if self.choice is None else self.choice[number])


def layer_bytes(leaf: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """Bytes of one device's arrays that are all-reduced for one layer, by candidate of its rank.

    Args:
        leaf: parameter with a sharding.
    """
    assert leaf.sharding is not None
    local, width = leaf.sharding.shard_shape(leaf.shape), jnp.dtype(leaf.dtype).itemsize
    layers = layers_of(leaf.shape)
    whole = math.prod(local) // (local[0] if len(local) > 2 else 1) * width
    one = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return tuple(whole if rank == WHOLE else PowerSgd(rank).sent(one) // layers for rank in candidates(leaf.shape))


def rank_errors(x: Array) -> Float[Array, "L C"]:
    """Squared errors of the best approximations of a parameter's layers, by candidate of their rank.

    Args:
        x: gradient of the parameter, summed over all devices.
    """
    if sharding.current_mesh() is not None:
        x = jax.sharding.reshard(x, PartitionSpec(*(None,) * x.ndim))
    found = candidates(x.shape)
    shape = PowerSgd(found[0]).shape(x.shape)
    assert shape is not None
    matrices = x.reshape(shape).astype(jnp.promote_types(x.dtype, jnp.float32))
    # Squared singular values are the eigenvalues of the smaller product of a matrix with itself.
    equation = "lmn,lkn->lmk" if shape[1] <= shape[2] else "lmn,lmk->lnk"
    energy = jnp.maximum(decompose_each(jnp.linalg.eigvalsh, jnp.einsum(equation, matrices, matrices)), 0)
    below = jnp.cumsum(energy, axis=1)  # in rising order
    zero = jnp.zeros(shape[0], energy.dtype)
    return jnp.stack([zero if rank == WHOLE else below[:, min(shape[1:]) - rank - 1] for rank in found], axis=1)


def fewest_bytes(
    errors: Sequence[Float[np.ndarray, " _"]], sizes: Sequence[Sequence[int]], budget: float, steps: int = STEPS
) -> tuple[int, ...]:
    """Candidates of all layers, by number, that send the fewest bytes with a sum of squared errors within a budget.

    Dynamic programming over layers and the budget: exact for errors that are rounded up to a step of it.

    Args:
        errors: squared errors of each layer's candidates.
        sizes: their bytes.
        budget: of the sum; 0 or more.
        steps: equal steps of the budget.

    Raises:
        ValueError: a layer has no candidate without an error, so that there may be no choice.
    """
    best = np.zeros(steps + 1)  # fewest bytes of the layers so far, by steps of the budget that they may take
    chosen, taken = [], []
    for number, (own, cost) in enumerate(zip(errors, sizes, strict=True)):
        if not (np.asarray(own) <= 0).any():
            raise ValueError(f"lgreco: layer {number} has no candidate without an error; add one that is sent whole.")
        units = steps_of(own, budget, steps)
        table = np.full((len(cost), steps + 1), np.inf)
        for option, (unit, size) in enumerate(zip(units, cost, strict=True)):
            if unit <= steps:
                table[option, unit:] = best[: steps + 1 - unit] + size
        choice = table.argmin(0)
        best = table[choice, np.arange(steps + 1)]
        chosen.append(choice)
        taken.append(units)
    found, left = [], steps
    for choice, units in zip(reversed(chosen), reversed(taken), strict=True):
        found.append(int(choice[left]))
        left -= units[found[-1]]
    return tuple(reversed(found))


def steps_of(errors: Float[np.ndarray, " _"], budget: float, steps: int) -> list[int]:
    """Squared errors as steps of the budget, rounded up; one more than all for what exceeds it.

    Args:
        errors: squared errors.
        budget: of their sum.
        steps: of the budget.
    """
    share = [0.0 if one <= 0 else (float(one) / budget if budget > 0 else math.inf) for one in errors]
    return [steps + 1 if one > 1 else math.ceil(one * steps) for one in share]
