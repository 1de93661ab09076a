"""Training loop: compile the step once, then step, log, save checkpoints and evaluate.

train              prepares a run, or resumes it from its newest checkpoint
run_with_rollback  repeats run_until after each rollback from a loss spike
run_until          the loop over steps
finish_run         evaluates on held-out text and writes the receipt
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax

from jaxllm.checkpoint import CheckpointError, StateProvider
from jaxllm.config import ConfigError, to_dict
from jaxllm.data import Dataset, Prefetcher, repeated_data
from jaxllm.models import param_count
from jaxllm.observe.event_log import EventLog, read_events
from jaxllm.parallel.compiler_flags import described
from jaxllm.parallel.distributed import SynchronizedStop, group
from jaxllm.parallel.elastic.rank_monitor import RankReporter
from jaxllm.parallel.elastic.run_generation import REFORM
from jaxllm.train.config import RunConfig
from jaxllm.train.disk.disk_step import DiskStep
from jaxllm.train.disk.layer_stream_step import LayerStreamStep
from jaxllm.train.disk.state_file import DiskTierError
from jaxllm.train.disk.streamed_bytes import step_traffic
from jaxllm.train.disk.streamed_evaluation import StreamedEvaluator
from jaxllm.train.evaluate import (
    Evaluation,
    Evaluator,
    described_evaluation,
    evaluates_objective,
    heldout_metrics,
    objective_evaluator,
)
from jaxllm.train.records.live_view import LiveView
from jaxllm.train.records.loss_plot import draw_loss
from jaxllm.train.records.receipt import make_receipt
from jaxllm.train.records.recorder import NON_SCALAR, Recorder, start_facts
from jaxllm.train.recovery.elastic_run import elastic_generation
from jaxllm.train.recovery.resume import start_state
from jaxllm.train.recovery.rollback import RollbackRequested, check_step_metrics, finite_or_none, roll_back
from jaxllm.train.recovery.saving import Saver
from jaxllm.train.recovery.step_watchdog import EVALUATING, SAVING, StepWatchdog
from jaxllm.train.run import Run, StepPrograms
from jaxllm.train.run_processes import device_fingerprint, fingerprint
from jaxllm.train.step.param_average import evaluated_params
from jaxllm.train.step.pipelined_loss import pipeline_plan, pipelined_loss_sums
from jaxllm.train.step.step_builder import streamed_model
from jaxllm.train.step.train_state import TrainState
from jaxllm.train.unequal.uneven_state import described_state


@dataclass(frozen=True)
class TrainResult:
    """Result of a call of ``train``.

    Attributes:
        directory: the run's directory.
        steps: steps done in all, earlier starts included.
        complete: whether all steps are done; False if a signal stopped the run, which the next start resumes.
        signal: number of the signal that stopped the run, or None.
        evaluation: held-out loss after the last step of a complete run; None without held-out text.
    """

    directory: Path
    steps: int
    complete: bool
    signal: int | None
    evaluation: Evaluation | None


@runtime_checkable
class BatchFeed(Protocol):
    """Batches that depend on the parameters, such as rollouts of a policy, in place of those of the data source."""

    def batches(
        self, run: Run, first: int, params: Callable[[], Any]
    ) -> contextlib.AbstractContextManager[Iterator[tuple[int, Any]]]:
        """Context manager with an iterator over (step, batch on the devices).

        Args:
            run: the run, whose data source has blank batches of the same shape.
            first: step of the first batch.
            params: returns the parameters after the steps so far; the next step donates them.
        """
        ...

    def metrics(self, step: int) -> dict[str, float]:
        """Metrics of the batch of step ``step``, counted from 1, for the log."""
        ...


def train(
    config: RunConfig,
    *,
    also: Sequence[StateProvider] = (),
    data: Dataset | None = None,
    feed: BatchFeed | None = None,
    until: int | None = None,
) -> TrainResult:
    """Trains the model that ``config`` describes, or resumes its run from the newest checkpoint.

    Ctrl-C and SIGTERM finish the current step, save a checkpoint and return; the next call with the same configuration
    resumes, with bitwise equal results on the same mesh.

    Args:
        config: the run.
        also: other parts of the program whose state is saved and restored in the run's checkpoints.
        data: the data set to train on, whose ``train`` may be any ``DataSource``; None: the one that ``config.data``
            describes.
        feed: gives the batches instead of ``data``, which then says their shape and has the data cursor; None: none.
        until: number of steps after which this call saves and returns, as at a signal; None: all.

    Raises:
        ResumeError: the directory holds a run with a different configuration.
        NonFiniteLossError: the loss diverged; the last checkpoint is from before.
        SpikesError: more loss spikes than ``spikes.limit``.
        ConfigError, ShardingError, DataError, CheckpointError: the message says what is wrong, where and what is
            legal.
        DistributedError: the processes of the run differ; the message says in what.
    """
    began = time.time()
    generation = elastic_generation(config)
    if generation is not None and feed is not None:
        raise ConfigError(
            "--elastic: the batches of this run are made with its parameters, by an engine on all its devices; leave "
            "--elastic out."
        )
    with contextlib.ExitStack() as stack:
        reporter = None
        if generation is not None:
            reporter = stack.enter_context(RankReporter(generation, group().rank))
        return _train(config, also, data, feed, began, reporter, until)


def _train(
    config: RunConfig,
    also: Sequence[StateProvider],
    data: Dataset | None,
    feed: BatchFeed | None,
    began: float,
    reporter: RankReporter | None,
    until: int | None,
) -> TrainResult:
    # Processes with different settings or data would hang or diverge later, so they compare them first.
    group().agree("the run", fingerprint(config), config.distributed.start_timeout)
    run = Run(config, also, data)
    run.reporter, run.until = reporter, config.steps if until is None else until
    if feed is not None and run.param_files is not None:
        raise ConfigError(
            "disk.parameters: the batches of this run are made with its parameters, which are in files; set "
            "disk.parameters to false."
        )
    run.group.agree("the devices and data", device_fingerprint(run.mesh, run.data.train.fingerprint))
    files = run.directory
    events = EventLog(files.events if files.writes else None, began)
    with run.saver() as saver:
        if run.until < config.steps and (done := saver.latest() or 0) >= run.until:
            return TrainResult(files.path, done, False, None, None)
        # Restore the newest checkpoint, or initialise.
        events.started(**(start_facts(run) if files.writes else {}))
        state, first = start_state(run, saver)
        jax.block_until_ready(state.params)
        written = read_events(files.path) if files.writes else []
        for event in () if run.generation is None else run.generation.events:
            if event not in written:  # a generation that failed before its first step has written them
                events.record(event)
        events.write("restored" if first else "initialised", step=first, **saver.restored)

        write_start(run, first)
        with Recorder.open(run, first, events) as recorder, stop_signals() as stopping:
            view = recorder.view
            announce_run(run, view, first)
            state, done = run_with_rollback(run, state, first, saver, recorder, stopping, feed)
            saver.finish()
            events.write("saved", step=done)
            if done < config.steps:
                next_start = "Start again with the same command to resume."
                if stopping[:1] == [REFORM]:
                    next_start = "All processes form again."
                elif not stopping:
                    next_start = f"It was to run until step {until}."
                view.say(f"Stopped after step {done}; saved. {next_start}")
                if files.writes:
                    draw_loss(files.read_metrics(), files.plot, config.name)
                events.write("stopped", step=done)
                return TrainResult(files.path, done, False, stopping[0] if stopping else None, None)
            evaluation = finish_run(run, state, recorder, trained=done > first)
            events.write("finished", step=done)
    return TrainResult(files.path, done, True, None, evaluation)


def write_start(run: Run, first: int) -> None:
    """Writes the description of this start to the run directory.

    Args:
        first: steps done before; rows of metrics after it are dropped, since they are written again.
    """
    files = run.directory
    files.write_json(files.config, to_dict(run.asked))
    if files.writes:
        run.data.tokenizer.save(files.tokenizer)
        if run.init_model is not None and run.init_model.template is not None:
            run.init_model.template.save(files.tokenizer)
    files.drop_metrics_after(first)


def run_with_rollback(
    run: Run,
    state: TrainState,
    first: int,
    saver: Saver,
    recorder: Recorder,
    stopping: list[int],
    feed: BatchFeed | None = None,
) -> tuple[TrainState, int]:
    """Compiles the step and runs it to the end or to a signal, rolling back at loss spikes where the run does so.

    Args:
        state: after ``first`` steps; its buffers are donated.
        stopping: numbers of the signals received so far (``stop_signals``).
        feed: see ``train``.

    Returns:
        the state and the number of steps done.
    """
    config, view, events = run.config, recorder.view, recorder.events
    if first == config.steps:
        return state, first
    if run.generation is not None and not run.group.is_leader:
        run.group.broadcast("compiled by process 0")  # programs are then in the cache that the processes share
    step, seconds = run.compile_step()
    if run.generation is not None and run.group.is_leader:
        run.group.broadcast("compiled by process 0")
    view.say(f"compiled the step in {seconds:.1f} s; options: {described(run.compiler_options)}")
    events.write("compiled", seconds=round(seconds, 3))
    if isinstance(step, LayerStreamStep):
        run.check_disk(sum(step.inputs.sizes))
    if isinstance(step, LayerStreamStep) and run.param_files is not None and run.state_files is not None:
        traffic = step_traffic(run.param_files, run.state_files, step.inputs.sizes, config.optim.clip_norm is not None)
        view.say(f"layers are streamed: {traffic}, for {config.accumulate} micro-batches")
    if isinstance(step, LayerStreamStep | DiskStep):
        step.say = view.say
    # Processes compile at different speeds, and collectives of the first step time out after half a minute.
    run.group.barrier("compiled")
    evaluate = make_evaluator(run) if config.eval_every else None
    synchronized_stop = SynchronizedStop(run.mesh)

    def stopped() -> bool:
        if run.reporter is not None and run.reporter.reform and not stopping:
            stopping.append(REFORM)
        return bool(synchronized_stop(stopping))

    while True:
        try:
            return run_until(run, step, evaluate, state, first, saver, recorder, stopped, feed)
        except RollbackRequested as request:
            spike, values = request.step, request.values
        except DiskTierError as error:
            raise DiskTierError(f"{error} {checkpoint_left(saver)}") from error
        # Outside of the except block nothing references the abandoned state, so two states never share the memory.
        state, first = roll_back(run, recorder, saver, spike, values)


def checkpoint_left(saver: Saver) -> str:
    """Sentence about the checkpoint from which a run that lost its state resumes."""
    with contextlib.suppress(CheckpointError):  # it is in the log, or the run would have ended with it
        saver.wait()
    newest = saver.disk.latest()
    if newest is None:
        return "There is no checkpoint yet; start again."
    return f"The checkpoint of step {newest} is intact; start again to resume from it."


def run_until(
    run: Run,
    step: Any,
    evaluate: Evaluator | None,
    state: TrainState,
    first: int,
    saver: Saver,
    recorder: Recorder,
    stopped: Callable[[], bool],
    feed: BatchFeed | None = None,
) -> tuple[TrainState, int]:
    """Loop over training steps, from step ``first`` until the last step or until ``stopped()``.

    Step n is dispatched before the metrics of step n - 1 are read, so that the devices never wait for the log. A step
    that does not come back is named (``jaxllm.train.recovery.step_watchdog``).

    Args:
        step: the compiled step, ``(state, batch) -> (state, metrics)``.
        evaluate: evaluation on held-out text every ``eval_every`` steps; None: none.
        state: after ``first`` steps.
        stopped: whether to stop after this step; called once per step, the same in all processes.
        feed: see ``train``.

    Returns:
        the state and the number of steps done.

    Raises:
        RollbackRequested: at a loss spike that the run is to roll back from.
        NonFiniteLossError, SpikesError: the run cannot continue.
    """
    config, view, events = run.config, recorder.view, recorder.events
    view.start_clock()
    recorder.start_clock()
    pending: list[tuple[int, dict[str, Any]]] = []  # the dispatched step whose metrics have not been read
    done = first

    def current_params() -> Any:
        nonlocal state
        state = run.settled(state)
        return state.params

    batches: Any = (
        Prefetcher(run.batches, first, run.put_batch, shard=run.data_shard, num_shards=run.num_data_shards)
        if feed is None
        else feed.batches(run, first, current_params)
    )
    with batches as given, jax.set_mesh(run.mesh), watchdog_of(run) as watchdog:
        values: dict[str, float] = {}

        def read_pending_metrics() -> None:
            nonlocal values
            if not pending:
                return
            number, metrics = pending.pop()
            more = feed.metrics if feed is not None else None
            values = record_metrics(run, recorder, saver, number, metrics, watchdog.waiting_for(number), more)
            if run.failed_at is not None:
                now, began, run.failed_at = time.time(), run.failed_at, None
                events.record({"event": "recovered", "time": now, "step": number, "seconds": round(now - began, 3)})

        def wait_for_devices() -> None:
            read_pending_metrics()
            jax.block_until_ready(state)

        for number, batch in recorder.timed_batches(watchdog.batches(given, first), pending):
            with recorder.profiler.before_step(number + 1, wait_for_devices), watchdog.waiting_for(number + 1):
                waits = {"wait": saver.wait_copied} if isinstance(step, StepPrograms) else {}
                state, metrics = step(state, batch, **waits)
            read_pending_metrics()  # of the step before
            done = number + 1
            pending.append((done, metrics))
            if summary := recorder.profiler.after_step(done, wait_for_devices):
                view.say(summary)

            with watchdog.waiting_for(done):  # the devices agree about signals one step later
                last = stopped() or done in (run.until, config.steps)
            place = saver.due(done, last)
            evaluating = evaluate is not None and done % config.eval_every == 0 and done < config.steps
            if place or evaluating:
                read_pending_metrics()  # a state is saved only after its step's loss was found finite
                state = run.settled(state)
            if place:
                events.flush()
                with watchdog.busy(done, SAVING):
                    run.save(saver, place, done, state, {key: finite_or_none(value) for key, value in values.items()})
                events.write("saved", step=done, place=place)
            if evaluating and evaluate is not None:
                events.flush()
                with watchdog.busy(done, EVALUATING):
                    record_evaluation(evaluate(evaluated_params(config.ema, state)), done, recorder.sinks.log, view)
                events.write("evaluated", step=done)
            if place or evaluating:
                recorder.start_clock()
            if last:
                break
    return state, done


def record_metrics(
    run: Run,
    recorder: Recorder,
    saver: Saver,
    number: int,
    metrics: dict[str, Any],
    waiting: contextlib.AbstractContextManager[Any] = contextlib.nullcontext(),  # noqa: B008
    more: Callable[[int], dict[str, float]] | None = None,
) -> dict[str, float]:
    """Reads the metrics of a step from the devices, checks and logs them, and returns its scalars.

    Args:
        number: of the step, from 1.
        metrics: on the devices.
        waiting: context while the devices are waited for.
        more: further metrics of a step, for the log.

    Raises:
        RollbackRequested, NonFiniteLossError, SpikesError: see ``check_step_metrics``.
    """
    with waiting:
        metrics = run.read_metrics(metrics)
        values = {key: float(value) for key, value in metrics.items() if key not in NON_SCALAR}
    check_step_metrics(run, recorder, saver, number, values)
    recorder.step(number, values | (more(number) if more is not None else {}), metrics)
    return values


def watchdog_of(run: Run) -> StepWatchdog:
    """Watchdog of a run's steps, which knows its processes."""
    return StepWatchdog(run.config.observe.stalled_after, group=run.group, reporter=run.reporter)


