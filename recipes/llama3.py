"""Llama 3.1 pretraining (arXiv:2407.21783): the architectures as released, from random weights.

    jaxllm train llama3_8b --data.source tokens.bin --data.tokenizer path/to/tokenizer.json

Rows of 8,192 tokens, bf16 over float32 parameters, full recomputation. What the compilers say of the 8B step on 64
devices is in README.md; the meshes of the others are where to begin, not yet compiled for any slice.
"""

import dataclasses

from jaxllm.checkpoint import CheckpointConfig
from jaxllm.data import DataConfig
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, Llama3Scaling, MlpConfig, RopeConfig
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.parallel.plan import ParallelConfig
from jaxllm.train import RunConfig


def llama3_8b() -> RunConfig:
    """8B parameters on a v6e-64 slice or eight nodes of eight H100, one row a device."""
    return _llama3("llama3_8b", embed_dim=4096, layers=32, heads=32, hidden=14336, peak=3e-4, rows=64, mesh="fsdp")


def llama3_70b() -> RunConfig:
    """70B parameters, meant for 256 devices, four of which share heads and feed-forward width."""
    return _llama3(
        "llama3_70b",
        embed_dim=8192,
        layers=80,
        heads=64,
        hidden=28672,
        peak=1.5e-4,
        rows=64,
        mesh="fsdp=64,tensor=4",
        parallel=ParallelConfig(sequence=True),
    )


def llama3_405b() -> RunConfig:
    """405B parameters, meant for 1,024 devices, eight of which share heads and feed-forward width."""
    return _llama3(
        "llama3_405b",
        embed_dim=16384,
        layers=126,
        heads=128,
        hidden=53248,
        peak=8e-5,
        rows=128,
        mesh="fsdp=128,tensor=8",
        parallel=ParallelConfig(sequence=True),
    )


def llama3_8b_1m() -> RunConfig:
    """8B parameters, one row of 1,048,576 tokens, meant for 128 devices whose keys and values go around a ring."""
    run = _llama3("llama3_8b_1m", 4096, 32, 32, 14336, peak=3e-5, rows=1, mesh="context=128")
    return dataclasses.replace(run, data=dataclasses.replace(run.data, seq_len=2**20))


def _llama3(
    name: str,
    embed_dim: int,
    layers: int,
    heads: int,
    hidden: int,
    *,
    peak: float,
    rows: int,
    mesh: str,
    parallel: ParallelConfig | None = None,
) -> RunConfig:
    rope = RopeConfig(theta=500_000.0, scaling=Llama3Scaling())
    attention = AttentionConfig(heads=heads, kv_heads=8, head_dim=128, rope=rope)
    return RunConfig(
        name=name,
        model=DecoderConfig(
            vocab_size=128_256,
            embed_dim=embed_dim,
            layers=layers,
            pattern=(BlockConfig(attention, MlpConfig(hidden=hidden)),),
            tied=False,
            dtype="bfloat16",
            remat="full",
        ),
        data=DataConfig(source="tokens.bin", tokenizer="tokenizer.json", seq_len=8192, batch_size=rows),
        optim=OptimConfig(schedule=ScheduleConfig(kind="cosine", peak=peak, warmup=0.01, floor=0.1)),
        steps=100_000,
        mesh=mesh,
        parallel=parallel or ParallelConfig(),
        checkpoint=CheckpointConfig(every=1000),
        eval_every=2000,
    )
