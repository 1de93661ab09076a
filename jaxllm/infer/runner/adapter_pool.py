"""Adapter pool: the low-rank factors of all adapters that are on the device, in pages of ranks.

An adapter of rank r takes ceil(r / R) pages. A page has the same number in every matrix and layer, so one
page table serves all of them, and one program writes a page. The pool is beside the pools of the KV cache and not in
them, see docs/decisions/0015-served-adapters.md.

Legend: L layers, P pages, R ranks of a page.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.runner.adapted_weight import AdaptedWeight
from jaxllm.models import Functional
from jaxllm.models.functional import LinearShape
from jaxllm.peft.adapter import Adapter, AdapterError, check_adapter
from sharding import LogicalAxes

FACTORS = "adapter_factors"
"""Name of the arrays of the pool beside parameters outside of blocks, where layers are streamed."""
Page = tuple[np.ndarray, ...]
"""A page's ranks of every array of the pool."""


@dataclass(frozen=True)
class PackedAdapter:
    """Adapter on the host, cut into pages that a pool takes.

    Attributes:
        pages: its pages, in the order of ranks.
        scale: factor on its result.
    """

    pages: tuple[Page, ...]
    scale: float

    @property
    def nbytes(self) -> int:
        """Bytes of its pages."""
        return sum(array.nbytes for page in self.pages for array in page)


