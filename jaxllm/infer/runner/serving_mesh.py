"""Serving mesh: how a served model is sharded, for tensor parallel serving and for data-parallel replicas.

axis      splits
tensor    heads and their KV cache pages, feed-forward width, vocabulary
data      replicas of the weights, each with sequences and pages of its own
fsdp      like data; weights are also stored split over it, and all-gathered one layer at a time
expert    like data; experts are split over it, and tokens are dispatched to them by all-to-all
context   tokens of a prefill step; pages are replicated over it, or spread (``kv_span``)
stage     layers and their KV cache pages; several steps are in flight, see ``jaxllm.infer.stages``
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, Mesh, NamedSharding

import sharding
from jaxllm.config import ConfigError
from jaxllm.infer.runner.extended_vocabulary import ExtendedVocabulary
from jaxllm.models import Functional, functional
from jaxllm.models.packed_weight import is_packed
from sharding import Rules, ShardingError

SERVED = ("data", "fsdp", "expert", "tensor", "context")
"""Mesh axes that one program can be served over; ``jaxllm.infer.stages`` serves over stage and tensor."""
LANES = 128
"""Numbers in a row of a TPU's tile."""
_WHY = {
    "replica": "replicas have parameters of their own; give its devices to data",
    "local": "it divides the sums of gradients; give its devices to data",
    "stage": "one program has all layers; pipeline stages are of Engine.of, which makes a StagedRunner",
    "features": "2D tensor parallelism is of training; give its devices to tensor",
    "ulysses": "the all-to-all between heads and tokens is not supported; use context instead",
}


def mesh_of(text: str) -> Mesh:
    """Builds a serving mesh over all devices from a spec such as ``data=2,tensor=4``.

    Raises:
        ShardingError: the spec is invalid, the sizes do not multiply to the number of devices, see ``check_mesh``.
    """
    mesh = sharding.MeshSpec.parse(text).build()
    check_stages(mesh) if stages_of(mesh) > 1 else check_mesh(mesh)
    return mesh


def stages_of(mesh: Mesh | None) -> int:
    """Number of pipeline stages of a mesh; 1 without a stage axis."""
    return 1 if mesh is None else mesh.shape.get("stage", 1)


def loading_mesh(mesh: Mesh | None, *, pooled: bool = False) -> Mesh | None:
    """Mesh to load a model on that is served on ``mesh``: the host's processor for pipeline stages, and with ``pooled``
    for the weights beside an attention pool, which are taken from there, because none of their devices needs room for
    the whole model.
    """
    if stages_of(mesh) == 1 and not pooled:
        return mesh
    try:
        host = jax.devices("cpu")[:1]
    except RuntimeError:  # JAX_PLATFORMS leaves it out
        return mesh
    return sharding.MeshSpec.parse("dp").build(host)


def check_stages(mesh: Mesh) -> None:
    """Checks that pipeline stages can serve on a mesh.

    Raises:
        ShardingError: names the axis, or the processes, and what to use instead.
    """
    other = next((name for name, size in mesh.shape.items() if size > 1 and name not in ("stage", "tensor")), None)
    if other is not None:
        raise ShardingError(
            f"stage={mesh.shape['stage']} does not go with {other}={mesh.shape[other]}: the steps of a pipeline are "
            "started one by one, of one replica. Give stage and tensor alone."
        )
    if spans_processes(mesh):
        raise ShardingError(
            f"stage={mesh.shape['stage']} is of one process, which hands activations from stage to stage; over several "
            "processes split heads over tensor."
        )


