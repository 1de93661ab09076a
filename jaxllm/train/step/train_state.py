"""TrainState: everything a checkpoint must restore to resume a run: parameters, optimizer state, step, RNG key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import sharding
from jaxllm.checkpoint.offloaded_leaf import OffloadedLeaf
from jaxllm.models import Functional
from jaxllm.train.host_offload import HostConfig, host_bytes

InitExtra = Callable[[Any], Any]
"""``params -> state`` of a step link before the first step."""


@dataclass(frozen=True)
class TrainState:
    """State of a run after ``step`` steps; field names are the leaf names in checkpoints.

    Leaves are arrays, or their shapes, dtypes and shardings (``abstract_state``).

    Attributes:
        params: nested dict of parameters.
        opt_state: optimizer state, sharded as the parameters are.
        step: steps done; int32 scalar.
        rng: key from which each step folds its own; it is never advanced, so the randomness of step k depends on k
            alone.
        extras: states of the step's links by name (``jaxllm.train.step.step_chain``): ``numerics``, ``spikes``,
            ``ema``. Members are saved under their own names, as if they were fields.
    """

    params: Any
    opt_state: Any
    step: Any
    rng: Any
    extras: dict[str, Any] = field(default_factory=dict)


FIELDS = ("params", "opt_state", "step", "rng")
"""Fields of ``TrainState`` before its extras."""


def _children(state: TrainState) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    names = tuple(sorted(state.extras))
    return (*(getattr(state, name) for name in FIELDS), *(state.extras[name] for name in names)), names


def _children_with_keys(state: TrainState) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
    children, names = _children(state)
    keys = map(jax.tree_util.GetAttrKey, (*FIELDS, *names))
    return list(zip(keys, children, strict=True)), names


def _from_children(names: tuple[str, ...], children: Iterable[Any]) -> TrainState:
    params, opt_state, step, rng, *extras = children
    return TrainState(params, opt_state, step, rng, dict(zip(names, extras, strict=True)))


jax.tree_util.register_pytree_with_keys(TrainState, _children_with_keys, _from_children, _children)


def abstract_state(
    model: Functional,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
    host: HostConfig = HostConfig(),  # noqa: B008
    extras: Mapping[str, InitExtra] = MappingProxyType({}),
) -> TrainState:
    """Shapes, dtypes and shardings of the train state, nothing allocated: the target of init, restore and compilation.

    Args:
        model, optimizer, mesh: of the run.
        host: what is offloaded to host memory.
        extras: initialisers of the states of the step's links (``step_chain.link_states``).

    Raises:
        ShardingError: the model does not fit the mesh.
    """
    params = sharding.abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
    everywhere = NamedSharding(mesh, PartitionSpec())
    key = jax.eval_shape(lambda: jax.random.key(0))
    params, opt_state = host.place(params, sharding.derived_abstract(optimizer.init, params, mesh))

    states = {name: sharding.derived_abstract(init, params, mesh) for name, init in extras.items()}
    return TrainState(
        params=params,
        opt_state=opt_state,
        step=jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere),
        rng=jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=everywhere),
        extras=states,
    )


def init_state(
    model: Functional,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    seed: int,
    abstract: TrainState,
    params: Any = None,
    extras: Mapping[str, InitExtra] = MappingProxyType({}),
    init_optimizer: InitExtra | None = None,
) -> TrainState:
    """Fresh train state; every array is created directly in its shards.

    Args:
        seed: of the parameters and of the run's randomness.
        abstract: from ``abstract_state``.
        params: initial parameters, on the mesh; None: random ones.
        extras: as given to ``abstract_state``.
        init_optimizer: ``params -> optimizer state`` that is not in memory; None: the optimizer's own, in its shards.
    """

    _, run_key = jax.random.split(jax.random.key(seed))
    with jax.set_mesh(mesh):
        if params is None:
            params = initial_params(model, seed, sharding.shardings_of(abstract.params))
        elif host_bytes(abstract.params):
            params = jax.tree.map(lambda p, there: jax.device_put(p, there.sharding), params, abstract.params)
        return TrainState(
            params=params,
            opt_state=init_optimizer(params)
            if init_optimizer is not None
            else _init_optimizer(optimizer, params, abstract.opt_state),
            step=jax.device_put(jnp.zeros((), jnp.int32), abstract.step.sharding),
            # Not device_put, which cannot put keys on devices of other processes.
            rng=jax.jit(lambda key: key, out_shardings=abstract.rng.sharding)(run_key),
            extras=init_extras(extras, params, abstract),
        )


def init_extras(extras: Mapping[str, InitExtra], params: Any, abstract: TrainState) -> dict[str, Any]:
    """Fresh states of the step's links, by name, each created in its shards."""
    # No link that reads the parameters goes with parameters in files.
    given = () if any(isinstance(leaf, OffloadedLeaf) for leaf in jax.tree.leaves(params)) else params
    return {
        name: jax.jit(init, out_shardings=sharding.shardings_of(abstract.extras[name]))(given)
        for name, init in extras.items()
    }


def initial_params(model: Functional, seed: int, shardings: Any) -> Any:
    """Random parameters that a run with this seed starts from; the run's mesh is set."""
    return model.init(jax.random.split(jax.random.key(seed))[0], shardings)


def _init_optimizer(optimizer: optax.GradientTransformation, params: Any, abstract: Any) -> Any:
    """Initial optimizer state; under optimizer offload array by array, since a device may not hold all of it."""
    if not host_bytes((params, abstract)):
        return jax.jit(optimizer.init, out_shardings=sharding.shardings_of(abstract))(params)
    leaves, structure = jax.tree.flatten(abstract)

    def one(number: int) -> jax.Array:
        make = lambda params: jax.tree.leaves(optimizer.init(params))[number]  # noqa: E731
        return jax.jit(make, out_shardings=leaves[number].sharding)(params)

    return structure.unflatten([one(number) for number in range(len(leaves))])