def announce_run(run: Run, view: LiveView, first: int) -> None:
    """Prints what is about to run: size, devices, mesh and data."""
    config = run.config
    params = param_count(run.abstract.params)
    mesh = ", ".join(f"{name}={size}" for name, size in run.mesh.shape.items())
    view.say(
        f"[bold]{config.name}[/]: {params:,} parameters on {run.mesh.size} x {jax.devices()[0].device_kind} ({mesh})"
    )
    if run.config.parallel.depths != run.asked.parallel.depths:
        view.say(f"layers of the pipeline stages: {', '.join(map(str, run.config.parallel.depths)) or 'as many each'}")
    view.say(run.data.summary)
    for files in (run.param_files, run.state_files):
        if files is not None:
            view.say(str(files))
    if run.slots is not None:
        view.say(run.slots.describe())
    if run.unequal is not None:
        view.say(run.unequal.describe())
    if run.uneven_state is not None:
        view.say(described_state(config, run.mesh.shape, run.abstract.opt_state))
    for line in repeated_data.repetition_warnings(run.data.train, config.steps):
        view.say(line)
    if first:
        view.say(f"Resuming after step {first} in {run.directory.path}")


def make_evaluator(run: Run) -> Evaluator | None:
    """Evaluator on the held-out set, on the same pipeline stages as training; None if nothing is held out."""
    if run.data.heldout is None:
        return None
    stages = run.mesh.shape.get("stage", 1)
    # Whatever attention the run trains with, a model is evaluated with the one that it is served with.
    model = dataclasses.replace(run.model, training_context=run.model.text_context)
    if run.param_files is not None:
        of = streamed_model(run.config, run.model, run.abstract, run.param_files)
        return StreamedEvaluator(of, model, run.mesh, run.data.heldout)
    sums = pipelined_loss_sums(model, *pipeline_plan(run.config, stages)) if stages > 1 else None
    if evaluates_objective(run.config):
        return objective_evaluator(
            run.config, model, run.mesh, run.data.heldout, run.reference, run.compiler_options or None
        )
    micro_batches = 1 if sums is None else run.config.accumulate
    return Evaluator(model, run.mesh, run.data.heldout, sums, micro_batches=micro_batches)


