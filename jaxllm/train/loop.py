"""The training loop: compile once, then step, log, save; stop cleanly and go on where it stopped."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxllm.checkpoint import StateProvider
from jaxllm.config import to_dict
from jaxllm.data import Prefetcher, repeated_data
from jaxllm.models import param_count
from jaxllm.observe.event_log import EventLog
from jaxllm.parallel.compiler_flags import described
from jaxllm.parallel.distributed import SynchronizedStop, group
from jaxllm.train.config import RunConfig
from jaxllm.train.evaluate import Evaluation, Evaluator
from jaxllm.train.records.live_view import LiveView
from jaxllm.train.records.loss_plot import draw_loss
from jaxllm.train.records.receipt import make_receipt
from jaxllm.train.records.recorder import NON_SCALAR, Recorder, start_facts
from jaxllm.train.recovery.resume import start_state
from jaxllm.train.recovery.rollback import RollbackRequested, check_step_metrics, finite_or_none, roll_back
from jaxllm.train.recovery.saving import Saver
from jaxllm.train.run import Run
from jaxllm.train.run_processes import device_fingerprint, fingerprint
from jaxllm.train.step.pipelined_loss import pipeline_plan, pipelined_loss_sums
from jaxllm.train.step.train_state import TrainState


@dataclass(frozen=True)
class TrainResult:
    """How a call of ``train`` ended.

    Attributes:
        directory: the run's directory.
        steps: steps done in all.
        complete: False when a signal stopped the run; it goes on at the next start.
        signal: the signal's number, or None.
        evaluation: held-out loss after the last step, where something is held out and the run is complete.
    """

    directory: Path
    steps: int
    complete: bool
    signal: int | None
    evaluation: Evaluation | None


def train(config: RunConfig, *, also: Sequence[StateProvider] = ()) -> TrainResult:
    """Runs, or goes on with, the run that ``config`` describes.

    Ctrl-C and SIGTERM finish the step, save and return; the next call with the same configuration continues, bit for
    bit on the same mesh.

    Args:
        also: parts of the program whose state is saved and restored together with the run's.

    Raises:
        ResumeError: the directory holds a run with other mathematics.
        NonFiniteLossError: the loss diverged; the last checkpoint is from before.
        SpikesError: it leapt more often than ``spikes`` bears.
        ConfigError, ShardingError, DataError, CheckpointError: what is wrong, where, and what would be legal.
        DistributedError: the processes that are to train together differ; says in what.
    """
    began = time.time()
    group().agree("the run", fingerprint(config), config.distributed.start_timeout)
    run = Run(config, also)
    run.group.agree("the devices and data", device_fingerprint(run.mesh, run.data.train.fingerprint))
    files = run.directory
    events = EventLog(files.events if files.writes else None, began)
    with run.saver() as saver:
        events.started(**(start_facts(run) if files.writes else {}))
        state, first = start_state(run, saver)
        jax.block_until_ready(state.params)
        events.write("restored" if first else "initialised", step=first)
        files.write_json(files.config, to_dict(config))
        if files.writes:
            run.data.tokenizer.save(files.tokenizer)
            if run.init_model is not None and run.init_model.template is not None:
                run.init_model.template.save(files.tokenizer)
        files.drop_metrics_after(first)
        with Recorder.open(run, first, events) as recorder, stop_signals() as stopping:
            view = recorder.view
            announce_run(run, view, first)
            state, done = run_with_rollback(run, state, first, saver, recorder, stopping)
            saver.finish()
            events.write("saved", step=done)
            if done < config.steps:
                view.say(f"Stopped after step {done}; saved. Start again with the same command to go on.")
                if files.writes:
                    draw_loss(files.read_metrics(), files.plot, config.name)
                events.write("stopped", step=done)
                return TrainResult(files.path, done, False, stopping[0] if stopping else None, None)
            evaluation = finish_run(run, state, recorder, trained=done > first)
            events.write("finished", step=done)
    return TrainResult(files.path, done, True, None, evaluation)


def run_with_rollback(
    run: Run, state: TrainState, first: int, saver: Saver, recorder: Recorder, stopping: list[int]
) -> tuple[TrainState, int]:
    """Steps ``first`` to the end, or to a signal; returns the state and the steps done."""
    config, view, events = run.config, recorder.view, recorder.events
    if first == config.steps:
        return state, first
    step, seconds = run.compile_step()
    view.say(f"compiled the step in {seconds:.1f} s; options: {described(run.compiler_options)}")
    events.write("compiled", seconds=round(seconds, 3))
    run.group.barrier("compiled")  # collectives of the first step wait for no more than half a minute
    evaluate = make_evaluator(run) if config.eval_every else None
    stop_together = SynchronizedStop(run.mesh)
    while True:
        try:
            return run_until(run, step, evaluate, state, first, saver, recorder, lambda: bool(stop_together(stopping)))
        except RollbackRequested as found:
            spike, values = found.step, found.values
        # Out here nothing holds the state that is given up, when another one is read.
        state, first = roll_back(run, recorder, saver, spike, values)


def run_until(
    run: Run,
    step: Any,
    evaluate: Evaluator | None,
    state: TrainState,
    first: int,
    saver: Saver,
    recorder: Recorder,
    stopped: Callable[[], bool],
) -> tuple[TrainState, int]:
    """Steps ``first`` to the end or to a signal, one after the other.

    Raises:
        GoBack: at a spike that the run goes back from.
    """
    config, view, events = run.config, recorder.view, recorder.events
    view.start_clock()
    recorder.start_clock()
    pending: list[tuple[int, dict[str, Any]]] = []
    done = first
    batches = Prefetcher(run.batches, first, run.put_batch, shard=run.data_shard, num_shards=run.num_data_shards)
    with batches, jax.set_mesh(run.mesh):
        values: dict[str, float] = {}

        def settle() -> None:
            # Fetched one step late, so that the next step is already on its way: the device never waits for the log.
            nonlocal values
            if not pending:
                return
            number, metrics = pending.pop()
            values = {key: float(value) for key, value in metrics.items() if key not in NON_SCALAR}
            check_step_metrics(run, recorder, saver, number, values)
            recorder.step(number, values, metrics)

        def computed() -> None:
            settle()
            jax.block_until_ready(state)

        for number, batch in recorder.timed_batches(batches, pending):
            with recorder.profiler.before_step(number + 1, computed):
                state, metrics = step(state, batch)
            settle()
            done = number + 1
            pending.append((done, metrics))
            if said := recorder.profiler.after_step(done, computed):
                view.say(said)
            last = stopped() or done == config.steps
            place = saver.due(done, last)
            evaluating = evaluate is not None and done % config.eval_every == 0 and done < config.steps
            if place or evaluating:
                settle()  # nothing is saved before its loss was seen to be finite
            if place:
                events.flush()
                run.save(saver, place, done, state, {key: finite_or_none(value) for key, value in values.items()})
                events.write("saved", step=done, place=place)
            if evaluating and evaluate is not None:
                events.flush()
                record_evaluation(evaluate(state.params), done, recorder.sinks.log, view)
                events.write("evaluated", step=done)
            if place or evaluating:
                recorder.start_clock()
            if last:
                break
    return state, done


def announce_run(run: Run, view: LiveView, first: int) -> None:
    """Says what is about to run."""
    config = run.config
    params = param_count(run.abstract.params)
    mesh = ", ".join(f"{name}={size}" for name, size in run.mesh.shape.items())
    view.say(
        f"[bold]{config.name}[/]: {params:,} parameters on {run.mesh.size} x {jax.devices()[0].device_kind} ({mesh})"
    )
    view.say(run.data.summary)
    for line in repeated_data.repetition_warnings(run.data.train, config.steps):
        view.say(line)
    if first:
        view.say(f"Going on after step {first} in {run.directory.path}")


def make_evaluator(run: Run) -> Evaluator | None:
    """The held-out evaluation, None when nothing is held out."""
    if run.data.heldout is None:
        return None
    stages = run.mesh.shape.get("stage", 1)
    sums = pipelined_loss_sums(run.model, *pipeline_plan(run.config, stages)) if stages > 1 else None
    return Evaluator(run.model, run.mesh, run.data.heldout, sums)


def record_evaluation(evaluation: Evaluation, step: int, log: Any, view: LiveView) -> None:
    """Shows and logs one evaluation."""
    log(step, {"heldout_nll": evaluation.nll, "heldout_bits_per_byte": evaluation.bits_per_byte})
    view.say(f"step {step}: held out {evaluation.nll:.4f} nats per token, {evaluation.bits_per_byte:.4f} bits per byte")


def finish_run(run: Run, state: TrainState, recorder: Recorder, *, trained: bool) -> Evaluation | None:
    """Evaluates, draws and writes the receipt of a complete run; one that was complete before keeps its receipt."""
    files, config, view = run.directory, run.config, recorder.view
    evaluate = make_evaluator(run)
    evaluation = None
    if evaluate is not None:
        view.say("evaluating on held-out text")
        evaluation = evaluate(state.params)
        files.drop_evaluation(config.steps)  # of an earlier start of this finished run
        record_evaluation(evaluation, config.steps, recorder.sinks.log, view)
        recorder.events.write("evaluated", step=config.steps)
    if not files.writes:
        return evaluation
    rows = files.read_metrics()
    draw_loss(rows, files.plot, config.name)
    last = [row for row in rows if "nll" in row][-1]
    result: dict[str, Any] = {"steps": config.steps, "nll": last["nll"]}
    if evaluation is not None:
        result |= {"heldout_nll": evaluation.nll, "heldout_bits_per_byte": evaluation.bits_per_byte}
    if trained or not files.receipt.exists():
        files.write_json(files.receipt, make_receipt(config, data_hash=run.data.train.fingerprint, result=result))
    view.say(f"Done: {files.path} (loss.png, metrics.jsonl, checkpoints, receipt.json; `jaxllm report` draws it)")
    return evaluation


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM instead of dying; a second one of the same kind acts as usual."""
    seen: list[int] = []
    old: dict[int, Any] = {}

    def remember(number: int, frame: Any) -> None:
        seen.append(number)
        signal.signal(number, old[number])

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            old[number] = signal.signal(number, remember)
    except ValueError:  # not the main thread: signals are not ours to take
        old.clear()
    try:
        yield seen
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
