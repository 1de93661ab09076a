"""Step builder: composes a run's training step and optimizer from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from jaxllm.models import Functional
from jaxllm.models.param_subset import select
from jaxllm.optim import StepHooks, layer_optimizer, optimizer, schedule
from jaxllm.train.config import RunConfig
from jaxllm.train.disk.disk_step import DiskStepPrograms, disk_step_programs, initial_arrays, part_of, step_programs
from jaxllm.train.disk.saved_inputs import DiskInputs, HostInputs
from jaxllm.train.disk.state_files import StateFiles
from jaxllm.train.disk.streamed_programs import StreamedModel, StreamedPrograms, compiled_streamed_programs
from jaxllm.train.disk.streamed_start import initial_streamed_arrays, stored_params
from jaxllm.train.outer.adaptive_step import Choice
from jaxllm.train.outer.co2 import co2_step
from jaxllm.train.outer.compressed_gradients import compressed_gradients, gradient_errors
from jaxllm.train.outer.dedloc import fixed_batch
from jaxllm.train.outer.outer_step import averaging_step, outer_states
from jaxllm.train.outer.replicas import copy_to_replicas, over_replicas, replica_states, with_outer_step
from jaxllm.train.run_model import trained_params
from jaxllm.train.step.absent_experts import absent_experts
from jaxllm.train.step.objective import HeadObjective, make_objective
from jaxllm.train.step.param_average import parameter_average
from jaxllm.train.step.step_chain import Report, Step, StepLink, link_states
from jaxllm.train.step.step_links import (
    balance_biases,
    layer_norms_report,
    mixed_precision,
    routing_report,
    spike_detection,
)
from jaxllm.train.step.subset_update import subset_optimizer
from jaxllm.train.step.train_state import TrainState, abstract_state, init_state
from jaxllm.train.step.training_step import (
    SplitStep,
    ValueAndGrad,
    composed_gradients,
    layerwise_step,
    split_step,
    train_step,
)
from jaxllm.train.step.zo2 import pending_update
from jaxllm.train.unequal.uneven_state import UnevenState
from jaxllm.train.unequal.uneven_update import UnevenUpdate, initial_parts


def build_step(
    config: RunConfig,
    model: Functional,
    grads: ValueAndGrad,
    optimizer: optax.GradientTransformation,
    *,
    layers: bool = False,
    choice: Choice | None = None,
) -> Step:
    """Training step of a run, not yet jitted; of all its replicas, with their outer steps, where it has any.

    Args:
        config: the run.
        model: of the run.
        grads: loss sums and gradients of a batch, on the run's mesh (``jaxllm.train.run.build_value_and_grad``).
        optimizer: of the run (``build_optimizer``).
        layers: also report norms layer by layer.
        choice: ranks of adaptive compression; None: those before the first choice.
    """
    rate, hooks, links = (
        schedule(config.optim.schedule, config.steps),
        _hooks(config, model),
        step_links(config, choice),
    )
    if hooks.update is not None:
        return layerwise_step(hooks.update, rate, links)
    step = train_step(grads, optimizer, rate, links, _reports(model, layers), hooks)
    outer = config.outer
    if outer.kind == "none":
        return step
    step = over_replicas(step)
    return co2_step(step, outer) if outer.kind == "co2" else with_outer_step(step, outer.every, averaging_step(outer))


def build_error_measure(
    config: RunConfig, model: Functional, grads: ValueAndGrad
) -> Callable[[TrainState, Any], dict[str, jax.Array]]:
    """Function that measures what adaptive compression would lose of a batch's gradients, not yet jitted.

    Args:
        config, model, grads: as for ``build_step``; with ``config.grads.is_adaptive``.
    """
    return gradient_errors(config.grads, composed_gradients(grads, (), _hooks(config, model)))


def build_split_step(
    config: RunConfig,
    model: Functional,
    grads: ValueAndGrad,
    optimizer: optax.GradientTransformation,
    *,
    layers: bool = False,
) -> SplitStep:
    """Training step of a run as two functions, for checkpoints that are copied while gradients are computed.

    Args:
        config, model, grads, optimizer, layers: as for ``build_step``; the optimizer needs whole gradients.
    """
    rate, hooks, links = schedule(config.optim.schedule, config.steps), _hooks(config, model), step_links(config)
    return split_step(grads, optimizer, rate, links, _reports(model, layers), hooks)


def build_disk_step(
    config: RunConfig, model: Functional, grads: ValueAndGrad, abstract: TrainState, units: StateFiles | UnevenState
) -> DiskStepPrograms:
    """Training step of a run that updates unit by unit, as jitted programs, or programs to be lowered.

    Args:
        config, model, grads: as for ``build_step``; the optimizer must be streamable, and elementwise for uneven parts.
        abstract: the train state with ``units.leaves()``.
        units: optimizer state in files, or in parts of unequal size.
    """
    links, make, axes = step_links(config), layer_optimizer(config.optim, config.steps), model.logical_axes()
    clip_norm, rate = config.optim.clip_norm, schedule(config.optim.schedule, config.steps)
    gradients, reports = composed_gradients(grads, links, _hooks(config, model)), _reports(model, layers=False)
    if isinstance(units, StateFiles):
        return disk_step_programs(gradients, make, clip_norm, axes, rate, links, reports, abstract, units)
    updates = {
        segment: UnevenUpdate(make(part_of(axes, segment)), clip_norm, abstract.opt_state, units, segment)
        for segment in dict.fromkeys(unit.segment for unit in units.units)
    }
    return step_programs(gradients, updates, rate, links, reports, abstract)


def streamed_model(config: RunConfig, model: Functional, abstract: TrainState, params: StateFiles) -> StreamedModel:
    """Streamed model of a run with its parameters in files, which its programs are made of.

    Args:
        config, model: of the run, whose objective is of the final hidden states.
        abstract: the train state, with ``DiskLeaf`` for what is in files.
        params: files of the parameters.
    """
    objective = make_objective(config.objective, config.z_loss)
    assert isinstance(objective, HeadObjective)
    return StreamedModel(model, objective, config.routing, config.parallel.layout, config.accumulate, params, abstract)


def build_streamed_step(
    config: RunConfig, of: StreamedModel, files: StateFiles, batch: Any, options: dict[str, Any] | None
) -> StreamedPrograms:
    """Compiled programs of a step with parameters and optimizer state in files; the run's mesh is set.

    Args:
        config: the run.
        of: from ``streamed_model``.
        files: of the optimizer state.
        batch: abstract.
        options: of the compiler.
    """
    make, rate = layer_optimizer(config.optim, config.steps), schedule(config.optim.schedule, config.steps)
    reports = _reports(of.model, layers=False)
    links, clip_norm = step_links(config), config.optim.clip_norm
    return compiled_streamed_programs(of, make, clip_norm, rate, links, reports, files, batch, options)


def streamed_inputs(
    config: RunConfig, of: StreamedModel, programs: StreamedPrograms, mesh: Mesh
) -> HostInputs | DiskInputs:
    """Saved inputs of the layers of a streamed step, in the host's memory or in files.

    Args:
        config: the run.
        of, programs: of its step.
        mesh: of the run.
    """
    if not config.disk.activations:
        return HostInputs()
    hidden = programs.hidden
    there = jax.ShapeDtypeStruct(hidden.shape, hidden.dtype, sharding=jax.NamedSharding(mesh, hidden.sharding.spec))
    saved = [[("hidden states", there), *programs.values[of.kind_of(unit)]] for unit in of.params.units]
    return DiskInputs(config.disk, saved, config.accumulate)


def _hooks(config: RunConfig, model: Functional) -> StepHooks:
    return StepHooks() if config.optim.spec.hooks is None else config.optim.spec.hooks(config, model)


def _reports(model: Functional, layers: bool) -> list[Report]:
    return [routing_report(model.config), *([layer_norms_report] if layers else [])]


def settle_function(config: RunConfig, model: Functional) -> Callable[[TrainState], TrainState] | None:
    """Function that applies a state's pending update before it is saved or evaluated; None: steps leave none."""
    deferred = config.optim.spec.deferred and config.host.params and config.optim.spec.hooks is not None
    return config.optim.spec.hooks(config, model).settle if deferred else None  # type: ignore[misc]


