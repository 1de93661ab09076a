"""Llama 2 fine-tuning (arXiv:2307.09288): all parameters of the 7B model on conversations, beyond a device's memory.

    jaxllm plan llama2_7b --capacity --on rtx4090:1x1 --host 64GiB --disk 200GiB --compile
    jaxllm train llama2_7b --data.source chats.jsonl --within 21GiB --host 64GiB --disk /mnt/nvme:200GiB

Parameters and AdamW's moments in float32 are 75 GiB: on one GPU of 24 GB they are in files, and layers are streamed
(docs/train/recomputation.md). The step's programs were compiled for a GPU; nothing was run at this size.
"""

from jaxllm.checkpoint import CheckpointConfig
from jaxllm.data import DataConfig
from jaxllm.models import AttentionConfig, BlockConfig, MlpConfig, RopeConfig
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.train import RunConfig
from recipes._pretraining import decoder


def llama2_7b() -> RunConfig:
    """6.7B parameters, all of them fine-tuned on one GPU of 24 GB: eight rows of 2,048 tokens a step."""
    attention = AttentionConfig(heads=32, kv_heads=32, head_dim=128, rope=RopeConfig(theta=10_000.0))
    return RunConfig(
        name="llama2_7b",
        model=decoder(32_000, 4096, 32, BlockConfig(attention, MlpConfig(hidden=11_008))),
        init_from="hf:meta-llama/Llama-2-7b-hf",
        data=DataConfig(
            source="chats.jsonl",
            content="chat",
            tokenizer="model",
            seq_len=2048,
            batch_size=8,
            packing="documents",
        ),
        optim=OptimConfig(schedule=ScheduleConfig(kind="cosine", peak=2e-5, warmup=0.03, floor=0.1)),
        steps=1000,
        accumulate=8,
        checkpoint=CheckpointConfig(every=200, keep_last=1),
    )
