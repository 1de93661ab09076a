"""Training step with its optimizer state in files: gradients, then the update of one layer after the other.

    gradients    state without optimizer state, batch -> loss sums, gradients, their norms
    update       parameters, gradients, state of one unit -> parameters, new state of the unit; once for each unit
    finish       links and metrics

Each is a program of its own; between them the host streams the state (``disk_tier``). Parameters are donated from
one to the next, so that they are updated in place. The result is that of ``training_step.train_step``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxllm.models.params import at_least_f32
from jaxllm.optim.streamed_state import layer_row, merged_parts, part_of_model, put_layer_row
from jaxllm.train.disk.io_timeline import IoTimeline
from jaxllm.train.disk.state_files import StateFiles
from jaxllm.train.disk.state_units import StateUnits
from jaxllm.train.step.step_chain import Gradients, Report, StepLink, StepResult, finished
from jaxllm.train.step.subset_update import apply_updates
from jaxllm.train.step.train_state import TrainState
from sharding import shardings_of

Make = Callable[[Any], optax.GradientTransformation]


@runtime_checkable
class SeveralPrograms(Protocol):
    """Update of a unit that is several programs; ``lower`` and ``compile`` are as of a jitted function."""

    def outputs(self, *given: Any) -> Any:
        """Shapes and shardings of what the update returns, as ``jax.eval_shape`` finds them of a function."""
        ...

    def lower(self, *given: Any) -> Any:
        """The programs, lowered for abstract arguments."""
        ...


class DiskStepPrograms(NamedTuple):
    """Programs of a streamed step: jitted, lowered or compiled.

    Attributes:
        gradients: ``(state, batch) -> (sums, gradients, norms, amax)``; the norms are that of the metrics, and that
            of gradient clipping.
        updates: by segment, and "" for what is outside of layers: ``(params, gradients, norm, counters, arrays, row)
            -> (new parameters of the unit, arrays, counters, squared norm of the update)``, of that part of the model.
        puts: by segment: ``(params, new parameters of the unit, row) -> params``, in place. A program of its own: XLA
            copies stacks that a program both reads in several loops and updates.
        finish: ``(params, state, counters, sums, norm, amax, squares) -> (params, step, extras, metrics)``.
    """

    gradients: Any
    updates: dict[str, Any]
    puts: dict[str, Any]
    finish: Any


def disk_step_programs(
    gradients: Gradients,
    make: Make,
    clip_norm: float | None,
    logical_axes: dict[str, Any],
    rate: optax.Schedule,
    links: Sequence[StepLink],
    reports: Sequence[Report],
    abstract: TrainState,
    files: StateFiles,
) -> DiskStepPrograms:
    """Jitted programs of a step with its state in files.

    Args:
        gradients: function of loss and gradients, with the changes of the links (``composed_gradients``).
        make: logical axes of a part of the parameters -> its optimizer, without gradient clipping.
        clip_norm: global norm that gradients are clipped to; None: any.
        logical_axes: of all parameters.
        rate: learning-rate schedule, for the metrics.
        links: techniques that need neither gradients nor updates after the update.
        reports: further metrics, of the same kind.
        abstract: the train state with ``files.leaves()``.
        files: of the optimizer state.
    """

    shardings = shardings_of(abstract.params)
    everywhere = NamedSharding(jax.tree.leaves(shardings)[0].mesh, PartitionSpec())
    updates = {
        segment: jax.jit(
            _update_of(make(part_of(logical_axes, segment)), clip_norm, abstract.opt_state, segment),
            donate_argnums=() if segment else 0,
            out_shardings=(
                part_of(shardings, segment),
                [one.sharding for one in files.abstract_rows(segment)],
                [everywhere] * len(files.kept),
                everywhere,
            ),
        )
        for segment in dict.fromkeys(unit.segment for unit in files.units)
    }

    return step_programs(gradients, updates, rate, links, reports, abstract)


def step_programs(
    gradients: Gradients,
    updates: dict[str, Any],
    rate: optax.Schedule,
    links: Sequence[StepLink],
    reports: Sequence[Report],
    abstract: TrainState,
) -> DiskStepPrograms:
    """Programs of a step that updates unit by unit.

    Args:
        updates: by segment, see ``DiskStepPrograms``.
        gradients, rate, links, reports, abstract: as for ``disk_step_programs``.
    """
    shardings = shardings_of(abstract.params)

    def gradients_and_norms(state: TrainState, batch: Any) -> Any:
        sums, grads, *amax = gradients(state, batch)
        norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(at_least_f32(g.dtype)), grads))
        return sums, grads, (norm, optax.tree.norm(grads)), tuple(amax)

    puts = {
        segment: jax.jit(put_layer_row, donate_argnums=0, out_shardings=part_of(shardings, segment))
        for segment in updates
        if segment
    }

    def norms(squares: Any) -> Report:
        def report(result: StepResult) -> dict[str, Any]:
            return {
                "param_norm": optax.tree.norm(result.state.params),
                "update_norm": jnp.sqrt(jnp.sum(jnp.stack(squares))),
            }

        return report

    def finish(params: Any, state: TrainState, counters: Any, sums: Any, norm: Any, amax: Any, squares: Any) -> Any:
        before = replace(state, params=params)

        def inner(state: TrainState, batch: Any) -> StepResult:
            new = replace(state, opt_state=tuple(counters), step=state.step + 1)
            return StepResult(new, sums, rate(state.step), norm, amax=amax)

        new, metrics = finished(inner, links, [*reports, norms(squares)])(before, None)
        return new.params, new.step, new.extras, metrics

    outs = (shardings, abstract.step.sharding, shardings_of(abstract.extras), None)
    return DiskStepPrograms(
        jax.jit(gradients_and_norms), updates, puts, jax.jit(finish, donate_argnums=0, out_shardings=outs)
    )


def lowered_programs(
    programs: DiskStepPrograms, abstract: TrainState, batch: Any, files: StateUnits
) -> DiskStepPrograms:
    """The programs, lowered for their arguments; the run's mesh is set.

    Args:
        programs: from ``disk_step_programs``.
        abstract: the train state with ``files.leaves()``.
        batch: abstract.
        files: units of the optimizer state.
    """
    resident = replace(abstract, opt_state=())
    sums, grads, norms, amax = jax.eval_shape(programs.gradients, resident, batch)
    counters = files.kept_of(abstract.opt_state)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    updates, puts, square = {}, {}, None
    for segment, update in programs.updates.items():
        parts = part_of(abstract.params, segment), part_of(grads, segment)
        given = (*parts, norms[1], counters, files.abstract_rows(segment), number)
        updates[segment] = update.lower(*given)
        own = isinstance(update, SeveralPrograms)
        new, _, _, square = update.outputs(*given) if own else jax.eval_shape(update, *given)
        if segment:
            puts[segment] = programs.puts[segment].lower(parts[0], new, number)
    last = (abstract.params, _ends_of(resident), counters, sums, norms[0], amax, [square] * len(files.units))
    return DiskStepPrograms(programs.gradients.lower(resident, batch), updates, puts, programs.finish.lower(*last))


def compiled_programs(lowered: DiskStepPrograms, options: dict[str, Any] | None) -> DiskStepPrograms:
    """Lowered programs, compiled with options of the compiler."""

    def compiled(program: Any) -> Any:
        return program.compile(compiler_options=options)

    updates, puts = ({s: compiled(one) for s, one in many.items()} for many in (lowered.updates, lowered.puts))
    return DiskStepPrograms(compiled(lowered.gradients), updates, puts, compiled(lowered.finish))


class DiskStep:
    """Compiled training step that updates unit by unit, ``(state, batch) -> (state, metrics)``.

    The optimizer state is in files, or in parts of unequal size (``jaxllm.train.unequal``).

    Args:
        programs: compiled.
        files: units of the optimizer state.
        score: ``(params, batch) -> batch``, which scores a batch with the reference model; None without one.

    Attributes:
        say: called with lines for the log.
        timeline: of the steps that come; None: none is kept.
    """

    def __init__(self, programs: DiskStepPrograms, files: StateUnits, score: Any = None):
        self._programs, self._files, self._score = programs, files, score
        self._backwards = False
        self.say: Callable[[str], object] = lambda line: None
        self.timeline: IoTimeline | None = None

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """The state after the step, and its metrics; the parameters of the state are donated.

        Raises:
            DiskTierError: the files failed; the state is lost then.
        """
        files, programs = self._files, self._programs
        batch = batch if self._score is None else self._score(state.params, batch)
        resident = replace(state, opt_state=())
        begin = time.monotonic()
        sums, grads, norms, amax = programs.gradients(resident, batch)
        if self.timeline is not None:
            self.timeline.dispatched(norms, begin)
        params, before = state.params, files.kept_of(state.opt_state)
        counters, squares = before, [None] * len(files.units)
        order = files.order(self._backwards)
        self._backwards = not self._backwards
        files.begin(order)
        for number in order:
            unit = files.units[number]
            rows = files.take(number)
            parts = part_of(params, unit.segment), part_of(grads, unit.segment)
            begin = time.monotonic()
            part, new, counters, squares[number] = programs.updates[unit.segment](
                *parts, norms[1], before, rows, np.int32(unit.row)
            )
            if unit.segment:
                part = programs.puts[unit.segment](parts[0], part, np.int32(unit.row))
            params = merged_parts(params, part)
            files.give(number, new)
            if self.timeline is not None:
                self.timeline.dispatched(squares[number], begin)
            del rows, new, parts, part
        del grads
        ends = _ends_of(resident)
        params, step, extras, metrics = programs.finish(params, ends, counters, sums, norms[0], amax, squares)
        state = replace(state, params=params, opt_state=files.with_kept(counters), step=step, extras=extras)
        if line := files.end():
            self.say(line)
        return state, metrics


def initial_arrays(make: Make, logical_axes: dict[str, Any], params: Any, files: StateFiles) -> Any:
    """Writes the optimizer state before the first step, unit by unit; returns the state with ``DiskLeaf``.

    Args:
        make, logical_axes: as for ``disk_step_programs``.
        params: the parameters, on the mesh, which is set.
        files: of the optimizer state.
    """

    def arrays_of(segment: str) -> Any:
        rule = make(part_of(logical_axes, segment))

        def init(params: Any, row: Any) -> list[Any]:
            state = rule.init(layer_row(params, row) if segment else params)
            return [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]

        return jax.jit(init, out_shardings=[one.sharding for one in files.abstract_rows(segment)])

    programs = {segment: arrays_of(segment) for segment in dict.fromkeys(unit.segment for unit in files.units)}

    def rows(number: int) -> list[jax.Array]:
        segment, row = files.units[number]
        return programs[segment](part_of(params, segment), np.int32(row))

    files.initialise(rows)
    return files.with_kept(unit_counters(make, logical_axes, params, files))


def unit_counters(make: Make, logical_axes: dict[str, Any], params: Any, units: StateUnits) -> list[jax.Array]:
    """Scalars of the optimizer state before the first step.

    Args:
        make, logical_axes, params: as for ``initial_arrays``.
        units: of the state.
    """
    leaves = jax.tree.leaves(units.leaves())
    shardings = [leaves[n].sharding for n in units.kept]
    whole = make(logical_axes)
    counters = jax.jit(
        lambda params: [leaf for leaf in jax.tree.leaves(whole.init(params)) if not leaf.ndim], out_shardings=shardings
    )
    return counters(params)


def part_of(tree: Any, segment: str) -> Any:
    """Part of a tree over the model that belongs to the units of a segment, or to those outside of layers ("")."""
    if segment:
        return part_of_model(tree, ["segments"], segment)
    return part_of_model(tree, [name for name in tree if name != "segments"])


def _ends_of(state: TrainState) -> TrainState:
    return replace(state, params=(), opt_state=())


def _update_of(
    rule: optax.GradientTransformation, clip_norm: float | None, opt_state: Any, segment: str
) -> Callable[..., Any]:
    """Update of one unit: of a layer of the segment, or of everything outside of layers."""
    of_unit = unit_update(rule, opt_state, segment)

    def update(params: Any, grads: Any, norm: Any, counters: Any, arrays: Any, row: Any) -> Any:
        own = layer_row((params, grads), row) if segment else (params, grads)
        clipped = own[1]
        if clip_norm is not None:
            clipped = jax.tree.map(lambda g, most=clip_norm: clipped_by(norm, most, g), clipped)
        changed, new, counts, changes = of_unit(own[0], clipped, counters, arrays)
        return changed, new, counts, optax.tree.norm(changes, squared=True)

    return update


def unit_update(rule: optax.GradientTransformation, opt_state: Any, segment: str) -> Callable[..., Any]:
    """Update of one unit: ``(params, gradients, counters, arrays) -> (params, arrays, counters, updates)``.

    Args:
        rule: of the unit's parameters.
        opt_state: the whole optimizer state, abstract.
        segment: of the unit; empty: everything outside of layers.
    """
    part = part_of_state(opt_state, segment)
    scalar = [leaf.ndim == 0 for leaf in jax.tree.leaves(part)]
    structure = jax.tree.structure(part)

    def update(params: Any, grads: Any, counters: Any, arrays: Any) -> Any:
        counts, rows = iter(counters), iter(arrays)
        state = structure.unflatten([next(counts) if one else next(rows) for one in scalar])
        changes, new = rule.update(grads, state, params)
        leaves = jax.tree.leaves(new)
        return (
            apply_updates(params, changes),
            [leaf for leaf, one in zip(leaves, scalar, strict=True) if not one],
            [leaf for leaf, one in zip(leaves, scalar, strict=True) if one],
            changes,
        )

    return update


def clipped_by(norm: Float[Array, ""], most: float, grads: Float[Array, "..."]) -> Float[Array, "..."]:
    """Gradients clipped by a global norm that is known, as ``optax.clip_by_global_norm`` clips them."""
    return jax.lax.select(norm < most, grads, (grads / norm.astype(grads.dtype)) * most)


def part_of_state(opt_state: Any, segment: str) -> Any:
    """Part of an optimizer state that belongs to the units of a segment, or to those outside of layers ("")."""
    names = [name for name in _model_tree(opt_state) if name != "segments"]
    return part_of_model(opt_state, ["segments"], segment) if segment else part_of_model(opt_state, names)


def _model_tree(tree: Any) -> dict[str, Any]:
    """First tree over the model in a state."""
    if isinstance(tree, dict):
        if {"embedding", "segments", "head"} <= set(tree):
            return tree
        tree = tuple(tree.values())
    if isinstance(tree, (list, tuple)):
        for one in tree:
            if found := _model_tree(one):
                return found
    return {}
