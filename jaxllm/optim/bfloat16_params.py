"""Parameters and optimizer state stored in bfloat16 only, without losing small updates to rounding.

An update of less than half a unit in the last place (1/512 of the value) is rounded away: a bfloat16 run stalls as its
learning rate falls. Two remedies, neither of which stores a float32 array:

    "stochastic"  stochastic rounding: a value is rounded up with the probability of what is cut off, so that updates
                  arrive on average (arXiv:2010.06192). Parameters and moments: 6 bytes with AdamW.
    "collage"     a parameter is the sum of two bfloat16 values, and so is the second moment (Collage-plus,
                  arXiv:2405.03637): 10 bytes with AdamW. The update that is added is a bfloat16 number, as in the
                  paper, so that kernels read and write bfloat16 alone. The paper adds by error-free bfloat16
                  operations (Fast2Sum); compilers may compute these in float32 and would undo them, so here sums are
                  float32 in registers, and what is cut off is rounded explicitly.

Steps log ``update_share``: the part of the update that arrives in the stored parameters, ``<u, a> / <u, u>`` for the
update u that the rule gives ("collage": rounded to bfloat16) and the change a of what is stored (the effective descent
quality of section 3 of the Collage paper, over the length of u). It is 1 where nothing is lost.
"""

from __future__ import annotations

import zlib
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

Rounding = Literal["nearest", "stochastic", "collage"]
PAIRED_MOMENT = "nu"
"""State field of the second moment: its slow decay is the update that bfloat16 would round away."""


class Bfloat16Pair(NamedTuple):
    """A value as the sum of two bfloat16 values; ``low`` is at most half a unit in the last place of ``high``."""

    high: Any
    low: Any


class Bfloat16State(NamedTuple):
    """Optimizer state of a rule stored in bfloat16; field names are the leaf names in checkpoints.

    Attributes:
        count: steps; with a parameter's path, the seed of its stochastic rounding.
        low: "collage": low halves of the parameters (``Bfloat16Pair.low``); else an empty tuple.
        rule: the rule's state, each float32 array in bfloat16 or a ``Bfloat16Pair``.
    """

    count: Int[Array, ""]
    low: Any
    rule: Any


def store_in_bfloat16(rule: optax.GradientTransformation, rounding: Rounding) -> optax.GradientTransformation:
    """Runs ``rule`` in float32 on parameters and state stored in bfloat16; "nearest" returns the rule unchanged.

    Updates are differences of bfloat16 values, so that ``optax.apply_updates`` gives exactly the rounded parameters.
    ``update`` takes ``metrics``, a dict to which it adds ``update_share``.
    """
    if rounding == "nearest":
        return rule
    pairs = rounding == "collage"

    def init(params: Any) -> Bfloat16State:
        inner = rule.init(jax.tree.map(_wide, params))
        low = jax.tree.map(jnp.zeros_like, params) if pairs else ()
        return Bfloat16State(jnp.zeros((), jnp.int32), low, _stored(inner, _plain_key(), pairs, first=True))

    def update(
        updates: Any, state: Any, params: Any = None, *, metrics: dict[str, Any] | None = None, **_: Any
    ) -> tuple[Any, Any]:
        key = jax.random.fold_in(_plain_key(), state.count)
        wide = jax.tree.map(_wide, params)
        if pairs:
            wide = jax.tree.map(lambda high, low: high + _wide(low), wide, state.low)
        change, inner = rule.update(jax.tree.map(_wide, updates), _loaded(state.rule), wide)
        stored = _stored(inner, jax.random.fold_in(key, 1), pairs)
        if pairs:
            # Without the barrier a compiler would keep the update in float32 between two kernels.
            change, stored = jax.lax.optimization_barrier((jax.tree.map(round_to_nearest, change), stored))
            change = jax.tree.map(_wide, change)
        goal = jax.tree.map(jnp.add, wide, change)
        if pairs:
            new = jax.tree.map(split_bfloat16, goal)
            high, low = (jax.tree.map(lambda one, i=i: one[i], new, is_leaf=_is_pair) for i in (0, 1))
        else:
            high, low = jax.tree.map_with_path(lambda path, x: round_stochastically(x, _named(key, path)), goal), ()
        moved = _differences(high, params)
        if metrics is not None:
            arrived = jax.tree.map(jnp.add, moved, _differences(low, state.low)) if pairs else moved
            metrics["update_share"] = share_of_update(change, arrived)
        return moved, Bfloat16State(state.count + 1, low, stored)

    return optax.GradientTransformationExtraArgs(init, update)


def share_of_update(update: Any, arrived: Any) -> Float[Array, ""]:
    """Part of an update that arrives: ``<update, arrived> / <update, update>``; 1 for an update of zero.

    Args:
        update: tree of changes that were to be made.
        arrived: tree of changes that were made.
    """

    def inner(a: Any, b: Any) -> Array:
        return jnp.asarray(optax.tree.sum(jax.tree.map(jnp.multiply, a, b)))

    both, whole = inner(update, arrived), inner(update, update)
    return jnp.where(whole > 0, both / whole, 1.0)


def round_to_nearest(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Rounds to bfloat16 explicitly; compilers that allow excess precision may drop a plain cast."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)


def split_bfloat16(x: Float[Array, "..."]) -> Bfloat16Pair:
    """Splits float32 values into pairs of bfloat16 values with the nearest sum, which keeps 16 bits or more."""
    high = round_to_nearest(x)
    return Bfloat16Pair(high, round_to_nearest(x - _wide(high)))


def round_stochastically(x: Float[Array, "..."], key: PRNGKeyArray) -> Float[Array, "..."]:
    """Stochastic rounding to bfloat16: adds random bits below the last place, then truncates."""
    here = None if jax.sharding.get_abstract_mesh().empty else jax.typeof(x).sharding
    noise = jax.random.bits(key, x.shape, jnp.uint16, out_sharding=here).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    cut = ((bits + noise) >> 16).astype(jnp.uint16)
    return jnp.where(jnp.isfinite(x), jax.lax.bitcast_convert_type(cut, jnp.bfloat16), x.astype(jnp.bfloat16))


def _stored(tree: Any, key: PRNGKeyArray, pairs: bool, first: bool = False) -> Any:
    """State in bfloat16, or pairs."""

    def one(path: Any, x: Array) -> Any:
        if x.dtype != jnp.float32 or x.ndim == 0:
            return x
        if pairs:
            paired = any(getattr(part, "name", None) == PAIRED_MOMENT for part in path)
            return split_bfloat16(x) if paired else split_bfloat16(x).high
        return x.astype(jnp.bfloat16) if first else round_stochastically(x, _named(key, path))

    return jax.tree.map_with_path(one, tree)


def _loaded(tree: Any) -> Any:
    """State in float32."""

    def one(x: Any) -> Any:
        if isinstance(x, Bfloat16Pair):
            return _wide(x.high) + _wide(x.low)
        return _wide(x) if x.dtype == jnp.bfloat16 else x

    return jax.tree.map(one, tree, is_leaf=_is_pair)


def _differences(new: Any, old: Any) -> Any:
    """Differences of bfloat16 arrays in float32, in which they are exact."""
    return jax.tree.map(lambda new, old: _wide(new) - _wide(old), new, old)


def _wide(x: Array) -> Array:
    return x.astype(jnp.float32)


def _is_pair(x: Any) -> bool:
    return isinstance(x, Bfloat16Pair)


def _plain_key() -> PRNGKeyArray:
    return jax.random.key(0)


def _named(key: PRNGKeyArray, path: Any) -> PRNGKeyArray:
    return jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
