"""Fine-tuning run beside an engine: the run of ``jaxllm train``, advanced unit by unit in what the engine leaves.

    run = CoServedRun(config, loaded, chunk=64)       # before the engine is built, so that it leaves memory
    llm = LLM(loaded, reserved_bytes=run.device_bytes)
    run.attach(llm.engine, target=0.05)               # compiles; then the engine's steps advance the run

The directory is that of any run: configuration, metrics, events and checkpoints, from which this or ``jaxllm train``
resumes. A step counts once its update is done; a step that was stopped half way begins again from its first chunk, and
gives the same result bit for bit.
"""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
from collections import deque
from dataclasses import replace
from typing import Any

import jax

import sharding
from jaxllm.config import ConfigError, to_dict
from jaxllm.convert import LoadedModel
from jaxllm.data import Prefetcher
from jaxllm.hub.families.config_json import config_json
from jaxllm.infer.engine.engine import Engine
from jaxllm.models.functional import has_unstacked_layers
from jaxllm.models.packed_weight import has_packed
from jaxllm.models.param_subset import select
from jaxllm.observe.event_log import EventLog
from jaxllm.observe.metric_sinks import MetricSinks
from jaxllm.peft.adapted_model import adapter_of
from jaxllm.peft.peft_files import write_peft
from jaxllm.posttrain.coserve.finetune_programs import (
    FinetunePrograms,
    UnitsInFlight,
    chunked_gradients,
    device_bytes,
)
from jaxllm.posttrain.coserve.step_slack import SlackScheduler
from jaxllm.posttrain.coserve.work_units import WorkUnit, work_units
from jaxllm.train.combinations import check_combinations
from jaxllm.train.config import RunConfig
from jaxllm.train.init_from import open_initial_model
from jaxllm.train.loop import write_start
from jaxllm.train.records.recorder import NON_SCALAR, start_facts
from jaxllm.train.recovery.resume import start_state
from jaxllm.train.recovery.rollback import finite_or_none
from jaxllm.train.run import Run
from jaxllm.train.run_features import CO_SERVED
from jaxllm.train.run_model import base_model, saved_params
from sharding import MeshSpec

_log = logging.getLogger("jaxllm.posttrain")
ADAPTER = "adapter"
"""Directory of the finished adapter, in PEFT's format, in that of the run."""


class CoServedRun:
    """Prepared run with an adapter of a model that is about to be served.

    Args:
        config: the run; ``init_from`` names the model that is served.
        loaded: that model, on one device.
        chunk: tokens of a unit of work.

    Raises:
        ConfigError: the run does not go with serving, or the model is not its base.
        Others: as ``jaxllm.train.run.Run``.
    """

    def __init__(self, config: RunConfig, loaded: LoadedModel, chunk: int):
        if type(config) is not RunConfig:
            raise ConfigError(
                f"{config.name} is a {type(config).__name__}, which samples rollouts of its own; beside serving only a "
                "run on given data is trained."
            )
        if chunk < 1:
            raise ConfigError(f"fine-tuning: chunks of {chunk} tokens; give a positive number.")
        asked = {name: size for name, size in MeshSpec.parse(config.mesh).axes if size > 0}
        check_combinations(config, asked, jax.default_backend(), also=(CO_SERVED,))
        if (count := math.prod(asked.values())) > 1:
            raise ConfigError(
                f"mesh = {config.mesh!r} has {count} devices, and {config.name} beside serving (--finetune) has the "
                "one that serves; set mesh to dp."
            )
        check_model(config, loaded)
        self.loaded = loaded
        opened = open_initial_model(config.init_from, config.model)
        initial = replace(opened, load=self._served_params)
        device = jax.tree.leaves(loaded.params)[0].sharding.mesh.devices.flat[0]
        self.run = Run(replace(config, mesh="data=1"), init_model=initial, devices=[device])
        self.gradients = chunked_gradients(self.run, min(chunk, config.data.seq_len))
        self.device_bytes = device_bytes(self.run, self.gradients)

    def attach(self, engine: Engine, target: float) -> SlackScheduler:
        """Compiles the programs and gives the run to an engine as its side work.

        Args:
            engine: serves the model; nothing runs in it yet.
            target: seconds per output token that a step with decoding sequences may take.

        Raises:
            ConfigError: the engine does not go with fine-tuning beside it.
            ResumeError: the run's directory holds another run.
        """
        check_engine(engine, self.gradients.chunk * self.gradients.rows)
        source = FinetuneUnits(self.run, self.gradients, engine)
        scheduler = SlackScheduler(source, target, source.programs.seconds)
        engine.side_work = scheduler
        return scheduler

    def _served_params(self, mesh: Any, dtype: str) -> Any:
        """The served weights on the run's mesh, which has the same device: nothing is copied."""
        shardings = sharding_of_base(self.run, mesh)
        return jax.device_put(self.loaded.params, shardings)