class AdapterPool:
    """Layout of the pool of one model: which arrays there are, and where each part of an adapter goes.

    Args:
        model: model that is served.
        params: its weights, layers stacked or apart; without layers where these are streamed.
        config: configuration of the engine, with ``adapter_slots``.

    Attributes:
        slots: adapters that can be on the device.
        columns: pages of an adapter of the largest rank.
        pages: pages of the pool.
    """

    def __init__(self, model: Functional, params: Any, config: EngineConfig):
        self.slots, self.pages = config.adapter_slots, config.pages_of_adapters
        self.columns, self._most = config.adapter_columns, config.adapter_rank
        self._page_ranks = config.adapter_page_ranks
        self._model, self._dtype = model, jnp.dtype(model.config.dtype)
        self._linears = model.linears()
        # Layers of each path: a stack, or one after the other.
        segments = params.get("segments", {})
        self._apart = {path: isinstance(segments.get(path.split("/")[1]), tuple) for path in self._linears}

    def arrays(self, place: Callable[..., Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Abstract arrays of the pool; ``place`` gives the sharding of logical axes."""
        found = []
        for path, linear in self._linears.items():
            for shape, axes in self._factors(linear):
                stack = () if self._apart[path] else linear.stack
                shape, axes = (
                    (*stack, self.pages, self._page_ranks, *shape),
                    (*(("layers",) * len(stack)), None, None, *axes),
                )
                one = jax.ShapeDtypeStruct(shape, self._dtype, sharding=place(axes, shape))
                found += [one] * (math.prod(linear.stack) if self._apart[path] else 1)
        return tuple(found)

    def weights(self, params: Any, arrays: tuple[Any, ...]) -> Any:
        """Parameters with the pool's arrays beside the weights that they adapt; beside all of them without layers."""
        if "segments" not in params:
            return params | {FACTORS: arrays}
        rest = iter(arrays)
        out = params | {"segments": {s: _copied(segment) for s, segment in params["segments"].items()}}
        for path in self._linears:
            _, s, *keys, last = path.split("/")
            layers = out["segments"][s] if self._apart[path] else (out["segments"][s],)
            count = len(layers)
            a, b = [next(rest) for _ in range(count)], [next(rest) for _ in range(count)]
            for node, left, right in zip(layers, a, b, strict=True):
                for key in keys:
                    node = node[key]
                node[last] = AdaptedWeight(node[last], left, right)
        return out

    def pack(self, adapter: Adapter) -> PackedAdapter:
        """Adapter cut into pages, in the dtype of the pool.

        Raises:
            AdapterError: it is not an adapter of this model, its rank is larger than the engine's, or it changes more
                than low-rank factors can.
        """
        check_adapter(adapter, self._model)
        if adapter.magnitudes or adapter.modules:
            what = "the magnitudes of dora" if adapter.magnitudes else f"whole weights ({next(iter(adapter.modules))})"
            raise AdapterError(
                f"the adapter has {what}, which rows of one batch cannot have each for itself: merge it into the model."
            )
        if not 0 < adapter.rank <= self._most:
            raise AdapterError(
                f"the adapter has rank {adapter.rank}; this engine takes 1 to {self._most}: set adapter_rank "
                f"(--adapter-rank {adapter.rank})."
            )
        scales = {float(value) for one in adapter.factors.values() for value in np.unique(np.asarray(one.scale))}
        # One scale for the whole adapter is applied to its result; several go into the right factors.
        scale = scales.pop() if len(scales) == 1 else 1.0
        pages = -(-adapter.rank // self._page_ranks)
        parts = [part for path in self._linears for part in self._parts(path, adapter, pages, scale)]
        return PackedAdapter(tuple(tuple(part[i] for part in parts) for i in range(pages)), scale)

    def write(self, arrays: tuple[Any, ...], page: Int[Array, " B"], content: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arrays of the pool with one page replaced; ``page`` is its number, for each replica."""
        number = jnp.max(page)  # the same everywhere

        def one(array: Any, new: Any, axis: int) -> Any:
            return jax.lax.dynamic_update_slice_in_dim(array, jnp.expand_dims(new, axis), number, axis)

        return tuple(one(*parts) for parts in zip(arrays, content, self._page_axes, strict=True))

    def page(self, arrays: tuple[jax.ShapeDtypeStruct, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Abstract content of a page of abstract arrays of the pool."""
        found = []
        for array, axis in zip(arrays, self._page_axes, strict=True):
            place = array.sharding
            if isinstance(place, jax.NamedSharding):
                place = jax.NamedSharding(place.mesh, jax.P(*place.spec[:axis], *place.spec[axis + 1 :]))
            shape = (*array.shape[:axis], *array.shape[axis + 1 :])
            found.append(jax.ShapeDtypeStruct(shape, array.dtype, sharding=place))
        return tuple(found)

    @property
    def _page_axes(self) -> list[int]:
        """Dimension of each array that pages are along."""
        return [
            0 if self._apart[path] else len(linear.stack)
            for path, linear in self._linears.items()
            for _ in range(2 * (math.prod(linear.stack) if self._apart[path] else 1))
        ]

    @staticmethod
    def _factors(linear: LinearShape) -> list[tuple[tuple[int, ...], LogicalAxes]]:
        """Shape and logical axes of a rank of the left and of the right factor."""
        n = linear.contract
        return [(linear.shape[:n], linear.axes[:n]), (linear.shape[n:], linear.axes[n:])]

    def _parts(self, path: str, adapter: Adapter, pages: int, scale: float) -> list[list[np.ndarray]]:
        """Pages of each array of a path."""
        linear, found = self._linears[path], adapter.factors.get(path)
        lead = len(linear.stack)
        parts = []
        for i, (shape, _) in enumerate(self._factors(linear)):
            ranks = np.zeros((*linear.stack, pages * self._page_ranks, *shape), self._dtype)
            if found is not None:
                value = np.asarray(found.b) if i else np.moveaxis(np.asarray(found.a), -1, lead)
                if i:
                    own = np.asarray(found.scale) / scale
                    value = value * own.reshape(own.shape + (1,) * (value.ndim - own.ndim))
                ranks[(slice(None),) * lead + (slice(0, found.rank),)] = value.astype(self._dtype)
            cut = np.split(ranks, pages, axis=lead)
            parts += [[page[n] for page in cut] for n in np.ndindex(linear.stack)] if self._apart[path] else [cut]
        return parts


def _copied(tree: Any) -> Any:
    """Tree with dicts and tuples of its own, whose leaves are the same."""
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return tuple(map(_copied, tree)) if isinstance(tree, tuple) else tree
