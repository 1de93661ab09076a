"""Sharded operations: matmuls, lookups and shard_maps whose result's sharding is given by logical axes.

Tensor parallelism, FSDP (ZeRO) and sequence parallelism follow from the rules in force. Outside a mesh, and inside a
fully manual ``jax.shard_map``, these are the plain operations.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from sharding import collective_matmul, int8_gather, layer_layouts, partial_sums
from sharding.mesh import ShardingError
from sharding.rules import DEFAULT, FEATURES, LogicalAxes, Rules, mesh_axes_of, split_sizes, without_axes
from sharding.star_sum import star_sum

GATHERED_WEIGHT = "gathered_weight"
"""``checkpoint_name`` of the results of ``gather_weight``."""
SCATTERED_SUM = "scattered_sum"
"""``checkpoint_name`` of results of ``project`` that are reduce-scattered partial sums: a policy that saves no
``reshard`` then still saves the scattered result, instead of the partial sums."""

MatmulFn = Callable[[Array, Array, int, PartitionSpec | None], Array]
"""Matmul ``(x, w, contract, out_sharding) -> result`` that ``project`` uses, such as one in INT8 or FP8."""

ShardMatmulFn = Callable[..., Array]
"""Matmul ``(x, *arrays of the weight, over, tokens) -> result`` of one device's shards; see ``project_by_shard``."""

_BESIDE = {"heads": "act_heads", "kv_heads": "act_kv_heads", "mlp": "act_mlp"}
"""Logical axes of activations, by those of the columns of the weights that compute them."""

_rules: ContextVar[Rules] = ContextVar("sharding_rules", default=DEFAULT)


@contextlib.contextmanager
def use_rules(rules: Rules) -> Iterator[None]:
    """Context manager: traces the body under sharding rules.

    Enter it *inside* the jitted function: the rules are not part of jit's cache key, but the function is.
    """
    token = _rules.set(rules)
    try:
        yield
    finally:
        _rules.reset(token)


def current_rules() -> Rules:
    """Sharding rules in force."""
    return _rules.get()


def current_mesh() -> AbstractMesh | None:
    """Mesh in force if it has explicit axes of more than one device, else None.

    Some of its axes may be manual (inside the ``jax.shard_map`` of a pipeline); the others still split arrays.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or AxisType.Auto in mesh.axis_types or math.prod(split_sizes(mesh).values()) == 1:
        return None
    return mesh


def _supports_unreduced(mesh: AbstractMesh) -> bool:
    """Whether ``jax.P(unreduced=...)`` can be used: XLA has no arrays that are both unreduced and partly manual."""
    return AxisType.Manual not in mesh.axis_types


def spec(*logical: str | None, shape: Sequence[int] | None = None, what: str = "activation") -> PartitionSpec:
    """Partition spec of logical axes under the rules and mesh in force; all-None outside a mesh."""
    mesh = current_mesh()
    if mesh is None:
        return PartitionSpec(*(None,) * len(logical))
    return current_rules().spec(logical, mesh, shape, what=what)


def constrain(x: Array, *logical: str | None, what: str = "activation") -> Array:
    """``x`` resharded to what its logical axes say."""
    if current_mesh() is None:
        return x
    return jax.sharding.reshard(x, spec(*logical, shape=x.shape, what=what))


def fan_out(x: Array, *logical: str | None, over: str, what: str = "activation") -> Array:
    """``constrain`` for the input of several column-parallel matmuls whose weights are split over the axes of ``over``.

    In the backward pass the gradients from all of them are added on each device first, and all-reduced once instead of
    once per matmul (the operator f of Megatron, arXiv:1909.08053 section 3).
    """
    mesh = current_mesh()
    if mesh is None:
        return x
    there = spec(*logical, shape=x.shape, what=what)
    if not _supports_unreduced(mesh):
        return jax.sharding.reshard(x, there)
    return jax.sharding.reshard(x, jax.P(*there, reduced=frozenset(axis_names(over)) - mesh_axes_of(there)))


def whole_rows(x: Array, *, over: str) -> Array:
    """Hidden states with all features on each device, for a matrix whose rows are split over the axes of ``over``.

    Unchanged where no mesh axis splits features. Gradients are reduce-scattered over ``features``, and then summed over
    the other axes (2D tensor parallelism).
    """
    mesh = current_mesh()
    if mesh is None or split_sizes(mesh).get(FEATURES, 1) == 1:
        return x
    x, there = fan_out(x, "batch", "seq", "act_embed", over=over), spec("batch", "seq", None)
    reduced = frozenset(axis_names(over)) if _supports_unreduced(mesh) else frozenset()
    return jax.sharding.reshard(x, jax.P(*there, reduced=reduced))


def einsum(equation: str, *operands: Array, out: LogicalAxes, what: str = "activation") -> Array:
    """``jnp.einsum`` with a result sharded by the logical axes ``out``.

    Contractions over a split dimension give partial sums; ``out`` decides whether they are all-reduced or
    reduce-scattered.
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
    if (axis := ring_axis(over)) is None or mesh is None:
        x = fan_out(x, "batch", "seq", "act_embed", over=over, what=what)
        found = []
        for i, (w, out) in enumerate(zip(weights, outs, strict=True)):
            with jax.named_scope(scopes[i]) if scopes else contextlib.nullcontext():
                found.append(project(x, w, out, what=what))
        return found

    def local(x: Array, *weights: Array) -> tuple[Array, ...]:
        first, *rest = _alike(x, *weights)
        return collective_matmul.all_gather_matmul(axis, first, tuple(rest))

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


