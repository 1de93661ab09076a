"""Packing a model's matrices, or its experts alone, in a weight format, by rounding to the format's nearest values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

import sharding
from jaxllm.models import Functional
from jaxllm.models.packed_weight import HostPackedFormat, PackedWeight, WeightFormat, is_packed, scale_spec
from jaxllm.quant.formats.format_table import EXPERTS_ONLY, VOCABULARY_FORMAT, WeightPacking, packing


def pack_params(model: Functional, params: Any, name: str) -> Any:
    """Parameters with every matrix of a block packed in a format, and embedding and head in ``VOCABULARY_FORMAT``.

    With a format of experts alone (``experts_int4``) everything else stays. Routers, norms, biases and
    learned positions always do.

    Run it under the mesh of the parameters: packed weights are sharded as the dense ones were.

    Args:
        name: see ``packing``.

    Raises:
        ValueError: an unknown format, a matrix does not fit it, or there are no experts for one of experts alone.
    """
    chosen = _packing_for(model, name)

    def one(path: str, weight: Any, axis: int) -> Any:
        return _pack(chosen.make, path, weight, axis) if chosen.packs(path) else weight

    return pack_vocabulary(model, model.map_matrices(params, one), name)


def pack_vocabulary(model: Functional, params: Any, name: str) -> Any:
    """Parameters with embedding and head in ``VOCABULARY_FORMAT``, unless the format ``name`` is of experts alone.

    Parameters of blocks need not be there.
    """
    if packing(name).experts_only:
        return params
    for where, matrix in model.vocabulary:
        values, scales = _packed_rows(VOCABULARY_FORMAT, params[where][matrix])
        weight = PackedWeight(values, scales, VOCABULARY_FORMAT)
        params = params | {where: params[where] | {matrix: weight}}
    return params


def pack_repeat(model: Functional, segment: int, params: Any, name: str) -> Any:
    """Parameters of one repeat of a segment with every matrix packed, see ``pack_params``."""
    chosen, axes = _packing_for(model, name), dict[str, int]()
    model.map_matrices(model.abstract(), lambda path, _, axis: axes.setdefault(path, axis))

    def one(path: tuple[Any, ...], leaf: Any) -> Any:
        whole = f"segments/{segment}/{jax.tree_util.keystr(path, simple=True, separator='/')}"
        return _pack(chosen.make, whole, leaf, axes[whole]) if whole in axes and chosen.packs(whole) else leaf

    return jax.tree.map_with_path(one, params)


def _packing_for(model: Functional, name: str) -> WeightPacking:
    chosen = packing(name)
    if chosen.experts_only and not model.config.mixtures:
        dense = name.removeprefix(EXPERTS_ONLY)
        raise ValueError(f"weight format {name!r} is of experts, and the model has none; give {dense!r}.")
    return chosen


def _pack(make: Callable[[int], WeightFormat], path: str, weight: Any, axis: int) -> PackedWeight:
    try:
        return packed_weight(make(axis), weight)
    except ValueError as error:
        reason = str(error).partition("\n")[0]  # jax appends a note on its traceback
        raise ValueError(f"{path}: {reason}") from error


def packed_weight(form: WeightFormat, weight: Any) -> PackedWeight:
    """A dense weight packed in a format, shard by shard; raises ValueError where it does not fit."""
    if isinstance(form, HostPackedFormat):
        values, scales, made = form.pack_on_host(weight)
        where = weight.sharding
        if isinstance(where, jax.NamedSharding):
            where = jax.NamedSharding(where.mesh, jax.P())
        return PackedWeight(jax.device_put(values, where), jax.device_put(scales, where), made)
    values, scales = _packed(form, weight)
    return PackedWeight(values, scales, form)


@functools.partial(jax.jit, static_argnums=0)
def _packed(form: WeightFormat, weight: Array) -> tuple[Array, Array]:
    spec = jax.typeof(weight).sharding.spec
    return sharding.by_shard(form.pack, weight, out=(spec, scale_spec(form, tuple(spec))))


@functools.partial(jax.jit, static_argnums=0)
def _packed_rows(form: WeightFormat, weight: Array) -> tuple[Array, Array]:
    """Values and scales of an embedding or output matrix, with one scale for a row, whatever splits it."""
    spec = tuple(jax.typeof(weight).sharding.spec)
    if sharding.current_mesh() is None:
        return form.pack(weight)
    whole = jax.P(spec[0], None)
    values, scales = sharding.by_shard(form.pack, jax.sharding.reshard(weight, whole), out=(whole, jax.P(spec[0])))
    return jax.sharding.reshard(values, jax.P(*spec)), scales


def packed_shapes(model: Functional, name: str) -> Any:
    """Abstract packed parameters of a model: shapes and dtypes, nothing allocated.

    Raises:
        ValueError: see ``pack_params``; or a format whose sizes depend on the weights.
    """
    if isinstance(packing(name).make(-2), HostPackedFormat):
        raise ValueError(f"weight format {name!r}: its sizes depend on the weights, and there are none here.")
    return jax.eval_shape(lambda params: pack_params(model, params, name), model.abstract())


def describe_packed(params: Any) -> list[str]:
    """Lines about the packed weights of a model: each format, its matrices, and the bytes of them and of the rest."""
    found: dict[str, tuple[dict[str, None], list[int]]] = {}
    rest = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_packed):
        if not is_packed(leaf):
            rest += leaf.nbytes
            continue
        names, sizes = found.setdefault(str(leaf.format), ({}, []))
        names["/".join(str(getattr(key, "key", key)) for key in path[-2:])] = None
        sizes.append(leaf.nbytes)
    lines = [
        f"{form}: {', '.join(names)} ({sum(sizes) / 2**20:,.1f} MiB)" for form, (names, sizes) in sorted(found.items())
    ]
    return [*lines, f"not packed: {rest / 2**20:,.1f} MiB"] if lines else []
