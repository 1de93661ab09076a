"""Mixed precision by name: dtypes of parameters, activations, matmuls and updates, and what each costs.

A precision sets four values, which belong to the model and the optimizer, together.

    jaxllm train quickstart --precision fp8_current
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.config import ConfigError
from jaxllm.models import DecoderConfig, functional
from jaxllm.models.decoder import DTypeName
from jaxllm.models.low_precision_matmul import MatmulPrecision, QuantisationScheme
from jaxllm.optim import optimizer
from jaxllm.optim.bfloat16_params import Rounding as UpdateRounding
from jaxllm.train.config import RunConfig
from jaxllm.train.model_flops import causal_mean
from jaxllm.train.step.numerics import init_numerics


@dataclass(frozen=True)
class Precision:
    """Dtypes of a run.

    Attributes:
        param_dtype: of parameters, accumulated gradients and the optimizer's moments.
        dtype: compute dtype of weights and activations, except for norms, softmax and loss, which are in float32.
            "float16" adds loss scaling (``jaxllm.train.step.numerics``).
        matmul_precision: dtype to which the operands of matmuls with weights are quantised in training.
        rounding: of updates of parameters stored in bfloat16.
    """

    param_dtype: DTypeName = "float32"
    dtype: DTypeName = "float32"
    matmul_precision: MatmulPrecision = "plain"
    rounding: UpdateRounding = "nearest"

    @classmethod
    def of(cls, run: RunConfig) -> Precision:
        """Precision of a run."""
        return cls(run.model.param_dtype, run.model.dtype, run.model.matmul_precision, run.optim.rounding)

    def apply_to(self, run: RunConfig) -> RunConfig:
        """The run in this precision.

        Raises:
            ValueError: the model or the optimizer does not support it.
        """
        model = replace(
            run.model, param_dtype=self.param_dtype, dtype=self.dtype, matmul_precision=self.matmul_precision
        )
        return replace(run, model=model, optim=replace(run.optim, rounding=self.rounding))


PRECISIONS = {
    "float32": Precision(),
    "bf16": Precision(dtype="bfloat16"),
    "fp16": Precision(dtype="float16"),
    "bf16_collage": Precision("bfloat16", "bfloat16", rounding="collage"),
    "bf16_stochastic": Precision("bfloat16", "bfloat16", rounding="stochastic"),
    "int8": Precision(dtype="bfloat16", matmul_precision="int8"),
    "fp8_current": Precision(dtype="bfloat16", matmul_precision="fp8_current"),
    "fp8_delayed": Precision(dtype="bfloat16", matmul_precision="fp8_delayed"),
    "fp8_block": Precision(dtype="bfloat16", matmul_precision="fp8_block"),
    "mxfp4": Precision(dtype="bfloat16", matmul_precision="mxfp4"),
}
"""Precisions by name. "bf16" and "fp16" are mixed precision with float32 parameters (arXiv:1710.03740);
"bf16_collage" and "bf16_stochastic" store parameters in bfloat16.
"""


def with_precision(run: RunConfig, name: str) -> RunConfig:
    """The run in the precision of that name.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in PRECISIONS:
        raise ConfigError(f"precision {name!r} is none of these: {', '.join(PRECISIONS)}.")
    return PRECISIONS[name].apply_to(run)


@dataclass(frozen=True)
class PrecisionCost:
    """Memory and compute of a precision, by formula, before a run.

    Attributes:
        parameters, optimizer, gradients: stored bytes per parameter; the optimizer's step counters are left out.
        numerics: bytes of the mixed-precision state (``jaxllm.train.step.numerics``), in all.
        flops: of one token's training step without recomputation, by the dtype of the matmul operands.
    """

    parameters: float
    optimizer: float
    gradients: float
    numerics: int
    flops: dict[str, float]


def precision_cost(run: RunConfig) -> PrecisionCost:
    """Memory and compute of a run's precision; nothing is allocated or compiled."""
    model = functional(run.model)
    params = model.abstract()
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    state = jax.eval_shape(optimizer(run.optim, run.steps, model.logical_axes()).init, params)
    arrays = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    wide = jnp.dtype(run.model.param_dtype).itemsize
    kept = jax.eval_shape(lambda: init_numerics(run.model))
    return PrecisionCost(
        wide, tree_bytes(arrays) / count, wide, tree_bytes(kept), flops_by_dtype(run.model, run.data.seq_len)
    )


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays of a tree, concrete or abstract."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def flops_by_dtype(config: DecoderConfig, seq_len: int) -> dict[str, float]:
    """FLOPs of one token's forward and backward pass by dtypes of the matmul operands ("float8_e4m3fn*float8_e5m2").

    Of each matmul with a block's weights, the forward pass multiplies x and w, and the backward pass has two matmuls
    with the gradient as one operand. The matmuls of attention scores and the head are in the compute dtype.
    """
    d = config.embed_dim
    weights = attended = 0.0
    for block in config.blocks:
        weights += 2.0 * (block.attention.weight_macs(d) + block.mlp.weight_macs(d))
        attended += 2.0 * block.attention.attention_macs * causal_mean(seq_len, block.attention.window)
    plain = 3 * (attended + 2.0 * d * config.vocab_size)
    scheme = QuantisationScheme(config.matmul_precision)
    if not scheme.multiplies_8bit:
        return {config.dtype: plain + 3 * weights}
    forward, gradient = (jnp.dtype(scheme.format(of)).name for of in (False, True))
    out = {config.dtype: plain, forward: weights}
    name = forward if forward == gradient else f"{forward}*{gradient}"
    return out | {name: out.get(name, 0.0) + 2 * weights}