def ring_axis(over: str) -> str | None:
    """Mesh axis that splits both the residual stream's sequence and ``over``, if the rules use collective matmul."""
    axes = set(axis_names("residual_seq")) & set(axis_names(over)) & set(current_rules().rings)
    return axes.pop() if axes else None


def _alike(*arrays: Array) -> list[Array]:
    """Arrays that all vary over the manual axes that any of them varies over."""
    kinds = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    every = frozenset().union(*kinds)
    return [
        jax.lax.pcast(x, tuple(sorted(every - kind)), to="varying") if every - kind else x
        for x, kind in zip(arrays, kinds, strict=True)
    ]


def _spec_of(w: Array) -> PartitionSpec:
    there = jax.typeof(w).sharding.spec
    return jax.P(*there.partitions, reduced=there.reduced)


def project(
    x: Array,
    w: Array,
    out: LogicalAxes,
    *,
    contract: int = 1,
    multiply: MatmulFn | None = None,
    what: str = "activation",
) -> Array:
    """Matmul of activations and a weight: ``x[B, S, *in] @ w[*in, *out] -> [B, S, *out]``.

    Args:
        out: logical axes of the result.
        contract: number of trailing dimensions of x that are contracted with as many leading ones of w.
        multiply: the matmul on the arrays; None for the plain one. Collective matmuls support the plain one alone.

    Raises:
        ShardingError: ``multiply`` where the rules ask for a collective matmul.
    """
    mesh = current_mesh()
    if mesh is None:
        tokens, columns = x.shape[: x.ndim - contract], w.shape[contract:]
        if multiply is None and current_rules().keep_heads:
            rows = x.reshape(math.prod(tokens), *w.shape[:contract])
            return _dot(rows, w, contract, None).reshape(*tokens, *columns)
        # Tokens as one dimension: the weight gradient then contracts one dimension instead of two, which XLA:CPU runs
        # as a plain matmul; otherwise it copies the activations transposed, a third of the step's time.
        rows = x.reshape(math.prod(tokens), -1)
        matmul = multiply or (lambda x, w, *_: multiply_rows(lambda x: x @ w, x))
        return matmul(rows, w.reshape(rows.shape[1], -1), 1, None).reshape(*tokens, *columns)
    matmul = multiply or _dot
    x, w = _inputs_there(x, w, contract), _reduced_over_tokens(x, w, contract)
    there = current_rules().spec(out, mesh, (*x.shape[: x.ndim - contract], *w.shape[contract:]), what=what)
    if not (summed := summed_axes(w, contract)) & mesh_axes_of(there):
        if _goes_through_star(summed, x, w, there, contract):
            return _through_star(lambda x, w: matmul(x, w, contract, None), x, (w,), there, contract)
        return matmul(x, w, contract, there)
    if summed <= set(current_rules().rings):
        if multiply is not None:
            raise ShardingError(
                f"{what}: a collective matmul over {', '.join(sorted(summed))} multiplies plain weights only, not in "
                "low precision or from compressed activations; leave the rings out of the sharding rules."
            )
        return _scattered(x, w, there, contract)
    # The axis that is summed over also splits the result: compute partial sums, then reduce-scatter them. The transpose
    # is then an all-gather of the cotangent and one matmul with the whole of x.
    parts = jax.P(*without_axes(there, summed), unreduced=summed if _supports_unreduced(mesh) else frozenset())
    return checkpoint_name(jax.sharding.reshard(matmul(x, w, contract, parts), there), SCATTERED_SUM)