def sharding_of_base(run: Run, mesh: Any) -> Any:
    """Shardings of the base's parameters on the run's mesh."""
    base = base_model(run.config)
    return sharding.shardings_of(sharding.abstract_params(base.abstract(), base.logical_axes(), mesh, base.rules))


def check_model(config: RunConfig, loaded: LoadedModel) -> None:
    """Checks that a model can be served and be the base of a run; raises ConfigError."""
    name = f"{config.name} beside serving (--finetune)"
    if loaded.mesh.size > 1:
        raise ConfigError(
            f"{name}: the model is served on {loaded.mesh.size} devices; serve it on one: leave --mesh out."
        )
    if not isinstance(loaded.params, dict):
        raise ConfigError(f"{name}: the served weights are streamed to the device; serve them without --offload.")
    if has_packed(loaded.params):
        raise ConfigError(f"{name}: the served weights are packed (quantised); serve them with --weights plain.")
    if has_unstacked_layers(loaded.params):
        raise ConfigError(f"{name}: the served layers have arrays of their own; serve them with --layers stacked.")
    kinds = {"dtype": loaded.model.config.dtype, "param_dtype": str(jax.tree.leaves(loaded.params)[0].dtype)}
    for field, served in kinds.items():
        if (own := getattr(config.model, field)) != served:
            raise ConfigError(
                f"{name}: model.{field} = {own!r}, but the model is served in {served}; set model.{field}={served}, or "
                "serve it with another --dtype."
            )


def check_engine(engine: Engine, tokens: int) -> None:
    """Checks that an engine can run fine-tuning in units of so many tokens beside its steps; raises ConfigError."""
    runner, config = engine.runner, engine.config
    if config.pools is not None:
        raise ConfigError(f"fine-tuning beside an engine with pools = {config.pools!r}; serve without --pools.")
    if runner.mesh is not None and runner.mesh.size > 1:
        raise ConfigError(
            f"fine-tuning beside an engine on {runner.mesh.size} devices; serve on one: leave --mesh out."
        )
    if engine.folding is not None:
        raise ConfigError(
            f"fine-tuning beside an engine with kv_dtype = {config.kv_dtype!r} and head_clusters = "
            f"{config.head_clusters}, which reorders or folds the weights; choose another --kv-format, such as int8, "
            "or --kv-keep."
        )
    if config.speculate is not None or engine.proposer is not None:
        raise ConfigError(
            "fine-tuning beside speculative decoding, which decides by the durations of steps how many tokens to "
            "propose; leave --speculate out."
        )
    if tokens >= config.max_batched_tokens:
        raise ConfigError(
            f"fine-tuning: chunks of {tokens} tokens never fit beside a decoding sequence in a step of "
            f"{config.max_batched_tokens} tokens; give smaller chunks (--finetune-tokens), or a larger "
            "--max-batched-tokens."
        )


