"""RunConfig: the configuration of a training run, from the model and the data to the optimizer and the mesh."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from jaxllm.checkpoint import CheckpointConfig
from jaxllm.config import runtime_only
from jaxllm.data import DataConfig
from jaxllm.models.decoder import DecoderConfig
from jaxllm.observe.config import ObserveConfig
from jaxllm.optim import OptimConfig
from jaxllm.parallel.distributed import DistributedConfig
from jaxllm.parallel.elastic.run_generation import ElasticConfig
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.peft.adapter_method import AdapterConfig
from jaxllm.train.disk.config import DiskConfig
from jaxllm.train.host_offload import HostConfig
from jaxllm.train.outer.compressed_gradients import GradsConfig
from jaxllm.train.outer.config import OuterConfig
from jaxllm.train.outer.dedloc import PeersConfig
from jaxllm.train.step.loss_spikes import SpikeConfig
from jaxllm.train.step.objective import ObjectiveConfig
from jaxllm.train.step.param_average import EmaConfig
from jaxllm.train.step.routing_losses import RoutingConfig


@dataclass(frozen=True)
class EngineBeside:
    """Sizes of an engine that the process of a run has beside its training step, for estimates of memory.

    Attributes:
        mesh: mesh that it serves on, over the first devices of the run's; empty: the run's own.
        sequences: sequences of a replica at a time.
        tokens: most tokens of a sequence.
        page: tokens of a page of its KV cache.
    """

    mesh: str
    sequences: int
    tokens: int
    page: int


@dataclass(frozen=True)
class RunConfig:
    """Configuration of a training run.

    Attributes:
        name: the run's name, and that of its directory.
        model: the architecture; its vocab_size must be at least the tokenizer's.
        init_from: a model to start from instead of random parameters: the directory of a run or a model, a .gguf file,
            ``smollm2`` or ``hf:ORG/NAME``. ``model`` must be its architecture
            (``open_source(find_model(NAME)).config``).
        data: the training data, sequence length and global batch size.
        optim: the optimizer and its learning-rate schedule.
        steps: optimizer steps; the schedule is spread over them.
        accumulate: gradient accumulation: micro-batches per step, which bound activation memory; divides
            data.batch_size.
        objective: what is minimised; next-token cross-entropy by default.
        z_loss: weight of the z-loss, the squared log-partition function of the output softmax.
        trainable: the parameters that are trained, by role ("gain"), by name ("attention", "*norm*") or by path
            ("segments/0/*"); the others stay as they are, without gradients and optimizer state. Empty: all.
        adapter: adapter that is trained beside the frozen model of ``init_from``: LoRA and its family. Parameters in
            ``trainable`` are trained besides.
        reference: a frozen model of the same architecture that gives ``reference_logprobs`` to the objective: as
            ``init_from``, or "start" for the parameters that the run starts from. Empty: none.
        routing: load-balancing losses and biases of mixture-of-experts models.
        spikes: what is done at a loss spike.
        outer: outer steps between replicas that train by themselves, over the mesh axis ``replica``.
        grads: compression of gradients over the mesh axis ``data``.
        peers: peers along the mesh axis ``data`` that come and go and fill a fixed global batch.
        ema: exponential moving average of the parameters, for evaluation and export.
        seed: seed of the parameters and of all randomness of the run.
        mesh: devices by named axis ("fsdp=4,tensor=2,context=2"; ``sharding.AXES``) or a preset: dp, fsdp, tp,
            fsdp_tp.
        device_order: order of equal blocks of consecutive devices in the mesh, by their numbers from 0: its first axes
            are over these blocks ("2 0 1 3": of four nodes, processes in order, the third comes first). Empty: devices
            are ordered by their links.
        parallel: how arrays are sharded over the mesh: ZeRO stage, sequence, context and pipeline parallelism.
        host: optimizer offload and parameter offload to host memory.
        disk: optimizer and parameter offload to files.
        distributed: timeouts of runs in several processes.
        elastic: go on with the processes left when one dies, hangs or slows down.
        compiler_options: changes to the table of ``jaxllm.parallel.compiler_flags``: "NAME=VALUE", or "NAME=" for the
            compiler's own choice.
        checkpoint: when to save checkpoints and which to keep.
        log_every: steps between two lines of the log where there is no live view.
        eval_every: steps between two evaluations on held-out text; 0 evaluates at the end only.
        observe: trackers, norms by layer, profiles.
        out: directory that holds the runs.
    """

    name: str = runtime_only("run")
    model: DecoderConfig = field(default_factory=DecoderConfig)
    init_from: str = ""
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    steps: int = 1000
    accumulate: int = 1
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    z_loss: float = 0.0
    trainable: tuple[str, ...] = ()
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    reference: str = ""
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    spikes: SpikeConfig = field(default_factory=SpikeConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    grads: GradsConfig = field(default_factory=GradsConfig)
    peers: PeersConfig = field(default_factory=PeersConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    seed: int = 0
    mesh: str = runtime_only("dp")
    device_order: tuple[int, ...] = runtime_only(())
    parallel: ParallelConfig = field(default_factory=ParallelConfig, metadata={"runtime_only": True})
    host: HostConfig = field(default_factory=HostConfig, metadata={"runtime_only": True})
    disk: DiskConfig = field(default_factory=DiskConfig, metadata={"runtime_only": True})
    distributed: DistributedConfig = field(default_factory=DistributedConfig, metadata={"runtime_only": True})
    elastic: ElasticConfig = field(default_factory=ElasticConfig, metadata={"runtime_only": True})
    compiler_options: tuple[str, ...] = runtime_only(())
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig, metadata={"runtime_only": True})
    log_every: int = runtime_only(10)
    eval_every: int = runtime_only(0)
    observe: ObserveConfig = field(default_factory=ObserveConfig, metadata={"runtime_only": True})
    out: str = runtime_only("runs")

    loop: ClassVar[str] = "jaxllm.train:train"
    """Function that trains a run of this kind, as MODULE:NAME."""
    loop_together: ClassVar[str] = "jaxllm.train:train_together"
    """Function that trains several runs of this kind in one step; empty: there is none."""
    own_together: ClassVar[tuple[str, ...]] = ()
    """Further settings in which runs of this kind may differ when they are trained together."""

    @property
    def engine_beside(self) -> EngineBeside | None:
        """Engine beside the training step; None: the run has none."""
        return None

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("accumulate", 1), ("log_every", 1), ("eval_every", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)}; give {least} or more.")
        if self.model.learned_positions is not None and self.data.seq_len > self.model.learned_positions:
            raise ValueError(
                f"data.seq_len = {self.data.seq_len}, but the model has learned {self.model.learned_positions} "
                "positions (model.learned_positions); give data.seq_len at most that."
            )
        if (virtual := self.adapter.virtual_tokens) >= self.data.seq_len:
            raise ValueError(
                f"adapter.tokens = {virtual} take a whole row of data.seq_len = {self.data.seq_len}; give fewer, "
                "or longer rows."
            )
        self.routing.check(self.model, adapter_experts=self.adapter.has_experts)
        if self.z_loss < 0:
            raise ValueError(f"z_loss = {self.z_loss}; give 0 (none) or a positive weight.")
        if self.data.batch_size % self.accumulate:
            legal = [n for n in range(1, self.data.batch_size + 1) if self.data.batch_size % n == 0]
            raise ValueError(
                f"accumulate = {self.accumulate} does not divide data.batch_size = {self.data.batch_size}; "
                f"legal: {legal}."
            )