def _inputs_there(x: Array, w: Array, contract: int) -> Array:
    """Activations all-gathered over ``features``, where it splits their inputs further than those of the weight.

    Where it splits the outputs of the weight, their gradient is partial sums there, and is reduce-scattered.
    """
    kept, own = jax.typeof(x).sharding.spec, x.ndim - contract
    extra = (mesh_axes_of(kept.partitions[own:]) - summed_axes(w, contract)) & {FEATURES}
    if not extra:
        return x
    late = extra & mesh_axes_of(jax.typeof(w).sharding.spec.partitions[contract:])
    late = late if _supports_unreduced(jax.sharding.get_abstract_mesh()) else frozenset()
    return jax.sharding.reshard(x, jax.P(*without_axes(jax.P(*kept.partitions), extra), reduced=kept.reduced | late))


def _reduced_over_tokens(x: Array, w: Array, contract: int) -> Array:
    """Weight whose gradient stays partial sums over all axes that split the tokens of ``x``, if it does over some.

    The tokens of a router may be split over more axes than those of the rest of the model.
    """
    kept = jax.typeof(w).sharding.spec.reduced
    tokens = mesh_axes_of(jax.typeof(x).sharding.spec.partitions[: x.ndim - contract])
    if not kept or tokens <= kept:
        return w
    return jax.sharding.reshard(w, jax.P(*_spec_of(w).partitions, reduced=kept | tokens))


def multiply_rows(multiply: Callable[[Array], Array], x: Array, leading: int = 1) -> Array:
    """A matmul of activations whose first ``leading`` dimensions are rows; of a single row, on TPUs, twice that row.

    A TPU multiplies one row by its vector unit, which takes several times as long as reading the weight; its matrix
    unit keeps up with memory from two rows on (``python -m benchmarks.engine_bytes --batches 1,2``).
    """
    if math.prod(x.shape[:leading]) != 1:
        return multiply(x)
    axis = leading - 1

    def doubled(x: Array) -> Array:
        # Behind a barrier, so that no compiler finds the rows equal.
        both = jax.lax.optimization_barrier(jnp.concatenate([x, x], axis))
        return jax.lax.slice_in_dim(multiply(both), 0, 1, axis=axis)

    return jax.lax.platform_dependent(x, tpu=doubled, default=multiply)


def project_by_shard(
    multiply: ShardMatmulFn, x: Array, weight: tuple[Array, ...], out: LogicalAxes, contract: int
) -> Array:
    """Matmul of activations and a weight that consists of several arrays, each device with its shards.

    Args:
        multiply: the matmul of shards of ``x[B, S, *in]`` and of the weight's arrays; is told the mesh axes that the
            inputs are split over, whose partial sums are added, and those that the tokens are split over.
        weight: arrays, the first of which is sharded like ``[*in, *out]``.
        out: logical axes of the result.
    """
    mesh = current_mesh()
    if mesh is None:
        return multiply(x, *weight, (), ())
    there = current_rules().spec(out, mesh, what="activation")
    first = _spec_of(weight[0])
    of_inputs, of_tokens = first.partitions[:contract], _spec_of(x).partitions[: x.ndim - contract]
    x = jax.sharding.reshard(x, jax.P(*of_tokens, *of_inputs))
    over, tokens = tuple(sorted(mesh_axes_of(of_inputs))), tuple(sorted(mesh_axes_of(of_tokens)))
    sharded = jax.P(*of_tokens, *first.partitions[contract:])
    if _goes_through_star(frozenset(over), x, weight[0], there, contract):
        return _through_star(lambda *shards: multiply(*shards, over, tokens), x, weight, there, contract)
    partial = bool(over) and _supports_unreduced(mesh)
    if partial:
        sharded = jax.P(*sharded, unreduced=frozenset(over))

    def of_shard(*shards: Array) -> Array:
        found = multiply(*shards, over, tokens)
        return jax.lax.psum(found, over) if over and not partial else found

    return jax.sharding.reshard(by_shard(of_shard, x, *weight, out=sharded), there)


