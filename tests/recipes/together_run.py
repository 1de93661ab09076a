"""A run of a second for several processes: it divides over eight devices in every way."""

from jaxllm.checkpoint import CheckpointConfig
from jaxllm.data import DataConfig
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.parallel.distributed import DistributedConfig
from jaxllm.train import RunConfig


def together_run() -> RunConfig:
    """Twelve steps in float64, saving every four."""
    block = BlockConfig(AttentionConfig(heads=8, kv_heads=4, head_dim=4), MlpConfig(hidden=32))
    return RunConfig(
        name="together",
        model=DecoderConfig(
            vocab_size=272, embed_dim=16, layers=1, pattern=(block,), dtype="float64", param_dtype="float64"
        ),
        data=DataConfig(source="shakespeare", tokenizer="byte", seq_len=16, batch_size=8, heldout_fraction=0.1),
        optim=OptimConfig(schedule=ScheduleConfig(peak=1e-2)),
        steps=12,
        mesh="dp",
        checkpoint=CheckpointConfig(every=4),
        distributed=DistributedConfig(start_timeout=60, lost_after=5),
        log_every=1,
    )
