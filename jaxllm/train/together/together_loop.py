"""Loop that trains several runs with adapters of one base: one compiled step, and for each run its own optimizer state,
data, log, checkpoints and receipt, so that its directory is that of a run that was trained alone.

The published systems that batch the adapters of several jobs over one base: MixLoRA (arXiv:2404.15159) and mLoRA
(arXiv:2312.02515).
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from jaxllm.config import ConfigError
from jaxllm.data import Dataset, Prefetcher
from jaxllm.models.param_subset import merge
from jaxllm.observe.event_log import EventLog
from jaxllm.parallel.compiler_flags import described
from jaxllm.parallel.distributed import SynchronizedStop, group
from jaxllm.train.combinations import check_combinations
from jaxllm.train.config import RunConfig
from jaxllm.train.evaluate import Evaluator
from jaxllm.train.frozen_base import trained_only
from jaxllm.train.loop import (
    TrainResult,
    announce_run,
    finish_run,
    make_evaluator,
    record_evaluation,
    record_metrics,
    stop_signals,
    watchdog_of,
    write_start,
)
from jaxllm.train.records.loss_plot import draw_loss
from jaxllm.train.records.recorder import Recorder, start_facts
from jaxllm.train.recovery.rollback import NonFiniteLossError, SpikesError, finite_or_none
from jaxllm.train.recovery.saving import Saver
from jaxllm.train.run import Run, build_value_and_grad
from jaxllm.train.run_features import TOGETHER
from jaxllm.train.run_model import saved_params
from jaxllm.train.step.step_builder import build_split_step
from jaxllm.train.step.train_state import TrainState
from jaxllm.train.together.runs_file import check_alike
from jaxllm.train.together.shared_base import LoadedOnce, start_together
from jaxllm.train.together.together_step import JointStep, jit_joint_step, joint_step


class Member(NamedTuple):
    """One of the runs that are trained together.

    Attributes:
        run: prepared; its base is that of all.
        saver: of its checkpoints.
        recorder: of its log.
        evaluate: evaluation on its held-out text, by the program of all; None without any.
    """

    run: Run
    saver: Saver
    recorder: Recorder
    evaluate: Evaluator | None


@runtime_checkable
class JointFeed(Protocol):
    """Batches of runs that depend on their parameters, such as rollouts of policies (``loop.BatchFeed`` of one run)."""

    def batches(
        self, runs: Sequence[Run], base: Any, first: int, params: Callable[[], Sequence[Any]]
    ) -> contextlib.AbstractContextManager[Sequence[Iterator[tuple[int, Any]]]]:
        """Context manager with an iterator over (step, batch on the devices) for each run.

        Args:
            runs: their data sources have blank batches of the same shapes.
            base: the parameters that they share.
            first: step of the first batches.
            params: returns the parameters of each run after the steps so far, without the base, which the next step
                donates; None for a run that has stopped by itself, whose batches are not read any more.
        """
        ...

    def metrics(self, number: int, step: int) -> dict[str, float]:
        """Metrics of the batch of step ``step``, counted from 1, of the run at ``number``, for the log."""
        ...


def train_together(
    configs: Sequence[RunConfig], *, data: Sequence[Dataset] | None = None, feed: JointFeed | None = None
) -> tuple[TrainResult, ...]:
    """Trains several runs with adapters of one base in one compiled step, or resumes them.

    Each run gets what ``train`` would give it: the gradients, the updates and the files. A run whose loss is not finite
    stops by itself, and the others continue. Signals stop all of them, as they do one run.

    Args:
        configs: the runs, which differ in ``runs_file.may_differ`` alone.
        data: the data set of each, as for ``train``; None: those of the configurations.
        feed: gives the batches instead of ``data``, which then say their shapes; None: none.

    Returns:
        the result of each; ``complete`` is False for one that stopped.

    Raises:
        ConfigError: runs differ in what they share, or their settings do not go with a joint step.
        ResumeError: as ``train``, or the runs have no checkpoints of one step.
    """
    began = time.time()
    check_alike(configs)
    check_one_process(configs[0])
    if not configs[0].init_from:
        raise ConfigError("runs that are trained together adapt one trained model; set init_from, such as smollm2.")
    initial = LoadedOnce(configs[0])
    sets = [None] * len(configs) if data is None else data
    runs = [Run(config, data=own, init_model=initial.model) for config, own in zip(configs, sets, strict=True)]
    for run in runs:
        check_combinations(run.config, dict(run.mesh.shape), jax.default_backend(), also=(TOGETHER,))
    with contextlib.ExitStack() as stack:
        savers = [stack.enter_context(run.saver()) for run in runs]
        logs = [EventLog(run.directory.events, began) for run in runs]
        for run, events in zip(runs, logs, strict=True):
            events.started(**start_facts(run))
        base, states, first = start_together(runs, savers, initial)
        jax.block_until_ready(states)
        members = []
        for run, saver, events in zip(runs, savers, logs, strict=True):
            events.write("restored" if first else "initialised", step=first)
            write_start(run, first)
            recorder = stack.enter_context(Recorder.open(run, first, events, label=run.config.name))
            shared = next((one.evaluate for one in members if one.evaluate is not None), None)
            no_text = run.data.heldout is None
            evaluate = make_evaluator(run) if shared is None or no_text else shared.on(run.data.heldout)
            members.append(Member(run, saver, recorder, evaluate))
            announce_run(run, recorder.view, first)
        stopping = stack.enter_context(stop_signals())
        states, done, stopped = run_together(members, base, states, first, stopping, feed)
        return tuple(
            _finished(member, with_base(state, base), done, stopping, trained=done > first, failed=failed)
            for member, state, failed in zip(members, states, stopped, strict=True)
        )


def compile_joint_step(runs: Sequence[Run]) -> tuple[Any, float]:
    """The compiled joint step of runs, ``(base, states, batches) -> (states, metrics)``, and the seconds it took.

    Raises:
        ConfigError: the batches of two runs have different fields.
    """
    start, first = time.monotonic(), runs[0]
    config, model, mesh = first.config, first.model, first.mesh
    grads = build_value_and_grad(config, model, mesh)
    layers = config.observe.layers_every > 0
    updates = [
        build_split_step(run.config, model, grads, run.optimizer, layers=layers).update  # type: ignore[arg-type]
        for run in runs
    ]
    batches = []
    for run in runs:
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=first.batch_sharding), run.data.train.batch_at(0)
        )
        if batches and jax.tree.structure(batch) != jax.tree.structure(batches[0]):
            raise ConfigError(
                f"{config.name} and {run.config.name} are trained together, but their batches have different fields; "
                "give them data of the same content."
            )
        batches.append(batch)
    saved = saved_params(config, model)
    abstract = tuple(trained_only(run.base, run.abstract) for run in runs)
    frozen = jax.tree.map(lambda own, leaf: None if own else leaf, saved, first.abstract.params)
    step: JointStep = jit_joint_step(joint_step(grads, updates, saved), abstract)
    with jax.set_mesh(mesh):
        lowered = step.lower(frozen, abstract, tuple(batches))  # type: ignore[attr-defined]
        compiled = lowered.compile(compiler_options=first.compiler_options or None)
    return compiled, time.monotonic() - start


def run_together(
    members: Sequence[Member],
    base: Any,
    states: tuple[TrainState, ...],
    first: int,
    stopping: list[int],
    feed: JointFeed | None = None,
) -> tuple[tuple[TrainState, ...], int, list[bool]]:
    """Loop over joint steps, from step ``first`` until the last step, or a signal.

    Args:
        members: the runs.
        base: the parameters that they share.
        states: of the runs after ``first`` steps, without the base.
        stopping: numbers of the signals received so far.
        feed: see ``train_together``.

    Returns:
        the states, the number of steps done, and for each run whether it stopped by itself.
    """
    leader, config = members[0].run, members[0].run.config
    stopped = [False] * len(members)
    if first == config.steps:
        return states, first, stopped
    step, seconds = compile_joint_step([member.run for member in members])
    members[0].recorder.view.say(
        f"compiled the step of {len(members)} runs in {seconds:.1f} s; options: {described(leader.compiler_options)}"
    )
    for member in members:
        member.recorder.events.write("compiled", seconds=round(seconds, 3))
        member.recorder.view.start_clock()
        member.recorder.start_clock()
    synchronized_stop, done = SynchronizedStop(leader.mesh), first
    pending: list[list[tuple[int, dict[str, Any]]]] = [[] for _ in members]  # of the step that was dispatched last
    values: list[dict[str, float]] = [{} for _ in members]

    def read_pending_metrics() -> None:
        for i, (member, waiting) in enumerate(zip(members, pending, strict=True)):
            if not waiting or stopped[i]:
                waiting.clear()
                continue
            try:
                more = None if feed is None else functools.partial(feed.metrics, i)
                values[i] = record_metrics(member.run, member.recorder, member.saver, *waiting.pop(), more=more)
            except (NonFiniteLossError, SpikesError) as error:
                stopped[i] = True
                member.recorder.events.write("failed", why=str(error).splitlines()[0])
                member.recorder.view.say(f"{member.run.config.name}: {error}\nThe other runs continue.")

    def wait_for_devices() -> None:
        read_pending_metrics()
        jax.block_until_ready(states)

    def each(act: Callable[[int, Member], None]) -> None:
        for i, member in enumerate(members):
            if not stopped[i]:
                act(i, member)

    def save(i: int, member: Member) -> None:
        member.recorder.events.flush()
        metrics = {key: finite_or_none(value) for key, value in values[i].items()}
        member.run.save(member.saver, "disk", done, states[i], metrics)
        member.recorder.events.write("saved", step=done, place="disk")
        member.recorder.start_clock()

    def evaluate(i: int, member: Member) -> None:
        if member.evaluate is None:
            return
        member.recorder.events.flush()
        found = member.evaluate(with_base(states[i], base).params)
        record_evaluation(found, done, member.recorder.sinks.log, member.recorder.view)
        member.recorder.events.write("evaluated", step=done)
        member.recorder.start_clock()

    def current_params() -> list[Any]:
        return [None if ended else state.params for state, ended in zip(states, stopped, strict=True)]

    with contextlib.ExitStack() as stack:
        feeds: Sequence[Any]
        if feed is None:
            feeds = [stack.enter_context(Prefetcher(one.run.batches, first, one.run.put_batch)) for one in members]
        else:
            feeds = stack.enter_context(feed.batches([one.run for one in members], base, first, current_params))
        stack.enter_context(jax.set_mesh(leader.mesh))
        watchdog = stack.enter_context(watchdog_of(leader))
        timed = [one.recorder.timed_batches(feed, own) for one, feed, own in zip(members, feeds, pending, strict=True)]
        profiler = members[0].recorder.profiler
        for batches in watchdog.batches(map(_together, zip(*timed, strict=True)), first):
            number, rows = batches
            with profiler.before_step(number + 1, wait_for_devices), watchdog.waiting_for(number + 1):
                states, metrics = step(base, states, rows)
            read_pending_metrics()  # of the step before
            done = number + 1
            for own, found in zip(pending, metrics, strict=True):
                own.append((done, found))
            if summary := profiler.after_step(done, wait_for_devices):
                members[0].recorder.view.say(summary)
            last = bool(synchronized_stop(stopping)) or done == config.steps
            saving = members[0].saver.due(done, last)
            evaluating = config.eval_every > 0 and done % config.eval_every == 0 and done < config.steps
            if saving or evaluating:
                read_pending_metrics()  # a state is saved only after its step's loss was found finite
            if saving:
                each(save)
            if evaluating:
                each(evaluate)
            if last or all(stopped):
                break
    return states, done, stopped


def check_one_process(config: RunConfig) -> None:
    """Checks that the program is one process; raises ConfigError."""
    if group().size > 1:
        raise ConfigError(
            f"{config.name} and others are trained together in {group().size} processes; runs in several processes are "
            "trained one after the other. Leave --together out, or start one process."
        )


def with_base(state: TrainState, base: Any) -> TrainState:
    """State of a run with the parameters of the base."""
    return replace(state, params=merge(state.params, base))


def _together(items: tuple[tuple[int, Any], ...]) -> tuple[int, tuple[Any, ...]]:
    """One step's number and the batches of all runs, from those of each."""
    return items[0][0], tuple(batch for _, batch in items)


def _finished(
    member: Member, state: TrainState, done: int, stopping: list[int], *, trained: bool, failed: bool
) -> TrainResult:
    """Result of a run, after its last evaluation and its receipt if it is complete."""
    run, recorder, files = member.run, member.recorder, member.run.directory
    member.saver.finish()
    if failed:
        return TrainResult(files.path, member.saver.disk.latest() or 0, False, None, None)
    recorder.events.write("saved", step=done)
    if done < run.config.steps:
        recorder.view.say(f"Stopped after step {done}; saved. Start again with the same command to resume.")
        draw_loss(files.read_metrics(), files.plot, run.config.name)
        recorder.events.write("stopped", step=done)
        return TrainResult(files.path, done, False, stopping[0] if stopping else None, None)
    evaluation = finish_run(run, state, recorder, trained=trained, evaluate=member.evaluate)
    recorder.events.write("finished", step=done)
    return TrainResult(files.path, done, True, None, evaluation)
