"""Quickstart: a 1.6M-parameter Llama trained on Shakespeare in one to two minutes on two CPU cores.

    jaxllm train quickstart          (or: python -m recipes.quickstart)

Expect about 2.25 bits per byte on held-out plays; a byte bigram reaches 3.68.
"""

from jaxllm.checkpoint import CheckpointConfig
from jaxllm.data import DataConfig
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.train import RunConfig


def quickstart() -> RunConfig:
    """A 1.6M-parameter Llama that learns Shakespeare in one to two minutes on two CPU cores."""
    block = BlockConfig(
        attention=AttentionConfig(heads=5, kv_heads=5, head_dim=32, qk_norm="head"), mlp=MlpConfig(hidden=448)
    )
    return RunConfig(
        name="quickstart",
        model=DecoderConfig(vocab_size=2048, embed_dim=160, layers=4, pattern=(block,), tied=True),
        data=DataConfig(source="shakespeare", tokenizer="bpe:2048", seq_len=128, batch_size=16),
        optim=OptimConfig(schedule=ScheduleConfig(kind="wsd", peak=6e-3, warmup=0.03, decay=0.4, floor=0.02)),
        steps=600,
        checkpoint=CheckpointConfig(every=200, keep_last=2),
        log_every=20,
        eval_every=200,
    )


if __name__ == "__main__":
    from jaxllm.cli.recipe_arguments import run_recipe

    raise SystemExit(run_recipe(quickstart))