def is_scattered(w: Array, out: LogicalAxes, *, contract: int = 1) -> bool:
    """Whether the results of ``project`` with this weight are partial sums that are reduce-scattered."""
    mesh = current_mesh()
    return mesh is not None and bool(summed_axes(w, contract) & mesh_axes_of(current_rules().spec(out, mesh)))


def summed_axes(w: Array, contract: int) -> frozenset[str]:
    """Mesh axes that the sums of a matmul with this weight run over."""
    return frozenset(mesh_axes_of(jax.typeof(w).sharding.spec.partitions[:contract]))


def split_tokens(x: Array, share: float) -> tuple[Array, Array]:
    """First ``share`` of a device's tokens in each row, and the others: ``x[B, S, ...]`` split along S."""
    spec = _sequence_spec(x)
    if spec is None:
        k = round(share * x.shape[1])
        return x[:, :k], x[:, k:]
    halves = lambda x: (x[:, : (k := round(share * x.shape[1]))], x[:, k:])  # noqa: E731
    mesh = jax.sharding.get_abstract_mesh()
    return jax.shard_map(halves, mesh=mesh, in_specs=spec, out_specs=(spec, spec), axis_names=set(split_sizes(mesh)))(x)


def join_tokens(first: Array, rest: Array) -> Array:
    """Inverse of ``split_tokens``."""
    both = lambda *halves: jnp.concatenate(halves, axis=1)  # noqa: E731
    if (spec := _sequence_spec(first)) is None:
        return both(first, rest)
    mesh = jax.sharding.get_abstract_mesh()
    names = set(split_sizes(mesh))
    return jax.shard_map(both, mesh=mesh, in_specs=(spec, spec), out_specs=spec, axis_names=names)(first, rest)


def _sequence_spec(x: Array) -> PartitionSpec | None:
    """Partition spec of an array if its sequence is split over devices, else None."""
    if current_mesh() is None or jax.typeof(x).sharding.spec.partitions[1] is None:
        return None
    return _spec_of(x)


def _dot(x: Array, w: Array, contract: int, there: PartitionSpec | None) -> Array:
    """Plain matmul, a ``MatmulFn``."""
    dims = tuple(range(x.ndim - contract, x.ndim)), tuple(range(contract))
    plain = lambda x: jax.lax.dot_general(x, w, (dims, ((), ())), out_sharding=there)  # noqa: E731
    return multiply_rows(plain, x, x.ndim - contract)


def _goes_through_star(summed: frozenset[str], x: Array, w: Array, there: PartitionSpec, contract: int) -> bool:
    """Whether the partial sums of a matmul over these mesh axes are added through one device."""
    most = current_rules().star_bytes
    if not most or len(summed) != 1 or summed & mesh_axes_of(there):
        return False
    sizes = split_sizes(jax.sharding.get_abstract_mesh())
    shards = math.prod(sizes[axis] for axis in mesh_axes_of(there))
    elements = math.prod(x.shape[: x.ndim - contract]) * math.prod(w.shape[contract:]) // shards
    return elements * x.dtype.itemsize <= most


def _through_star(
    multiply: Callable[..., Array], x: Array, weight: tuple[Array, ...], there: PartitionSpec, contract: int
) -> Array:
    """Matmul whose partial sums over one mesh axis are added through one device.

    Args:
        multiply: the matmul of shards of ``x`` and of the weight's arrays.
        there: partition spec of the result.
    """
    mesh = jax.sharding.get_abstract_mesh()
    first = _spec_of(weight[0])
    (axis,) = mesh_axes_of(first.partitions[:contract])
    rows = _spec_of(x).partitions[: x.ndim - contract]
    x = jax.sharding.reshard(x, jax.P(*rows, *first.partitions[:contract]))
    specs = (_spec_of(x), *map(_spec_of, weight))
    names = set(split_sizes(mesh))
    out = jax.P(*rows, *first.partitions[contract:])
    # check=False: all devices have the sum, which JAX cannot know.
    run = jax.shard_map(
        lambda *shards: star_sum(multiply(*shards), axis),
        mesh=mesh, in_specs=specs, out_specs=out, axis_names=names, check_vma=False,
    )  # fmt: skip
    return jax.sharding.reshard(run(x, *weight), there)


