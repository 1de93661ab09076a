"""Layer split for pipelining: forward and backward pass become F (forward), B (input grads) and W (weight grads).

The whole pass ``(w, x, consts, dy) -> (y, dx, dw)`` is traced once. F has the equations that y needs; B the others that
dx needs; W those that are left for dw. The values that F saves for B follow from the model's ``remat``, as with
``jax.checkpoint``: x alone ("full"), x and the named matmul results ("elementwise"), or all that B needs ("none"); B
recomputes the rest. Values that follow from weights and constants alone are never saved. W takes from B the values that
both need.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend import core

Remat = Literal["none", "elementwise", "full"]


@dataclass(frozen=True)
class SplitLayer:
    """Layer split into F, B and W, each a function of flat lists of values.

    Attributes:
        tree: tree structure of the weights.
        more: tree structure of the layer's auxiliary output.
        saved: shapes and dtypes of the values that F saves.
        pending: shapes and dtypes of the values that B leaves for W; empty where B computes the weight gradients.
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
        """Runs F; returns y, the auxiliary output, and the saved values."""
        y, *rest = self._forward(*jax.tree.leaves((w, x, consts)))
        return y, self.more.unflatten(rest[: self.more.num_leaves]), rest[self.more.num_leaves :]

    def backward(self, w: Any, saved: Sequence[Any], consts: Any, dy: Any) -> tuple[Any, dict[int, Any], list[Any]]:
        """Runs B; returns dx, the weight gradients computed so far by index of the leaf, and the values for W."""
        dx, *rest = self._backward(*jax.tree.leaves((w, consts, dy)), *saved)
        early = dict(zip(self._early, rest, strict=False))
        return dx, early, rest[len(self._early) :]

    def weights(self, w: Any, saved: Sequence[Any], consts: Any, pending: Sequence[Any]) -> dict[int, Any]:
        """Runs W; returns the remaining weight gradients by index of the leaf."""
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
    trained: Sequence[bool] | None = None,
) -> SplitLayer:
    """Splits ``layer(w, x, consts) -> ((y, loss), more)``, where y has the shape and dtype of x.

    ``loss``, a scalar or None, is an auxiliary loss that is added to the loss of the step, so its gradient is one;
    ``more`` is any tree, without gradients.

    Args:
        w: tree of weights.
        consts: tree of arrays without gradients.
        remat: gradient checkpointing policy.
        names: ``checkpoint_name``s of the values that remat = "elementwise" saves.
        split: whether weight gradients are left to W, except those that are computed on the way to dx.
        trained: whether a leaf of ``w`` gets a gradient; None: all do.
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
    wanted_dw = [i for i in range(len(dw_out)) if trained is None or trained[i]]
    dw_goals = [dw_out[i] for i in wanted_dw]

    free = graph.reached(fixed)  # values that follow from weights and constants alone
    forward = graph.reached([*fixed, *x_in])
    if remat == "full":
        saved = list(x_in)
    elif remat == "elementwise":
        wanted = set(names)
        named = [e.outvars[0] for e in graph.eqns if e.primitive.name == "name" and e.params["name"] in wanted]
        saved = [*x_in, *(v for v in named if v in forward)]
    else:
        needed = graph.inputs([dx_out, *dw_goals], forward)
        saved = [v for v in needed if v in forward and v not in free]
    goals = [dx_out] if split else [dx_out, *dw_goals]
    made = graph.made(goals, [*fixed, *dy_in, *saved])
    early = [i for i in wanted_dw if not split or isinstance(dw_out[i], core.Literal) or dw_out[i] in made]
    late = [i for i in wanted_dw if i not in early]
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
    """Function of a jaxpr with inner jitted functions inlined; named scopes are kept."""

    def run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else values[atom]

        for eqn in jaxpr.eqns:
            inputs = [read(v) for v in eqn.invars]
            scope = str(eqn.source_info.name_stack)
            with jax.named_scope(scope) if scope else contextlib.nullcontext():
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
    """Dependency graph of a jaxpr's equations, from which functions of a part of them are built."""

    def __init__(self, closed: Any):
        self.closed = closed
        self.eqns = list(closed.jaxpr.eqns)
        self.of = {v: e for e in self.eqns for v in e.outvars}

    def reached(self, given: Iterable[Any]) -> set[Any]:
        """Values that depend on ``given`` and constants alone."""
        known = {*given, *self.closed.jaxpr.constvars}
        for e in self.eqns:
            if all(isinstance(v, core.Literal) or v in known for v in e.invars):
                known.update(e.outvars)
        return known

    def slice(self, goals: Iterable[Any], given: Iterable[Any]) -> list[Any]:
        """Equations that compute ``goals`` from ``given``, in order."""
        known, wanted, out = set(given), set(), []
        wanted.update(v for v in goals if not isinstance(v, core.Literal) and v not in known)
        for e in reversed(self.eqns):
            if any(v in wanted for v in e.outvars):
                out.append(e)
                wanted.update(v for v in e.invars if not isinstance(v, core.Literal) and v not in known)
        return out[::-1]

    def made(self, goals: Iterable[Any], given: Iterable[Any]) -> set[Any]:
        """Values that are computed on the way from ``given`` to ``goals``."""
        return {v for e in self.slice(goals, given) for v in e.outvars}

    def inputs(self, goals: Iterable[Any], given: set[Any]) -> list[Any]:
        """Members of ``given`` that computing ``goals`` takes, in order."""
        goals = [v for v in goals if not isinstance(v, core.Literal)]
        read = [v for e in self.slice(goals, given) for v in e.invars if not isinstance(v, core.Literal)]
        return list(dict.fromkeys(v for v in [*read, *goals] if v in given))

    def function(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[..., list[Any]]:
        """Function from values ``inputs`` to ``outputs``."""
        jaxpr = self.closed.jaxpr
        part = jaxpr.replace(invars=list(inputs), outvars=list(outputs), eqns=self.slice(outputs, inputs))
        return core.jaxpr_as_fun(core.ClosedJaxpr(part, self.closed.consts))