def check_mesh(
    mesh: Mesh | AbstractMesh | None,
    *,
    invariant: bool = False,
    latent: bool = False,
    retention: bool = False,
    residual: bool = False,
    values_on_host: bool = False,
    platform: str = "cpu",
    span: bool = False,
) -> None:
    """Checks that an engine can serve on a mesh.

    Args:
        mesh: None for one device.
        invariant: the engine is batch-invariant.
        latent: the model has multi-head latent attention.
        retention: a retention rule lets tokens leave the KV cache.
        residual: pages of the KV cache are encoded as a whole, behind a window of tokens in full precision.
        values_on_host: values of the KV cache are in host memory.
        platform: of the devices, such as "tpu".
        span: pages of a request are spread over ``context``.

    Raises:
        ShardingError: names the axis, and what to use instead.
    """
    if mesh is not None and values_on_host:
        raise ShardingError(
            f"a KV cache format with values in host memory is for one device, not for {dict(mesh.shape)}: use kivi4."
        )
    if values_on_host and platform == "tpu":
        raise ShardingError(
            "a KV cache format with values in host memory is not for TPUs, whose compiler ends when a loop slices host "
            "memory by several dimensions: use kivi4."
        )
    if span and (mesh is None or mesh.shape.get("context", 1) == 1):
        raise ShardingError(
            f"kv_span spreads pages over context, and the mesh {dict(mesh.shape) if mesh else 'of one device'} has "
            "none: give context=2 or more, or leave kv_span out."
        )
    if mesh is not None and invariant and mesh.shape.get("expert", 1) > 1:
        raise ShardingError(
            "batch_invariant does not go with expert: an expert's batch has rows of all replicas. Split experts over "
            "tensor, or leave batch_invariant out."
        )
    if mesh is not None and mesh.shape.get("context", 1) > 1 and (invariant or latent or retention or residual):
        what = "batch_invariant" if invariant else "multi-head latent attention" if latent else "a retention rule"
        if not (invariant or latent or retention):
            what = "a KV cache format that encodes whole pages"
        raise ShardingError(
            f"{what} does not go with context={mesh.shape['context']}: a step's tokens are split over it. Use data."
        )
    for name, size in {} if mesh is None else mesh.shape.items():
        if size > 1 and name not in SERVED:
            raise ShardingError(
                f"an engine does not serve over {name}={size}: {_WHY[name]}. The axes are {', '.join(SERVED)}."
            )


def check_overlap(mesh: Mesh | None, residual: str) -> None:
    """Checks that steps can go through the layers in two halves, see ``jaxllm.infer.runner.step.step_halves``.

    Args:
        mesh: None for one device.
        residual: ``DecoderConfig.residual``.

    Raises:
        ShardingError: there are no all-reduces to hide, or the halves' rows are split.
        ConfigError: a ladder residual hides them already.
    """
    sizes = {} if mesh is None else dict(mesh.shape)
    if sizes.get("tensor", 1) == 1:
        raise ShardingError(
            f"overlap hides all-reduces of tensor shards, and the mesh {sizes or 'of one device'} has none: give "
            "tensor=2 or more, or leave overlap out."
        )
    if sizes.get("context", 1) > 1:
        raise ShardingError(
            f"overlap does not go with context={sizes['context']}, which splits the rows that it halves: use data."
        )
    if residual != "plain":
        raise ConfigError(
            f"overlap does not go with residual = {residual!r}, which hides all-reduces already: leave overlap out."
        )


def check_star(mesh: Mesh | None, star_bytes: int) -> None:
    """Checks that there are sums of tensor shards to add through one device.

    Raises:
        ShardingError: there are none.
    """
    sizes = {} if mesh is None else dict(mesh.shape)
    if star_bytes and sizes.get("tensor", 1) == 1:
        raise ShardingError(
            f"star sums are sums of tensor shards, and the mesh {sizes or 'of one device'} has none: give tensor=3 or "
            "more, or leave star_bytes out."
        )


def serving_rules(rules: Rules, *, split: bool = False, span: bool = False, star_bytes: int = 0) -> Rules:
    """Sharding rules for serving: flat batches, one per replica, and weights without an optimizer.

    With ``split`` a batch's tokens are split over ``context``; each of its devices has all keys and values. With
    ``span`` each has some of the pages, and attends with all queries. ``star_bytes``: see ``Rules``.

    Training stores a weight split over all axes that split tokens; serving splits it over ``fsdp`` only, so that the
    all-gather before each use, which is repeated for every decoded token, is always an explicit choice.
    """
    stored = dict.fromkeys(rules.storage, ("fsdp",))
    tokens = ("context",) if split else ()
    own = dict.fromkeys(("seq", "residual_seq", "attn_seq", "router_seq", "expert_seq"), tokens)
    if span:
        own |= {"attn_seq": (), "pages": (*rules.mesh_axes("batch"), "context")}
    rules = replace(rules.override(**own, attn_kv_seq=(), layers=(), **stored), folding=None)
    return replace(rules, layouts=(), keep_heads=True, star_bytes=star_bytes)


def serving_model(model: Functional, *, split: bool = False, span: bool = False, star_bytes: int = 0) -> Functional:
    """Model with ``serving_rules``, without gradient checkpointing."""
    return functional(
        replace(model.config, remat="none", matmul_precision="plain", embed_grad=1.0),
        serving_rules(model.rules, split=split, span=span, star_bytes=star_bytes),
    )


