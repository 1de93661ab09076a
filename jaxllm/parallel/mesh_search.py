"""Mesh search: meshes that a model and a batch fit, nearest to one that they do not fit.

Nothing is compiled and no device is used: a mesh is tried as an ``AbstractMesh`` against the shapes of the parameters
and of the batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.sharding import AbstractMesh
from jax.tree_util import keystr, tree_leaves_with_path

from sharding import AXES, MeshSpec, Rules, ShardingError
from sharding.mesh import divisors

Fits = Callable[[AbstractMesh], None]
"""Check of a mesh: raises a ShardingError, or another ValueError, if the model or the batch does not fit it."""

SHOWN = 4
"""Meshes listed in an error."""
TRIED = 2000
"""Maximum number of meshes to try: a thousand devices have very many factorings."""


def resolve(mesh: MeshSpec, num_devices: int, fits: Fits) -> MeshSpec:
    """Resolved mesh: ``mesh`` with its open sizes (-1) filled in, if the model and the batch fit it.

    Raises:
        ShardingError: they do not; says why, and lists the nearest meshes that they fit.
    """
    try:
        resolved = mesh.resolve(num_devices)
        fits(resolved.abstract())
        return resolved
    except ValueError as error:
        why = str(error).split(". ")[0].rstrip(".") + "."
        why = why if str(mesh) in why else f"the mesh {mesh}: {why}"
        # Search the axes that the mesh names; if they are not enough, also axes that suit every model.
        near = nearest(mesh, num_devices, fits) or nearest(mesh, num_devices, fits, more=("context", "tensor"))
        if not near:
            raise ShardingError(
                f"{why} No mesh of {num_devices} devices fits this model and batch: use another number of devices, or "
                "another batch size."
            ) from error
        listed = ", ".join(f'"{legal}"' for legal in near)
        raise ShardingError(
            f"{why} The nearest meshes of {num_devices} devices that this model and batch fit: {listed}."
        ) from error


def nearest(
    mesh: MeshSpec, num_devices: int, fits: Fits, count: int = SHOWN, more: Sequence[str] = ()
) -> list[MeshSpec]:
    """Legal meshes over the axes of ``mesh``, data, fsdp and ``more``: up to ``count``, nearest to ``mesh`` first."""
    wanted = _wanted(mesh, num_devices)
    names = [name for name in AXES if name in wanted or name in ("data", "fsdp", *more)]

    def distance(sizes: Sequence[int]) -> tuple[float, int]:
        apart = sum(abs(math.log2(size / wanted.get(name, 1.0))) for name, size in zip(names, sizes, strict=True))
        added = sum(size > 1 and name not in wanted for name, size in zip(names, sizes, strict=True))
        return round(apart, 6), added

    found: list[MeshSpec] = []
    for sizes in itertools.islice(sorted(factorings(num_devices, len(names)), key=distance), TRIED):
        axes = tuple((name, size) for name, size in zip(names, sizes, strict=True) if size > 1)
        spec = MeshSpec(axes or (("data", 1),))
        try:
            fits(spec.abstract())
        except ValueError:
            continue
        found.append(spec)
        if len(found) == count:
            break
    return found


def factorings(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Ordered factorings: all ways to write ``number`` as a product of ``parts`` positive integers."""
    if parts == 1:
        yield (number,)
        return
    for first in divisors(number):
        for rest in factorings(number // first, parts - 1):
            yield (first, *rest)


def check_parameters(shapes: Any, logical_axes: Any, mesh: AbstractMesh, rules: Rules) -> None:
    """Checks that all parameters can be split over the mesh.

    Args:
        shapes: pytree of ``jax.ShapeDtypeStruct``.
        logical_axes: the same tree with a tuple of logical axes at each leaf.

    Raises:
        ShardingError: names the first parameter that does not fit the mesh.
    """
    axes = dict(tree_leaves_with_path(logical_axes, is_leaf=lambda leaf: isinstance(leaf, tuple)))
    for path, leaf in tree_leaves_with_path(shapes):
        rules.spec(axes[path], mesh, leaf.shape, what=keystr(path, simple=True, separator="/"))


def _wanted(mesh: MeshSpec, num_devices: int) -> dict[str, float]:
    """Size of each named axis; open axes share the remaining devices evenly."""
    fixed = math.prod(size for _, size in mesh.axes if size != -1)
    open_axes = sum(size == -1 for _, size in mesh.axes)
    left = max(1.0, num_devices / fixed) ** (1 / max(1, open_axes))
    return {name: left if size == -1 else float(size) for name, size in mesh.axes}
