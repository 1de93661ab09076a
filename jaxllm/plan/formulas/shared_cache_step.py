"""Time of a serving step where the devices of an engine share a token's KV cache: slices of latents, or spread pages.

TPLA (``EngineConfig.mla``, arXiv:2508.15881): each ``tensor`` shard has a slice of the latents. A step that only
decodes attends with all heads to the slice of each device, between two all-to-alls; fresh prompts attend to their own
keys; any other step gathers the latents of its requests' pages, as long as their tables are, and does both.

KV span (``EngineConfig.kv_span``, arXiv:2401.02669): pages are spread over ``context``. Each device attends with all
queries to the pages that it has, and the parts are joined by an all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.infer.runner.latent_rotation import check_sliceable, with_slices
from jaxllm.infer.runner.serving_mesh import check_mesh
from jaxllm.infer.weight_folding import without_tensor
from jaxllm.models import DecoderConfig
from jaxllm.plan.formulas.serving_step import BatchWork, ServingStepModel, StepCost
from jaxllm.plan.hardware import Cluster
from sharding import MeshSpec

PART_BYTES = 4
"""Bytes of a value of the parts of attention that are joined: float32."""


@dataclass(frozen=True)
class CacheSharing:
    """Way in which the devices of an engine share a token's KV cache.

    Attributes:
        mla: see ``EngineConfig``.
        kv_span: see ``EngineConfig``.
        sequences, longest: most sequences of a step, and tokens that a page table covers.
    """

    mla: str = "exact"
    kv_span: bool = False
    sequences: int = 1
    longest: int = 1

    @property
    def is_any(self) -> bool:
        """Whether devices share it."""
        return self.kv_span or self.mla != "exact"


class SharedCacheStepModel(ServingStepModel):
    """Step-time model of an engine whose devices share a token's KV cache; see ``ServingStepModel``.

    Args:
        config, cluster, mesh, options: of ``ServingStepModel``.
        sharing: the way.

    Raises:
        ConfigError: the model's latents cannot be in slices, or the mesh has no ``tensor`` for them.
        ShardingError: the mesh has no ``context`` for a span, or has it for latents.
    """

    def __init__(self, config: DecoderConfig, cluster: Cluster, mesh: MeshSpec, sharing: CacheSharing, **options: Any):
        sizes = dict(mesh.axes)
        latent = any(block.attention.kv_spec.latent for block in config.blocks)
        check_mesh(mesh.abstract(), latent=latent, span=sharing.kv_span)
        if sharing.mla != "exact":
            if sizes.get("tensor", 1) == 1:
                raise ConfigError(without_tensor(sharing.mla))
            check_sliceable(config, sizes["tensor"])
            config = with_slices(config, sizes["tensor"])
        self.sharing = sharing
        super().__init__(config, cluster, mesh, **options)
        self.span = self.context if sharing.kv_span else 1

    @property
    def token_bytes(self) -> float:
        """Bytes of KV cache per token on one device, in all layers; with a span the mean over the devices."""
        return super().token_bytes / self.span

    def group_token_bytes(self, group: int) -> float:
        """Bytes of KV cache per token on one device, in all layers of a layer group, see ``token_bytes``."""
        return super().group_token_bytes(group) / self.span

    def step(self, batches: Sequence[BatchWork], rows: int, samples: int) -> StepCost:
        """Cost of one pass, see ``ServingStepModel``."""
        total = super().step(batches, rows, samples)
        return total + self._shared(batches, rows)

    def _attention(self, batch: BatchWork, split: int, blocks: Any = None) -> StepCost:
        """Attention of a device: to its share of the pages, or with all heads to its slices."""
        if self.span > 1:
            return super()._attention(batch, 1, blocks) * (1 / self.span)
        if self._is_fresh(batch):
            return super()._attention(batch, split, blocks)
        latent = [one for one, _ in self._latent_blocks()]
        total = super()._attention(batch, split, [one for one in self._blocks if one not in latent])
        if not self._decodes(batch):
            total += super()._attention(_continued(batch), split, latent)
        pairs = batch.pairs(None).sum()
        for one, block in self._latent_blocks():
            spec, slices = block.attention.kv_spec, block.attention.kv_spec.slices
            macs = block.attention.heads * (2 * spec.value_dim // slices + spec.key_dim - spec.value_dim)
            flops = 2.0 * one.layers * macs * float(pairs)
            moved = one.layers * batch.read(None) * one.slot
            work = flops / (self._rate(False) * self.calibration.attention)
            total += StepCost(work, max(0.0, self._seconds_of(moved) - work), flops=flops, bytes=moved)
        return total

    def _shared(self, batches: Sequence[BatchWork], rows: int) -> StepCost:
        """Cost of the collectives of shared KV caches, and of latents that are gathered."""
        seconds, moved = 0.0, 0.0
        if self.span > 1:
            for block in self.config.blocks:
                layer = block.attention
                heads = layer.heads / self.tensor
                part = rows * heads * (layer.value_dim + 2) * PART_BYTES
                seconds += self._collective("all-reduce", "context", part)
                if any((one.counts > 1).any() for one in batches):  # rows are split, and queries are gathered
                    sent = rows * heads * layer.key_dim * self.width
                    seconds += self._collective("all-gather", "context", sent)
        elif self.sharing.mla != "exact":
            fresh, decodes = (all(map(what, batches)) for what in (self._is_fresh, self._decodes))
            for one, block in () if fresh else self._latent_blocks():
                spec, heads = block.attention.kv_spec, block.attention.heads
                sliced = spec.value_dim // spec.slices
                for width in (sliced + spec.key_dim - spec.value_dim, sliced):  # queries there, outputs back
                    seconds += one.layers * self._collective("all-to-all", "tensor", rows * heads * width * self.width)
                if not decodes:
                    tokens = min(rows, self.sharing.sequences) * self.sharing.longest
                    whole = tokens * spec.value_dim * self.width
                    seconds += one.layers * self._collective("all-gather", "tensor", whole)
                    moved += one.layers * (tokens * one.slot + 2 * whole)
        return StepCost(memory=self._seconds_of(moved), network=seconds, bytes=moved)

    def _latent_blocks(self) -> list[tuple[Any, Any]]:
        """Kinds of blocks with latents: their costs, and one of them."""
        kinds = list(dict.fromkeys(self.config.blocks))
        return [(one, block) for one, block in zip(self._blocks, kinds, strict=True) if block.attention.kv_spec.latent]

    @staticmethod
    def _decodes(batch: BatchWork) -> bool:
        return bool((batch.counts <= 1).all())

    @staticmethod
    def _is_fresh(batch: BatchWork) -> bool:
        return bool((batch.starts == 0).all() and (batch.counts > 1).any())


def _continued(batch: BatchWork) -> BatchWork:
    """The same work, less a pair of each chunk that attends to its own keys alone, so that none counts as such."""
    whole = (batch.starts == 0) & (batch.counts > 1)
    return BatchWork(batch.starts + whole, batch.counts - whole)
