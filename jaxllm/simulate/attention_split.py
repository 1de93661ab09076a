"""Attention split: an engine whose KV cache and attention have devices of their own, perhaps of another kind.

    simulate(OffloadedDeployment.of(base, weights_cluster, attention_cluster), trace)
    provision([*attention_splits(base, kinds, most=8), *mixed_splits(base, kinds, most=8)], trace, slo, "cost")

Attention is bound by memory and the rest of a decode step by the weights, so cheap devices with much memory may serve
the one, and fast ones the other (Lamina, arXiv:2405.01814). A step takes the time of the weights' devices, that of the
attention devices, and that of the transfers in between, one after the other; with ``overlap = "nano"`` two halves of
its rows take turns on both.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxllm.infer.attention_pool.transfer_bytes import transfer_bytes
from jaxllm.infer.pools.pool_argument import AttentionPoolSizes
from jaxllm.infer.runner.model_runner import ACCELERATOR_MEMORY_SHARE
from jaxllm.models import DecoderConfig
from jaxllm.plan.formulas.engine_memory import slot_bytes
from jaxllm.plan.formulas.serving_step import LAUNCH, BatchWork, ServingStepModel, StepCost
from jaxllm.plan.hardware import Cluster, Hardware
from jaxllm.simulate.deployment import Deployment, DeploymentError
from jaxllm.simulate.step_parts import makespan
from sharding import MeshSpec
from sharding.mesh import divisors

MESSAGES = 2
"""Messages of a layer that wait for each other: to the attention devices, and back."""


class OffloadedStepModel(ServingStepModel):
    """Step-time model of an engine with an attention pool.

    Args:
        config: architecture.
        cluster, mesh: devices of the weights, split over ``tensor`` alone.
        attention: devices of the KV cache.
        sizes: of both parts.
        bandwidth: bytes per second between them.
        halves: two halves of a step's rows take turns.
        options: of ``ServingStepModel``.

    Raises:
        DeploymentError: heads do not divide over the attention devices.
    """

    def __init__(
        self,
        config: DecoderConfig,
        cluster: Cluster,
        mesh: MeshSpec,
        attention: Cluster,
        sizes: AttentionPoolSizes,
        bandwidth: float,
        *,
        halves: bool = False,
        **options: Any,
    ):
        super().__init__(config, cluster, mesh, **options)
        self.attention, self.pool_sizes, self.bandwidth, self.halves = attention, sizes, bandwidth, halves
        self._parts, self.span = (sizes.attention, 1) if sizes.axis == "tensor" else (1, sizes.attention)
        for block in config.blocks:
            heads, kv = block.attention.heads, block.attention.kv_spec.kv_heads
            if heads % self._parts or (kv % self._parts and self._parts % kv):
                raise DeploymentError(
                    f"{heads} heads and {kv} of keys and values do not divide over {self._parts} attention devices: "
                    "give another number of them."
                )
            if self.span > 1 and block.attention.kv_spec.latent:
                raise DeploymentError(
                    "multi-head latent attention is not spread over context: split attention over tensor."
                )

    @property
    def token_bytes(self) -> float:
        """Bytes of KV cache per token on one attention device, in all layers."""
        return sum(self.group_token_bytes(n) for n in range(len(self.groups)))

    def group_token_bytes(self, group: int) -> float:
        """Bytes of KV cache per token on one attention device, in all layers of a layer group."""
        one, platform = self.groups[group], self.attention.topology.platform
        return len(one.layers) * slot_bytes(one.kv_spec, one.dtype, self._parts, platform) / self.span

    def step(self, batches: Sequence[BatchWork], rows: int, samples: int) -> StepCost:
        """Cost of one pass, see ``ServingStepModel``; what the slower part hides of the other is not in it."""
        (batch,) = batches
        if not self.halves or rows < 2:
            return self.weights_part(rows, samples) + self.attention_part(batch) + self.transfer_part(rows)
        half, layers, head = -(-rows // 2), self.config.layers, self._head(samples)
        own = self.weights_part(half, samples) + head * -1
        away = self.attention_part(batch) * 0.5 + self.transfer_part(half)
        both = makespan([own.seconds / layers] * 2, [away.seconds / layers] * 2, layers)
        total = (own + away) * 2
        return replace(total * (both / total.seconds), flops=total.flops, bytes=total.bytes) + head

    def weights_part(self, rows: int, samples: int) -> StepCost:
        """Cost on the devices of the weights; the attention of a layer is no operation of theirs."""
        layers = StepCost(launch=self.config.layers * self._launch)
        return self.beside_attention(rows, rows, samples, prefill=False) + layers * -1

    def attention_part(self, batch: BatchWork) -> StepCost:
        """Cost on an attention device: all layers' attention, of latents in the absorbed form."""
        hardware, total = self.attention.hardware, StepCost()
        rate = (hardware.flops if self.width == 2 else hardware.flops_float32) * self.calibration.attention
        for group in range(len(self.groups)):
            one = self.groups[group]
            heads = sum(self.config.blocks[layer].attention.heads for layer in one.layers) // self._parts
            macs = heads * (one.kv_spec.key_dim + one.kv_spec.value_dim)
            flops = 2.0 * macs * float(batch.pairs(one.window).sum()) / self.span
            moved = self.group_token_bytes(group) * batch.read(one.window)
            work = flops / rate
            wait = max(0.0, moved / (hardware.bandwidth * self.calibration.memory) - work)
            total += StepCost(work, wait, flops=flops, bytes=moved)
        return total + StepCost(launch=self.config.layers * LAUNCH[self.attention.topology.platform])

    def transfer_part(self, rows: int) -> StepCost:
        """Cost of the transfers, which wait for each other and for the computation."""
        size = sum(transfer_bytes(self.config, self.pool_sizes, rows, self.width))
        hop = max(self.hardware.hop, self.attention.hardware.hop)
        return StepCost(
            network=size / (self.bandwidth * self.calibration.link) + MESSAGES * self.config.layers * hop
        )  # fmt: skip


