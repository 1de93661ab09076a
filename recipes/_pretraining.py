"""Settings that pretraining recipes share: cosine schedule, checkpoints, evaluations."""

from typing import Any

from jaxllm.checkpoint import CheckpointConfig
from jaxllm.data import DataConfig
from jaxllm.models import BlockConfig, DecoderConfig
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.train import RunConfig


def decoder(vocab: int, width: int, layers: int, block: BlockConfig, **rest: Any) -> DecoderConfig:
    """Products in bfloat16 over float32 parameters, blocks recomputed in full, a head of its own."""
    settings = {"tied": False, "dtype": "bfloat16", "remat": "full", **rest}
    return DecoderConfig(vocab_size=vocab, embed_dim=width, layers=layers, pattern=(block,), **settings)


def pretraining(
    name: str,
    model: DecoderConfig,
    *,
    seq_len: int,
    rows: int,
    peak: float,
    mesh: str,
    steps: int = 100_000,
    **rest: Any,
) -> RunConfig:
    """``rows`` of ``seq_len`` tokens a step, from files that --data.source and --data.tokenizer name; AdamW."""
    return RunConfig(
        name=name,
        model=model,
        data=DataConfig(source="tokens.bin", tokenizer="tokenizer.json", seq_len=seq_len, batch_size=rows),
        optim=OptimConfig(schedule=ScheduleConfig(kind="cosine", peak=peak, warmup=0.01, floor=0.1)),
        steps=steps,
        mesh=mesh,
        checkpoint=CheckpointConfig(every=1000),
        eval_every=2000,
        **rest,
    )
