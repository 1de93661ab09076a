"""Run of a few seconds, for tests that start it in a process of its own and kill it."""

from jaxllm.checkpoint import CheckpointConfig
from jaxllm.data import DataConfig
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.train import RunConfig


def tiny_run() -> RunConfig:
    """120 steps of a small model, saving every ten."""
    block = BlockConfig(AttentionConfig(heads=2, kv_heads=1, head_dim=16), MlpConfig(hidden=64))
    return RunConfig(
        name="tiny",
        model=DecoderConfig(vocab_size=272, embed_dim=32, layers=2, pattern=(block,)),
        data=DataConfig(source="shakespeare", tokenizer="byte", seq_len=64, batch_size=8),
        optim=OptimConfig(schedule=ScheduleConfig(peak=1e-2)),
        steps=120,
        checkpoint=CheckpointConfig(every=10, keep_last=3),
        log_every=1,
    )