def step_links(config: RunConfig, choice: Choice | None = None) -> tuple[StepLink, ...]:
    """Links of a run's step, innermost first; the run's state has their states (``run_state``).

    Args:
        config: the run.
        choice: see ``build_step``.
    """
    rate = schedule(config.optim.schedule, config.steps)
    links = (
        absent_experts(config.routing, config.model),
        compressed_gradients(config.grads, choice),
        fixed_batch(config.peers),
        mixed_precision(config.model, rate),
        spike_detection(config.spikes, rate),
        None if config.optim.spec.layerwise else balance_biases(config.model, config.routing.bias_rate),
        parameter_average(config.ema),
        pending_update(config),
    )
    return tuple(link for link in links if link is not None)


def run_state(
    config: RunConfig, model: Functional, optimizer: optax.GradientTransformation, mesh: Mesh | AbstractMesh
) -> TrainState:
    """Shapes, dtypes and shardings of a run's train state, with the states of its step's links (``abstract_state``).

    With outer steps it is the state of all replicas (``jaxllm.train.outer.replicas``).
    """
    one = abstract_state(model, optimizer, mesh, config.host, link_states(step_links(config)))
    return one if config.outer.kind == "none" else replica_states(one, *outer_states(config.outer, one.params))


def init_run_state(
    config: RunConfig,
    model: Functional,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    abstract: TrainState,
    params: Any = None,
    files: StateFiles | None = None,
    param_files: StateFiles | None = None,
    uneven: UnevenState | None = None,
) -> TrainState:
    """Fresh train state of a run; replicas begin with the same values.

    Args:
        config, model, optimizer, mesh: of the run.
        abstract: from ``run_state``.
        params: initial parameters, on the mesh; None: random ones.
        files: where the optimizer state is; None: in memory.
        param_files: where the parameters of layers are; None: in memory.
        uneven: parts of the optimizer state of unequal size; None: its shards are even.
    """
    extras = link_states(step_links(config))
    if config.outer.kind == "none":
        make = layer_optimizer(config.optim, config.steps)
        in_files = files and (lambda params: initial_arrays(make, model.logical_axes(), params, files))
        if uneven is not None:
            in_files = lambda params: initial_parts(make, model.logical_axes(), params, uneven)  # noqa: E731
        if files is not None and param_files is not None:
            with jax.set_mesh(mesh):
                params = stored_params(model, config.seed, abstract.params, param_files, params)
            in_files = lambda params: initial_streamed_arrays(  # noqa: E731
                make, model.logical_axes(), params, param_files, files
            )
        return init_state(model, optimizer, mesh, config.seed, abstract, params, extras, in_files)
    one = abstract_state(model, optimizer, mesh, config.host, extras)
    first = init_state(model, optimizer, mesh, config.seed, one, params, extras)
    with jax.set_mesh(mesh):
        return copy_to_replicas(first, abstract)


def build_optimizer(config: RunConfig, model: Functional) -> optax.GradientTransformation:
    """Optimizer of a run, for its trainable parameters; optimizer offload (``config.host``) updates layer by layer."""
    every = config.host.device_every if config.host.optimizer else 0
    trained = trained_params(config, model)
    found = optimizer(config.optim, config.steps, select(trained, model.logical_axes()), every)
    return subset_optimizer(found, trained)
