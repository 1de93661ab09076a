"""Where a served model lives on a mesh: by the rules of training, less what only training needs.

axis      splits
tensor    heads and their pages, feed-forward width, vocabulary
data      replicas of the parameters, each with sequences and pages of its own
fsdp      the same; parameters are also stored split over it, and gathered a layer at a time
expert    the same; experts are split over it, and tokens travel to theirs
context   the tokens of a step that reads prompts; pages are on all its devices
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

import sharding
from jaxllm.models import Functional, functional
from sharding import Rules, ShardingError

SERVED = ("data", "fsdp", "expert", "tensor", "context")
"""Mesh axes that a model is served over."""
_WHY = {
    "stage": "a token would wait for all stages, one after the other; split heads over tensor instead",
    "ulysses": "the heads of a long prompt are not exchanged for its tokens; use context instead",
}


def mesh_of(text: str) -> Mesh:
    """A mesh over all devices, such as ``data=2,tensor=4``, to load a model on and serve it.

    Raises:
        ShardingError: the text is no mesh, the sizes do not multiply to the number of devices, see ``check_mesh``.
    """
    mesh = sharding.MeshSpec.parse(text).build()
    check_mesh(mesh)
    return mesh


def check_mesh(mesh: Mesh | None, *, invariant: bool = False, latent: bool = False) -> None:
    """Refuses meshes that an engine cannot serve on.

    Args:
        mesh: None for one device.
        invariant: the same bits are asked for whatever a request's neighbours are.
        latent: the model has multi-head latent attention.

    Raises:
        ShardingError: names the axis, and what to use instead.
    """
    if mesh is not None and invariant and mesh.shape.get("expert", 1) > 1:
        raise ShardingError(
            "batch_invariant does not go with expert: an expert's rows are those of all replicas, whatever they serve. "
            "Split experts over tensor, or leave batch_invariant out."
        )
    if mesh is not None and mesh.shape.get("context", 1) > 1 and (invariant or latent):
        what = "batch_invariant" if invariant else "multi-head latent attention"
        raise ShardingError(
            f"{what} does not go with context={mesh.shape['context']}: a step's tokens are split over it. Use data."
        )
    for name, size in {} if mesh is None else mesh.shape.items():
        if size > 1 and name not in SERVED:
            raise ShardingError(
                f"an engine does not serve over {name}={size}: {_WHY[name]}. The axes are {', '.join(SERVED)}."
            )


def serving_rules(rules: Rules, *, split: bool = False) -> Rules:
    """A model's rules for flat batches, one for each replica, and for weights that have no optimizer.

    With ``split`` a batch's tokens lie split over ``context``; each of its devices has all keys and values.

    Where training stores a weight split over all that splits tokens, serving does so over ``fsdp`` alone: a gather
    before each use, for every token that is made, is asked for and not met with.
    """
    stored = dict.fromkeys(rules.storage, ("fsdp",))
    tokens = ("context",) if split else ()
    return rules.override(seq=tokens, residual_seq=tokens, attn_seq=tokens, attn_kv_seq=(), layers=(), **stored)


def serving_model(model: Functional, *, split: bool = False) -> Functional:
    """The model by ``serving_rules``, and nothing kept for a backward pass."""
    return functional(
        dataclasses.replace(model.config, remat="none", products="plain", embed_grad=1.0),
        serving_rules(model.rules, split=split),
    )


def placements(model: Functional, params: Any, mesh: Mesh) -> Any:
    """The sharding of every parameter, in the form that ``params`` have: layers in stacks, or apart.

    Raises:
        ShardingError: a dimension does not divide over the mesh, names it and what would; experts are packed.
    """
    tree = sharding.shardings_of(sharding.abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules))
    for name, segment in params["segments"].items():
        if isinstance(segment, tuple):
            one = jax.tree.map(lambda x: NamedSharding(mesh, jax.P(*x.spec[1:])), tree["segments"][name])
            tree["segments"][name] = (one,) * len(segment)
    if jax.tree.structure(tree) != jax.tree.structure(params):
        raise ShardingError("packed experts are for one device; load the model with its experts unpacked for a mesh.")
    return tree


def spans_processes(mesh: Mesh | None) -> bool:
    """Whether its devices are of several processes."""
    return mesh is not None and len({device.process_index for device in mesh.devices.flat}) > 1


def put(value: Any, place: Any, *, may_alias: bool | None = None) -> Any:
    """An array on its devices; where these are of several processes, each has the whole of it or of all a part."""
    if place.is_fully_addressable or (isinstance(value, jax.Array) and not value.is_fully_addressable):
        return jax.device_put(value, place, may_alias=may_alias)
    array = np.asarray(value)
    return jax.make_array_from_callback(array.shape, place, lambda index: array[index])
