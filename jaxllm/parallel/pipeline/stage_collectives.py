"""Collectives of weights and gradients in a pipeline: a program that is manual over some mesh axes only.

XLA replicates an array over explicit axes before it all-gathers it over manual ones, and jax 0.10 does so for every
array that enters or leaves such a program. To avoid that, collectives of weights run in ``run_fully_manual``, a nested
``shard_map`` over all axes, and weights and gradients enter and leave the program as the shards that devices have.

Specs are those of global arrays, reduced to the manual axes (``only``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

from sharding.rules import split_sizes


def only(spec: Any, axes: tuple[str, ...]) -> Any:
    """Partition spec reduced to some mesh axes."""
    parts = [(part,) if isinstance(part, str) else part or () for part in spec]
    return jax.P(*(tuple(a for a in part if a in axes) or None for part in parts))


def is_spec(x: Any) -> bool:
    """Whether ``x`` is a partition spec; for use as ``is_leaf``."""
    return isinstance(x, jax.P)


def dimension_over(spec: Any, axis: str) -> int | None:
    """Dimension that is split over ``axis``; None if none is."""
    for dim, part in enumerate(spec):
        if part is not None and axis in ((part,) if isinstance(part, str) else part):
            return dim
    return None


def all_gather_over(w: Array, spec: Any, axes: tuple[str, ...] = ("fsdp",), *, stacked: bool = False) -> Array:
    """All-gather over ``axes``; the innermost axis first, so that shards come in order.

    Args:
        stacked: the spec is that of a stack of layers, and ``w`` is one of them.
    """
    for axis in reversed(_nested(spec, axes)):
        dim = dimension_over(spec, axis)
        assert dim is not None
        w = run_fully_manual(functools.partial(jax.lax.all_gather, axis_name=axis, axis=dim - stacked, tiled=True), w)
    return w


def reduce_scatter_over(g: Array, spec: Any, axes: tuple[str, ...] = ("fsdp",), *, stacked: bool = False) -> Array:
    """Reduce-scatter over ``axes``, the transpose of ``all_gather_over``."""
    for axis in _nested(spec, axes):
        dim = dimension_over(spec, axis)
        assert dim is not None
        scatter = functools.partial(jax.lax.psum_scatter, axis_name=axis, scatter_dimension=dim - stacked, tiled=True)
        g = run_fully_manual(scatter, g)
    return g


def before_entry(x: Array, spec: Any, manual: tuple[str, ...]) -> Array:
    """Array as it enters the program, called outside it: stored by ``spec``, its type without the explicit axes."""
    return x if _mixed(spec, manual) else _called(x, spec, only(spec, manual))


def after_entry(x: Array, spec: Any, manual: tuple[str, ...]) -> Array:
    """Array given to ``before_entry``, called inside the program: split over explicit axes as it is stored."""
    return x if _mixed(spec, manual) else _called(x, jax.P(), _others(spec, manual))


def before_exit(x: Array, spec: Any, manual: tuple[str, ...]) -> Array:
    """Array as it leaves the program, called inside it: the inverse of ``after_entry``."""
    return x if _mixed(spec, manual) else _called(x, _others(spec, manual), jax.P())


def after_exit(x: Array, spec: Any, manual: tuple[str, ...]) -> Array:
    """Array after it left the program, called outside it: the inverse of ``before_entry``."""
    return x if _mixed(spec, manual) else _called(x, only(spec, manual), spec)


def _mixed(spec: Any, manual: tuple[str, ...]) -> bool:
    """Whether a dimension is split over both manual and explicit axes, or none is split over explicit ones.

    Such an array crosses as it is: the order of axes within a dimension could differ, or there is nothing to change.
    """
    pairs = list(zip(only(spec, manual), _others(spec, manual), strict=True))
    return any(a is not None and b is not None for a, b in pairs) or all(b is None for _, b in pairs)


def _others(spec: Any, manual: tuple[str, ...]) -> Any:
    return only(
        spec, tuple(a for part in spec for a in ((part,) if isinstance(part, str) else part or ()) if a not in manual)
    )


def _called(x: Array, before: Any, after: Any) -> Array:
    """Same shards on the same devices, under another spec; no communication."""
    mesh = jax.sharding.get_abstract_mesh()
    names = set(split_sizes(mesh))
    return jax.shard_map(lambda x: x, mesh=mesh, in_specs=before, out_specs=after, axis_names=names, check_vma=False)(x)


def run_fully_manual(fn: Callable[[Array], Array], x: Array) -> Array:
    """``fn`` applied to each device's shard of ``x``, manual over the explicit axes too.

    jax 0.10 cannot lower ``psum_scatter`` of an array that is split over explicit axes, and XLA replicates an array
    over them before an ``all_gather`` over manual ones.
    """
    there = jax.typeof(x).sharding.spec
    mesh = jax.sharding.get_abstract_mesh()
    names = set(split_sizes(mesh))
    if not names:
        return fn(x)
    return jax.shard_map(fn, mesh=mesh, in_specs=there, out_specs=there, axis_names=names, check_vma=False)(x)


def replicate_shared_dims(w: Array, spec: Any) -> Array:
    """``w`` replicated over those explicit axes that split a dimension which manual axes split too.

    Shards of such a dimension would be permuted when it is all-gathered over the manual, outer axes.
    """
    there = jax.typeof(w).sharding.spec
    parts = [None if manual is not None else part for part, manual in zip(there, spec, strict=True)]
    return jax.sharding.reshard(w, jax.P(*parts)) if tuple(parts) != tuple(there) else w


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather_layer_weight(w: Array, spec: Any) -> Array:
    """One layer's weight, all-gathered for use; its gradient is reduce-scattered. The spec is that of the stack."""
    return all_gather_over(w, spec, stacked=True)


def _layer_forward(w: Array, spec: Any) -> tuple[Array, None]:
    return all_gather_over(w, spec, stacked=True), None


def _layer_backward(spec: Any, _: None, dy: Array) -> tuple[Array]:
    return (reduce_scatter_over(dy, spec, stacked=True),)


gather_layer_weight.defvjp(_layer_forward, _layer_backward)


def _nested(spec: Any, axes: tuple[str, ...]) -> list[str]:
    """Members of ``axes`` that the spec has, outermost first."""
    found = [a for part in spec if part is not None for a in ((part,) if isinstance(part, str) else part)]
    return [a for a in found if a in axes]
