"""Checkpoint conversion: a subset of the leaves, another dtype, layers stacked or unstacked, other names.

Meshes need no conversion: a checkpoint has whole arrays, and on restore every process reads the slices that it needs
(resharding). This module changes what is stored, one piece of a leaf at a time.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np

from jaxllm.checkpoint.checkpoint_reader import CheckpointLeaf, Progress
from jaxllm.checkpoint.checkpoint_writer import StreamedLeaf
from jaxllm.checkpoint.errors import CheckpointError
from jaxllm.checkpoint.restore import LeafSource, stack_sources, unstack_sources
from jaxllm.checkpoint.storage.checkpoint_manifest import LeafRecord, dtype_from_name

LayerStorage = Literal["stacked", "single"]
PIECE_BYTES = 2**25
"""Bytes of a leaf in memory at a time."""

_STACK = re.compile(r"(?P<before>(?:.*/)?)segments/(?P<segment>\d+)/(?P<slot>\d+)/(?P<rest>[^/].*)")
_LAYER = re.compile(r"(?P<before>(?:.*/)?)layers/(?P<segment>\d+)/(?P<slot>\d+)/(?P<row>\d+)/(?P<rest>.+)")


@dataclasses.dataclass(frozen=True)
class RelayoutOptions:
    """Options of a checkpoint conversion.

    Attributes:
        only: paths of the subtrees to keep, such as ``params``; empty keeps all.
        dtype: new dtype of floating-point leaves; None keeps theirs.
        layers: stacked: one leaf for all layers of a group, ``segments/0/0/...``, as in this library's models; single:
            one leaf per layer, ``layers/0/0/ROW/...``. None keeps the layers as they are.
    """

    only: tuple[str, ...] = ()
    dtype: str | None = None
    layers: LayerStorage | None = None


def leaf_sources(saved: Mapping[str, LeafRecord], layout: RelayoutOptions) -> dict[str, LeafSource]:
    """Source of each leaf of the new checkpoint.

    Raises:
        CheckpointError: no leaf is left.
    """
    kept = {
        path: leaf
        for path, leaf in saved.items()
        if not layout.only or any(path == top or path.startswith(f"{top}/") for top in layout.only)
    }
    if not kept:
        tops = sorted({path.split("/")[0] for path in saved})
        raise CheckpointError(f"there is no leaf below {', '.join(layout.only)}: the checkpoint has {', '.join(tops)}.")
    if layout.layers == "single":
        inside = {p: leaf for p, leaf in kept.items() if _STACK.fullmatch(p) and leaf.shape}
        found = unstack_sources(inside, _single)
    elif layout.layers == "stacked":
        inside = {p: leaf for p, leaf in kept.items() if _LAYER.fullmatch(p)}
        found = stack_sources(inside, _place)
    else:
        inside, found = {}, {}
    return {p: LeafSource((p,)) for p in kept if p not in inside} | found


def relayout_leaves(
    leaves: Mapping[str, CheckpointLeaf],
    sources: Mapping[str, LeafSource],
    dtype: str | None,
    progress: Progress | None = None,
) -> dict[str, StreamedLeaf]:
    """Leaves of the new checkpoint, in pieces that are read, verified and converted on demand.

    Raises:
        CheckpointError: a finite value overflows the new dtype.
    """
    shapes = {path: source.shape(leaves) for path, source in sources.items()}
    total = sum(int(np.prod(shape)) for shape in shapes.values())
    done = 0

    def pieces(path: str, source: LeafSource, to: np.dtype) -> Iterator[np.ndarray]:
        nonlocal done
        shape = shapes[path]
        rows = shape[0] if shape else 1
        step = max(1, rows * PIECE_BYTES // max(1, int(np.prod(shape)) * to.itemsize))
        for begin in range(0, rows, step) if shape else [0]:
            index = (slice(begin, min(rows, begin + step)), *(slice(None) for _ in shape[1:])) if shape else ()
            piece = source.read(leaves, index)
            if piece.dtype != to:
                with np.errstate(over="ignore"):
                    piece, before = piece.astype(to), piece
                if np.isfinite(before).all() and not np.isfinite(piece).all():
                    raise CheckpointError(f"{path} has values that overflow {to}.")
            done += piece.size
            yield piece
            if progress is not None:
                progress(path, done, total)

    out = {}
    for path, source in sources.items():
        record = leaves[source.paths[0]].record
        own = record.stored_dtype
        to = dtype_from_name(dtype) if dtype is not None and record.key_impl is None and _floating(own) else own
        key = None if record.key_impl is None else (record.dtype, record.key_impl)
        out[path] = StreamedLeaf(shapes[path], to, pieces(path, source, to), key)
    return out


def _place(path: str) -> tuple[str, int] | None:
    found = _LAYER.fullmatch(path)
    if found is None:
        return None
    return f"{found['before']}segments/{found['segment']}/{found['slot']}/{found['rest']}", int(found["row"])


def _single(path: str, row: int) -> str:
    return _STACK.sub(rf"\g<before>layers/\g<segment>/\g<slot>/{row}/\g<rest>", path)


def _floating(dtype: np.dtype) -> bool:
    import jax.numpy as jnp

    return bool(jnp.issubdtype(dtype, jnp.floating))
