"""Published MFU beside the formulas' predictions for the same configurations.

One calibration (``jaxllm.plan.formulas.calibration``) for all rows. What a row's own policy computes again is a share
of a block's products, between remat = "elementwise" (none) and "full" (all): the prediction is interpolated. The
paper's GPT of 530B is left out: its 35 stages do not divide a width by which parameters could be stored here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from jaxllm.data import DataConfig
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.plan.formulas import step_time
from jaxllm.plan.hardware import Cluster
from jaxllm.train import RunConfig
from recipes.llama3 import llama3_8b, llama3_70b, llama3_405b
from sharding import MeshSpec
from tests.proofs.harness import proof

TIERING = "AI-Hypercomputer/maxtext, docs/reference/models/tiering.md"
TRILLIUM = f"{TIERING}; benchmarks/maxtext_trillium_model_configs.py"
KORTHIKANTI = "arXiv:2205.05198, tables 3 and 5 (sequence parallelism and selective recomputation)"


@dataclass(frozen=True)
class Row:
    """A published utilisation.

    Attributes:
        run: its model, batch and plan.
        on: its devices.
        again: share of a block's products that its policy computes again.
        mfu: as published.
        source: of the figure and of the configuration.
        policy: its policy in the source's words.
    """

    run: RunConfig
    on: str
    again: float
    mfu: float
    source: str
    policy: str


def _llama(run: RunConfig, rows: int, mesh: str, seq_len: int = 8192, vocab: int = 128_256) -> RunConfig:
    data = dataclasses.replace(run.data, batch_size=rows, seq_len=seq_len)
    plan = ParallelConfig(sequence="tensor" in mesh)
    model = dataclasses.replace(run.model, vocab_size=vocab)
    return dataclasses.replace(run, mesh=mesh, data=data, parallel=plan, model=model)


def _gpt(heads: int, width: int, layers: int, rows: int, micro: int, mesh: str, chunks: int) -> RunConfig:
    """A GPT of the paper: rows of 2,048, a vocabulary of 51,200."""
    attention = AttentionConfig(heads=heads, kv_heads=heads, head_dim=width // heads, rope=None, bias="all")
    mlp = MlpConfig(hidden=4 * width, activation="gelu_tanh", gated=False, bias=True)
    model = DecoderConfig(
        vocab_size=51_200,
        embed_dim=width,
        layers=layers,
        pattern=(BlockConfig(attention, mlp),),
        tied=True,
        learned_positions=2048,
        norm="layer",
        dtype="bfloat16",
        remat="full",
    )
    schedule = "interleaved" if chunks > 1 else "1f1b"
    plan = ParallelConfig(sequence=True, zero=2, schedule=schedule, chunks=chunks if chunks > 1 else 0)
    data = DataConfig(seq_len=2048, batch_size=rows)
    return RunConfig(name="gpt", model=model, data=data, mesh=mesh, parallel=plan, accumulate=micro)


OFFLOADED = "custom: decoder_layer_input, query_proj, key_proj, value_proj"
ROWS = {
    "MaxText Llama 3.1 8B, v6e-256": Row(
        _llama(llama3_8b(), 3 * 256, "fsdp=256"), "v6e:16x16", 0.74, 45.5, TRILLIUM, f"{OFFLOADED}, out_proj offloaded"
    ),
    "MaxText Llama 3.1 70B, v6e-256": Row(
        _llama(llama3_70b(), 5 * 256, "fsdp=256"), "v6e:16x16", 0.86, 50.3, TRILLIUM, f"{OFFLOADED} offloaded"
    ),
    "MaxText Llama 3.1 405B, v6e-256": Row(
        _llama(llama3_405b(), 256, "fsdp=64,tensor=4"),
        "v6e:16x16",
        0.86,
        38.6,
        TRILLIUM,
        f"{OFFLOADED}, out_proj offloaded",
    ),
    "MaxText Llama 2 70B, v5p-512": Row(
        _llama(llama3_70b(), 4 * 256, "fsdp=256", 4096, 32_000),
        "v5p:4x8x8",
        0.76,
        65.4,
        f"{TIERING}; MaxText/configs/v5p/llama2_70b.sh",
        "save_dot_except_mlpwi",
    ),
    "Megatron GPT 22B, 8 A100": Row(
        _gpt(64, 6144, 48, 4, 1, "tensor=8", 1), "a100:1x8", 0.0, 41.5, KORTHIKANTI, "selective"
    ),
    "Megatron GPT 175B, 64 A100": Row(
        _gpt(96, 12288, 96, 64, 64, "stage=8,tensor=8", 3), "a100:8x8", 0.0, 51.4, KORTHIKANTI, "selective"
    ),
    "Megatron GPT 1T, 512 A100": Row(
        _gpt(160, 25600, 128, 512, 512, "stage=64,tensor=8", 1), "a100:64x8", 0.0, 56.3, KORTHIKANTI, "selective"
    ),
}


def predicted(row: Row) -> float:
    """Per cent, by formula."""
    cluster, mesh = Cluster.parse(row.on), MeshSpec.parse(row.run.mesh)

    def seconds(remat: str) -> step_time.StepTime:
        model = dataclasses.replace(row.run.model, remat=remat)  # type: ignore[arg-type]
        return step_time.predict(dataclasses.replace(row.run, model=model), cluster, mesh)

    least, most = seconds("elementwise"), seconds("full")
    between = least.seconds + row.again * (most.seconds - least.seconds)
    return 100 * least.flops / between / cluster.devices / cluster.hardware.flops


def errors() -> dict[str, float]:
    """Relative error of each row."""
    return {name: predicted(row) / row.mfu - 1 for name, row in ROWS.items()}


@proof("plan", cases=("all rows",), sample=1, bound={"median": 0.20, "worst": 0.35})
def published_mfu(_: str) -> dict[str, float]:
    """Predicted over published, less one, of all rows with one calibration."""
    off = sorted(map(abs, errors().values()))
    middle = (off[(len(off) - 1) // 2] + off[len(off) // 2]) / 2
    return {"median": middle, "worst": off[-1]}
