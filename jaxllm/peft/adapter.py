"""Adapter: what was trained beside a frozen base, by the paths of the base's parameters.

``Adapter`` is one in memory, on the host, as it comes from a file or goes into one; ``adapted_params`` puts it into a
model's parameters and ``merged_params`` adds it to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import sharding
from jaxllm.config import closest
from jaxllm.hub.errors import HubError
from jaxllm.models import Functional
from jaxllm.models.functional import LinearShape, Params
from jaxllm.models.linear import dense
from jaxllm.peft.low_rank_factors import LoraWeight, LowRank, factor_axes
from jaxllm.peft.methods.dora import DoraWeight

AdapterKind = Literal["lora", "rslora", "dora", "prefix", "prompt"]
VIRTUAL = ("prefix", "prompt")
"""Kinds that are virtual tokens, and no change of weights."""


class AdapterError(HubError):
    """An adapter that cannot be used: of another base or family, damaged, or with an illegal rank or target."""


@dataclass(frozen=True)
class Adapter:
    """Adapter of a model, with arrays on the host.

    Attributes:
        kind: how it adapts the weights: "lora" with the scale alpha / r, "rslora" with alpha / sqrt(r), "dora"; or
            "prefix" and "prompt", whose parameters are among ``modules``.
        factors: low-rank factors by the path of the ``Linear`` that they adapt ("segments/0/0/attention/q").
        ranks: rank in each layer of the stack, by the same path; 0 where the layer is not adapted.
        magnitudes: magnitudes of "dora", by the same path.
        modules: whole parameters that replace the base's, by path (``modules_to_save``).
        base: name of the model that it was trained on ("" if unknown).
        base_hash: hash of that model (``base_hash``), "" if unknown.
        settings: further fields of its ``adapter_config.json``, as they were read.
    """

    kind: AdapterKind
    factors: Mapping[str, LowRank]
    ranks: Mapping[str, tuple[int, ...]]
    magnitudes: Mapping[str, Any] = field(default_factory=dict)
    modules: Mapping[str, Any] = field(default_factory=dict)
    base: str = ""
    base_hash: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Largest rank."""
        return max((max(ranks) for ranks in self.ranks.values()), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        arrays = jax.tree.leaves((dict(self.factors), dict(self.magnitudes), dict(self.modules)))
        return sum(array.nbytes for array in arrays)


def check_adapter(adapter: Adapter, model: Functional) -> None:
    """Checks that every path and shape of an adapter is one of the model; raises AdapterError."""
    if adapter.kind in VIRTUAL and not model.config.virtual_tokens:
        raise AdapterError(
            f"the adapter is virtual tokens ({adapter.kind} tuning), for which this model has no places: it is used by "
            "with_adapter, or as the run that trained it, and not beside other adapters of a base."
        )
    linears = model.linears()
    for path, one in adapter.factors.items():
        if path not in linears and path in model.linears(experts=True):
            raise AdapterError(
                f"the adapter has factors for the matrices of experts ({path}), which are used by merging them into "
                "the model: load the run, or jaxllm convert RUN OUT --merge."
            )
        if path not in linears:
            raise AdapterError(f"the adapter has factors for {path}, which this model lacks.{closest(path, linears)}")
        shape = linears[path]
        wanted = factor_shapes(shape, one.rank)
        found = tuple(one.a.shape), tuple(one.b.shape)
        if found != wanted:
            raise AdapterError(
                f"the adapter's factors of {path} have shapes {list(found[0])} and {list(found[1])}; this model needs "
                f"{list(wanted[0])} and {list(wanted[1])}: it is an adapter of another base."
            )
    leaves = _leaves(model.abstract())
    for path, value in adapter.modules.items():
        if path not in leaves or tuple(value.shape) != leaves[path].shape:
            raise AdapterError(f"the adapter replaces {path} {list(value.shape)}, which this model lacks.")


def factor_shapes(shape: LinearShape, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the factors ``a`` and ``b`` of a ``Linear``, with its leading dimensions."""
    lead = (*shape.stack, *shape.shape[: shape.lead])
    return (*lead, *shape.inputs, rank), (*lead, rank, *shape.outputs)


def adapted_params(model: Functional, params: Params, adapter: Adapter) -> Params:
    """Parameters with the adapter's weights in place of the base's, sharded as these are; the base is not copied.

    Run it under the mesh of the parameters.

    Raises:
        AdapterError: it is not an adapter of this model, or virtual tokens, which are no weights.
    """
    if adapter.kind in VIRTUAL:
        raise AdapterError(
            f"virtual tokens ({adapter.kind} tuning) cannot be put into the weights of a model, nor merged with them."
        )
    check_adapter(adapter, model)
    linears = model.linears()

    def weight(path: str, base: Any) -> Any:
        shape, one = linears[path], adapter.factors[path]
        layers = ("layers",) * len(shape.stack)
        axes, lead = (*layers, *shape.axes), len(shape.stack)
        dtype = shape.dtype if not isinstance(base, jax.Array) else base.dtype
        of_a, of_b = factor_axes(axes, lead + shape.contract, lead)
        scale = one.scale if isinstance(one.scale, float) else jnp.asarray(one.scale)
        factors = LowRank(placed(model, one.a, of_a, dtype), placed(model, one.b, of_b, dtype), scale)
        if path not in adapter.magnitudes:
            return LoraWeight(base, factors)
        of_m = (*layers, *shape.axes[shape.contract :])
        return DoraWeight(base, factors, placed(model, adapter.magnitudes[path], of_m, dtype))

    return _replaced(_with_modules(model, params, adapter), dict.fromkeys(adapter.factors, weight))


def merged_params(model: Functional, params: Params, adapter: Adapter) -> Params:
    """Dense parameters with the adapter added, in the dtype of the base.

    Run it under the mesh of the parameters.
    """
    adapted = adapted_params(model, params, adapter)

    def weight(path: str, value: Any) -> Any:
        return merged_weight(value, len(model.linears()[path].stack))

    return _replaced(adapted, dict.fromkeys(adapter.factors, weight))


def merged_weight(weight: Any, lead: int) -> Any:
    """Dense array of a stack of adapted weights, in the dtype of their factors.

    Args:
        lead: number of leading dimensions (layers) that the weights are stacked over.
    """

    def merge(one: Any) -> Any:
        return dense(one, one.low_rank.a.dtype)

    for _ in range(0 if isinstance(weight, LoraWeight) else lead):  # factors and packed bases take leading dimensions
        merge = jax.vmap(merge)
    return jax.jit(merge)(weight)


def _with_modules(model: Functional, params: Params, adapter: Adapter) -> Params:
    axes, declared = _leaves(model.logical_axes(), is_leaf=lambda x: isinstance(x, tuple)), _leaves(model.abstract())

    def module(path: str, old: Any) -> Any:
        kind = old if isinstance(old, jax.Array) else declared[path]  # whole parameters take the place of packed ones
        return placed(model, adapter.modules[path], axes[path], kind.dtype)

    return _replaced(params, dict.fromkeys(adapter.modules, module))


def placed(model: Functional, value: Any, axes: sharding.LogicalAxes, dtype: Any) -> jax.Array:
    """Array in its shards under the current mesh."""
    array = np.asarray(value).astype(dtype)
    mesh = sharding.current_mesh()
    if mesh is None:
        return jnp.asarray(array)
    return jax.device_put(array, model.rules.spec(axes, mesh, array.shape, what="adapter"))


def _replaced(params: Params, new: Mapping[str, Callable[[str, Any], Any]]) -> Params:
    """Tree with ``new[path](path, old)`` at each path."""
    out = dict(params)
    for path, make in new.items():
        *parents, last = path.split("/")
        node = out
        for key in parents:
            node[key] = dict(node[key])
            node = node[key]
        node[last] = make(path, node[last])
    return out


def _leaves(tree: Any, is_leaf: Any = None) -> dict[str, Any]:
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}
