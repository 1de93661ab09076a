"""A tiny policy that learns in seconds: bytes, one block, rewards for a letter."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.checkpoint import CheckpointConfig
from jaxllm.data import DataConfig
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.posttrain.policy_config import PolicyRunConfig, RolloutConfig

MODEL = DecoderConfig(
    vocab_size=272, embed_dim=32, layers=1,
    pattern=(BlockConfig(AttentionConfig(heads=2, kv_heads=1, head_dim=16), MlpConfig(hidden=32)),),
)  # fmt: skip


def small_bytes(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Share of a completion's characters that are ASCII; an empty one has none."""
    return sum(ord(x) < 128 for x in completion) / max(len(completion), 1)


def large_bytes(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Share of a completion's characters that are not ASCII."""
    return 1.0 - small_bytes(prompt, completion, row) if completion else 0.0


def raises(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """A reward function that fails."""
    raise KeyError("no such answer")


def sometimes_nan(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """NaN for a part of the completions."""
    return math.nan if len(completion) % 4 == 0 else float(len(completion) % 3)


def slow(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """A reward function that takes a second."""
    time.sleep(1.0)
    return 1.0


def prompts_file(folder: Path) -> Path:
    """Four prompts."""
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text, "answer": "x"}) + "\n" for text in ("ab", "cde", "f", "ghij")))
    return file


def policy_run(folder: Path, **fields: Any) -> PolicyRunConfig:
    """A run of the tiny policy; ``fields`` by name, those of rollout too where the run has none of the name, and
    ``rollout_mesh``.
    """
    rollout: dict[str, Any] = {
        name: fields.pop(name)
        for name in list(fields)
        if name in RolloutConfig.__dataclass_fields__ and name not in PolicyRunConfig.__dataclass_fields__
    }
    if "rollout_mesh" in fields:
        rollout["mesh"] = fields.pop("rollout_mesh")
    sizes: dict[str, Any] = {"prompts": 4, "group": 4, "max_tokens": 6, "max_sequences": 8}
    shared: dict[str, Any] = {
        "name": "policy",
        "model": MODEL,
        "data": DataConfig(tokenizer="byte", seq_len=32, batch_size=8),
        "optim": OptimConfig(ScheduleConfig("constant", peak=1e-2, warmup=0.0)),
        "steps": 4,
        "prompts": str(prompts_file(folder)),
        "rewards": ("tests.posttrain.tiny_policy:small_bytes",),
        "rollout": RolloutConfig(**(sizes | rollout)),
        "checkpoint": CheckpointConfig(every=2, keep_last=9),
        "mesh": "dp",
        "out": str(folder / "runs"),
        "log_every": 5,
    }
    return PolicyRunConfig(**(shared | fields))