def _scattered(x: Array, w: Array, there: PartitionSpec, contract: int) -> Array:
    """Matmul whose partial sums are reduce-scattered over the sequence, as a collective matmul."""
    (axis,) = mesh_axes_of(_spec_of(w).partitions[:contract])

    def local(x: Array, w: Array) -> Array:
        x, w = _alike(x, w)
        flat = x.reshape(*x.shape[:-contract], -1), w.reshape(math.prod(w.shape[:contract]), -1)
        return collective_matmul.matmul_reduce_scatter(axis, *flat)

    mesh = jax.sharding.get_abstract_mesh()
    specs = jax.typeof(x).sharding.spec, _spec_of(w)
    names = set(split_sizes(mesh))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=there, axis_names=names)(x, w)


def take(table: Array, ids: Array, out: LogicalAxes, what: str = "embedding") -> Array:
    """Lookup ``table[ids]``; the table may be split over its rows (the vocabulary)."""
    mesh = current_mesh()
    if mesh is None:
        return table[ids]
    there = current_rules().spec(out, mesh, what=what)
    # Each device looks up the rows that it has, for all tokens; only then may the axis of the rows split the tokens.
    rows = mesh_axes_of(jax.typeof(table).sharding.spec.partitions[:1])
    first = without_axes(there, rows)
    if rows and mesh_axes_of(first.partitions[: ids.ndim]) and AxisType.Manual in mesh.axis_types:
        found = _masked_take(table, ids, first)
    else:
        found = table.at[ids].get(out_sharding=first)
    return jax.sharding.reshard(found, there)


def _masked_take(table: Array, ids: Array, there: PartitionSpec) -> Array:
    """Lookup of each device's own rows of a table, with zeros for other rows, added over the devices that split rows.

    For partly manual programs. It communicates what the compiler's lookup does: the found rows are summed, and their
    gradient is all-gathered over the tokens. XLA of jax 0.12.0.1 aborts (``ExpandDeviceGroupsWithIota``) when it
    partitions a lookup there whose table and tokens are split over different axes.

    Args:
        there: partition spec of the result, without the axes that split the table's rows.
    """
    first, *columns = stored = jax.typeof(table).sharding.spec.partitions
    mesh = jax.sharding.get_abstract_mesh()
    height = table.shape[0] // math.prod(mesh.shape[axis] for axis in mesh_axes_of([first]))  # rows of a device
    tokens = without_axes(jax.P(*there.partitions[: ids.ndim]), mesh_axes_of(stored))
    everywhere, width, names = (None,) * ids.ndim, (None,) * len(columns), set(split_sizes(mesh))

    def own_rows(ids: Array) -> tuple[Array, Array]:
        rows = ids - jax.lax.axis_index(first) * height
        return rows, (rows >= 0) & (rows < height)

    def look_up(table: Array, ids: Array) -> Array:
        rows, own = own_rows(ids)
        return jax.lax.psum(jnp.where(own[..., *width], table[jnp.where(own, rows, 0)], 0), first)

    def add_up(ids: Array, grads: Array) -> Array:
        rows, own = own_rows(ids)
        zeros = jnp.zeros((height, *grads.shape[ids.ndim :]), grads.dtype)
        return zeros.at[jnp.where(own, rows, height)].add(grads, mode="drop")

    @jax.custom_vjp
    def run(table: Array, ids: Array) -> Array:
        specs, out = (jax.P(*stored), tokens), jax.P(*tokens, *columns)
        return jax.shard_map(look_up, in_specs=specs, out_specs=out, axis_names=names)(table, ids)

    def backward(ids: Array, grads: Array) -> tuple[Array, None]:
        specs = jax.P(*everywhere), jax.P(*everywhere, *columns)
        moved = jax.sharding.reshard(ids, specs[0]), jax.sharding.reshard(grads, specs[1])
        return jax.shard_map(add_up, in_specs=specs, out_specs=jax.P(*stored), axis_names=names)(*moved), None

    run.defvjp(lambda table, ids: (run(table, ids), ids), backward)
    return jax.sharding.reshard(run(table, jax.sharding.reshard(ids, tokens)), there)


