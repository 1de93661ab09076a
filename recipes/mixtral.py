"""Mixtral pretraining (arXiv:2401.04088): the architecture as released, from random weights.

    jaxllm train mixtral_8x22b --data.source tokens.bin --data.tokenizer path/to/tokenizer.json

Its mesh is where to begin, not yet compiled for any slice.
"""

from jaxllm.checkpoint import CheckpointConfig
from jaxllm.data import DataConfig
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MoeConfig, RopeConfig
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.train import RunConfig


def mixtral_8x22b() -> RunConfig:
    """141B parameters, 39B of them for each token, meant for 256 devices; each of eight experts on its own part."""
    attention = AttentionConfig(heads=48, kv_heads=8, head_dim=128, rope=RopeConfig(theta=1_000_000.0))
    block = BlockConfig(attention, MoeConfig(experts=8, top_k=2, hidden=16384))
    return RunConfig(
        name="mixtral_8x22b",
        model=DecoderConfig(
            vocab_size=32_768,
            embed_dim=6144,
            layers=56,
            pattern=(block,),
            tied=False,
            dtype="bfloat16",
            remat="full",
        ),
        data=DataConfig(source="tokens.bin", tokenizer="tokenizer.json", seq_len=4096, batch_size=256),
        optim=OptimConfig(schedule=ScheduleConfig(kind="cosine", peak=2e-4, warmup=0.01, floor=0.1)),
        steps=100_000,
        mesh="fsdp=32,expert=8",
        checkpoint=CheckpointConfig(every=1000),
        eval_every=2000,
    )
