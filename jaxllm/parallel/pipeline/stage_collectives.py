"""Collectives by hand, in a program that is manual over some mesh axes and explicit over the others.

XLA makes an array whole over explicit axes before it gathers it over manual ones, and jax 0.10 wherever one goes into
such a program or comes out of it. So what moves weights goes through ``run_fully_manual``, a nested ``shard_map`` over all
axes, and weights and gradients cross the border as the parts that devices have.

Specs are those of whole arrays, less all but the manual axes (``only``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

from sharding.rules import split_sizes


def only(spec: Any, axes: tuple[str, ...]) -> Any:
    """The spec less all other mesh axes."""
    parts = [(part,) if isinstance(part, str) else part or () for part in spec]
    return jax.P(*(tuple(a for a in part if a in axes) or None for part in parts))


def is_spec(x: Any) -> bool:
    return isinstance(x, jax.P)


def dimension_over(spec: Any, axis: str) -> int | None:
    """The dimension that is split over ``axis``."""
    for dim, part in enumerate(spec):
        if part is not None and axis in ((part,) if isinstance(part, str) else part):
            return dim
    return None


def all_gather_over(w: Array, spec: Any, axes: tuple[str, ...] = ("fsdp",), *, stacked: bool = False) -> Array:
    """Whole over ``axes``; the innermost first, so that parts come in order.

    Args:
        stacked: the spec is that of a stack, of which w is one.
    """
    for axis in reversed(_nested(spec, axes)):
        dim = dimension_over(spec, axis)
        assert dim is not None
        w = run_fully_manual(functools.partial(jax.lax.all_gather, axis_name=axis, axis=dim - stacked, tiled=True), w)
    return w


def reduce_scatter_over(g: Array, spec: Any, axes: tuple[str, ...] = ("fsdp",), *, stacked: bool = False) -> Array:
    """The transpose of ``gathered``: sums over ``axes``, and each device its part."""
    for axis in _nested(spec, axes):
        dim = dimension_over(spec, axis)
        assert dim is not None
        scatter = functools.partial(jax.lax.psum_scatter, axis_name=axis, scatter_dimension=dim - stacked, tiled=True)
        g = run_fully_manual(scatter, g)
    return g


def before_entry(x: Array, spec: Any, manual: tuple[str, ...]) -> Array:
    """Before the border: an array stored by ``spec`` as it goes in, explicit axes not in its type any more."""
    return x if _mixed(spec, manual) else _called(x, spec, only(spec, manual))


def after_entry(x: Array, spec: Any, manual: tuple[str, ...]) -> Array:
    """Behind the border: the array that ``before_entry`` was given, split over explicit axes as it is stored."""
    return x if _mixed(spec, manual) else _called(x, jax.P(), _others(spec, manual))


def before_exit(x: Array, spec: Any, manual: tuple[str, ...]) -> Array:
    """``after_entry`` the other way."""
    return x if _mixed(spec, manual) else _called(x, _others(spec, manual), jax.P())


def after_exit(x: Array, spec: Any, manual: tuple[str, ...]) -> Array:
    """``before_entry`` the other way."""
    return x if _mixed(spec, manual) else _called(x, only(spec, manual), spec)


def _mixed(spec: Any, manual: tuple[str, ...]) -> bool:
    """Whether a dimension is split over axes of both kinds, whose order may differ; or none over explicit ones."""
    pairs = list(zip(only(spec, manual), _others(spec, manual), strict=True))
    return any(a is not None and b is not None for a, b in pairs) or all(b is None for _, b in pairs)


def _others(spec: Any, manual: tuple[str, ...]) -> Any:
    return only(
        spec, tuple(a for part in spec for a in ((part,) if isinstance(part, str) else part or ()) if a not in manual)
    )


def _called(x: Array, before: Any, after: Any) -> Array:
    """The same parts on the same devices, by another spec; nothing moves."""
    mesh = jax.sharding.get_abstract_mesh()
    names = set(split_sizes(mesh))
    return jax.shard_map(lambda x: x, mesh=mesh, in_specs=before, out_specs=after, axis_names=names, check_vma=False)(x)


def run_fully_manual(fn: Callable[[Array], Array], x: Array) -> Array:
    """``fn`` of the part of ``x`` that a device has, over explicit axes too.

    jax 0.10 cannot lower ``psum_scatter`` of an array that explicit axes split, and XLA makes one whole over them
    before an ``all_gather`` over manual ones.
    """
    there = jax.typeof(x).sharding.spec
    mesh = jax.sharding.get_abstract_mesh()
    names = set(split_sizes(mesh))
    if not names:
        return fn(x)
    return jax.shard_map(fn, mesh=mesh, in_specs=there, out_specs=there, axis_names=names, check_vma=False)(x)


def replicate_shared_dims(w: Array, spec: Any) -> Array:
    """``w``, whole over explicit axes that split a dimension which manual ones split too.

    Parts of such a dimension would change places when it is gathered over the manual, outer axes.
    """
    there = jax.typeof(w).sharding.spec
    parts = [None if manual is not None else part for part, manual in zip(there, spec, strict=True)]
    return jax.sharding.reshard(w, jax.P(*parts)) if tuple(parts) != tuple(there) else w


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather_layer_weight(w: Array, spec: Any) -> Array:
    """One layer's weight, gathered for its use; its gradient is scattered. The spec is that of the stack."""
    return all_gather_over(w, spec, stacked=True)


def _layer_forward(w: Array, spec: Any) -> tuple[Array, None]:
    return all_gather_over(w, spec, stacked=True), None


def _layer_backward(spec: Any, _: None, dy: Array) -> tuple[Array]:
    return (reduce_scatter_over(dy, spec, stacked=True),)


gather_layer_weight.defvjp(_layer_forward, _layer_backward)


def _nested(spec: Any, axes: tuple[str, ...]) -> list[str]:
    """Those of ``axes`` that the spec has, outermost first."""
    found = [a for part in spec if part is not None for a in ((part,) if isinstance(part, str) else part)]
    return [a for a in found if a in axes]