def placements(model: Functional, params: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Sharding of every parameter, in the structure of ``params``: layers stacked, or apart; packed weights too.

    ``params`` may be some of the parameters: of the head alone, or of some segments.

    Raises:
        ShardingError: a dimension does not divide over the mesh, names it and what would.
    """

    def place(axes: sharding.LogicalAxes, value: Any) -> Any:
        def one(x: Any, names: sharding.LogicalAxes) -> NamedSharding:
            return NamedSharding(mesh, model.rules.spec(names, mesh, x.shape, what="parameter"))

        if isinstance(value, ExtendedVocabulary):
            return ExtendedVocabulary(place(axes, value.base), one(value.extra, (None, axes[1])))
        if not is_packed(value):
            return one(value, axes)
        values, scales = value.array_axes(axes)
        return replace(value, values=one(value.values, values), scales=one(value.scales, scales))

    return jax.tree.map(place, _axes_of(model, params), params, is_leaf=_is_axes)


def with_layouts(model: Functional, params: Any, platform: str) -> Any:
    """Shapes, dtypes and places of parameters, in the memory layout that steps on this platform read without a copy.

    On a TPU the last two dimensions of an array are cut into tiles. The weight of the query heads is ``[D, N, H]``, and
    its tiles hold several heads of one input; a step that decodes would copy it to tiles of one head, and keep the
    copy. So it lies as ``[N, D, H]``, and those of keys and values too. Its shape, and results, are the same.

    Args:
        params: arrays, or shapes with shardings, as for ``placements``.
        platform: of the devices: "tpu", or one that takes arrays as they are.
    """

    def one(axes: sharding.LogicalAxes, value: Any) -> Any:
        if (
            len(axes) < 3
            or (axes[-3], axes[-1]) != ("embed", "head_dim")
            or is_packed(value)
            or value.shape[-1] % LANES
        ):
            return jax.tree.map(lambda x: shaped(x, x.sharding), value)
        n = value.ndim
        return shaped(value, Format(Layout((*range(n - 3), n - 2, n - 3, n - 1)), value.sharding))

    shaped = lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)  # noqa: E731
    if platform != "tpu":
        return jax.tree.map(lambda x: shaped(x, x.sharding), params)
    return jax.tree.map(one, _axes_of(model, params), params, is_leaf=_is_axes)


def _axes_of(model: Functional, params: Any) -> Any:
    """Logical axes of every parameter, in the structure of ``params``, which may be some of them."""
    every = model.logical_axes()
    tree = {name: every[name] for name in params}
    if "segments" in params:
        tree["segments"] = {name: every["segments"][name] for name in params["segments"]}
    for name, segment in params.get("segments", {}).items():
        if isinstance(segment, tuple):
            layer = jax.tree.map(lambda axes: axes[1:], tree["segments"][name], is_leaf=_is_axes)
            tree["segments"][name] = (layer,) * len(segment)
    return tree


def relaid(value: jax.Array, there: Any) -> jax.Array:
    """The array in the memory layout of this shape, if that has one of its own."""
    return value if there.format.layout is None else jax.device_put(value, there.format)


def fresh(value: Any, there: Any) -> jax.Array:
    """A copy of weights where this shape is; always one, since a training step donates its buffers."""
    if there.format.layout is None:
        return put(value, there.sharding, may_alias=False)
    layout = value.format.layout if isinstance(value, jax.Array) else None  # pyright: ignore[reportAttributeAccessIssue]
    if layout == there.format.layout:
        value = jnp.copy(value)  # of default layout; ``device_put`` to a sharding would mix up its numbers (jax 0.10.2)
    return relaid(put(value, there.sharding), there)


def _is_axes(x: Any) -> bool:
    return isinstance(x, tuple) and all(name is None or isinstance(name, str) for name in x)


def spans_processes(mesh: Mesh | None) -> bool:
    """Whether a mesh has devices of several processes."""
    return mesh is not None and len({device.process_index for device in mesh.devices.flat}) > 1


def put(value: Any, place: Any, *, may_alias: bool | None = None) -> Any:
    """Places an array on its devices; with several processes, each has the whole array or all of its shards."""
    if place.is_fully_addressable or (isinstance(value, jax.Array) and not value.is_fully_addressable):
        return jax.device_put(value, place, may_alias=may_alias)
    array = np.asarray(value)
    return jax.make_array_from_callback(array.shape, place, lambda index: array[index])
