"""A run made ready: mesh, optimizer, data, the step; checked against each other before anything is allocated."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxllm.checkpoint import StateProvider, state_providers
from jaxllm.config import ConfigError, to_dict
from jaxllm.data import Batch, Dataset, load_dataset
from jaxllm.data.skip_batches import SkippingDataset
from jaxllm.models import Functional, functional
from jaxllm.observe.metric_sinks import check_sinks as check_trackers
from jaxllm.parallel.compiler_flags import options
from jaxllm.parallel.distributed import group
from jaxllm.parallel.mesh_search import check_parameters, resolve
from jaxllm.parallel.pipeline.stage_split import Remat
from jaxllm.train.config import RunConfig
from jaxllm.train.init_from import beginning
from jaxllm.train.records.receipt import versions
from jaxllm.train.records.run_directory import RunDirectory
from jaxllm.train.recovery.saving import Place, Saver
from jaxllm.train.run_processes import local_part, put_batch
from jaxllm.train.step.loss import value_and_grad
from jaxllm.train.step.numerics import init_numerics
from jaxllm.train.step.pipelined_loss import pipeline_plan, pipelined_value_and_grad
from jaxllm.train.step.step_builder import build_optimizer, build_step, check_offload, check_optimizer
from jaxllm.train.step.train_state import TrainState, abstract_state
from jaxllm.train.step.training_step import ValueAndGrad, jit_step
from pallas_kernels.ring_attention import order
from sharding import MeshSpec


class Run:
    """A run made ready: data opened, mesh built, shardings checked; nothing large allocated yet.

    Attributes:
        batches: what its steps take of the data.
        spikes: those so far, as JSON (``jaxllm.train.recovery.rollback``).

    Raises:
        ConfigError, ShardingError, DataError: something does not fit; the message says what would.
    """

    def __init__(self, config: RunConfig, also: Sequence[StateProvider] = ()):
        self.config = config
        self.also = also
        check_trackers(config.observe.sinks)
        self.group = group()
        self.directory = RunDirectory(Path(config.out) / config.name, writes=self.group.is_leader)
        check_precision(config)
        self.model = functional(config.model, config.parallel.rules())
        self.mesh = fitting_mesh(config, self.model, jax.device_count()).build()
        self.optimizer = build_optimizer(config, self.model)
        self.abstract = abstract_state(self.model, self.optimizer, self.mesh, config.host, config.spikes)
        self.init_model = beginning(config.init_from, config.model) if config.init_from else None
        init = self.init_model
        self.data: Dataset = load_dataset(config.data, init and init.tokenizer, init and init.template)
        self.data.train.check_steps(config.steps)
        self.batches = SkippingDataset(self.data.train)
        self.spikes: list[dict[str, Any]] = []
        check_vocabulary(config, self.data.tokenizer)
        shape = (config.data.batch_size, config.data.seq_len)
        spec = self.model.rules.spec(("batch", "seq"), self.mesh, shape, what="batch")
        self.batch_sharding = NamedSharding(self.mesh, spec)
        self.data_shard, self.num_data_shards = local_part(self.batch_sharding, shape)
        device = self.mesh.devices.flat[0]
        self.compiler_options = options(device.platform, device.device_kind, config.compiler_options)

    def put_batch(self, batch: Batch) -> Batch:
        """This process's part of a batch, on the devices."""
        rows = self.config.data.batch_size
        return put_batch(batch, self.batch_sharding, rows, self.data_shard * rows // self.num_data_shards)

    def saver(self) -> Saver:
        """Of this process, or of all together."""
        return Saver(self.directory.path, self.config.checkpoint, self.group)

    def compile_step(self) -> tuple[Any, float]:
        """The compiled step and the seconds it took; being compiled, it can never recompile."""
        start = time.monotonic()
        grads = build_value_and_grad(self.config, self.model, self.mesh)
        layers = self.config.observe.layers_every > 0
        own = build_step(self.config, self.model, grads, self.optimizer, layers=layers)
        step = jit_step(own, self.abstract)
        sample = self.data.train.batch_at(0)
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.batch_sharding), sample)
        with jax.set_mesh(self.mesh):
            compiled = step.lower(self.abstract, batch).compile(compiler_options=self.compiler_options or None)
        return compiled, time.monotonic() - start

    def save(self, saver: Saver, place: Place, step: int, state: TrainState, metrics: dict[str, Any]) -> None:
        """The state, the providers', and the facts beside them."""
        meta = {**self.meta(step), "metrics": metrics, **state_providers.facts(self.also)}
        saver.save(place, step, state_providers.with_arrays(state, self.also), meta)

    def meta(self, step: int) -> dict[str, Any]:
        """What a checkpoint carries beside the state."""
        return {
            "config": to_dict(self.config),
            "source": None
            if self.init_model is None or self.init_model.source is None
            else dict(self.init_model.source),
            "cursor": self.batches.cursor(step),
            "spikes": self.spikes,
            "tokenizer": self.data.tokenizer.fingerprint,
            "versions": versions(),
        }


