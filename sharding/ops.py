"""Operations that say where their result lives, by logical axes.

Outside a mesh, and inside a fully manual ``jax.shard_map``, they are the plain operation: there is nothing to say.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from sharding import ring
from sharding.rules import DEFAULT, LogicalAxes, Rules, split_sizes

GATHERED_WEIGHT = "gathered_weight"
"""Name under which ``gather_weight``'s results are known to ``jax.checkpoint`` policies."""
SCATTERED_SUM = "scattered_sum"
"""And ``project``'s, where devices hold summands and then parts of the sum: by it a policy that keeps no ``reshard``
keeps the parts, and not the summands."""

MatmulFn = Callable[[Array, Array, int, PartitionSpec | None], Array]
"""``(x, w, contract, where the result is)``: what ``project`` multiplies by, see ``use_matmul``."""

TokenSplit = Callable[[Callable[[Array], Array], Array], Array]
"""``(multiply, x) -> multiply(x)``, perhaps of some tokens after the others: see ``use_token_split``."""

_rules: ContextVar[Rules] = ContextVar("sharding_rules", default=DEFAULT)
_product: ContextVar[MatmulFn | None] = ContextVar("sharding_product", default=None)
_tokens: ContextVar[TokenSplit] = ContextVar("sharding_tokens", default=lambda multiply, x: multiply(x))


@contextlib.contextmanager
def use_rules(rules: Rules) -> Iterator[None]:
    """Traces the body under ``rules``.

    Enter it *inside* the function that is jitted: rules are not part of jit's cache key, the function is.
    """
    token = _rules.set(rules)
    try:
        yield
    finally:
        _rules.reset(token)


@contextlib.contextmanager
def use_matmul(product: MatmulFn | None) -> Iterator[None]:
    """Traces the body with another product of activations and weights than the plain one, such as one of 8 bits."""
    token = _product.set(product)
    try:
        yield
    finally:
        _product.reset(token)


@contextlib.contextmanager
def use_token_split(by: TokenSplit) -> Iterator[None]:
    """Traces the body with ``by`` around every ``project`` whose result no device has a summand of."""
    token = _tokens.set(by)
    try:
        yield
    finally:
        _tokens.reset(token)


def current_rules() -> Rules:
    """The rules in force."""
    return _rules.get()


def current_mesh() -> AbstractMesh | None:
    """The mesh in force if it has explicit axes of more than one device, else None.

    Some of its axes may be manual (inside a pipeline's ``jax.shard_map``); the others split arrays as ever.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or AxisType.Auto in mesh.axis_types or math.prod(split_sizes(mesh).values()) == 1:
        return None
    return mesh


def _sums_can_wait(mesh: AbstractMesh) -> bool:
    """Whether ``jax.P(unreduced=...)`` can be used: XLA knows no array that is both it and manual over some axes."""
    return AxisType.Manual not in mesh.axis_types


def spec(*logical: str | None, shape: Sequence[int] | None = None, what: str = "activation") -> PartitionSpec:
    """Partition spec of logical axes under the rules and mesh in force (all-None outside a mesh)."""
    mesh = current_mesh()
    if mesh is None:
        return PartitionSpec(*(None,) * len(logical))
    return current_rules().spec(logical, mesh, shape, what=what)


def constrain(x: Array, *logical: str | None, what: str = "activation") -> Array:
    """``x``, moved if need be to where its logical axes say."""
    if current_mesh() is None:
        return x
    return jax.sharding.reshard(x, spec(*logical, shape=x.shape, what=what))


def fan_out(x: Array, *logical: str | None, over: str, what: str = "activation") -> Array:
    """``constrain``, for an array that several products meet whose other factor is split over the axes of ``over``.

    What reaches back through them is added up on each device before it is summed over devices: once, not once for each
    product (the operator f of Megatron, arXiv:1909.08053 section 3).
    """
    mesh = current_mesh()
    if mesh is None:
        return x
    there = spec(*logical, shape=x.shape, what=what)
    if not _sums_can_wait(mesh):
        return jax.sharding.reshard(x, there)
    return jax.sharding.reshard(x, jax.P(*there, reduced=frozenset(axis_names(over)) - _mesh_axes(there)))


def einsum(equation: str, *operands: Array, out: LogicalAxes, what: str = "activation") -> Array:
    """``jnp.einsum`` whose result lives where ``out`` says.

    Contractions over a split dimension become partial sums; ``out`` decides who gets the total.
    """
    mesh = current_mesh()
    if mesh is None:
        return jnp.einsum(equation, *operands)
    return jnp.einsum(equation, *operands, out_sharding=current_rules().spec(out, mesh, what=what))


def project_many(
    x: Array,
    weights: Sequence[Array],
    outs: Sequence[LogicalAxes],
    *,
    over: str,
    scopes: Sequence[str] = (),
    what: str = "activation",
) -> list[Array]:
    """``project`` of the residual stream with several column-parallel weights (tensor parallelism).

    Where the rules have a ring for it, the all-gather of the sequence runs as a collective matmul.

    Args:
        outs: logical axes of each result.
        over: logical axis of the results that is split over devices.
        scopes: ``jax.named_scope`` of each matmul; none by default.
    """
    mesh = current_mesh()
    if (axis := _ring(over)) is None or mesh is None:
        x = fan_out(x, "batch", "seq", "act_embed", over=over, what=what)
        found = []
        for i, (w, out) in enumerate(zip(weights, outs, strict=True)):
            with jax.named_scope(scopes[i]) if scopes else contextlib.nullcontext():
                found.append(project(x, w, out, what=what))
        return found

    def local(x: Array, *weights: Array) -> tuple[Array, ...]:
        first, *rest = _alike(x, *weights)
        return ring.all_gather_matmul(axis, first, tuple(rest))

    with jax.named_scope("+".join(scopes)) if scopes else contextlib.nullcontext():
        return list(
            jax.shard_map(
                local,
                mesh=mesh,
                in_specs=(spec("batch", "residual_seq", "act_embed"), *(_spec_of(w) for w in weights)),
                out_specs=tuple(spec(*out, what=what) for out in outs),
                axis_names=set(split_sizes(mesh)),
            )(x, *weights)
        )


def _ring(over: str) -> str | None:
    """The mesh axis that splits the residual stream's sequence and ``over``, if products go around it in a ring."""
    axes = set(axis_names("residual_seq")) & set(axis_names(over)) & set(current_rules().rings)
    return axes.pop() if axes else None


