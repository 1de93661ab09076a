"""Run: a prepared training run, with mesh, optimizer, data and step checked against each other.

All checks happen before anything large is allocated.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxllm.checkpoint import StateProvider, state_providers
from jaxllm.compiler.replica_groups import island_of
from jaxllm.config import ConfigError, to_dict
from jaxllm.data import Batch, Dataset, load_dataset
from jaxllm.data.skip_batches import SkippingDataset
from jaxllm.models import Functional
from jaxllm.models.param_subset import select
from jaxllm.observe.metric_sinks import check_sinks as check_trackers
from jaxllm.parallel.compiler_flags import options
from jaxllm.parallel.distributed import group
from jaxllm.parallel.elastic.rank_monitor import RankReporter
from jaxllm.parallel.elastic.run_generation import RunGeneration
from jaxllm.parallel.mesh_search import check_parameters, resolve
from jaxllm.train.combinations import check_combinations
from jaxllm.train.config import RunConfig
from jaxllm.train.disk.disk_step import DiskStep, compiled_programs, lowered_programs
from jaxllm.train.disk.disk_tier import check_room
from jaxllm.train.disk.layer_stream_step import LayerStreamStep
from jaxllm.train.disk.state_files import StateFiles, share_chunks
from jaxllm.train.frozen_base import FrozenBase, trained_only
from jaxllm.train.init_from import InitialModel, open_initial_model
from jaxllm.train.outer.adaptive_step import AdaptiveStep, Choice, Layers
from jaxllm.train.outer.compressed_gradients import NAME as GRADIENTS
from jaxllm.train.outer.lgreco import LayerwiseRanks
from jaxllm.train.outer.replicas import REPLICA, replica_means, slow_links
from jaxllm.train.records.receipt import versions
from jaxllm.train.records.run_directory import RunDirectory
from jaxllm.train.recovery.elastic_mesh import config_for_devices_left
from jaxllm.train.recovery.elastic_run import elastic_checkpoint, elastic_generation, failed_at
from jaxllm.train.recovery.saving import Place, Saver
from jaxllm.train.reference import ReferenceModel
from jaxllm.train.run_model import base_model, run_model, trained_params
from jaxllm.train.run_processes import local_part, put_batch
from jaxllm.train.run_rows import pad_rows, rows_on_mesh
from jaxllm.train.run_slots import abstract_slotted, context_slots, put_slotted
from jaxllm.train.step.loss import value_and_grad
from jaxllm.train.step.objective import make_objective
from jaxllm.train.step.objective_support import check_batch_fields, check_content, check_reference
from jaxllm.train.step.pipelined_loss import pipeline_plan, pipelined_value_and_grad
from jaxllm.train.step.step_builder import (
    build_disk_step,
    build_error_measure,
    build_optimizer,
    build_split_step,
    build_step,
    build_streamed_step,
    run_state,
    settle_function,
    step_links,
    streamed_inputs,
    streamed_model,
)
from jaxllm.train.step.step_chain import saved_state
from jaxllm.train.step.train_state import TrainState
from jaxllm.train.step.training_step import ValueAndGrad, jit_split_step, jit_step
from jaxllm.train.unequal.unequal_rows import unequal_rows
from jaxllm.train.unequal.uneven_state import uneven_state
from pallas_kernels.ring_attention import order
from sharding import MeshSpec, ShardingError, shardings_of
from sharding.layer_layouts import rules_of
from sharding.tensor_factoring import legal


class StepPrograms:
    """Compiled training step in two programs: gradients, which only read the state, and the update, which donates it.

    Args:
        gradients, update: the programs of a ``SplitStep``.
        score: ``(params, batch) -> batch``, which scores a batch with the reference model; None without one.
    """

    def __init__(self, gradients: Any, update: Any, score: Any = None):
        self._gradients, self._update, self._score = gradients, update, score

    def __call__(self, state: TrainState, batch: Batch, wait: Callable[[], None] = lambda: None) -> Any:
        """The state after the step, and its metrics.

        Args:
            state: donated once ``wait`` has returned.
            batch: of the step.
            wait: called after the gradients are dispatched and before the update; it blocks while the state is copied.
        """
        batch = batch if self._score is None else self._score(state.params, batch)
        gradients = self._gradients(state, batch)
        wait()
        return self._update(state, batch, gradients)


class Run:
    """A prepared training run: data opened, mesh built, shardings checked; nothing large is allocated yet.

    Args:
        config: the run.
        also: other parts of the program whose state is saved with the run's.
        data: the data set to train on; None: the one that ``config.data`` describes.
        init_model: the opened model of ``config.init_from``; None: it is opened here.
        devices: devices of the mesh; None: all.

    Attributes:
        config: settings for the devices that are there; of an elastic run, mesh and stages may be others than asked.
        asked: settings as they were given, which are recorded.
        model: the architecture with its sharding rules.
        optimizer: the optax chain.
        abstract: shapes, dtypes and shardings of the train state.
        state_files: the optimizer state, where it is on disk; else None.
        uneven_state: the optimizer state, where ``parallel.state_shares`` has numbers; else None.
        param_files: the parameters of layers, where they are on disk; else None.
        disk_bytes: bytes of the state in files.
        links: techniques of the step, some of which keep state.
        init_model: the model that parameters are initialised from, or None.
        base: the frozen base of the run's adapter, or None.
        data: training and held-out datasets, and the tokenizer.
        reference: the frozen reference model, or None.
        batches: the batches of the run's steps, without those that rollbacks skip.
        spikes: loss spikes so far, as JSON (``jaxllm.train.recovery.rollback``).
        replicas: replicas with parameters of their own; 1 without outer steps.
        data_shard, num_data_shards: part of each batch's rows that this process loads.
        generation: of the processes of an elastic run; None for others.
        until: number of steps after which this start ends.
        reporter: sends the phases of an elastic run's loop to its supervisor; None until the run is trained.
        failed_at: time of the failure before this start of an elastic run, until a step is done; else None.
        rows: rows of a batch on the devices: those of the data, and of padding in an elastic run or beside uneven rows.
        unequal: uneven rows of the devices, where ``parallel.micro_batches`` has numbers; else None.
        slots: slots that batches are arranged in, with context parallelism by need; else None.

    Raises:
        ConfigError, ShardingError, DataError: something does not fit; the message says what would.
    """

    def __init__(
        self,
        config: RunConfig,
        also: Sequence[StateProvider] = (),
        data: Dataset | None = None,
        init_model: InitialModel | None = None,
        devices: Sequence[jax.Device] | None = None,
    ):
        self.asked = config
        self.also = also
        check_trackers(config.observe.sinks)
        self.group = group()
        self.directory = RunDirectory(Path(config.out) / config.name, writes=self.group.is_leader)
        check_precision(config)
        devices = jax.devices() if devices is None else devices
        self.generation = elastic_generation(config)
        if self.generation is not None:
            config = elastic_config(config, len(devices), devices[0].platform, self.generation)
        self.config = config
        self.model = run_model(config)
        self.reporter: RankReporter | None = None
        self.until = config.steps
        self.failed_at = failed_at(self.generation)
        self.mesh = run_mesh(config, self.model, devices)
        self.optimizer = build_optimizer(config, self.model)
        self.replicas = self.mesh.shape.get(REPLICA, 1)
        self.abstract = run_state(config, self.model, self.optimizer, self.mesh)
        self.state_files: StateFiles | None = None
        if config.disk.directory:
            self.state_files = StateFiles(config.disk, self.abstract.opt_state)
            self.abstract = replace(self.abstract, opt_state=self.state_files.leaves())
        self.uneven_state = uneven_state(config, self.mesh, self.abstract.opt_state)
        if self.uneven_state is not None:
            self.abstract = replace(self.abstract, opt_state=self.uneven_state.leaves())
        self.param_files: StateFiles | None = None
        if self.state_files is not None and config.disk.parameters:
            self.param_files = StateFiles(config.disk, self.abstract.params, "params")
            self.abstract = replace(self.abstract, params=self.param_files.leaves())
        all_files = [files for files in (self.state_files, self.param_files) if files is not None]
        share_chunks(config.disk, all_files)
        self.disk_bytes = sum(files.bytes for files in all_files)
        self.check_disk()
        self.links = step_links(config)
        settle = settle_function(config, self.model)
        self._settle = settle and jax.jit(settle, donate_argnums=0, out_shardings=shardings_of(self.abstract))
        if init_model is None and config.init_from:
            init_model = open_initial_model(config.init_from, config.model)
        self.init_model = init = init_model
        self.base = FrozenBase(config, self.model, self.mesh, init) if config.adapter else None
        self.reference = ReferenceModel(config, base_model(config), self.mesh, init) if config.reference else None
        known, virtual = (init and init.tokenizer, init and init.template), config.adapter.virtual_tokens
        if data is None:
            check_content(config)
        self.data = load_dataset(config.data, *known, virtual_tokens=virtual) if data is None else data
        self.data.train.check_steps(config.steps)
        self.batches = SkippingDataset(self.data.train)
        self.spikes: list[dict[str, Any]] = []
        check_vocabulary(config, self.data.tokenizer)
        if self.reference is not None:
            self.reference.check_tokenizer(self.data.tokenizer)
        check_batch_fields(config, self.data.train.batch_at(0))
        self.rows = batch_rows(config, self.mesh, self.model.rules)
        shape = (self.rows, config.data.seq_len)
        spec = self.model.rules.spec(("batch", "seq"), self.mesh, shape, what="batch")
        self.batch_sharding = NamedSharding(self.mesh, spec)
        self.slots = context_slots(config, self.mesh, self.model.rules)
        self.unequal = unequal_rows(config, self.mesh)
        # With slots, documents move between rows; with padding and uneven rows, parts are unequal. Each process loads
        # the whole batch.
        whole = self.slots is not None or self.unequal is not None or self.rows != config.data.batch_size
        self.data_shard, self.num_data_shards = (0, 1) if whole else local_part(self.batch_sharding, shape)
        device = self.mesh.devices.flat[0]
        self.compiler_options = options(device.platform, device.device_kind, config.compiler_options)

    def check_disk(self, activations: int = 0) -> None:
        """Checks that the disk has room for the files of all processes; each of them calls this at the same time.

        Args:
            activations: bytes of saved activations in files.

        Raises:
            DiskTierError: it has not.
        """
        files = [one for one in (self.state_files, self.param_files) if one is not None]
        if files:
            reserved = sum(one.reserved for one in files)
            check_room(self.config.disk, self.disk_bytes, activations, reserved, self.group)

    def put_batch(self, batch: Batch) -> Any:
        """This process's rows of a batch, placed on the devices; in slots, where the run has them."""
        if self.slots is not None:
            return put_slotted(batch, self.slots, self.batch_sharding)
        if self.unequal is not None:
            batch = self.unequal.arrange(batch)
        elif self.rows != self.config.data.batch_size:
            batch = pad_rows(batch, self.rows)
        return put_batch(batch, self.batch_sharding, self.rows, self.data_shard * self.rows // self.num_data_shards)

    def saver(self) -> Saver:
        """Saver of the run's checkpoints, shared by all its processes."""
        return Saver(self.directory.path, elastic_checkpoint(self.config), self.group, self.generation)

    def compile_step(self) -> tuple[Any, float]:
        """The compiled training step, and the seconds it took; compiled ahead of time, it never recompiles.

        With a reference model, the step scores its batch first. For overlapped saves it is ``StepPrograms``, which is
        called with a function that waits for the copy.
        """
        start = time.monotonic()
        grads = build_value_and_grad(self.config, self.model, self.mesh)
        layers = self.config.observe.layers_every > 0
        sample = pad_rows(self.data.train.batch_at(0), self.rows)
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.batch_sharding), sample)
        batch = batch if self.slots is None else abstract_slotted(batch, self.slots)
        options, score = self.compiler_options or None, None
        if self.reference is not None:
            score = self.reference.compile_scorer(batch, options, self.abstract.params)
            batch = batch._replace(reference_logprobs=self.reference.scores(batch))
        if self.config.checkpoint.saving == "overlapped":
            split = build_split_step(self.config, self.model, grads, self.optimizer, layers=layers)
            found = jit_split_step(split, self.abstract)
            with jax.set_mesh(self.mesh):
                first = found.gradients.lower(self.abstract, batch)  # type: ignore[attr-defined]
                given = jax.eval_shape(found.gradients, self.abstract, batch)
                then = found.update.lower(self.abstract, batch, given)  # type: ignore[attr-defined]
                programs = [one.compile(compiler_options=options) for one in (first, then)]
            return StepPrograms(*programs, score=score), time.monotonic() - start
        if (files := self.state_files) is not None and self.param_files is not None:
            of = streamed_model(self.config, self.model, self.abstract, self.param_files)
            with jax.set_mesh(self.mesh):
                programs = build_streamed_step(self.config, of, files, batch, options)
            inputs = streamed_inputs(self.config, of, programs, self.mesh)
            return LayerStreamStep(programs, of, files, inputs), time.monotonic() - start
        if (units := files or self.uneven_state) is not None:
            streamed = build_disk_step(self.config, self.model, grads, self.abstract, units)
            with jax.set_mesh(self.mesh):
                ready = compiled_programs(lowered_programs(streamed, self.abstract, batch, units), options)
            return DiskStep(ready, units, score), time.monotonic() - start

        def compile_choice(choice: Choice | None = None) -> Any:
            own = build_step(self.config, self.model, grads, self.optimizer, layers=layers, choice=choice)
            with jax.set_mesh(self.mesh):
                return jit_step(own, self.abstract).lower(self.abstract, batch).compile(compiler_options=options)

        adaptive = self.config.grads.is_adaptive
        compiled = self._adaptive(compile_choice, grads, batch) if adaptive else compile_choice()
        seconds = time.monotonic() - start
        return (
            compiled if score is None else lambda state, batch: compiled(state, score(state.params, batch))
        ), seconds

    def _adaptive(self, compile_choice: Callable[[Choice], Any], grads: ValueAndGrad, batch: Any) -> AdaptiveStep:
        """Step whose compression is re-chosen; ``ranks.json`` in the run's directory lists the programs."""
        measure, options = jax.jit(build_error_measure(self.config, self.model, grads)), self.compiler_options or None
        with jax.set_mesh(self.mesh):
            measured = measure.lower(self.abstract, batch).compile(compiler_options=options)  # pyright: ignore

        def told(step: int, ranks: dict[str, list[int]], sent: int) -> None:
            file = self.directory.path / "ranks.json"
            if self.directory.writes:
                before = [one for one in json.loads(file.read_text()) if one["step"] < step] if file.exists() else []
                self.directory.write_json(file, [*before, {"step": step, "bytes": sent, "ranks": ranks}])

        layers, exchange, given = Layers.of(self.abstract.params), self.config.grads.exchange, self.config.grads
        assert isinstance(exchange, LayerwiseRanks)
        return AdaptiveStep(
            layers, compile_choice, measured, GRADIENTS, exchange.error, given.steps_between_choices, told
        )

    def save(self, saver: Saver, place: Place, step: int, state: TrainState, metrics: dict[str, Any]) -> None:
        """Saves a checkpoint: the state, that of the providers in ``also``, and metadata."""
        meta = {**self.meta(step), "metrics": metrics, **state_providers.collect_facts(self.also)}
        saved = trained_only(self.base, saved_state(state, self.links))
        saver.save(place, step, state_providers.with_provider_arrays(saved, self.also), meta)

    def first_gradients(self, config: RunConfig, params: Any) -> Any:
        """Sum of the gradients of a run's trainable parameters on this run's first ``adapter.gradient_batches``.

        Args:
            config: this run with other trainable parameters.
            params: of ``config``'s model.
        """
        model = run_model(config)
        value_and_grad = build_value_and_grad(config, model, self.mesh)

        def added(params: Any, batch: Any, total: Any) -> Any:
            return jax.tree.map(jnp.add, total, value_and_grad(params, batch)[1])

        with jax.set_mesh(self.mesh):
            total = jax.tree.map(jnp.zeros_like, select(trained_params(config, model), params))
            step = jax.jit(added, donate_argnums=2)
            for number in range(self.config.adapter.gradient_batches):
                total = step(params, self.put_batch(self.data.train.batch_at(number)), total)
        return total

    def read_metrics(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Metrics of a step; of replicas, their means over those of this process, as host arrays."""
        return metrics if self.config.outer.kind == "none" else replica_means(metrics)

    def settled(self, state: TrainState) -> TrainState:
        """The state with its pending update applied, as saves and evaluations need; its buffers are donated."""
        if self._settle is None:
            return state
        with jax.set_mesh(self.mesh):
            return self._settle(state)

    def meta(self, step: int) -> dict[str, Any]:
        """Metadata of a checkpoint: configuration, position in the data, spikes, tokenizer, versions, other models."""
        reference = {} if self.reference is None else {"reference": self.reference.facts()}
        base = {} if self.base is None else {"base": self.base.facts()}
        return {
            **reference,
            **base,
            "config": to_dict(self.asked),
            "source": None
            if self.init_model is None or self.init_model.source is None
            else dict(self.init_model.source),
            "replicas": self.replicas,
            "cursor": self.batches.cursor(step),
            "spikes": self.spikes,
            "tokenizer": self.data.tokenizer.fingerprint,
            "versions": versions(),
        }


def elastic_config(config: RunConfig, devices: int, platform: str, generation: RunGeneration) -> RunConfig:
    """Settings of an elastic run for the devices of a generation, see ``config_for_devices_left``.

    Raises:
        ShardingError: no mesh of these devices fits.
    """

    def check(made: RunConfig, mesh: AbstractMesh) -> None:
        mesh_check(made, run_model(made))(mesh)
        check_combinations(made, dict(mesh.shape), platform)

    total = devices * generation.total // len(generation.slots)
    return config_for_devices_left(config, devices, total, check)


def run_mesh(config: RunConfig, model: Functional, devices: Sequence[jax.Device]) -> Mesh:
    """Mesh of a run over devices: ``fitting_mesh``, with groups of two-level sums.

    Raises:
        ShardingError, ConfigError: see ``fitting_mesh`` and ``two_level_mesh``.
    """
    mesh = fitting_mesh(config, model, len(devices), devices[0].platform)
    islands = len({island_of(device) for device in devices})
    return two_level_mesh(config, mesh, islands, devices[0].platform).build(devices, config.device_order)


def two_level_mesh(config: RunConfig, mesh: MeshSpec, islands: int, platform: str) -> MeshSpec:
    """Mesh with the axis ``local`` for two-level sums of gradients (``parallel.reduce``), split off ``data``.

    Args:
        config: the run.
        mesh: of the run, with all sizes.
        islands: slices (TPU) or nodes (others) of the devices.
        platform: of the devices.

    Raises:
        ConfigError: two-level sums are asked for, and the mesh has no two levels.
    """
    reduce = config.parallel.reduce
    plain = config.outer.kind == "none" and not (config.grads.compress or config.device_order)
    plain = plain and dict(mesh.axes).get("stage", 1) == 1 and not config.parallel.micro_batches
    if (
        reduce == "two_level"
        or config.parallel.zero == "3level"
        or (reduce == "auto" and platform == "tpu" and plain and config.engine_beside is None)
    ):
        factors = mesh.between(islands) if platform == "tpu" else mesh.outermost(islands)
        mesh = mesh.with_local(dict(zip(dict(mesh.axes), factors, strict=True)).get("data", 1))
    sizes = dict(mesh.axes)
    if reduce == "two_level" and min(sizes.get("data", 1), sizes.get("local", 1)) == 1:
        raise ConfigError(
            f'parallel.reduce = "two_level" needs groups: the devices of the mesh {mesh} along data are not in several '
            "slices or nodes with several devices in each; give the mesh the axis local for the devices of a group, "
            'such as "data=2,local=4", or set parallel.reduce to "flat".'
        )
    return mesh


def fitting_mesh(config: RunConfig, model: Functional, num_devices: int, platform: str = "") -> MeshSpec:
    """Mesh of a run over so many devices.

    Args:
        config: the run.
        model: of the run.
        num_devices: number of devices.
        platform: of the devices, where it is known: some combinations are refused on one platform alone.

    Raises:
        ShardingError: the parameters or the batch do not fit it; lists the nearest meshes that they do.
        ConfigError: settings do not go together (``jaxllm.train.combinations``).
    """
    mesh = factored_mesh(config, model, MeshSpec.parse(config.mesh), num_devices)
    trained_params(config, model)  # raises for a pattern that matches nothing
    check_combinations(config, dict(mesh.axes), platform)
    check_reference(config)
    if config.device_order:
        mesh.over_blocks(config.device_order)
    return mesh


def factored_mesh(config: RunConfig, model: Functional, mesh: MeshSpec, num_devices: int) -> MeshSpec:
    """Mesh with all sizes, and with the axis ``tensor`` factored in two where the run asks for it.

    Raises:
        ShardingError: the run does not fit it; lists the nearest factorings and meshes that it does.
    """
    try:
        if (given := _of_devices(mesh, num_devices)) is not None:  # before what the run's shapes have to say of it
            config.parallel.factored(given)
        return config.parallel.factored(resolve(mesh, num_devices, mesh_check(config, model)))
    except ShardingError as error:
        if config.parallel.tensor == "1d":
            raise
        fitting = _fitting_factorings(config, model, mesh, num_devices)
        if not fitting:
            raise
        said = ", ".join(f'"{one}"' for one in fitting)
        raise ShardingError(f"{error} With parallel.tensor one of {said} the mesh {mesh} fits.") from error


def _of_devices(mesh: MeshSpec, num_devices: int) -> MeshSpec | None:
    """Mesh with all sizes; None: it is not one of so many devices."""
    try:
        return mesh.resolve(num_devices)
    except ShardingError:
        return None


def _fitting_factorings(config: RunConfig, model: Functional, mesh: MeshSpec, num_devices: int) -> list[str]:
    """Values of ``parallel.tensor`` with which the run fits a mesh of so many devices."""
    resolved, found = _of_devices(mesh, num_devices), list[str]()
    if resolved is None:
        return found
    for tensor in (*map(str, legal(dict(resolved.axes).get("tensor", 1))), "1d"):
        try:
            other = replace(config, parallel=replace(config.parallel, tensor=tensor))
            mesh_check(other, model)(resolved.abstract())
        except ValueError:
            continue
        found.append(tensor)
    return found


def mesh_check(config: RunConfig, model: Functional) -> Callable[[AbstractMesh], None]:
    """Function that raises ValueError for a mesh that a run's model or batch does not fit."""
    shapes, axes = model.abstract(), model.logical_axes()

    def fits(mesh: AbstractMesh) -> None:
        if config.parallel.tensor != "1d":
            mesh = config.parallel.factored(MeshSpec(tuple(mesh.shape.items()))).abstract()
        if (stages := mesh.shape.get("stage", 1)) > 1:
            pipeline_plan(config, stages)
        check_batch(config, mesh, model.rules)
        check_parameters(shapes, axes, mesh, model.rules)

    return fits


def batch_rows(config: RunConfig, mesh: Any, rules: Any) -> int:
    """Rows of a batch on a mesh: those of the data, and of padding in an elastic run and beside uneven rows."""
    rows = config.data.batch_size
    if (unequal := unequal_rows(config, mesh)) is not None:
        return unequal.rows
    return rows_on_mesh(rows, mesh, rules, config.accumulate) if config.elastic.enabled else rows


def micro_batch_rows(config: RunConfig, mesh: Any, rules: Any) -> int:
    """Rows of a micro-batch on all devices: those of a batch over ``accumulate``."""
    if (unequal := unequal_rows(config, mesh)) is not None:
        return unequal.each * len(unequal.counts)
    return batch_rows(config, mesh, rules) // config.accumulate


def check_batch(config: RunConfig, mesh: Any, rules: Any) -> None:
    """Checks that a micro-batch divides over the mesh; raises ShardingError or ValueError."""
    shape = (micro_batch_rows(config, mesh, rules), config.data.seq_len)
    rules.spec(("batch", "seq"), mesh, shape, what="micro-batch (data.batch_size / accumulate)")
    rules.spec(("batch", "residual_seq"), mesh, shape, what="micro-batch (data.batch_size / accumulate)")
    for layout in dict(rules.layouts):
        what = f'micro-batch (data.batch_size / accumulate) in layers of parallel.layers = "{layout}"'
        rules_of(rules, layout).spec(("batch", "residual_seq"), mesh, shape, what=what)
    context_slots(config, mesh, rules)
    shards = mesh.shape.get("context", 1)
    if shards > 1:
        order(config.parallel.layout, shards, config.data.seq_len)  # raises if the sequence does not divide


def build_value_and_grad(config: RunConfig, model: Functional, mesh: Mesh | AbstractMesh) -> ValueAndGrad:
    """Loss and gradients of a run's step: pipelined on a mesh with stages, else with gradient accumulation.

    Raises:
        ConfigError: settings do not go together (``jaxllm.train.combinations``).
    """
    check_combinations(config, dict(mesh.shape))
    shared: dict[str, Any] = {
        "objective": make_objective(config.objective, config.z_loss),
        "trainable": trained_params(config, model),
        "layout": config.parallel.layout,
        "zero": config.parallel.zero,
    }
    if (stages := mesh.shape.get("stage", 1)) > 1:
        return pipelined_value_and_grad(
            model,
            *pipeline_plan(config, stages),
            routing=config.routing,
            offload=config.parallel.offload,
            offload_chunks=config.parallel.offload_chunks,
            links=slow_links(config.outer, mesh.shape.get(REPLICA, 1), config.model.embed_dim),
            **shared,
        )
    slots = context_slots(config, mesh, model.rules)
    sizes = () if slots is None else slots.sizes
    shared["micro_batches"] = config.parallel.micro_batches
    return value_and_grad(model, accumulate=config.accumulate, routing=config.routing, ring_sizes=sizes, **shared)


def check_precision(config: RunConfig) -> None:
    """Checks that JAX_ENABLE_X64 is set for float64, which jax would else silently make float32; raises ConfigError."""
    if "float64" in (config.model.dtype, config.model.param_dtype) and not jax.config.jax_enable_x64:  # pyright: ignore
        raise ConfigError(
            "model.dtype or model.param_dtype is float64, which needs the environment variable JAX_ENABLE_X64=1."
        )


def check_vocabulary(config: RunConfig, tokenizer: Any) -> None:
    """Checks that the embedding has a row for every token of the tokenizer; raises ConfigError."""
    if config.model.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size = {config.model.vocab_size}, but the tokenizer {config.data.tokenizer!r} has "
            f"{tokenizer.vocab_size} tokens; set model.vocab_size to {tokenizer.vocab_size} or more."
        )
