"""Shared parts of pretraining recipes: cosine schedule, checkpoints, evaluations."""

import dataclasses
from typing import Any

from jaxllm.checkpoint import CheckpointConfig
from jaxllm.data import DataConfig
from jaxllm.models import BlockConfig, DecoderConfig
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.train import RunConfig


def decoder(vocab: int, width: int, layers: int, block: BlockConfig, **rest: Any) -> DecoderConfig:
    """Decoder with bfloat16 compute over float32 parameters (mixed precision), full remat, and an untied output head.

    Args:
        vocab: vocabulary size.
        width: size of the residual stream.
        layers: number of blocks.
        block: every block.
        rest: further fields of ``DecoderConfig``, or other values for the above.
    """
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
    """Pretraining run with AdamW, on token files named by --data.source and --data.tokenizer.

    Args:
        seq_len: tokens per row.
        rows: rows per step, the global batch size.
        peak: peak learning rate.
        rest: further fields of ``RunConfig``.
    """
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


def with_token_share(run: RunConfig, on: str, host: float) -> RunConfig:
    """The run with token-wise activation offload, whose share of tokens is computed for devices (MEMO,
    arXiv:2407.12117): the most that a layer's forward pass hides and the host holds.

    Args:
        run: the run.
        on: topology, such as h200:1x8.
        host: memory of the host for each device, bytes.
    """
    from jaxllm.plan.hardware import Cluster
    from jaxllm.plan.tiers.token_share import token_share
    from sharding import MeshSpec

    found = token_share(run, MeshSpec.parse(run.mesh), Cluster.parse(on), host)
    return dataclasses.replace(run, model=dataclasses.replace(run.model, remat=found.remat))
