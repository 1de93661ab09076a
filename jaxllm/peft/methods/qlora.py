"""QLoRA: LoRA beside a frozen base that is packed in NF4 (arXiv:2305.14314).

Gradients pass through the dequantised base to the activations. The base is dequantised again for the backward pass, so
that no dense weight is saved for it, and has no gradient itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
from flax import nnx

from jaxllm.config import ConfigError
from jaxllm.models.functional import DeclaredParam, LinearShape
from jaxllm.models.packed_weight import PackedWeight
from jaxllm.models.params import declare
from jaxllm.peft.adapter_method import AdapterConfig, AdapterMethod, declare_factors, lora_scale
from jaxllm.peft.low_rank_factors import LoraWeight
from jaxllm.quant.formats.nf4 import NF4, block_of_scales
from jaxllm.quant.packing import packed_weight

SPLIT = 8
"""Devices that the last dimension of any weight can be split over; more where each part is a multiple of 256."""


def _declare(config: AdapterConfig, base: DeclaredParam, linear: LinearShape) -> LoraWeight:
    form = _format(linear)
    try:
        arrays = jax.eval_shape(form.pack, jax.ShapeDtypeStruct(linear.shape, linear.dtype))
    except ValueError as error:
        name = base.param.get_metadata()["name"]
        raise ConfigError(
            f"adapter.kind = 'qlora': {name} {list(linear.shape)} cannot be packed: {error} Leave it out of the "
            "targets, or choose lora."
        ) from error
    axes = linear.axes, form.scale_axes(linear.axes)
    values, scales = (
        DeclaredParam(declare(nnx.Param, array.shape, own, array.dtype, "packed"), linear.stack)
        for array, own in zip(arrays, axes, strict=True)
    )
    return LoraWeight(PackedWeight(values, scales, form), declare_factors(config, linear, lora_scale(config)))


def _start(config: AdapterConfig, weight: LoraWeight, linear: LinearShape, gradient: Any) -> LoraWeight:
    form = _format(linear)
    try:
        packed = packed_weight(form, weight.base)
    except ValueError as error:
        raise ConfigError(
            f"adapter.kind = 'qlora' on this mesh: {error} Split the weight over fewer devices."
        ) from error
    return replace(weight, base=packed)


def _format(linear: LinearShape) -> NF4:
    """NF4 along the last input, with blocks of scales that lie within a device's part of the outputs."""
    devices = 1 if linear.axes[-1] == "head_dim" else SPLIT
    return NF4(linear.contract - 1 - len(linear.shape), block_of_scales(linear.shape[-1], devices))


QLORA = AdapterMethod(_declare, _start)
