"""From declared parameters to where they live: abstract trees whose leaves carry shape, dtype and sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.tree_util import keystr

from sharding.rules import Rules


def abstract_params(shapes: Any, logical_axes: Any, mesh: Mesh | AbstractMesh, rules: Rules) -> Any:
    """Attaches to every leaf of ``shapes`` the sharding its logical axes ask for.

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
    """The shardings of an abstract tree."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def derived_abstract(fn: Callable[[Any], Any], abstract: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Shapes, dtypes and shardings of ``fn(params)`` (an optimizer's init, say) without running it.

    Under explicit axes a result inherits its operands' shardings, so this is exactly what ``jit(fn)`` will produce.
    """
    here = jax.set_mesh(mesh) if isinstance(mesh, Mesh) else jax.sharding.use_abstract_mesh(mesh)
    with here:
        out = jax.eval_shape(fn, abstract)

    def bind(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = leaf.sharding.spec if leaf.sharding is not None else jax.P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.NamedSharding(mesh, spec))

    return jax.tree.map(bind, out)