def gather_weight(w: Array, *logical: str | None, unreduced_grad: bool = False, what: str = "weight") -> Array:
    """Weight all-gathered for use: whole over the axes that only its storage is split over (FSDP), split over tensor.

    Args:
        unreduced_grad: whether its gradient stays partial sums per device (``jax.P(unreduced=...)``) over the axes that
            split tokens. The transpose of this function, or a caller that gathers ahead of all uses, reduce-scatters
            them to the storage sharding. For weights of matmuls and lookups alone. A weight that was gathered in this
            way before is returned as it is.
    """
    mesh = current_mesh()
    if mesh is None:
        return w
    stored, rules = jax.typeof(w).sharding.spec, current_rules()
    if not unreduced_grad and mesh.shape.get(FEATURES, 1) > 1:
        # Biases and gains are added to and multiplied with activations, whose heads and width are split further.
        logical = tuple(_BESIDE.get(name or "", name) for name in logical)
    whole = rules.spec(logical, mesh, w.shape, gathered=True, what=what)
    unreduced_grad = unreduced_grad and _supports_unreduced(mesh)
    late = _token_axes(logical) - mesh_axes_of(whole) if unreduced_grad else frozenset()
    if stored.reduced and stored.partitions == whole.partitions and late <= stored.reduced:
        return w
    if unreduced_grad:
        # In two steps, so that the gradient is first reduce-scattered, and only its shards are summed over replicas.
        if not stored.reduced:
            w = partial_sums.keep_gradient(w, late - mesh_axes_of(stored), two_level=rules.two_level)
        here, whole = jax.typeof(w).sharding.spec, jax.P(*whole, reduced=late)
        if rules.int8_gather and here.partitions != whole.partitions:
            return checkpoint_name(int8_gather.gather(w, whole, here), GATHERED_WEIGHT)
    if (first := layer_layouts.between(jax.typeof(w).sharding.spec, whole)) is not None:
        w = jax.sharding.reshard(w, jax.P(*first, reduced=whole.reduced - {layer_layouts.AXIS}))
    return checkpoint_name(jax.sharding.reshard(w, whole), GATHERED_WEIGHT)


def gather_for_step(w: Array, *logical: str | None, unreduced_grad: bool = False, what: str = "weight") -> Array:
    """Weight all-gathered for a step over the axes that it is split over between steps alone (3-level ZeRO).

    Over the slow links first, while shards are small. Each use in the step all-gathers the rest (``gather_weight``).

    Args:
        unreduced_grad: whether its gradient stays partial sums per device, see ``gather_weight``; the caller sums them
            (``reduce_partial_sums``). Other weights are all-gathered whole.
    """
    mesh, rules = current_mesh(), current_rules()
    if mesh is None or not rules.between_steps:
        return w
    if not unreduced_grad or not _supports_unreduced(mesh):
        return gather_weight(w, *logical, what=what)
    stored = jax.typeof(w).sharding.spec
    for axis in reversed(rules.between_steps):
        if axis in mesh_axes_of(stored):
            stored = without_axes(stored, frozenset({axis}))
            w = int8_gather.gathered(w, stored) if rules.int8_gather else jax.sharding.reshard(w, stored)
    late = _token_axes(logical) - mesh_axes_of(rules.spec(logical, mesh, gathered=True))
    return jax.sharding.reshard(w, jax.P(*stored, reduced=late - mesh_axes_of(stored)))


def _token_axes(logical: LogicalAxes) -> frozenset[str]:
    """Mesh axes that split the tokens which a weight is multiplied with: experts see them where they are sent."""
    return frozenset(axis_names(*(("expert_batch", "expert_seq") if "experts" in logical else ("batch", "seq"))))