def fitting_mesh(config: RunConfig, model: Functional, num_devices: int) -> MeshSpec:
    """The run's mesh over so many devices.

    Raises:
        ShardingError: the parameters or the batch do not fit it; lists the nearest that they do.
        ConfigError: a pipeline's sizes are given, and there is no pipeline.
    """
    shapes, axes = model.abstract(), model.logical_axes()

    def fits(mesh: AbstractMesh) -> None:
        if (stages := mesh.shape.get("stage", 1)) > 1:
            pipeline_plan(config, stages)
        check_batch(config, mesh, model.rules)
        check_parameters(shapes, axes, mesh, model.rules)

    mesh = resolve(MeshSpec.parse(config.mesh), num_devices, fits)
    check_optimizer(config, mesh.abstract())
    check_offload(config, mesh.abstract())
    if dict(mesh.axes).get("stage", 1) == 1:
        for name in ("chunks", "depths", "offload"):
            if getattr(config.parallel, name):
                raise ConfigError(
                    f"parallel.{name} is of a pipeline, and the mesh {config.mesh!r} has no stages: leave it out, or "
                    "give the mesh some, such as stage=2."
                )
    return mesh


def check_batch(config: RunConfig, mesh: Any, rules: Any) -> None:
    """A micro-batch must divide over the mesh."""
    shape = (config.data.batch_size // config.accumulate, config.data.seq_len)
    rules.spec(("batch", "seq"), mesh, shape, what="micro-batch (data.batch_size / accumulate)")
    rules.spec(("batch", "residual_seq"), mesh, shape, what="micro-batch (data.batch_size / accumulate)")
    shards = mesh.shape.get("context", 1)
    if shards > 1:
        order(config.parallel.layout, shards, config.data.seq_len)  # refuses lengths that do not divide


def build_value_and_grad(config: RunConfig, model: Functional, mesh: Mesh | AbstractMesh) -> ValueAndGrad:
    """The function of loss and gradients that the run's step takes."""
    same = {"z_loss": config.z_loss, "layout": config.parallel.layout, "zero": config.parallel.zero}
    if (stages := mesh.shape.get("stage", 1)) > 1:
        if config.model.remat not in get_args(Remat):
            raise ConfigError(
                f'model.remat = "{config.model.remat}" is not for pipelines: what a stage keeps is '
                f"{', '.join(get_args(Remat))}."
            )
        if init_numerics(config.model) is not None:
            what = 'dtype = "float16"' if config.model.dtype == "float16" else 'matmul_precision = "fp8_delayed"'
            raise ConfigError(f"model.{what} keeps state that pipelines do not hand on; leave out the mesh's stages.")
        return pipelined_value_and_grad(
            model, *pipeline_plan(config, stages), routing=config.routing, offload=config.parallel.offload, **same
        )
    return value_and_grad(model, accumulate=config.accumulate, routing=config.routing, **same)


def check_precision(config: RunConfig) -> None:
    """float64 is real only where jax allows it; elsewhere it would silently be float32."""
    if "float64" in (config.model.dtype, config.model.param_dtype) and not jax.config.jax_enable_x64:  # pyright: ignore
        raise ConfigError("model.dtype or model.param_dtype is float64, which needs the environment JAX_ENABLE_X64=1.")


def check_vocabulary(config: RunConfig, tokenizer: Any) -> None:
    """Every token needs a row of the embedding."""
    if config.model.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size = {config.model.vocab_size}, but the tokenizer {config.data.tokenizer!r} has "
            f"{tokenizer.vocab_size} tokens; set model.vocab_size to {tokenizer.vocab_size} or more."
        )
