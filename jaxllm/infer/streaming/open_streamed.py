"""Opens a model whose layers are streamed: published models are read layer by layer, and never whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.checkpoint.storage.step_directories import StepDirectories
from jaxllm.convert.load import LoadedModel, load_model
from jaxllm.convert.source_layers import open_layers
from jaxllm.hub import HubError, find_model
from jaxllm.infer.length_limits import choose_max_len
from jaxllm.infer.runner.paged_cache import layer_groups
from jaxllm.infer.streaming.experts.active_slices import ActiveSlices
from jaxllm.infer.streaming.experts.mlp_slices import SlicedLayers, sliced_model
from jaxllm.infer.streaming.experts.slot_fit import MixtureBytes
from jaxllm.infer.streaming.layer_store import (
    LayerStore,
    LoadedLayers,
    Unit,
    WithoutExperts,
    split_experts,
    units_of,
)
from jaxllm.infer.streaming.offload_budget import OffloadBudget
from jaxllm.infer.streaming.placement_fit import ModelBytes
from jaxllm.infer.streaming.sharded_layers import device_bytes
from jaxllm.infer.streaming.streamed_adapters import adapter_rank_bytes
from jaxllm.infer.streaming.streamed_weights import StreamedWeights, WeightPlacement, check_slots
from jaxllm.models import Functional
from jaxllm.models.packed_weight import HostPackedFormat
from jaxllm.quant import is_packing
from jaxllm.quant.formats.format_table import packing


def open_streamed(
    name: Path | str,
    budget: OffloadBudget | Callable[[ModelBytes], OffloadBudget],
    *,
    dtype: str | None = None,
    weights: str = "plain",
    kv_dtype: str = "auto",
    mesh: jax.sharding.Mesh | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> LoadedModel:
    """A model whose parameters are ``StreamedWeights``.

    Args:
        name, dtype, weights: see ``load_model``. A run is loaded whole first.
        budget: how many bytes of its layers may be where; or what chooses that, of the model's bytes.
        kv_dtype: format of the KV cache, see ``EngineConfig``, for those bytes.
        mesh: devices that layers are to be divided over, of each of which the budget says the bytes; None: one.
        progress: called with "layers", how many are in their places, and of how many.

    Raises:
        HubError: it cannot be loaded; says why.
        WeightsUnavailableError: files of layers cannot be written.
    """
    path = find_model(name)
    slots = isinstance(budget, OffloadBudget) and budget.experts > 0
    in_files = isinstance(budget, OffloadBudget) and budget.experts_host is not None
    if (not slots or in_files) and is_packing(weights) and isinstance(packing(weights).make(-2), HostPackedFormat):
        raise HubError(
            f"weights = {weights!r} have another size in each layer, and go with experts in slots alone, which wait "
            "in host memory; give the offload budget experts=N without experts_host, or leave it out."
        )
    loaded, layers, ends = _opened(path, dtype, weights)
    cut = isinstance(budget, OffloadBudget) and budget.slices
    if cut:
        if weights != "plain":
            raise HubError(f"slices are cut of plain weights, and weights = {weights!r} are packed; leave one out.")
        try:
            active = None if budget.active is None else ActiveSlices.read(budget.active)
            model = sliced_model(loaded.model, cut, active=active is not None)
            layers = SlicedLayers(layers, loaded.model.config, cut, active)
        except ValueError as error:
            raise HubError(f"--offload: {error}") from None
        loaded = replace(loaded, model=model)
    units = units_of(loaded.model.config.segments)
    of_units = _bytes_of_units(loaded.model, layers)
    if not isinstance(budget, OffloadBudget):
        budget = budget(_model_bytes(loaded, of_units, ends, kv_dtype))
    slots = budget.experts > 0
    placed = WithoutExperts(layers) if slots else layers
    unit_bytes = [one.rest if slots else one.whole for one in of_units]
    on_device = None
    if mesh is not None and mesh.size > 1:
        host = jax.devices("cpu")[0]
        firsts = {u.segment: placed.read(u, host) for u in reversed(units)}
        own = {s: device_bytes(loaded.model, s, tree, mesh) for s, tree in firsts.items()}
        on_device, loaded = [own[unit.segment] for unit in units], replace(loaded, mesh=mesh)
    placement = budget.placement(unit_bytes, on_device)
    key = [
        str(path.resolve()),
        _changed(path, loaded.step),
        str(dtype),
        weights,
        str(loaded.step),
        *([f"{cut} slices"] if cut else []),
        *([_changed(budget.active, 0)] if cut and budget.active is not None else []),
    ]
    tell = None if progress is None else lambda done, total: progress("layers", done, total)
    return replace(loaded, params=StreamedWeights.of(loaded.model, ends, layers, placement, key, tell))


def streamed_bytes(
    name: Path | str, *, dtype: str | None = None, weights: str = "plain", kv_dtype: str = "auto"
) -> ModelBytes:
    """Bytes of a model as ``open_streamed`` would have it; arguments and errors as there."""
    loaded, layers, ends = _opened(find_model(name), dtype, weights)
    return _model_bytes(loaded, _bytes_of_units(loaded.model, layers), ends, kv_dtype)


def _opened(path: Path, dtype: str | None, weights: str) -> tuple[LoadedModel, LayerStore, Any]:
    """A model without layers, these, and its parameters outside of blocks."""
    if not (path / "checkpoints").is_dir():
        loaded, layers = open_layers(path, dtype=dtype, weights=weights)
        return loaded, layers, loaded.params
    loaded = load_model(path, dtype=dtype, weights=weights)
    ends = {part: value for part, value in loaded.params.items() if part != "segments"}
    return loaded, LoadedLayers(loaded.params), jax.tree.map(lambda x: x.addressable_data(0), ends)


def _bytes_of_units(model: Functional, layers: LayerStore) -> list[UnitBytes]:
    """Bytes of each unit, by the first one of each segment."""
    units = units_of(model.config.segments)
    sizes = {s: UnitBytes.of(layers, next(u for u in units if u.segment == s)) for s in {u.segment for u in units}}
    return [sizes[unit.segment] for unit in units]


def _model_bytes(loaded: LoadedModel, units: Sequence[UnitBytes], ends: Any, kv_dtype: str) -> ModelBytes:
    model = loaded.model
    found = model_bytes(model, [one.whole for one in units], ends, mixture_bytes(model, units), kv_dtype)
    return replace(found, longest=choose_max_len(model.config, None, loaded.longest))


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of a unit.

    Attributes:
        whole: all of it.
        rest: without experts.
        experts: number and bytes of the experts of each of its mixtures.
    """

    whole: int
    rest: int
    experts: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, layers: LayerStore, unit: Unit) -> UnitBytes:
        """Those of a unit of a store, which is read."""
        return cls.of_tree(layers.read(unit, jax.devices("cpu")[0]))

    @classmethod
    def of_tree(cls, tree: Any) -> UnitBytes:
        """Those of the arrays of a unit, or of their shapes."""
        rest, found = split_experts(tree)
        experts = ((jax.tree.leaves(own)[0].shape[0], _bytes_of(own)) for own in found.values())
        return cls(_bytes_of(tree), _bytes_of(rest), tuple((many, size // many) for many, size in experts))


def mixture_bytes(model: Functional, units: Sequence[UnitBytes]) -> MixtureBytes | None:
    """Bytes of what slots of experts are made of; None: the model has no experts that may have slots."""
    experts = [one for unit in units for one in unit.experts]
    try:
        check_slots(model, WeightPlacement(expert_slots=1))
    except ValueError:
        return None
    sizes, many = [size for _, size in experts], min(many for many, _ in experts)
    rest = tuple(unit.rest for unit in units)
    return MixtureBytes(rest, sum(sizes), max(sizes), many, _routed(model), len(experts))


def _routed(model: Functional) -> float:
    """Share of the experts that a token is routed to, in the mean of the mixtures; 1: there are none."""
    routed = [moe.top_k / moe.experts for moe in model.config.mixtures.values()]
    return sum(routed) / len(routed) if routed else 1.0


def model_bytes(
    model: Functional,
    unit_bytes: Sequence[int],
    ends: Any,
    mixtures: MixtureBytes | None = None,
    kv_dtype: str = "auto",
) -> ModelBytes:
    """Bytes of a model with units of these sizes, with these parameters outside of blocks and this KV cache."""
    config = model.config
    leaves = jax.tree_util.tree_leaves_with_path(model.abstract()["segments"])
    of_experts = sum(x.size for path, x in leaves if "'experts'" in jax.tree_util.keystr(path))
    return ModelBytes(
        tuple(unit_bytes),
        sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(ends)),
        sum(group.token_bytes() for group in layer_groups(config, kv_dtype)),
        sum(x.size for _, x in leaves),
        of_experts,
        _routed(model),
        config.embed_dim * np.dtype(config.dtype).itemsize,
        adapter_rank_bytes(model),
        mixtures,
    )


def _bytes_of(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _changed(path: Path, step: int) -> list[list[object]]:
    """Names, sizes and times of change of a model's files; of a run those of a checkpoint.

    Not of other folders within the model's, since files of layers may be in one of them.
    """
    checkpoints = path / "checkpoints"
    own = checkpoints / StepDirectories(checkpoints).folder(step) if checkpoints.is_dir() else path
    files = sorted(own.rglob("*") if own != path else own.iterdir()) if own.is_dir() else [path]
    return [[file.name, (stat := file.stat()).st_size, stat.st_mtime_ns] for file in files if file.is_file()]