class FinetuneUnits:
    """Units of a run in their order (``jaxllm.posttrain.coserve.step_slack.UnitSource``). One thread uses it.

    Args:
        run: prepared, on one device.
        gradients: its step in chunks.
        engine: the finished adapter is loaded into it, if it serves adapters.

    Attributes:
        programs: compiled.
        done: steps done.
        failure: why the run has stopped; empty: it has not.
        finished: set when all steps are done, and the adapter is on disk.
    """

    def __init__(self, run: Run, gradients: Any, engine: Engine):
        self.run, self.engine = run, engine
        files, began = run.directory, time.time()
        self._events = EventLog(files.events, began)
        self._saver = run.saver()
        self._saver.__enter__()
        self._closed, self.failure, self.finished = False, "", threading.Event()
        try:
            self._events.started(**start_facts(run))
            state, self.done = start_state(run, self._saver)
            self._events.write("restored" if self.done else "initialised", step=self.done)
            write_start(run, self.done)
            self._sinks = MetricSinks(files.metrics, run.config.observe.sinks, run.config.name, to_dict(run.config))
            started = time.monotonic()
            self.programs = FinetunePrograms(run, gradients, state)
            self._events.write("compiled", seconds=round(time.monotonic() - started, 3))
        except BaseException:
            self._saver.__exit__()
            raise
        self._batches = Prefetcher(run.batches, self.done, lambda batch: (batch, self.programs.put_batch(batch)))
        self._units: deque[WorkUnit] = deque()
        self._in_flight = UnitsInFlight()
        self._pending: dict[str, Any] | None = None  # metrics of the last step, on the device
        self._values: dict[str, Any] = {}
        self._saved = self.done
        self._mark = time.monotonic()
        self._ending: threading.Thread | None = None
        _log.info("%s: fine-tuning beside serving, from step %d of %d on", run.config.name, self.done, run.config.steps)
        if self.done >= run.config.steps:
            self._finish()

    def peek(self) -> WorkUnit | None:
        """The next unit. Settles a step whose update has been started: waits for it, logs it and saves it if due."""
        if self.failure or self._closed:
            return None
        try:
            self._settle()
            if self.failure or self.done >= self.run.config.steps:
                return None
            if not self._units:
                self._next_step()
        except Exception as error:
            self._fail(error)
            return None
        return self._units[0]

    def run_next(self, *, wait: bool) -> float:
        """Starts the next unit; with ``wait`` returns when it has ended, with its duration in seconds, else 0."""
        began = time.monotonic()
        try:
            done, metrics = self.programs.start(self._units.popleft())
            if metrics:
                self._pending = metrics
                self.done += 1
            self._in_flight.add(done)
            if wait:
                jax.block_until_ready(done)
        except Exception as error:
            self._fail(error)
        return time.monotonic() - began if wait else 0.0

    @property
    def behind(self) -> bool:
        """Whether units before the last mark still run."""
        return self._in_flight.behind

    def mark(self) -> None:
        """Marks the units so far."""
        self._in_flight.mark()

    def counters(self) -> dict[str, int]:
        """Steps done, and steps of the run."""
        return {"finetune_steps": self.done}

    def close(self) -> None:
        """Saves the last complete step, and waits until it is on disk; a finished run has its adapter written first."""
        if self._closed:
            return
        try:
            if not self.failure:
                self._settle()
            self._closed = True
            if self._ending is not None:
                self._ending.join()
            elif not self.failure:
                if self.done > self._saved:
                    self._save()
                self._saver.finish()
                self._events.write("stopped", step=self.done)
                _log.info("%s: stopped after step %d; saved", self.run.config.name, self.done)
        finally:
            self._closed = True
            self._batches.close()
            self._sinks.close()
            self._saver.__exit__()

    def _next_step(self) -> None:
        """Begins the next step: its batch, and its units."""
        _, (batch, placed) = next(self._batches)
        self.programs.start_step(placed)
        units = list(work_units(batch.segment_ids, self.programs.gradients.rows, self.programs.gradients.chunk))
        self._units.extend(units)

    def _settle(self) -> None:
        if self._pending is None:
            return
        metrics, self._pending = self._pending, None
        values = {key: float(value) for key, value in jax.device_get(metrics).items() if key not in NON_SCALAR}
        now = time.monotonic()
        spent, self._mark = now - self._mark, now
        row: dict[str, Any] = {key: finite_or_none(value) for key, value in values.items()}
        self._sinks.log(self.done, row | {"step_seconds": round(spent, 6)})
        self._events.step(self.done, 0.0)
        if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
            raise FloatingPointError(
                f"step {self.done}: loss {values['loss']}, gradient norm {values['grad_norm']}; the last checkpoint is "
                f"of step {self._saved}. Lower optim.schedule.peak or look at the data, and start a new run."
            )
        self._values = row
        if self.done % self.run.config.log_every == 0 or self.done == self.run.config.steps:
            _log.info(
                "%s: step %d of %d, loss %.4f", self.run.config.name, self.done, self.run.config.steps, values["loss"]
            )
        last = self.done >= self.run.config.steps
        if self._saver.due(self.done, last):
            self._save()
        if last:
            self._finish()

    def _save(self) -> None:
        self._events.flush()
        self.run.save(self._saver, "disk", self.done, self.programs.state, self._values)
        self._saved = self.done
        self._events.write("saved", step=self.done, place="disk")

    def _finish(self) -> None:
        """Writes the adapter in a thread of its own, which requests do not wait for."""
        self._ending = threading.Thread(target=self._write_adapter, name="jaxllm adapter", daemon=True)
        self._ending.start()

    def _write_adapter(self) -> None:
        run, folder = self.run, self.run.directory.path / ADAPTER
        try:
            self._saver.finish()
            mask = saved_params(run.config, run.model)
            trained = select(mask, self.programs.state.params)
            assert run.base is not None
            facts = run.base.facts()
            adapter = replace(adapter_of(run.config.adapter, trained), base=facts["source"], base_hash=facts["hash"])
            base = base_model(run.config)
            source = run.init_model.source if run.init_model is not None else None
            if folder.exists():
                shutil.rmtree(folder)
            write_peft(folder, adapter, base, source or config_json(run.config.model, None, {}))
            served = ""
            if self.engine.adapter_slots is not None:
                self.engine.load_adapter(run.config.name, adapter)
                served = f"; served as {run.config.name}"
            self._events.write("finished", step=self.done)
            _log.info("%s: all %d steps are done; adapter in %s%s", run.config.name, self.done, folder, served)
        except Exception as error:
            self._fail(error)
        self.finished.set()

    def _fail(self, error: Exception) -> None:
        """Stops the run; requests go on."""
        self.failure = str(error) or type(error).__name__
        self._units.clear()
        self._pending = None
        self._events.write("failed", why=self.failure.splitlines()[0])
        _log.error("%s: fine-tuning has stopped, serving goes on: %s", self.run.config.name, self.failure)
