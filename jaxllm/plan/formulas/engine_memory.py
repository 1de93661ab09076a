"""Bytes of the engine that a run has beside its training step: rollouts are sampled by it on the same devices.

Counted are its arrays, which stay for as long as the run: weights in compute dtype, as serving shards them, pages of
the KV cache for all sequences at their longest, and what logits processors keep of each sequence. The temporaries of
its programs are not: they and those of the training step are not there at the same time.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax

from jaxllm.infer.runner import logits_processors
from jaxllm.infer.runner.paged_cache import layer_groups
from jaxllm.infer.runner.serving_mesh import placements, serving_model
from jaxllm.models import DecoderConfig, functional
from jaxllm.models.attention_context import KVSpec
from jaxllm.train.config import EngineBeside
from pallas_kernels.paged_attention import PageFormat
from pallas_kernels.paged_attention.kv_formats import is_quantised, kv_format
from sharding import MeshSpec

SLOT_MULTIPLE = {"tpu": 128}
"""Elements that a slot of the KV cache is padded to a multiple of, by platform (``PageFormat.multiple``)."""


@dataclass(frozen=True)
class EngineBytes:
    """Bytes of an engine's arrays on one device.

    Attributes:
        weights: weights.
        cache: pages of the KV cache.
        state: state of logits processors.
    """

    weights: int
    cache: int
    state: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.cache + self.state


@functools.lru_cache(maxsize=4096)
def engine_bytes(config: DecoderConfig, engine: EngineBeside, mesh: MeshSpec, platform: str) -> EngineBytes:
    """Bytes of an engine on each device that it serves on.

    Args:
        config: architecture, without adapters: they are merged into the engine's weights.
        engine: its sizes.
        mesh: of the training step.
        platform: "tpu", "gpu" or "cpu", whose pages are laid out differently.

    Raises:
        ShardingError: the model cannot be sharded like this, names the dimension.
    """
    own = MeshSpec.parse(engine.mesh) if engine.mesh else mesh
    abstract, model = own.abstract(), serving_model(functional(config))
    shapes = jax.eval_shape(model.in_compute_dtype, model.abstract())
    places = placements(model, shapes, abstract)
    shards = zip(jax.tree.leaves(shapes), jax.tree.leaves(places), strict=True)
    weights = sum(math.prod(place.shard_shape(x.shape)) * x.dtype.itemsize for x, place in shards)
    tokens = (engine.sequences * -(-engine.tokens // engine.page) + 1) * engine.page
    groups, tensor = layer_groups(config, config.dtype), dict(own.axes).get("tensor", 1)
    slots = sum(len(one.layers) * slot_bytes(one.kv_spec, one.dtype, tensor, platform) for one in groups)
    state = jax.eval_shape(lambda: logits_processors.empty_state(engine.sequences, config.vocab_size))
    return EngineBytes(weights, round(tokens * slots), sum(x.size * x.dtype.itemsize for x in state))


def slot_bytes(spec: Any, dtype: str, tensor: int, platform: str) -> float:
    """Bytes of a token's slot in the KV cache of one layer, on one of ``tensor`` devices that share the kv heads.

    Args:
        spec: kv heads and their dimensions, as in ``LayerGroup``.
        dtype: what pages hold, a dtype or a quantised format.
        tensor: number of devices that split the heads.
        platform: "tpu", "gpu" or "cpu".

    Raises:
        ValueError: the format has values in host memory, of which a step reads few: there are no formulas for it.
    """
    if is_quantised(dtype) and kv_format(dtype).on_host:
        raise ValueError(f"plan: kv_dtype = {dtype!r} has values in host memory, which formulas leave out; use int4.")
    if spec.slices > 1:  # each device's slice is a kv head, with all that is a key only behind it
        part = spec.value_dim // spec.slices
        spec = KVSpec(spec.slices, part + spec.key_dim - spec.value_dim, part, latent=True)
    kv = max(1, -(-spec.kv_heads // tensor))
    encoding = dtype if is_quantised(dtype) else "plain"
    form = PageFormat(kv, spec.key_dim, spec.value_dim, spec.latent, encoding, SLOT_MULTIPLE.get(platform, 1))
    return kv * form.slot_bytes("float32" if is_quantised(dtype) else dtype)
