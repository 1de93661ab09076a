"""Model FLOPs and bytes of an engine's steps, by program: what shares of a device's peaks (MFU, MBU) are made of.

A pass reads all weights but embeddings that are looked up, and the keys and values that its sequences attend to; it
writes those of its tokens. Of a mixture the weights that are read depend on the tokens, so its bytes are not told.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jaxllm.compiler.device_peaks import Peak, peak_of
from jaxllm.infer.engine.engine import Engine
from jaxllm.infer.engine.engine_metrics import Bucket
from jaxllm.infer.runner.model_runner import Device
from jaxllm.models import DecoderConfig, MoeConfig
from jaxllm.train.model_flops import forward_flops_per_token


@dataclass(frozen=True)
class ProgramUtilisation:
    """What steps of one program have done.

    Attributes:
        seconds: that they took.
        flops: of the model, see ``forward_flops_per_token``; the output head counts where a token is made.
        moved: bytes; None where they are not known.
        mfu, mbu: shares of what the devices can do in that time; None where that is not known.
    """

    seconds: float
    flops: float
    moved: float | None
    mfu: float | None = None
    mbu: float | None = None


def program_utilisation(engine: Engine) -> dict[str, ProgramUtilisation]:
    """By the program's name; none of an engine without a model."""
    import jax

    device = engine.device
    if not isinstance(device, Device):
        return {}
    config = device.model.config
    weights, cached = weight_bytes(config, device.params), cached_bytes(device)
    devices = jax.tree.leaves(device.params)[0].sharding.device_set
    peak, many = peak_of(next(iter(devices)).device_kind), len(devices)
    out = {}
    for name, bucket in list(engine.metrics.buckets.items()):
        if bucket.seconds > 0 and bucket.tokens:
            flops = model_flops(config, bucket)
            moved = None if weights is None else bucket.passes * weights + cache_bytes(cached, bucket)
            out[name] = ProgramUtilisation(
                bucket.seconds, flops, moved, *_shares(peak, many, bucket.seconds, flops, moved)
            )
    return out


def _shares(
    peak: Peak | None, devices: int, seconds: float, flops: float, moved: float | None
) -> tuple[float | None, float | None]:
    if peak is None:
        return None, None
    most = seconds * devices
    return flops / (most * peak.flops), None if moved is None else moved / (most * peak.bandwidth)


def model_flops(config: DecoderConfig, bucket: Bucket) -> float:
    """Of all tokens of a bucket; its head's of those that were made."""
    each = forward_flops_per_token(config, lambda window: bucket.attended.get(window, 0) / bucket.tokens)
    return each * bucket.tokens - 2.0 * config.embed_dim * config.vocab_size * (bucket.tokens - bucket.samples)


def weight_bytes(config: DecoderConfig, params: Any) -> float | None:
    """That a pass reads, on all devices together; None of a mixture."""
    import jax

    if any(isinstance(block.mlp, MoeConfig) for block in config.blocks):
        return None
    total = 0
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        looked_up = path[0].key == "embedding" and not (config.tied and path[-1].key == "table")
        if not looked_up:
            each = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            total += each * len(leaf.sharding.device_set)
    return float(total)


def cached_bytes(device: Device) -> dict[int | None, float]:
    """Keys and values of a position, in all layers of a window."""
    out: dict[int | None, float] = {}
    for group, pool in zip(device.spec.groups, device.pools, strict=True):
        positions = pool.numbers.shape[1] * pool.numbers.shape[3]
        bytes_ = sum(x.nbytes for x in pool if x is not None)
        out[group.window] = out.get(group.window, 0.0) + bytes_ / positions
    return out


def cache_bytes(cached: dict[int | None, float], bucket: Bucket) -> float:
    """Keys and values read and written."""
    return sum(each * (bucket.read.get(window, 0) + bucket.tokens) for window, each in cached.items())
