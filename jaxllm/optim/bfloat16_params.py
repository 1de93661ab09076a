"""Parameters and moments that are stored in bfloat16 alone, without losing small updates to rounding.

An update of less than half a unit in the last place, 1/512 of a number, is rounded away: a bfloat16 run stalls as its
learning rate falls. Two ways around it, of which neither keeps a float32 array:

    "stochastic"  a number is rounded up with the probability of what is cut off, so that updates arrive on average
                  (arXiv:2010.06192). Parameters and moments: 6 bytes with AdamW.
    "collage"     a parameter is the sum of two bfloat16 numbers, and so is the second moment (Collage-plus,
                  arXiv:2405.03637): 10 bytes with AdamW. The paper adds such sums by bfloat16 operations without
                  error (Fast2Sum); compilers may compute these in float32 and would undo them, so here sums are float32
                  in registers, and what is cut off is rounded explicitly.
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
"""Name of the second moment in the state of a rule: decayed slowly, it is what bfloat16 would never let move."""


class Bfloat16Pair(NamedTuple):
    """A number as the sum of two of bfloat16, of which ``low`` is at most half a last place of ``high``."""

    high: Any
    low: Any


class Bfloat16State(NamedTuple):
    """State of a rule in bfloat16.

    Attributes:
        count: steps; with a parameter's name, the seed of its rounding.
        low: of "collage", what parameters are more than their bfloat16; else an empty tuple.
        rule: the rule's, each float32 array in bfloat16 or a ``Pair``.
    """

    count: Int[Array, ""]
    low: Any
    rule: Any


def store_in_bfloat16(rule: optax.GradientTransformation, rounding: Rounding) -> optax.GradientTransformation:
    """``rule`` in float32 on parameters and state that are stored in bfloat16; the rule as it is for "nearest".

    Its updates are differences of bfloat16 numbers, so that ``optax.apply_updates`` gives just what was rounded here.
    """
    if rounding == "nearest":
        return rule
    pairs = rounding == "collage"

    def init(params: Any) -> Bfloat16State:
        inner = rule.init(jax.tree.map(_wide, params))
        low = jax.tree.map(jnp.zeros_like, params) if pairs else ()
        return Bfloat16State(jnp.zeros((), jnp.int32), low, _stored(inner, _plain_key(), pairs, first=True))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        key = jax.random.fold_in(_plain_key(), state.count)
        wide = jax.tree.map(_wide, params)
        if pairs:
            wide = jax.tree.map(lambda high, low: high + _wide(low), wide, state.low)
        change, inner = rule.update(jax.tree.map(_wide, updates), _loaded(state.rule), wide)
        goal = jax.tree.map(jnp.add, wide, change)
        if pairs:
            new = jax.tree.map(split_bfloat16, goal)
            high, low = (jax.tree.map(lambda one, i=i: one[i], new, is_leaf=_is_pair) for i in (0, 1))
        else:
            high, low = jax.tree.map_with_path(lambda path, x: round_stochastically(x, _named(key, path)), goal), ()
        moved = jax.tree.map(lambda new, old: _wide(new) - _wide(old), high, params)
        return moved, Bfloat16State(state.count + 1, low, _stored(inner, jax.random.fold_in(key, 1), pairs))

    return optax.GradientTransformation(init, update)


def round_to_nearest(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """To bfloat16, in a way that compilers that allow more precision than was asked for do not leave out."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)


def split_bfloat16(x: Float[Array, "..."]) -> Bfloat16Pair:
    """The two bfloat16 numbers whose sum is nearest to a float32: together they have 16 bits of it or more."""
    high = round_to_nearest(x)
    return Bfloat16Pair(high, round_to_nearest(x - _wide(high)))


def round_stochastically(x: Float[Array, "..."], key: PRNGKeyArray) -> Float[Array, "..."]:
    """To bfloat16, up with the probability of what is cut off: random bits are added to those, and they are cut."""
    here = None if jax.sharding.get_abstract_mesh().empty else jax.typeof(x).sharding
    noise = jax.random.bits(key, x.shape, jnp.uint16, out_sharding=here).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    cut = ((bits + noise) >> 16).astype(jnp.uint16)
    return jnp.where(jnp.isfinite(x), jax.lax.bitcast_convert_type(cut, jnp.bfloat16), x.astype(jnp.bfloat16))


def _stored(tree: Any, key: PRNGKeyArray, pairs: bool, first: bool = False) -> Any:
    def one(path: Any, x: Array) -> Any:
        if x.dtype != jnp.float32 or x.ndim == 0:
            return x
        if pairs:
            paired = any(getattr(part, "name", None) == PAIRED_MOMENT for part in path)
            return split_bfloat16(x) if paired else split_bfloat16(x).high
        return x.astype(jnp.bfloat16) if first else round_stochastically(x, _named(key, path))

    return jax.tree.map_with_path(one, tree)


def _loaded(tree: Any) -> Any:
    def one(x: Any) -> Any:
        if isinstance(x, Bfloat16Pair):
            return _wide(x.high) + _wide(x.low)
        return _wide(x) if x.dtype == jnp.bfloat16 else x

    return jax.tree.map(one, tree, is_leaf=_is_pair)


def _wide(x: Array) -> Array:
    return x.astype(jnp.float32)


def _is_pair(x: Any) -> bool:
    return isinstance(x, Bfloat16Pair)


def _plain_key() -> PRNGKeyArray:
    return jax.random.key(0)


def _named(key: PRNGKeyArray, path: Any) -> PRNGKeyArray:
    return jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
