"""Adapted model: a model whose targeted weights are declared with an adapter, so that it initialises, shards, trains
and is saved like any other; only the adapter is trainable.

The parameters of an adapted model have a weight such as ``LoraWeight`` where the base has an array; its leaves are
``.../q/base`` and ``.../q/low_rank/a``.
"""

from __future__ import annotations

import fnmatch
import zlib
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, get_args

import jax
import numpy as np
from jax.sharding import Mesh

import sharding
from jaxllm.config import ConfigError, closest
from jaxllm.models import Functional, functional
from jaxllm.models.functional import DeclaredParam, Params
from jaxllm.models.param_subset import is_frozen
from jaxllm.models.params import draw
from jaxllm.peft.adapter import VIRTUAL, Adapter, AdapterKind, adapted_params, check_adapter, merged_weight, placed
from jaxllm.peft.adapter_method import AdapterConfig, AdapterMethod, is_declared
from jaxllm.peft.low_rank_factors import LowRank
from jaxllm.peft.method_table import ADAPTER_METHODS


def adapted_model(base: Functional, config: AdapterConfig) -> Functional:
    """The model with adapters of the targeted matmuls; ``base`` itself without one.

    Raises:
        ConfigError: a target matches no matmul, or the architecture has no such adapter; lists what is legal.
    """
    if not config:
        return base
    method = ADAPTER_METHODS[config.kind]
    check_fields(config, method)
    own: dict[str, Any] = {}
    made = base if method.architecture is None else functional(method.architecture(config, base.config), base.rules)
    if (declare := method.declare) is not None:
        linears, found = base.linears(experts=True), targeted(base, config.targets)
        chosen = [path for path in found if not set(path.split("/")) & set(method.not_adapted)]
        if of_experts := [path for path in chosen if linears[path].lead and not method.experts]:
            able = ", ".join(name for name, one in ADAPTER_METHODS.items() if one.experts)
            raise ConfigError(
                f"adapter.targets = {','.join(config.targets)} match the matrices of experts ({of_experts[0]}), which "
                f"{config.kind} does not adapt. Give targets beside them, such as attention, or a method that adapts "
                f"experts: {able}."
            )

        def adapt(declared: Params) -> Params:
            def one(path: tuple, leaf: DeclaredParam) -> Any:
                name = _name(path)
                return declare(config, leaf, linears[name]) if name in chosen else leaf

            return jax.tree.map_with_path(one, declared, is_leaf=is_declared)

        own["adapt"] = adapt
    if method.text_context is not None:
        own["text_context"] = own["training_context"] = method.text_context(config)
    if method.context is not None:
        own["training_context"] = method.context(config)
    return replace(made, **own)


def check_fields(config: AdapterConfig, method: AdapterMethod) -> None:
    """Checks that no field is set that the method does not follow; raises ConfigError."""
    for one in fields(config):
        if one.name not in ("kind", *method.fields) and getattr(config, one.name) != one.default:
            raise ConfigError(
                f"adapter.{one.name} = {getattr(config, one.name)!r} has no effect for adapter.kind = {config.kind!r}; "
                f"leave it out. {config.kind} follows {', '.join(f'adapter.{name}' for name in method.fields)}."
            )


def targeted(base: Functional, targets: Sequence[str]) -> list[str]:
    """Paths of the ``Linear``s that targets match, see ``AdapterConfig.targets``; with the matrices of experts.

    Raises:
        ConfigError: a target matches none.
    """
    paths = list(base.linears(experts=True))
    others = [path for path in _by_path(base.abstract()) if path.startswith(("head/", "embedding/"))]

    def matches(target: str, path: str) -> bool:
        names = [path, *(name for name in path.split("/")[2:] if not name.isdecimal())]
        return any(fnmatch.fnmatchcase(name, target) for name in names)

    for target in targets:
        if not any(matches(target, path) for path in paths):
            if target in ("lm_head", "head", "embedding") or any(matches(target, path) for path in others):
                raise ConfigError(
                    f"adapter.targets: {target!r} is no matmul of a block: the output matrix and the embedding have "
                    "no adapters. Train them whole, and save them with the adapter, by their names in trainable: "
                    f"{', '.join(path for path in others if 'norm' not in path)}."
                )
            names = sorted({name for path in paths for name in path.split("/")[2:] if not name.isdecimal()})
            raise ConfigError(
                f"adapter.targets: {target!r} matches no matmul of a block.{closest(target, names)} Legal: a name "
                f"({', '.join(names)}), * for all, or a pattern of whole paths ({paths[0]}, segments/0/*)."
            )
    return [path for path in paths if any(matches(target, path) for target in targets)]


