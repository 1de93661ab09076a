"""TrainState: everything a checkpoint must restore to resume a run: parameters, optimizer state, step, RNG key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import sharding
from jaxllm.models import Functional
from jaxllm.train.host_offload import HostConfig, host_bytes
from jaxllm.train.step.loss_spikes import SpikeConfig, init_spike_detector
from jaxllm.train.step.numerics import init_numerics


@jax.tree_util.register_dataclass
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
        numerics: loss scale of float16 and amax history of delayed fp8 scaling (``jaxllm.train.step.numerics``); None
            for precisions that need neither.
        spikes: state of the loss spike detector (``jaxllm.train.step.loss_spikes``); None where it is off.
    """

    params: Any
    opt_state: Any
    step: Any
    rng: Any
    numerics: Any = None
    spikes: Any = None


def abstract_state(
    model: Functional,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
    host: HostConfig = HostConfig(),  # noqa: B008
    spikes: SpikeConfig | None = None,
) -> TrainState:
    """Shapes, dtypes and shardings of the train state, nothing allocated: the target of init, restore and compilation.

    Args:
        model, optimizer, mesh: of the run.
        host: what is offloaded to host memory.
        spikes: configuration of the loss spike detector; None: no detector.

    Raises:
        ShardingError: the model does not fit the mesh.
    """
    params = sharding.abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
    everywhere = NamedSharding(mesh, PartitionSpec())
    key = jax.eval_shape(lambda: jax.random.key(0))
    params, opt_state = host.place(params, sharding.derived_abstract(optimizer.init, params, mesh))

    def replicated(make: Any) -> Any:
        shapes = jax.eval_shape(make)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), shapes)

    return TrainState(
        params=params,
        opt_state=opt_state,
        step=jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere),
        rng=jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=everywhere),
        numerics=replicated(lambda: init_numerics(model.config)),
        spikes=replicated(lambda: None if spikes is None else init_spike_detector(spikes)),
    )


def init_state(
    model: Functional,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    seed: int,
    abstract: TrainState,
    params: Any = None,
    spikes: SpikeConfig | None = None,
) -> TrainState:
    """Fresh train state; every array is created directly in its shards.

    Args:
        seed: of the parameters and of the run's randomness.
        abstract: from ``abstract_state``.
        params: initial parameters, on the mesh; None: random ones.
        spikes: as given to ``abstract_state``.
    """

    _, run_key = jax.random.split(jax.random.key(seed))
    with jax.set_mesh(mesh):
        if params is None:
            params = initial_params(model, seed, sharding.shardings_of(abstract.params))
        elif host_bytes(abstract.params):
            params = jax.tree.map(lambda p, there: jax.device_put(p, there.sharding), params, abstract.params)
        return TrainState(
            params=params,
            opt_state=_init_optimizer(optimizer, params, abstract.opt_state),
            step=jax.device_put(jnp.zeros((), jnp.int32), abstract.step.sharding),
            # Not device_put, which cannot put keys on devices of other processes.
            rng=jax.jit(lambda key: key, out_shardings=abstract.rng.sharding)(run_key),
            numerics=jax.tree.map(lambda x: jax.device_put(x, abstract.step.sharding), init_numerics(model.config)),
            spikes=None if spikes is None else jax.device_put(init_spike_detector(spikes), abstract.step.sharding),
        )


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
