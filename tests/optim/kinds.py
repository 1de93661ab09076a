"""Optimizers of every kind, with the configuration that each kind needs."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

import jax

from jaxllm.optim import OPTIMIZERS, OptimConfig, ScheduleConfig
from jaxllm.optim.adam8bit import block_dim_and_size
from jaxllm.optim.matrix_params import matrix_dims
from tests import environment

DOCS = environment.ROOT / "docs" / "train" / "optimizers.md"

KINDS = (
    *OPTIMIZERS,
    *(f"{kind} 8bit" for kind, spec in OPTIMIZERS.items() if "moments" in spec.fields),
)
"""By name; with moments in eight bits too, where a kind has that."""
LATER = ("adan",)
"""Those that came after the records of the proofs over ``WHOLE``, which name their cases."""
WHOLE = tuple(name for name in KINDS if not OPTIMIZERS[name.split()[0]].projected and name not in LATER)
"""Those whose gradients have the shapes of the parameters; the others have proofs of their own."""


def named(name: str, **more: Any) -> OptimConfig:
    """One of ``KINDS``; other fields as given, or the defaults that are legal."""
    kind, _, moments = name.partition(" ")
    fields: dict[str, Any] = {"moments": moments} if moments else {}
    if OPTIMIZERS[kind].layerwise:
        fields["clip_norm"] = None
    if OPTIMIZERS[kind].averaging:
        peak = more.get("schedule", ScheduleConfig()).peak
        more["schedule"] = dataclasses.replace(more.get("schedule", ScheduleConfig()), kind="constant", peak=peak)
    return OptimConfig(kind=kind, **fields | more)  # type: ignore[arg-type]


def arrays_bytes(state: Any) -> int:
    """Bytes of the state arrays that belong to parameters: not counts, nor Muon's fifteen coefficients."""
    arrays = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim and leaf.shape != (3,)]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in arrays)


@functools.cache
def table() -> dict[str, tuple[str, str]]:
    """Table of docs/train/optimizers.md: formulas for the bytes of a matrix, and per number of other parameters."""
    rows = re.findall(
        r"^\| `([a-z_]+)(?: --optim\.moments (8bit))?` \| `([^`]+)` \| `([^`]+)` \|", DOCS.read_text(), re.M
    )
    return {f"{kind} {moments}".strip(): (matrix, number) for kind, moments, matrix, number in rows}


def table_bytes(name: str, params: Any, logical_axes: Any, rank: int = 0) -> int:
    """Bytes of a model's optimizer state by the table."""
    of_matrix, of_number = table()[name]
    total = 0.0
    axes = jax.tree.leaves(logical_axes, is_leaf=lambda x: isinstance(x, tuple))
    for leaf, one in zip(jax.tree.leaves(params), map(matrix_dims, axes), strict=True):
        if one is None or (one.vocabulary and of_number != "all"):
            total += eval(of_number.replace("all", "4")) * leaf.size
            continue
        sizes = {side: math.prod(leaf.shape[i] for i in side) for side in one[:2]}
        small, large = sorted(sizes, key=sizes.__getitem__)
        m, n = sizes[small], sizes[large]
        r = 1 if name.startswith("apollo_mini") else min(m, rank or m // 4)
        kept = list(leaf.shape)
        if "r" in of_matrix:
            kept = [r if i == small[0] else 1 if i in small else size for i, size in enumerate(kept)]
        # Outputs of a matrix are all that follows the residual stream where that comes first, else the stream.
        c, o = (sizes[one.rows], sizes[one.columns])[:: 1 if one.rows[0] < one.columns[0] else -1]
        scope = {"m": m, "n": n, "r": r, "b": block_dim_and_size(tuple(kept))[1], "q": rank or c // 4, "o": o}
        total += eval(of_matrix, scope) * (leaf.size // (m * n))
    return round(total)