def start_params(
    model: Functional, config: AdapterConfig, base: Params, mesh: Mesh, seed: int, gradients: Any = None
) -> Params:
    """Parameters of an adapted model before training: the base's, and fresh adapters, with which it equals the base.

    Args:
        model: from ``adapted_model``.
        base: parameters of the base on the mesh; they are not copied.
        mesh: of the parameters.
        seed: of the adapters; the value of each depends on the seed and its name alone.
        gradients: of the base, with None where there are none; for methods that start from them.
    """
    abstract = sharding.abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
    there, given, grads = _by_path(abstract), _by_path(base), _by_path(gradients)
    linears, method = model.linears(experts=True), ADAPTER_METHODS[config.kind]
    key = jax.random.key(seed)

    def one(path: tuple, node: Any) -> Any:
        name = _name(path)
        if is_declared(node):
            return given[name] if name in given else drawn(name, node)

        def fresh(inner: tuple, leaf: Any) -> Any:
            return drawn(f"{name}/{_name(inner)}", leaf) if is_declared(leaf) else leaf

        weight = jax.tree.map_with_path(fresh, replace(node, base=given[name]))
        return method.start(config, weight, linears[name], grads.get(name))

    def drawn(name: str, leaf: DeclaredParam) -> jax.Array:
        return draw(leaf.param, jax.random.fold_in(key, zlib.crc32(name.encode())), leaf.stack, there[name].sharding)

    with jax.set_mesh(mesh):
        params = jax.tree.map_with_path(one, model.declared(), is_leaf=_is_node)
        return method.start_rest(config, params)


def with_adapter(model: Functional, params: Params, adapter: Adapter) -> tuple[Functional, Params]:
    """A model and its parameters with an adapter of any kind; the base is not copied. Run it under the mesh.

    Virtual tokens are parameters of another architecture, whose sequences have them at the first positions.

    Raises:
        AdapterError: it is not an adapter of this model.
    """
    if adapter.kind not in VIRTUAL:
        return model, adapted_params(model, params, adapter)
    tokens = next(iter(adapter.modules.values())).shape[-2 if adapter.kind == "prompt" else -3]
    adapted = adapted_model(model, AdapterConfig(adapter.kind, tokens=tokens))
    check_adapter(adapter, adapted)
    axes = adapted.logical_axes()

    def one(path: tuple, axes: Any, old: Any) -> Any:
        return (
            placed(model, adapter.modules[name], axes, old.dtype) if (name := _name(path)) in adapter.modules else None
        )

    found = jax.tree.map_with_path(one, axes, adapted.abstract(), is_leaf=lambda x: isinstance(x, tuple))
    given = _by_path(params)
    return adapted, jax.tree.map_with_path(
        lambda path, own: given[_name(path)] if own is None else own, found, is_leaf=lambda x: x is None
    )


def base_params(params: Params) -> Params:
    """Dense parameters of the base of an adapted model; arrays are not copied."""
    return jax.tree.map(lambda node: node.base if _is_node(node) else node, params, is_leaf=_is_node)


def merge_adapters(model: Functional, params: Params) -> Params:
    """Dense parameters with the adapters merged into the base's.

    Run it under the mesh of the parameters.
    """
    linears = model.linears(experts=True)

    def one(path: tuple, node: Any) -> Any:
        return merged_weight(node, len(linears[_name(path)].stack)) if _is_adapted(node) else node

    return jax.tree.map_with_path(one, params, is_leaf=_is_node)


def adapter_of(config: AdapterConfig, trained: Params) -> Adapter:
    """Adapter of trained parameters, on the host.

    Args:
        config: of the run.
        trained: parameters with None in place of those that were not trained (``param_subset.select``).
    """
    factors: dict[str, LowRank] = {}
    ranks, magnitudes, modules = {}, {}, {}
    nodes = jax.tree_util.tree_leaves_with_path(trained, is_leaf=lambda x: _is_node(x) or is_frozen(x))
    for path, node in nodes:
        name = _name(path)
        if _is_adapted(node):
            # LoRA-GA's have those that are subtracted too.
            factors[name] = jax.tree.map(np.asarray, getattr(node, "factors", node.low_rank))
            ranks[name] = (factors[name].rank,) * factors[name].a.shape[0]
            if hasattr(node, "magnitude"):
                magnitudes[name] = np.asarray(node.magnitude)
        elif node is not None:
            modules[name] = np.asarray(node)
    kind: Any = config.kind if config.kind in get_args(AdapterKind) else "lora"
    return Adapter(kind, factors, ranks, magnitudes, modules)


def _is_adapted(node: Any) -> bool:
    return hasattr(node, "low_rank")


def _is_node(node: Any) -> bool:
    """Whether a node of a parameter tree is a declaration, or a weight with an adapter."""
    return is_declared(node) or _is_adapted(node)


def _by_path(tree: Any) -> dict[str, Any]:
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
