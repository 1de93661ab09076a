"""A benchmark's setting as a run of ours."""

from __future__ import annotations

from benchmarks.peers.setting import Setting
from jaxllm.data import DataConfig
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.train import RunConfig
from jaxllm.train.precision import with_precision

POSITIONS = 1024
"""Of GPT-2's position embedding."""


def as_run(setting: Setting) -> RunConfig:
    """One device, no clipping (a peer's loop has none), torch's b2 and decay; its data are never opened.

    Raises:
        ConfigError: there is no such precision.
        ValueError: there is no such family, or the model cannot be recomputed as asked.
    """
    schedule = ScheduleConfig(peak=setting.learning_rate, warmup=0.0)
    run = RunConfig(
        name="benchmark",
        model=decoder(setting),
        data=DataConfig(seq_len=setting.seq_len, batch_size=setting.batch),
        optim=OptimConfig(schedule=schedule, b2=0.999, weight_decay=0.01, clip_norm=None),
        steps=10_000,
        mesh="data=1",
    )
    return with_precision(run, setting.precision)


def decoder(setting: Setting) -> DecoderConfig:
    """The setting's model, in float32; rotations of 10,000, whatever the real model's: they cost the same."""
    s = setting
    if s.family not in ("llama", "gpt2"):
        raise ValueError(f"there is no family {s.family!r}; give llama or gpt2.")
    if s.family == "gpt2":
        attention = AttentionConfig(heads=s.heads, kv_heads=s.kv_heads, head_dim=s.head_dim, rope=None, bias="all")
        block = BlockConfig(attention, MlpConfig(s.mlp, "gelu_tanh", gated=False, bias=True))
    else:
        attention = AttentionConfig(heads=s.heads, kv_heads=s.kv_heads, head_dim=s.head_dim)
        block = BlockConfig(attention, MlpConfig(hidden=s.mlp))
    return DecoderConfig(
        vocab_size=s.vocab,
        embed_dim=s.hidden,
        layers=s.layers,
        pattern=(block,),
        tied=s.tied,
        learned_positions=POSITIONS if s.family == "gpt2" else None,
        norm="layer" if s.family == "gpt2" else "rms",
        remat=s.remat,
    )
