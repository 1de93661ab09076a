"""Small deployments for tests and proofs."""

from __future__ import annotations

from typing import Any

from jaxllm.infer import EngineConfig
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig
from jaxllm.plan.formulas.serving_step import StepCost
from jaxllm.plan.hardware import Cluster
from jaxllm.simulate import Deployment
from sharding import MeshSpec

MODEL = DecoderConfig(
    1000, 256, 4, pattern=(BlockConfig(AttentionConfig(8, 4, 32), MlpConfig(512)),), dtype="bfloat16",
    param_dtype="bfloat16",
)  # fmt: skip


def deployment(on: str = "h100:1x1", mesh: str = "tensor=1", **sizes: Any) -> Deployment:
    """The model on devices; ``sizes`` are of the engine, and ``model`` and ``weights`` of the deployment."""
    fields = {name: sizes.pop(name) for name in ("model", "weights") if name in sizes}
    config = {
        "max_sequences": 16, "max_batched_tokens": 128, "max_len": 512, "page_size": 16, "pages": 600,
        "decode_steps": 1, "samplers": ("plain",),
    }  # fmt: skip
    return Deployment(
        fields.pop("model", MODEL),
        Cluster.parse(on),
        MeshSpec.parse(mesh),
        EngineConfig(**{**config, **sizes}),
        **fields,
    )


def seconds(base: float, slope: float = 0.0):
    """Step clock of steps that take ``base`` seconds and ``slope`` for each row."""
    return lambda batches, shape, passes: StepCost(compute=(base + slope * shape.tokens) * passes)
