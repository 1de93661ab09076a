"""Abstract state: trees whose leaves carry shape, dtype and sharding, from declared parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.tree_util import keystr

from sharding.rules import Rules


def abstract_params(shapes: Any, logical_axes: Any, mesh: Mesh | AbstractMesh, rules: Rules) -> Any:
    """Abstract parameters with shardings: every leaf of ``shapes`` with the sharding of its logical axes.

    Args:
        shapes: pytree of ``jax.ShapeDtypeStruct``.
        logical_axes: the same tree with a tuple of logical axes at each leaf.

    Raises:
        ShardingError: a parameter does not fit the mesh; the message names it.
    """

    def attach(path: tuple, leaf: jax.ShapeDtypeStruct, axes: tuple) -> jax.ShapeDtypeStruct:
        name = keystr(path, simple=True, separator="/")
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=rules.sharding(axes, mesh, leaf.shape, name))

    return jax.tree.map_with_path(attach, shapes, logical_axes)


def shardings_of(abstract: Any) -> Any:
    """Shardings of the leaves of an abstract tree."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def derived_abstract(fn: Callable[[Any], Any], abstract: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Abstract result of ``fn(params)`` (such as an optimizer's init), without running it: shapes, dtypes, shardings.

    Under explicit mesh axes a result inherits its operands' shardings, so ``jit(fn)`` will have exactly these.
    """
    here = jax.set_mesh(mesh) if isinstance(mesh, Mesh) else jax.sharding.use_abstract_mesh(mesh)
    with here:
        out = jax.eval_shape(fn, abstract)

    def bind(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = leaf.sharding.spec if leaf.sharding is not None else jax.P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.NamedSharding(mesh, spec))

    return jax.tree.map(bind, out)
