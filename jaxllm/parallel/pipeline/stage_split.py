"""A layer's forward and backward pass, cut into F, B and W at the values between them.

The whole of it, ``(w, x, consts, dy) -> (y, dx, dw)``, is traced once. F is what y needs; B what dx needs of the rest;
W what is left for dw. What F saves for B follows from the model's ``remat``, as where ``jax.checkpoint`` is used: of
all values between the two only x ("full"), x and named matrix products ("elementwise"), or those that B needs
("none"); B computes again what it lacks. What follows from weights and constants alone is never saved. W takes from B
what both need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend import core

Remat = Literal["none", "elementwise", "full"]


@dataclass(frozen=True)
class SplitLayer:
    """The three parts. Values are flat lists.

    Attributes:
        tree, more: of w, and of what the layer says besides.
        saved: shapes and types of what F leaves.
        pending: of what B leaves for W; empty where B makes the gradients of weights itself.
    """

    tree: Any
    more: Any
    saved: tuple[Any, ...]
    pending: tuple[Any, ...]
    _forward: Callable[..., list[Any]]
    _backward: Callable[..., list[Any]]
    _weights: Callable[..., list[Any]]
    _early: tuple[int, ...]
    _late: tuple[int, ...]

    def forward(self, w: Any, x: Any, consts: Any) -> tuple[Any, Any, list[Any]]:
        """F: y, what the layer says besides, and what is saved."""
        y, *rest = self._forward(*jax.tree.leaves((w, x, consts)))
        return y, self.more.unflatten(rest[: self.more.num_leaves]), rest[self.more.num_leaves :]

    def backward(self, w: Any, saved: Sequence[Any], consts: Any, dy: Any) -> tuple[Any, dict[int, Any], list[Any]]:
        """B: dx, gradients of those leaves of w that have them now, by number, and what is left for W."""
        dx, *rest = self._backward(*jax.tree.leaves((w, consts, dy)), *saved)
        early = dict(zip(self._early, rest, strict=False))
        return dx, early, rest[len(self._early) :]

    def weights(self, w: Any, saved: Sequence[Any], consts: Any, pending: Sequence[Any]) -> dict[int, Any]:
        """W: gradients of the other leaves of w, by number."""
        return dict(zip(self._late, self._weights(*jax.tree.leaves((w, consts)), *saved, *pending), strict=True))


def split_layer(
    layer: Callable[[Any, Any, Any], Any],
    w: Any,
    x: Any,
    consts: Any,
    *,
    remat: Remat,
    names: Iterable[str],
    split: bool,
) -> SplitLayer:
    """Cuts ``layer(w, x, consts) -> ((y, loss), more)``, where y is as x.

    ``loss``, a scalar or None, is added to the step's own, so its gradient is one; ``more`` is any tree and has none.

    Args:
        w: tree of weights; all get gradients.
        consts: tree of arrays without gradients.
        names: ``checkpoint_name``s of the values that remat = "elementwise" saves.
        split: gradients of weights are left to W, as far as they are not made on the way to dx.
    """

    def whole(w: Any, x: Any, consts: Any, dy: Any) -> tuple[Any, Any, Any, Any]:
        (y, loss), pull, more = jax.vjp(lambda w, x: layer(w, x, consts), w, x, has_aux=True)
        dw, dx = pull((dy, jax.tree.map(jnp.ones_like, loss)))
        return y, more, dx, dw

    jaxpr, (_, more, _, _) = jax.make_jaxpr(whole, return_shape=True)(w, x, consts, x)
    said = jax.tree.structure(more)
    traced = jax.make_jaxpr(_inlined(jaxpr))(*jax.tree.leaves((w, x, consts, x)))
    graph = _Graph(traced)
    counts = [len(jax.tree.leaves(t)) for t in (w, x, consts, x)]
    ins = list(traced.jaxpr.invars)
    w_in, x_in, c_in, dy_in = (ins[sum(counts[:i]) : sum(counts[: i + 1])] for i in range(4))
    y_out, *rest = traced.jaxpr.outvars
    more_out, (dx_out, *dw_out) = rest[: said.num_leaves], rest[said.num_leaves :]
    fixed = [*w_in, *c_in]

    free = graph.reached(fixed)  # follows from weights and constants alone
    forward = graph.reached([*fixed, *x_in])
    if remat == "full":
        saved = list(x_in)
    elif remat == "elementwise":
        wanted = set(names)
        named = [e.outvars[0] for e in graph.eqns if e.primitive.name == "name" and e.params["name"] in wanted]
        saved = [*x_in, *(v for v in named if v in forward)]
    else:
        needed = graph.inputs([dx_out, *dw_out], forward)
        saved = [v for v in needed if v in forward and v not in free]
    goals = [dx_out] if split else [dx_out, *dw_out]
    made = graph.made(goals, [*fixed, *dy_in, *saved])
    early = [i for i, v in enumerate(dw_out) if not split or isinstance(v, core.Literal) or v in made]
    late = [i for i in range(len(dw_out)) if i not in early]
    left = graph.inputs([dw_out[i] for i in late], made | set(saved) | set(dy_in))
    pending = [v for v in left if v not in free and v not in saved and v not in c_in]
    return SplitLayer(
        jax.tree.structure(w),
        said,
        tuple(v.aval for v in saved),
        tuple(v.aval for v in pending),
        graph.function([*w_in, *x_in, *c_in], [y_out, *more_out, *saved]),
        graph.function([*fixed, *dy_in, *saved], [dx_out, *(dw_out[i] for i in early), *pending]),
        graph.function([*fixed, *saved, *pending], [dw_out[i] for i in late]),
        tuple(early),
        tuple(late),
    )


def _inlined(closed: Any) -> Callable[..., list[Any]]:
    """The function of a jaxpr, with calls of jitted functions opened."""

    def run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else values[atom]

        for eqn in jaxpr.eqns:
            inputs = [read(v) for v in eqn.invars]
            if eqn.primitive.name in ("jit", "pjit"):
                inner = eqn.params["jaxpr"]
                outs = run(inner.jaxpr, inner.consts, inputs)
            else:
                with eqn.ctx.manager:
                    outs = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
                outs = outs if eqn.primitive.multiple_results else [outs]
            values.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    return lambda *args: run(closed.jaxpr, closed.consts, args)


class _Graph:
    """Equations of a jaxpr, to be cut in parts."""

    def __init__(self, closed: Any):
        self.closed = closed
        self.eqns = list(closed.jaxpr.eqns)
        self.of = {v: e for e in self.eqns for v in e.outvars}

    def reached(self, given: Iterable[Any]) -> set[Any]:
        """Values that follow from ``given`` and constants alone."""
        known = {*given, *self.closed.jaxpr.constvars}
        for e in self.eqns:
            if all(isinstance(v, core.Literal) or v in known for v in e.invars):
                known.update(e.outvars)
        return known

    def slice(self, goals: Iterable[Any], given: Iterable[Any]) -> list[Any]:
        """Equations that make ``goals`` of ``given``, in order."""
        known, wanted, out = set(given), set(), []
        wanted.update(v for v in goals if not isinstance(v, core.Literal) and v not in known)
        for e in reversed(self.eqns):
            if any(v in wanted for v in e.outvars):
                out.append(e)
                wanted.update(v for v in e.invars if not isinstance(v, core.Literal) and v not in known)
        return out[::-1]

    def made(self, goals: Iterable[Any], given: Iterable[Any]) -> set[Any]:
        """All that is made on the way to ``goals``."""
        return {v for e in self.slice(goals, given) for v in e.outvars}

    def inputs(self, goals: Iterable[Any], given: set[Any]) -> list[Any]:
        """Those of ``given`` that making ``goals`` takes, in order."""
        goals = [v for v in goals if not isinstance(v, core.Literal)]
        read = [v for e in self.slice(goals, given) for v in e.invars if not isinstance(v, core.Literal)]
        return list(dict.fromkeys(v for v in [*read, *goals] if v in given))

    def function(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[..., list[Any]]:
        """A function of values ``inputs`` that gives ``outputs``."""
        jaxpr = self.closed.jaxpr
        part = jaxpr.replace(invars=list(inputs), outvars=list(outputs), eqns=self.slice(outputs, inputs))
        return core.jaxpr_as_fun(core.ClosedJaxpr(part, self.closed.consts))