def record_evaluation(evaluation: Evaluation, step: int, log: Any, view: LiveView) -> None:
    """Prints and logs one evaluation: cross-entropy in nats per token and bits per byte, or the objective's metrics.

    Args:
        log: ``(step, row)``, such as ``MetricSinks.log``.
    """
    log(step, heldout_metrics(evaluation))
    view.say(f"step {step}: held out {described_evaluation(evaluation)}")


def finish_run(
    run: Run, state: TrainState, recorder: Recorder, *, trained: bool, evaluate: Evaluator | None = None
) -> Evaluation | None:
    """Evaluates a complete run, draws its loss curve and writes its receipt.

    Args:
        trained: whether this start did any steps; a run that was complete before keeps its receipt.
        evaluate: evaluator on the run's held-out text; None: one is made.
    """
    files, config, view = run.directory, run.config, recorder.view
    evaluate = evaluate or make_evaluator(run)
    evaluation = None
    if evaluate is not None:
        view.say("evaluating on held-out text")
        evaluation = evaluate(evaluated_params(config.ema, state))
        files.drop_evaluation(config.steps)  # an earlier start of this finished run may have written one
        record_evaluation(evaluation, config.steps, recorder.sinks.log, view)
        recorder.events.write("evaluated", step=config.steps)
    if not files.writes:
        return evaluation
    rows = files.read_metrics()
    draw_loss(rows, files.plot, config.name)
    last = [row for row in rows if "nll" in row][-1]
    result: dict[str, Any] = {"steps": config.steps, "nll": last["nll"]}
    if evaluation is not None:
        result |= heldout_metrics(evaluation)
    if trained or not files.receipt.exists():
        files.write_json(files.receipt, make_receipt(run.asked, data_hash=run.data.train.fingerprint, result=result))
    view.say(f"Done: {files.path} (loss.png, metrics.jsonl, checkpoints, receipt.json; `jaxllm report` draws it)")
    return evaluation


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Context manager that collects SIGINT and SIGTERM in a list; a second one of the same kind acts as usual."""
    seen: list[int] = []
    old: dict[int, Any] = {}

    def remember(number: int, frame: Any) -> None:
        seen.append(number)
        signal.signal(number, old[number])

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            old[number] = signal.signal(number, remember)
    except ValueError:  # only the main thread can handle signals
        old.clear()
    try:
        yield seen
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
