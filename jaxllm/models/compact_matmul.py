"""Products that keep a random projection of their input for the weight's gradient (CompAct, arXiv:2410.15352).

Of ``y = x w`` the backward pass needs x for the gradient of w alone. Kept is ``z = x P`` instead, of r numbers for C,
with P of independent normal numbers of variance 1 / r: then ``P P^T`` is the identity in expectation, and so the
gradient from ``z P^T`` is that from x. P is drawn again from its seed, a new one for each batch. The gradient of x is
exact.

The paper leaves the gradient projected for the optimizer, whose state then has r rows for C, and draws P anew every few
steps; here it is whole, for any optimizer.

Legend: T dimensions of tokens, C those that a product sums over, O those of its result, r numbers kept of a token.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32


def batch_seed(tokens: Int[Array, "B S"]) -> UInt32[Array, ""]:
    """A number that is another one for every batch, and the same on every mesh: sums of integers do not round."""
    places = jnp.arange(tokens.shape[1], dtype=jnp.uint32) * jnp.uint32(2654435761) + jnp.uint32(1)
    return jnp.sum(tokens.astype(jnp.uint32) * places, dtype=jnp.uint32)


def projection_width(share: float, inner: int) -> int:
    """Numbers kept of a token, of ``inner``."""
    return max(1, round(share * inner))


class CompactMatmul:
    """The products of a block as they are traced: ``sharding.Product``.

    Inputs of one width share a projection, so which of a block's products comes first is of no account.

    Attributes:
        share: of the input's numbers, that are kept.
        key: of the block in this batch.
    """

    def __init__(self, share: float, key: PRNGKeyArray):
        self.share, self.key = share, key

    def __call__(self, x: Array, w: Array, contract: int, there: PartitionSpec | None) -> Array:
        key = jax.random.key_data(jax.random.fold_in(self.key, math.prod(w.shape[:contract])))
        return compact_matmul(self.share, contract, _spec(x), there, x, w, key)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def compact_matmul(
    share: float,
    contract: int,
    here: PartitionSpec | None,
    there: PartitionSpec | None,
    x: Float[Array, "..."],
    w: Float[Array, "..."],
    key: UInt32[Array, " K"],
) -> Float[Array, "..."]:
    """``x[*T, *C]`` times ``w[*C, *O]`` over ``contract`` dimensions, exact; of its gradients that of w is an estimate.

    Args:
        share: of x's numbers, that are kept.
        contract: how many trailing dimensions of x meet as many leading ones of w.
        here: where x is; None outside a mesh.
        there: where the result is, as ``jax.lax.dot_general`` takes it.
        key: data of the projection's key.
    """
    return _forward(share, contract, here, there, x, w, key)[0]


Spec = PartitionSpec | None


def _forward(share: float, contract: int, here: Spec, there: Spec, x: Array, w: Array, key: Array) -> tuple[Array, Any]:
    tokens = x.ndim - contract
    sums = tuple(range(tokens, x.ndim)), tuple(range(contract))
    y = jax.lax.dot_general(x, w, (sums, ((), ())), out_sharding=there)
    p = _projection(share, x.shape[tokens:], None if here is None else here.partitions[tokens:], key, x.dtype)
    of_z = None if here is None else jax.P(*here.partitions[:tokens], None)
    return y, (jax.lax.dot_general(_plain(x), p, (sums, ((), ())), out_sharding=of_z), w, key)


def _backward(share: float, contract: int, here: Spec, there: Spec, kept: Any, dy: Array) -> tuple[Any, ...]:
    z, w, key = kept
    last = z.ndim - 1
    tokens, outs = tuple(range(last)), tuple(range(last, dy.ndim))
    p = _projection(share, w.shape[:contract], None if here is None else here.partitions[last:], key, z.dtype)
    whole = None if here is None else jax.P(*here.partitions)
    x = jax.lax.dot_general(z, p, (((last,), (contract,)), ((), ())), out_sharding=whole)
    of_w, w_outs = _spec(w), tuple(range(contract, w.ndim))
    dx = jax.lax.dot_general(dy, _plain(w), ((outs, w_outs), ((), ())), out_sharding=_of_gradient(here))
    dw = jax.lax.dot_general(x, dy, ((tokens, tokens), ((), ())), out_sharding=_of_gradient(of_w))
    return dx.astype(z.dtype), dw.astype(w.dtype), None


def _projection(
    share: float, inner: tuple[int, ...], within: Any, key: Array, dtype: jnp.dtype
) -> Float[Array, "*C r"]:
    """P; its values do not depend on where it is."""
    kept = projection_width(share, math.prod(inner))
    place = {} if within is None else {"out_sharding": jax.P(*within, None)}
    drawn = jax.random.normal(jax.random.wrap_key_data(key), (*inner, kept), dtype, **place)
    return drawn / math.sqrt(kept)


def _spec(x: Array) -> Spec:
    """Where an array is, under a mesh of explicit axes."""
    return None if jax.sharding.get_abstract_mesh().empty else jax.typeof(x).sharding.spec


def _of_gradient(spec: Spec) -> Spec:
    """Where the gradient of an array is: summands are left as they are where it says so."""
    return None if spec is None else jax.P(*spec.partitions, unreduced=spec.reduced)


def _plain(x: Array) -> Array:
    """The array without word of how its gradient is to be summed: that is ours to say."""
    spec = _spec(x)
    return x if spec is None or not spec.reduced else jax.sharding.reshard(x, jax.P(*spec.partitions))


compact_matmul.defvjp(_forward, _backward)
