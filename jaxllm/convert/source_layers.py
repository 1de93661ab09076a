"""Source layers: a published model whose layers are read from its files one at a time, so that it need not fit memory.

A repeat of a segment is one layer for most models, or a group of layers that differ.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

import sharding
from jaxllm.config import closest
from jaxllm.convert.load import LoadedModel
from jaxllm.files import release
from jaxllm.hub import HubError, find_model, open_source
from jaxllm.hub.families.families import family
from jaxllm.hub.huggingface import (
    TensorSource,
    leaves_by_path,
    match_tensors,
    place_leaf,
    sources_by_leaf,
)
from jaxllm.hub.packed_weights import in_common_formats, packed_leaf_paths, place_packed
from jaxllm.models import functional
from jaxllm.quant import is_packing, packing_choices, packing_names
from jaxllm.quant.packing import pack_repeat, pack_vocabulary


class SourceLayers:
    """Parameters of a published model, read when they are asked for.

    Args:
        path: a directory with ``config.json`` and safetensors, or a GGUF file.
        dtype: storage and compute dtype.
        weights: see ``load_model``; rounded after each reading, where it is a format, see ``packing``.

    Raises:
        HubError: the model cannot be loaded; says why.

    Attributes:
        tier: "source".
        model: functions of the model.
        source: the open files.
    """

    tier = "source"

    def __init__(self, path: Path, dtype: str = "float32", weights: str = "plain"):
        known = ("plain", "packed", *packing_names())
        if weights not in known:
            legal = ", ".join(("plain", "packed", *packing_choices()))
            raise HubError(f"weights = {weights!r}: give one of {legal}.{closest(weights, known)}")
        self.source, self.weights = open_source(path), weights
        config = replace(self.source.config, param_dtype=dtype, dtype=dtype)  # type: ignore[arg-type]
        self.model = functional(config)
        tensors = self.source.tensors
        leaves = leaves_by_path(self.model.abstract())
        found, _ = match_tensors(family(self.source.source).table, config, leaves, tensors)
        self._sources = sources_by_leaf(found, tensors)
        self._packed = packed_leaf_paths(self._sources) if weights == "packed" else set[str]()
        self._sources |= {path: in_common_formats(self._sources[path]) for path in self._packed}

    def ends(self, device: jax.Device) -> Any:
        """Parameters outside of blocks, on a device."""
        tree = {name: value for name, value in self.model.abstract().items() if name != "segments"}
        found = jax.tree.map_with_path(lambda path, leaf: self._place(_name(path), leaf, None, device), tree)
        release(self.source.tensors.values())
        with jax.set_mesh(_mesh_of(device)):
            found = pack_vocabulary(self.model, found, self.weights) if is_packing(self.weights) else found
        return jax.tree.map(lambda x: x.addressable_data(0), found)

    def read(self, unit: Any, device: jax.Device) -> Any:
        """Parameters of one repeat of a segment on a device, without the dimension of layers.

        Args:
            unit: its ``segment`` and ``repeat``.

        Raises:
            HubError: values that are not finite, or a format that a matrix does not fit.
        """
        prefix, tree = f"segments/{unit.segment}", self.model.abstract()["segments"][str(unit.segment)]

        def place(path: tuple[Any, ...], leaf: Any) -> Any:
            shape = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
            return self._place(f"{prefix}/{_name(path)}", shape, unit.repeat, device)

        found = jax.tree.map_with_path(place, tree)
        if is_packing(self.weights):
            with jax.set_mesh(_mesh_of(device)):
                try:
                    found = pack_repeat(self.model, unit.segment, found, self.weights)
                except ValueError as error:
                    raise HubError(f"{self.source.path}: {error}") from error
        release(self.source.tensors.values())
        return jax.tree.map(lambda x: x.addressable_data(0), found)

    def _place(self, path: str, leaf: Any, repeat: int | None, device: jax.Device) -> Any:
        sources: list[TensorSource] = self._sources[path]
        if repeat is not None:
            sources = [(t, replace(part, at=part.at[1:])) for t, part in sources if part.at[0] == repeat]
        where = jax.NamedSharding(_mesh_of(device), jax.P())
        struct = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
        return (place_packed if path in self._packed else place_leaf)(struct, sources, path)


def open_layers(
    name: Path | str, *, dtype: str | None = None, weights: str = "plain"
) -> tuple[LoadedModel, SourceLayers]:
    """A published model whose layers are not loaded: only its embedding, head and last norm are.

    Args:
        name, dtype, weights: see ``load_model``.

    Raises:
        HubError: it is a run, or cannot be loaded.
    """
    path = find_model(name)
    if (path / "checkpoints").is_dir():
        raise HubError(
            f"{path} is a run, whose layers are read together: convert it first, `jaxllm convert {path} OUT`."
        )
    layers = SourceLayers(path, dtype or "float32", weights)
    device, source = jax.devices()[0], layers.source
    loaded = LoadedModel(
        layers.model, layers.ends(device), source.tokenizer, source.template, _mesh_of(device), 0, {}, source.source,
        source.sampling,
    )  # fmt: skip
    return loaded, layers


def _mesh_of(device: jax.Device) -> jax.sharding.Mesh:
    return sharding.MeshSpec.parse("dp").build([device])


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