def _alike(*arrays: Array) -> list[Array]:
    """The arrays, each varying over all manual axes that any of them varies over."""
    kinds = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    every = frozenset().union(*kinds)
    return [
        jax.lax.pcast(x, tuple(sorted(every - kind)), to="varying") if every - kind else x
        for x, kind in zip(arrays, kinds, strict=True)
    ]


def _spec_of(w: Array) -> PartitionSpec:
    there = jax.typeof(w).sharding.spec
    return jax.P(*there.partitions, reduced=there.reduced)


def project(x: Array, w: Array, out: LogicalAxes, *, contract: int = 1, what: str = "activation") -> Array:
    """Applies a weight to every token: ``x[B, S, *in]`` times ``w[*in, *out]``, over ``contract`` dimensions.

    Args:
        out: logical axes of the result ``[B, S, *out]``.
        contract: how many trailing dimensions of x meet as many leading ones of w.
    """
    mesh = current_mesh()
    if mesh is None:
        # Tokens as one dimension: the weight's gradient then contracts one dimension and not two, which XLA:CPU
        # runs as a plain matrix product instead of copying the activations transposed (a third of the step's time).
        product = _product.get() or (lambda x, w, *_: x @ w)

        def flat(x: Array) -> Array:
            tokens = x.shape[: x.ndim - contract]
            out = product(x.reshape(math.prod(tokens), -1), w.reshape(math.prod(w.shape[:contract]), -1), 1, None)
            return out.reshape(*tokens, *w.shape[contract:])

        return _tokens.get()(flat, x)
    there = current_rules().spec(out, mesh, what=what)
    summed = _mesh_axes(jax.typeof(w).sharding.spec.partitions[:contract])
    if not summed & _mesh_axes(there):
        return _tokens.get()(lambda x: _dot(x, w, contract, there), x)
    if summed <= set(current_rules().rings):
        return _scattered(x, w, there, contract)
    # The axis that is summed over also splits the result: summands first and then their scattered sums, so that the
    # transpose is as plain, a gathered cotangent meeting the whole of x.
    parts = jax.P(*_without(there, summed), unreduced=summed if _sums_can_wait(mesh) else frozenset())
    summands = _dot(x, w, contract, parts)
    return checkpoint_name(jax.sharding.reshard(summands, there), SCATTERED_SUM)


def split_tokens(x: Array, share: float) -> tuple[Array, Array]:
    """The first of a device's tokens in each row, such a share of them, and the others; ``x[B, S, ...]``."""
    spec = _sequence_spec(x)
    if spec is None:
        k = round(share * x.shape[1])
        return x[:, :k], x[:, k:]
    halves = lambda x: (x[:, : (k := round(share * x.shape[1]))], x[:, k:])  # noqa: E731
    mesh = jax.sharding.get_abstract_mesh()
    return jax.shard_map(halves, mesh=mesh, in_specs=spec, out_specs=(spec, spec), axis_names=set(split_sizes(mesh)))(x)