def reduce_partial_sums(x: Array, like: Array, *, in_step: bool = False) -> Array:
    """Sum of the partial sums (``jax.P(unreduced=)``) of ``x``, sharded as ``like``; see ``sharding.partial_sums``.

    Args:
        in_step: leave the sums over the outermost axis that parameters are split over between steps alone.
    """
    if current_mesh() is None:
        return x
    rules = current_rules()
    there = jax.typeof(like).sharding.spec
    levels = tuple(axis for axis in rules.between_steps if axis in mesh_axes_of(there))
    later = frozenset(levels[-1:]) if in_step else frozenset()
    return partial_sums.reduce(x, there, two_level=rules.two_level, levels=levels, later=later)


def shard_map(
    fn: Callable[..., Any],
    in_specs: Sequence[LogicalAxes | None],
    out_specs: LogicalAxes | tuple[LogicalAxes, ...],
    *,
    check: bool = True,
) -> Callable[..., Any]:
    """Function that runs ``fn`` per shard, fully manual (``jax.shard_map``); the plain ``fn`` where there is no mesh.

    Args:
        in_specs: logical axes of each argument, which is resharded to them first; None for an argument that is None.
        out_specs: logical axes of the result, or a tuple of them.
        check: track the manual axes over which values vary (``check_vma``), which differentiation needs; initial values
            of loops then have to be marked as varying.
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
    """Function that runs ``fn`` once per shard of the logical axis ``over``: dim 0 of all arrays, of size 1 per shard.

    ``fn`` takes and returns trees of arrays without that dim, and does not communicate. Devices along other mesh axes
    all compute the same.
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
        # check_vma=False: otherwise the initial values of all loops would have to be marked as varying.
        run = jax.shard_map(local, mesh=mesh, in_specs=there, out_specs=there, axis_names=names, check_vma=False)
        return run(*moved)

    return call


def by_shard(fn: Callable[..., Any], *arrays: Array, out: Any = None) -> Any:
    """Result of ``fn`` on the shards of arrays as they are sharded, for functions that need no other shard.

    Args:
        out: partition specs of the result; None: one array, sharded as the first argument.
    """
    mesh = current_mesh()
    if mesh is None:
        return fn(*arrays)
    specs = tuple(_spec_of(x) for x in arrays)
    names = set(split_sizes(mesh))

    def cast(*shards: Array) -> Any:
        # What each device has of an unreduced result is a part of a sum, and newer versions of JAX want to be told so.
        found = fn(*shards)
        parts = tuple(sorted(out.unreduced)) if isinstance(out, PartitionSpec) else ()
        return jax.lax.pcast(found, parts, to="unreduced") if parts else found

    return jax.shard_map(cast, mesh=mesh, in_specs=specs, out_specs=out or specs[0], axis_names=names)(*arrays)


def _argument_spec(rules: Rules, mesh: AbstractMesh, x: Array, axes: LogicalAxes) -> PartitionSpec:
    spec = rules.spec(axes, mesh, x.shape, what="argument of a kernel")
    reduced = jax.typeof(x).sharding.spec.reduced  # a weight that was gathered ahead: its gradient stays partial sums
    return jax.P(*spec, reduced=reduced) if reduced else spec


def axis_names(*logical: str) -> tuple[str, ...]:
    """Mesh axes (of more than one device) that these logical axes are split over; kernels reduce over them."""
    mesh = current_mesh()
    if mesh is None:
        return ()
    rules = current_rules().on(mesh)
    sizes = split_sizes(mesh)
    return tuple(a for name in logical for a in rules.mesh_axes(name) if sizes.get(a, 1) > 1)


def axis_size(*logical: str) -> int:
    """Number of shards that these logical axes are split into; 1 outside a mesh."""
    mesh = current_mesh()
    return 1 if mesh is None else math.prod(mesh.shape[a] for a in axis_names(*logical))


@contextlib.contextmanager
def use_mesh(mesh: Mesh | None) -> Iterator[Mesh | None]:
    """Context manager: runs the body on ``mesh``; None: on none, whichever mesh is current."""
    with jax.set_mesh(Mesh(np.empty((), object), ()) if mesh is None else mesh):
        yield mesh
