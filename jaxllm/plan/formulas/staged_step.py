"""Step-time model of an engine with pipeline stages: a cost for each stage, which computes some of the layers.

The layers are cut as the engine cuts them (``jaxllm.infer.stages``). Hidden states of all rows go from stage to stage
over a device's link; the first stage embeds, the last one has the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxllm.infer.stages.stage_cut import cut_stages
from jaxllm.models import DecoderConfig
from jaxllm.plan.formulas.engine_memory import slot_bytes
from jaxllm.plan.formulas.serving_step import BatchWork, ServingStepModel, StepCost
from jaxllm.plan.hardware import Cluster, devices_of_host
from sharding import MeshSpec, ShardingError


class OneStageStepModel(ServingStepModel):
    """Step-time model of one stage.

    Args:
        config: architecture with the stage's layers alone.
        cluster, mesh: devices of the stage.
        first, last: the stage embeds; it has the head.
        options: of ``ServingStepModel``.
    """

    def __init__(
        self, config: DecoderConfig, cluster: Cluster, mesh: MeshSpec, *, first: bool, last: bool, **options: Any
    ):
        self.first, self.last = first, last
        super().__init__(config, cluster, mesh, **options)

    def _head(self, samples: float) -> StepCost:
        return super()._head(samples) if self.last else StepCost()

    def _exchanged(self, own: float, rows: int, samples: int, prefill: bool) -> float:
        seconds = super()._exchanged(own, rows, samples, prefill)
        if self.tensor > 1 and not self.first:
            seconds -= self._collective("all-reduce", "tensor", own * self.config.embed_dim * self.width)
        if self.tensor > 1 and not self.last:
            seconds -= self._collective("all-gather", "tensor", samples * self._vocab * self.tensor * 4)
        return seconds


class StagedStepModel(ServingStepModel):
    """Step-time model of an engine on a mesh of ``stage`` and ``tensor``; bytes are of the device that has most.

    Args:
        config: architecture.
        cluster: devices of all stages, of one host.
        mesh: serving mesh with ``stage``.
        options: of ``ServingStepModel``.

    Attributes:
        stages: step-time model of each stage.

    Raises:
        ShardingError: another axis is split, or the devices are of several hosts.
        ValueError: the model has fewer groups of layers than there are stages.
    """

    def __init__(self, config: DecoderConfig, cluster: Cluster, mesh: MeshSpec, **options: Any):
        sizes = {name: size for name, size in mesh.axes if size > 1}
        if strange := [name for name in sizes if name not in ("stage", "tensor")]:
            raise ShardingError(f"stage={sizes['stage']} does not go with {strange[0]}: give stage and tensor alone.")
        count, tensor = sizes["stage"], sizes.get("tensor", 1)
        own = Cluster.sized(cluster.hardware, tensor)
        if own is None or count * tensor != cluster.devices or cluster.devices > devices_of_host(cluster.topology):
            raise ShardingError(
                f"the mesh {mesh} on {cluster.name}: stages are of one process on one host, each a slice of devices."
            )
        part = MeshSpec((("tensor", tensor),))
        super().__init__(config, own, part, **options)
        cuts = cut_stages(self.config.segments, count)
        self._cuts = [cut.layers for cut in cuts]
        self.stages = tuple(
            OneStageStepModel(
                self._stage_config(layers), own, part, first=number == 0, last=number == count - 1, **options
            )
            for number, layers in enumerate(self._cuts)
        )
        # Each stage's model counts embedding and head beside its layers, for which the engine keeps room on all stages.
        self.device_weight_bytes = max(one.device_weight_bytes for one in self.stages)

    def _stage_config(self, layers: range) -> DecoderConfig:
        """Architecture with some of the layers; a pattern has at least one, the others come before it."""
        *prefix, last = (self.config.blocks[n] for n in layers)
        return replace(self.config, prefix=tuple(prefix), pattern=(last,), layers=len(layers))

    @property
    def token_bytes(self) -> float:
        """Bytes of KV cache per token on a device of the stage with the most layers, of each group."""
        return sum(self.group_token_bytes(group) for group in range(len(self.groups)))

    def group_token_bytes(self, group: int) -> float:
        """Bytes of KV cache per token on a device of the stage with the most layers of a group."""
        one = self.groups[group]
        most = max(sum(layer in own for layer in one.layers) for own in self._cuts)
        return most * slot_bytes(one.kv_spec, one.dtype, self.tensor, self.platform)

    def stage_costs(self, batches: Sequence[BatchWork], rows: int, samples: int) -> list[StepCost]:
        """Cost of a step on each stage, see ``step``; that of receiving the hidden states is in it."""
        size = rows * self.config.embed_dim * self.width
        sent = StepCost(network=size / (self.hardware.link * self.calibration.link) + self.hardware.hop)
        costs = [one.step(batches, rows, samples) for one in self.stages]
        return [costs[0], *(cost + sent for cost in costs[1:])]

    def step(self, batches: Sequence[BatchWork], rows: int, samples: int) -> StepCost:
        """Cost of a step that is alone in the pipeline: those of all stages, one after the other."""
        total = StepCost()
        for cost in self.stage_costs(batches, rows, samples):
            total += cost
        return total


def pipeline_ends(free: list[float], start: float, seconds: Sequence[float]) -> float:
    """Time at which a pipeline has computed a step; ``free`` has the times from which on the stages are free.

    Args:
        free: of each stage; updated.
        start: when the step may begin.
        seconds: of the step on each stage.
    """
    for stage, own in enumerate(seconds):
        start = free[stage] = max(free[stage], start) + own
    return start