@dataclass(frozen=True)
class OffloadedDeployment(Deployment):
    """Deployment of engines with an attention pool; ``cluster`` and ``mesh`` are the devices of one engine's weights.

    Attributes:
        attention: attention devices of one engine.
        axis: see ``AttentionPoolSizes``.
        link: bytes per second between both parts; None: the network of the part that has less of it.

    Raises:
        DeploymentError: the weights' mesh is not of ``tensor`` alone, or has not all of ``cluster``.
    """

    attention: Cluster | None = None
    axis: str = "tensor"
    link: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attention is None or self.engine_devices != self.cluster.devices:
            raise DeploymentError("an attention split has one engine on a cluster, and attention devices: give both.")
        if any(size > 1 and name != "tensor" for name, size in self.mesh.axes):
            raise DeploymentError(f"weights beside an attention pool are split over tensor, not over {self.mesh}.")
        text = f"model=tensor:{self.cluster.devices}, attention={self.axis}:{self.attention.devices}"
        object.__setattr__(self, "engine", replace(self.engine, pools=text))

    @property
    def engines(self) -> int:
        """Number of engines."""
        return self.copies

    @property
    def kinds(self) -> tuple[tuple[Hardware, int], ...]:
        """Kinds of devices, and how many of each."""
        assert self.attention is not None
        return tuple((one.hardware, one.devices * self.copies) for one in (self.cluster, self.attention))

    @property
    def name(self) -> str:
        """Short description: engines, devices of both parts, and formats."""
        many = f"{self.engines} x " if self.engines > 1 else ""
        formats = [self.weights] if self.engine.kv_dtype == "auto" else [self.weights, f"kv {self.engine.kv_dtype}"]
        assert self.attention is not None
        halves = " in halves" if self.engine.overlap == "nano" else ""
        return (
            f"{many}model=tensor:{self.cluster.devices}, attention={self.axis}:{self.attention.devices} on "
            f"{self.attention.hardware.name}{halves}, {', '.join(formats)}"
        )

    @property
    def where(self) -> str:
        """All devices: of weights, and of attention."""
        counts: dict[str, int] = {}
        for one, count in self.kinds:
            counts[one.name] = counts.get(one.name, 0) + count
        return " and ".join(f"{count} x {name}" for name, count in counts.items())

    @property
    def bandwidth(self) -> float:
        """Bytes per second between both parts."""
        if self.link is not None:
            return self.link
        assert self.attention is not None
        return min(one.devices * one.hardware.network for one in (self.cluster, self.attention))

    @functools.cached_property
    def step_model(self) -> ServingStepModel:
        """Step-time model of one engine."""
        assert self.attention is not None
        return OffloadedStepModel(
            self.model, self.cluster, self.mesh, self.attention,
            AttentionPoolSizes(self.cluster.devices, self.attention.devices, self.axis), self.bandwidth,
            halves=self.engine.overlap == "nano", weights=self.weights, kv_dtype=self.engine.kv_dtype,
            calibration=self.calibration, launch=self.launch,
        )  # fmt: skip

    @functools.cached_property
    def cache_bytes(self) -> float:
        """Bytes of an attention device for the KV cache.

        Raises:
            DeploymentError: the weights do not fit on their devices.
        """
        model, config = self.step_model, self.engine
        temporaries = model.temporary_bytes(config.max_batched_tokens, config.max_sequences)
        if model.device_weight_bytes + temporaries > ACCELERATOR_MEMORY_SHARE * model.hardware.hbm_bytes:
            raise DeploymentError(
                f"{self.name}: a device needs {(model.device_weight_bytes + temporaries) / 2**30:.1f} GiB for weights "
                f"and a step, and has {model.hardware.hbm_bytes / 2**30:.1f}: give the weights more devices."
            )
        assert self.attention is not None
        return ACCELERATOR_MEMORY_SHARE * self.attention.hardware.hbm_bytes

    def joules(self, steps: Sequence[StepCost], seconds: float, power: Any) -> float | None:
        """None: a step's cost does not say how long each part idles."""
        return None


