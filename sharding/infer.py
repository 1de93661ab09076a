"""Sharding of a model that declares none: inferred from how its forward pass uses the parameters.

    specs = infer_specs(forward, params, tokens, axis="tensor", size=4)      # PartitionSpecs, like params

Two rules (after Redco, arXiv:2310.16355), for all that the arrays in between are whole or split over their features:

    fan-out    a matmul of whole features splits the weight over its outputs, and its result is split
    fan-in     a matmul of split features splits the weight over its inputs, and its result is summed, and whole

So matrices alternate, whatever they are called: queries, keys, values and gates are fan-out, outputs of attention and
of feed-forward layers fan-in, an output matrix is split over the vocabulary, and so is an embedding. Values do not
depend on a sharding that XLA propagates: a wrong guess costs time, never correctness.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Var
from jax.sharding import PartitionSpec

from sharding.mesh import ShardingError

FAN_OUT, FAN_IN, EMBEDDING, FEATURES, COPIED = "fan-out", "fan-in", "embedding", "features", "copied"
"""Rules: the two of matmuls; rows of a table that tokens look up; a vector beside split features; everything else."""


@dataclass(frozen=True)
class InferredSharding:
    """Split of one parameter, and the rule that found it.

    Attributes:
        path: its path in the tree.
        shape: its shape.
        rule: one of the rules above.
        dimension: the dimension that is split; None: it is copied.
        why: a reason, for a parameter that is copied although it is used as a matrix; else empty.
    """

    path: str
    shape: tuple[int, ...]
    rule: str
    dimension: int | None
    why: str = ""

    def spec(self, axis: str) -> PartitionSpec:
        """Sharding over a mesh axis."""
        if self.dimension is None:
            return PartitionSpec()
        return PartitionSpec(*(axis if place == self.dimension else None for place in range(len(self.shape))))


def infer_specs(forward: Callable[..., Any], params: Any, *inputs: Any, axis: str, size: int) -> Any:
    """PartitionSpecs of a parameter tree over one mesh axis.

    Args:
        forward: ``forward(params, *inputs)``, of any library; it is traced, not run.
        params: tree of arrays, or of anything with shape and dtype.
        inputs: a batch, or anything with its shapes and dtypes.
        axis: name of the mesh axis.
        size: number of its devices.

    Raises:
        ShardingError: as for ``infer_shardings``.
    """
    found = infer_shardings(forward, params, *inputs, size=size)
    return jax.tree.unflatten(jax.tree.structure(params), [one.spec(axis) for one in found])


def infer_shardings(forward: Callable[..., Any], params: Any, *inputs: Any, size: int) -> list[InferredSharding]:
    """The rule and the split dimension of each parameter, in the order of the tree's leaves.

    Raises:
        ShardingError: the forward pass cannot be traced with these inputs.
    """
    leaves = jax.tree.leaves(params)
    try:
        traced = jax.make_jaxpr(lambda params, *inputs: forward(params, *inputs))(*_abstract((params, *inputs)))
    except Exception as error:
        raise ShardingError(f"the forward pass cannot be traced with these parameters and inputs: {error}") from error
    flow = _Flow(size)
    own = {var: _Use(number, tuple(range(len(leaf.shape)))) for var, number, leaf in zip(
        traced.jaxpr.invars, range(len(leaves)), leaves, strict=False
    )}  # fmt: skip
    flow.run(traced.jaxpr, own, {})
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    return [
        flow.result(number, path, leaf.shape) for number, (path, leaf) in enumerate(zip(paths, leaves, strict=True))
    ]


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)), tree)


@dataclass(frozen=True)
class _Use:
    """A value that is a parameter but for its layout: the parameter's number, and which of its dimensions each is.

    Dimensions that were merged or added have None; a loop over layers takes the parameter's first one away.
    """

    leaf: int
    dims: tuple[int | None, ...]


class _Flow:
    """Goes through a program in its order and decides each parameter at its first use as a matrix."""

    def __init__(self, size: int):
        self.size = size
        self.found: dict[int, tuple[str, int | None, str]] = {}

    def result(self, leaf: int, path: str, shape: tuple[int, ...]) -> InferredSharding:
        """The decision on one parameter."""
        rule, dimension, why = self.found.get(leaf, (COPIED, None, ""))
        return InferredSharding(path, tuple(shape), rule if dimension is not None else COPIED, dimension, why)

    def run(self, jaxpr: Jaxpr, uses: dict[Any, _Use], split: dict[Any, bool]) -> None:
        """Goes through one program.

        Args:
            uses: values that are parameters; entries are added.
            split: values whose features are split; entries are added.
        """
        for eqn in jaxpr.eqns:
            handler = getattr(self, f"_{eqn.primitive.name}", None)
            inner = list(_programs(eqn))
            if inner:
                self._inside(eqn, inner, uses, split)
            elif handler is not None:
                handler(eqn, uses, split)
            else:
                self._elementwise(eqn, uses, split)

    def _inside(self, eqn: Any, inner: list[Jaxpr], uses: dict[Any, _Use], split: dict[Any, bool]) -> None:
        """Programs within an operation: loops, conditions, calls."""
        scanned = eqn.primitive.name == "scan"
        for program in inner:
            own: dict[Any, _Use] = {}
            given: dict[Any, bool] = {}
            shift = len(eqn.invars) - len(program.invars)  # the operand of a condition comes first
            for place, var in enumerate(program.invars):
                outer = eqn.invars[place + shift] if 0 <= place + shift < len(eqn.invars) else None
                if not isinstance(outer, Var):
                    continue
                given[var] = split.get(outer, False)
                if (use := uses.get(outer)) is not None:
                    stacked = scanned and len(_shape(outer)) > len(_shape(var))  # a turn has one layer's part
                    own[var] = _Use(use.leaf, use.dims[1:] if stacked else use.dims)
            self.run(program, own, given)
            for var, outer in zip(program.outvars, eqn.outvars, strict=False):
                if isinstance(var, Var):
                    split[outer] = split.get(outer, False) or given.get(var, False)
                    if var in own and not scanned:
                        uses[outer] = own[var]

    def _elementwise(self, eqn: Any, uses: dict[Any, _Use], split: dict[Any, bool]) -> None:
        """Operations that keep features where they are; a parameter that meets split features is split with them."""
        given: list[Any] = [var for var in eqn.invars if isinstance(var, Var)]
        is_split = any(split.get(var, False) for var in given if var not in uses)
        for var in given:
            if is_split and (use := uses.get(var)) is not None and use.dims and use.dims[-1] is not None:
                self._decide(use, FEATURES, use.dims[-1], _shape(var)[-1])
        one = next((uses[var] for var in given if var in uses), None)
        for out in eqn.outvars:
            split[out] = is_split
            if one is not None and len(given) == 1 and _shape(out) == _shape(given[0]):
                uses[out] = one  # a change of dtype, a scale, a sign

    def _transpose(self, eqn: Any, uses: dict[Any, _Use], split: dict[Any, bool]) -> None:
        (var,) = eqn.invars
        split[eqn.outvars[0]] = split.get(var, False)
        if (use := uses.get(var)) is not None:
            uses[eqn.outvars[0]] = _Use(use.leaf, tuple(use.dims[d] for d in eqn.params["permutation"]))

    def _reshape(self, eqn: Any, uses: dict[Any, _Use], split: dict[Any, bool]) -> None:
        var, out = eqn.invars[0], eqn.outvars[0]
        split[out] = isinstance(var, Var) and split.get(var, False)
        if isinstance(var, Var) and (use := uses.get(var)) is not None:
            uses[out] = _Use(use.leaf, _reshaped(use.dims, _shape(var), _shape(out)))

    def _broadcast_in_dim(self, eqn: Any, uses: dict[Any, _Use], split: dict[Any, bool]) -> None:
        var, out = eqn.invars[0], eqn.outvars[0]
        split[out] = isinstance(var, Var) and split.get(var, False)
        if isinstance(var, Var) and (use := uses.get(var)) is not None:
            places = eqn.params["broadcast_dimensions"]
            dims: list[int | None] = [None] * len(_shape(out))
            for dim, place, length in zip(use.dims, places, _shape(var), strict=True):
                dims[place] = dim if length == _shape(out)[place] else None
            uses[out] = _Use(use.leaf, tuple(dims))

    def _gather(self, eqn: Any, uses: dict[Any, _Use], split: dict[Any, bool]) -> None:
        """Rows of a table; those of an embedding are whole."""
        var, out = eqn.invars[0], eqn.outvars[0]
        use = uses.get(var) if isinstance(var, Var) else None
        split[out] = use is None and isinstance(var, Var) and split.get(var, False)
        if use is not None and len(use.dims) == 2 and use.dims[0] is not None:
            self._decide(use, EMBEDDING, use.dims[0], _shape(var)[0])

    def _dot_general(self, eqn: Any, uses: dict[Any, _Use], split: dict[Any, bool]) -> None:
        (contracted, batched), out = eqn.params["dimension_numbers"], eqn.outvars[0]
        weights = [isinstance(var, Var) and var in uses for var in eqn.invars]
        if all(weights) or not any(weights):
            split[out] = any(isinstance(var, Var) and split.get(var, False) for var in eqn.invars)
            return
        place = weights.index(True)
        var, other = eqn.invars[place], eqn.invars[1 - place]
        use, shape = uses[var], _shape(var)
        inner = tuple(contracted[place])
        free = [d for d in range(len(shape)) if d not in (*inner, *batched[place])]
        is_split = isinstance(other, Var) and split.get(other, False)
        # The largest of several dimensions is split, the first one of equals: heads before their widths.
        rule, among = (FAN_IN, inner) if is_split else (FAN_OUT, free)
        legal = [d for d in among if use.dims[d] is not None and shape[d] % self.size == 0]
        best = max(legal, key=lambda d: (d == among[0], shape[d]), default=None)
        before = self.found.get(use.leaf)
        if best is None:
            sizes = " x ".join(str(shape[d]) for d in among) or "1"
            self.found.setdefault(use.leaf, (COPIED, None, f"{rule}: {sizes} does not divide over {self.size}"))
            split[out] = False
            return
        self._decide(use, rule, use.dims[best], shape[best])
        kept = before or self.found[use.leaf]
        # A tied matrix stays as it was found first; what comes out of it follows from how it lies.
        split[out] = kept[1] is not None and kept[1] in [use.dims[d] for d in free]

    def _decide(self, use: _Use, rule: str, dimension: int | None, length: int) -> None:
        if dimension is not None and length % self.size == 0:
            self.found.setdefault(use.leaf, (rule, dimension, ""))


def _shape(var: Any) -> tuple[int, ...]:
    return tuple(var.aval.shape)


def _programs(eqn: Any) -> Iterator[Jaxpr]:
    for value in eqn.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, ClosedJaxpr):
                yield one.jaxpr
            elif isinstance(one, Jaxpr):
                yield one


def _reshaped(dims: tuple[int | None, ...], before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int | None, ...]:
    """Dimensions after a reshape: a dimension that is cut up is its first part, merged ones are the first of them."""
    out: list[int | None] = []
    products = {math.prod(before[:d]): d for d in range(len(before) - 1, -1, -1)}
    done = 1
    for length in after:
        place = products.get(done)
        out.append(dims[place] if place is not None and length > 1 else None)
        done *= length
    return tuple(out)
