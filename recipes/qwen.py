"""Qwen3-235B-A22B pretraining (arXiv:2505.09388): the architecture as released, from random weights.

    jaxllm train qwen3_235b_a22b --data.source tokens.bin --data.tokenizer path/to/tokenizer.json

docs/parallelism.md has its memory on slices of TPUs.
"""

from jaxllm.checkpoint import CheckpointConfig
from jaxllm.data import DataConfig
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MoeConfig, RopeConfig
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.train import RoutingConfig, RunConfig


def qwen3_235b_a22b() -> RunConfig:
    """235B parameters, 22B of them for each token, for 256 devices; 16 experts on each of eight parts."""
    attention = AttentionConfig(heads=64, kv_heads=4, head_dim=128, rope=RopeConfig(theta=1_000_000.0), qk_norm="head")
    block = BlockConfig(attention, MoeConfig(experts=128, top_k=8, hidden=1536))
    return RunConfig(
        name="qwen3_235b_a22b",
        model=DecoderConfig(
            vocab_size=151_936,
            embed_dim=4096,
            layers=94,
            pattern=(block,),
            tied=False,
            norm_eps=1e-6,
            dtype="bfloat16",
            remat="full",
        ),
        data=DataConfig(source="tokens.bin", tokenizer="tokenizer.json", seq_len=4096, batch_size=256),
        optim=OptimConfig(schedule=ScheduleConfig(kind="cosine", peak=2e-4, warmup=0.01, floor=0.1)),
        routing=RoutingConfig(balance_loss=1e-3),
        steps=100_000,
        mesh="fsdp=32,expert=8",
        checkpoint=CheckpointConfig(every=1000),
        eval_every=2000,
    )