def join_tokens(first: Array, rest: Array) -> Array:
    """What ``split_tokens`` split."""
    both = lambda *halves: jnp.concatenate(halves, axis=1)  # noqa: E731
    if (spec := _sequence_spec(first)) is None:
        return both(first, rest)
    mesh = jax.sharding.get_abstract_mesh()
    names = set(split_sizes(mesh))
    return jax.shard_map(both, mesh=mesh, in_specs=(spec, spec), out_specs=spec, axis_names=names)(first, rest)


def _sequence_spec(x: Array) -> PartitionSpec | None:
    """The array's spec, if its sequence is split over devices."""
    if current_mesh() is None or jax.typeof(x).sharding.spec.partitions[1] is None:
        return None
    return _spec_of(x)


def _dot(x: Array, w: Array, contract: int, there: PartitionSpec) -> Array:
    """The product in force."""
    if (product := _product.get()) is not None:
        return product(x, w, contract, there)
    dims = tuple(range(x.ndim - contract, x.ndim)), tuple(range(contract))
    return jax.lax.dot_general(x, w, (dims, ((), ())), out_sharding=there)


def _scattered(x: Array, w: Array, there: PartitionSpec, contract: int) -> Array:
    """The product whose sum over devices is scattered over the sequence, around a ring."""
    (axis,) = _mesh_axes(_spec_of(w).partitions[:contract])

    def local(x: Array, w: Array) -> Array:
        x, w = _alike(x, w)
        flat = x.reshape(*x.shape[:-contract], -1), w.reshape(math.prod(w.shape[:contract]), -1)
        return ring.matmul_reduce_scatter(axis, *flat)

    mesh = jax.sharding.get_abstract_mesh()
    specs = jax.typeof(x).sharding.spec, _spec_of(w)
    names = set(split_sizes(mesh))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=there, axis_names=names)(x, w)


def take(table: Array, ids: Array, out: LogicalAxes, what: str = "embedding") -> Array:
    """Rows ``table[ids]``; the table may be split over its rows."""
    mesh = current_mesh()
    if mesh is None:
        return table[ids]
    there = current_rules().spec(out, mesh, what=what)
    # Each device finds the rows it has, for all tokens; only then may the axis of the rows split the tokens.
    rows = _mesh_axes(jax.typeof(table).sharding.spec.partitions[:1])
    found = table.at[ids].get(out_sharding=_without(there, rows))
    return jax.sharding.reshard(found, there)


def gather_weight(w: Array, *logical: str | None, unreduced_grad: bool = False, what: str = "weight") -> Array:
    """A weight as it is used: whole over the axes it is only stored split over (fsdp), still split over tensor.

    Args:
        unreduced_grad: its gradient is one summand a device (``jax.P(unreduced=...)``) over the axes that split tokens,
            until the transpose of this adds it up and scatters it to where the weight is stored, or the caller does so
            who gathers ahead of all uses. Only a weight that products and lookups use can do so; one that was gathered
            in this way before is left alone.
    """
    mesh = current_mesh()
    if mesh is None or jax.typeof(w).sharding.spec.reduced:
        return w
    whole = current_rules().spec(logical, mesh, w.shape, gathered=True, what=what)
    if unreduced_grad and _sums_can_wait(mesh):
        late = frozenset(axis_names("batch", "seq")) - _mesh_axes(whole)
        stored = jax.typeof(w).sharding.spec
        # In two steps, so that the gradient is first scattered and then only the parts are summed over replicas.
        w = jax.sharding.reshard(w, jax.P(*stored, reduced=late - _mesh_axes(stored)))
        whole = jax.P(*whole, reduced=late)
    return checkpoint_name(jax.sharding.reshard(w, whole), GATHERED_WEIGHT)


def reduce_partial_sums(x: Array, like: Array) -> Array:
    """``x`` where ``like`` is, what devices hold as summands (``jax.P(unreduced=...)``) added up.

    First over the axes that then split the sum, so that only parts travel over the others.
    """
    if current_mesh() is None:
        return x
    there, late = jax.typeof(like).sharding.spec, jax.typeof(x).sharding.spec.unreduced
    if rest := late - _mesh_axes(there):
        x = jax.sharding.reshard(x, jax.P(*there, unreduced=rest))
    return jax.sharding.reshard(x, there)


