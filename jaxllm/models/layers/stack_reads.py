"""Layers of one stack that several loops read in turn, without slices of it and sums of padded gradients.

Layers with different remat policies are a loop each. Slices of the stack for each loop are copies, and so is the sum of
their gradients, which are padded to the size of the stack. Here a loop reads a layer at its number from the whole
stack, and its backward pass writes the layer's gradient in place into one array of the size of the stack. That array is
handed from loop to loop, the last one's first: in the forward pass it is a stand-in of zeros in the loops' carry, which
compilers remove, and its cotangent is the gradient. Llama 3.2 1B on one H100, half of its layers "full" and half
"save:attention": 19.8 GiB instead of 22.9, which is the mean of the two policies (docs/train/recomputation.md).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def gradient_of(stack: Any) -> Any:
    """Stand-ins whose cotangents are the gradients of stacked parameters: zeros of their shapes.

    Args:
        stack: stacked parameters, arrays ``[layers, ...]``.
    """
    return jax.tree.map(_stand_in, stack)


def read(stack: Any, gradient: Any, layer: Int[Array, ""]) -> tuple[Any, Any]:
    """Parameters of one layer, and the stand-ins for the next read. Each layer may be read once.

    Args:
        stack: stacked parameters under ``jax.lax.stop_gradient``, which is outside of the loop: no gradient flows here.
        gradient: ``gradient_of`` the parameters, or what the read before returned.
        layer: number of the layer.
    """
    leaves, tree = jax.tree.flatten(stack)
    # Array by array, so that those that are not trained have no gradient.
    pairs = [_read(own, one, layer) for own, one in zip(leaves, jax.tree.leaves(gradient), strict=True)]
    return tree.unflatten([own for own, _ in pairs]), tree.unflatten([one for _, one in pairs])


@jax.custom_vjp
def _stand_in(stack: Shaped[Array, "L ..."]) -> Shaped[Array, "L ..."]:
    zeros = jnp.zeros_like(stack)
    if jax.typeof(zeros).sharding.mesh.empty:  # out of a mesh's context, where the stack may be on one
        return jnp.where(False, stack, jnp.zeros((), stack.dtype))
    return zeros


@jax.custom_vjp
def _read(
    stack: Shaped[Array, "L ..."], gradient: Shaped[Array, "L ..."], layer: Int[Array, ""]
) -> tuple[Shaped[Array, "..."], Shaped[Array, "L ..."]]:
    return jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False), gradient


def _write(layer: Int[Array, ""], cotangents: tuple[Array, Array]) -> tuple[None, Array, None]:
    own, gradient = cotangents
    return None, jax.lax.dynamic_update_index_in_dim(gradient, own, layer, 0), None


_stand_in.defvjp(lambda stack: (_stand_in(stack), None), lambda _, gradient: (gradient,))
_read.defvjp(lambda stack, gradient, layer: (_read(stack, gradient, layer), layer), _write)