def split_of(
    base: Deployment, weights: Hardware, tensor: int, attention: Hardware, devices: int, copies: int = 1, **fields: Any
) -> OffloadedDeployment | None:
    """Engines with an attention pool; None if there is no slice of so many devices.

    Args:
        base: its model, formats and sizes are taken.
        weights, tensor: kind and number of the devices of an engine's weights.
        attention, devices: kind and number of an engine's attention devices.
        fields: of ``OffloadedDeployment``.
    """
    own, away = Cluster.sized(weights, tensor), Cluster.sized(attention, devices)
    if own is None or away is None:
        return None
    return OffloadedDeployment(
        base.model, own, MeshSpec.parse(f"tensor={tensor}"), base.engine, base.weights, base.longest, base.calibration,
        base.launch, copies, base.host_seconds, attention=away, **fields,
    )  # fmt: skip


def attention_splits(base: Deployment) -> Iterator[OffloadedDeployment]:
    """Engines with an attention pool on the devices of a deployment: all numbers of devices of both parts that divide
    it, and as many engines as there is room for. Both parts are near each other: the devices' links.

    Args:
        base: its devices, model, formats and sizes are taken; its mesh is not.
    """
    hardware = base.cluster.hardware
    for tensor, devices in itertools.product(divisors(base.devices), repeat=2):
        if copies := base.devices // (tensor + devices):
            near = min(tensor, devices) * hardware.link
            if (found := split_of(base, hardware, tensor, hardware, devices, copies, link=near)) is not None:
                yield found


def mixed_attention_splits(base: Deployment, kinds: Sequence[Hardware], most: int) -> Iterator[OffloadedDeployment]:
    """Engines with an attention pool of up to so many devices, each part of one of several kinds of devices.

    Both have powers of two of them.

    Args:
        base: its model, formats and sizes are taken.
        kinds: device kinds.
        most: devices of both parts and all engines together, at most.
    """
    degrees = [2**n for n in range(most.bit_length()) if 2**n <= most]
    for weights, attention, tensor, devices in itertools.product(kinds, kinds, degrees, degrees):
        for copies in range(1, most // (tensor + devices) + 1):
            if (found := split_of(base, weights, tensor, attention, devices, copies)) is not None:
                yield found