def shard_map(
    fn: Callable[..., Any],
    in_specs: Sequence[LogicalAxes | None],
    out_specs: LogicalAxes | tuple[LogicalAxes, ...],
    *,
    check: bool = True,
) -> Callable[..., Any]:
    """``fn`` run per shard, fully manual; arguments are moved to ``in_specs`` first.

    Args:
        in_specs: logical axes of each argument; None for an argument that is absent (None).
        out_specs: logical axes of the result, or a tuple of them.
        check: over which axes values vary is followed, which derivatives need; loops that begin with constants then
            have to say over which these do.

    The plain ``fn`` where there is no mesh.
    """
    mesh = current_mesh()
    if mesh is None:
        return fn
    rules = current_rules()

    def call(*args: Array | None) -> Any:
        present = [(a, axes) for a, axes in zip(args, in_specs, strict=True) if a is not None]
        specs = [_argument_spec(rules, mesh, a, axes or ()) for a, axes in present]
        moved = [jax.sharding.reshard(a, s) for (a, _), s in zip(present, specs, strict=True)]

        def local(*shards: Array) -> Any:
            rest = iter(shards)
            return fn(*(None if a is None else next(rest) for a in args))

        many = bool(out_specs) and isinstance(out_specs[0], tuple)
        outs = (
            tuple(rules.spec(o, mesh) for o in out_specs)  # type: ignore[union-attr]
            if many
            else rules.spec(out_specs, mesh)  # type: ignore[arg-type]
        )
        names = set(split_sizes(mesh))
        run = jax.shard_map(local, mesh=mesh, in_specs=tuple(specs), out_specs=outs, axis_names=names, check_vma=check)
        return run(*moved)

    return call


def per_shard(fn: Callable[..., Any], over: str) -> Callable[..., Any]:
    """``fn`` for every shard of the logical axis ``over``, which is dim 0 of all arrays and whole for each shard: of 1.

    ``fn`` sees and gives trees of arrays without that dim, and speaks to no other shard. Where other mesh axes split
    devices further, each does the same.
    """

    def local(*args: Any) -> Any:
        out = fn(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: x[None], out)

    mesh = current_mesh()
    if mesh is None:
        return local
    there = current_rules().spec((over,), mesh)

    def call(*args: Any) -> Any:
        moved = jax.tree.map(lambda x: jax.sharding.reshard(x, jax.P(*there, *(None,) * (x.ndim - 1))), args)
        names = set(split_sizes(mesh))
        # Not checked: loops that begin with constants would each have to say over which axes these vary.
        run = jax.shard_map(local, mesh=mesh, in_specs=there, out_specs=there, axis_names=names, check_vma=False)
        return run(*moved)

    return call


def _argument_spec(rules: Rules, mesh: AbstractMesh, x: Array, axes: LogicalAxes) -> PartitionSpec:
    spec = rules.spec(axes, mesh, x.shape, what="argument of a kernel")
    reduced = jax.typeof(x).sharding.spec.reduced  # of a weight gathered once: its gradient stays unsummed
    return jax.P(*spec, reduced=reduced) if reduced else spec


def _names(part: Any) -> tuple[str, ...]:
    """Mesh axes of one dimension of a partition spec."""
    return () if part is None else part if isinstance(part, tuple) else (part,)


def _without(spec: PartitionSpec, axes: frozenset[str]) -> PartitionSpec:
    """The spec less some mesh axes."""
    return jax.P(*(tuple(a for a in _names(part) if a not in axes) or None for part in spec))


def _mesh_axes(parts: Iterable[Any]) -> frozenset[str]:
    """Mesh axes of a partition spec."""
    return frozenset(axis for part in parts for axis in _names(part))


def axis_names(*logical: str) -> tuple[str, ...]:
    """Mesh axes (of more than one device) that these logical axes are split over: the names a kernel reduces over."""
    mesh = current_mesh()
    if mesh is None:
        return ()
    rules = current_rules()
    sizes = split_sizes(mesh)
    return tuple(a for name in logical for a in rules.mesh_axes(name) if sizes.get(a, 1) > 1)


def axis_size(*logical: str) -> int:
    """Number of shards these logical axes are split into (1 outside a mesh)."""
    mesh = current_mesh()
    return 1 if mesh is None else math.prod(mesh.shape[a] for a in axis_names(*logical))


@contextlib.contextmanager
def use_mesh(mesh: Mesh) -> Iterator[Mesh]:
    """Runs the body on ``mesh``."""
    with jax.set_mesh(mesh):
        yield mesh
