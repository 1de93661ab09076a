"""Step time of six runs that no formula was fitted to: predicted beside the compiled step's timeline.

    python -m tests.proofs.plan.unseen [NAME ...]    compiles those that are not stored, or the named ones again

The timeline has the TPU compiler's cycles; on GPUs, and for all collectives, it has the shares of the data sheet's
rates that the formulas have too (``jaxllm.plan.timeline_rates``). What is compared is therefore which work there is.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxllm.compiler import aot, program_walker
from jaxllm.compiler.timeline import timeline
from jaxllm.data import DataConfig
from jaxllm.files import write_json
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.plan.formulas import step_time
from jaxllm.plan.formulas.calibration import DEFAULT
from jaxllm.plan.hardware import Cluster
from jaxllm.plan.timeline_rates import rates_of
from jaxllm.train import RunConfig
from jaxllm.train.compile_step import compile_for
from sharding import MeshSpec
from tests.proofs.harness import proof

STORED = Path(__file__).with_suffix(".json")


def _run(model: tuple[int, int, int], attention: AttentionConfig, hidden: int, **rest: Any) -> RunConfig:
    """A dense model: (vocabulary, width, layers), its block, and fields of the model and of the run."""
    vocab, width, layers = model
    plan = {name: rest.pop(name) for name in ("mesh", "rows", "seq_len")}
    config = DecoderConfig(
        vocab_size=vocab,
        embed_dim=width,
        layers=layers,
        pattern=(BlockConfig(attention, MlpConfig(hidden=hidden), **rest.pop("block", {})),),
        dtype="bfloat16",
        **{"remat": "full", **rest},
    )
    data = DataConfig(seq_len=plan["seq_len"], batch_size=plan["rows"])
    parallel = ParallelConfig(sequence="tensor" in plan["mesh"])
    return RunConfig(name="unseen", model=config, data=data, mesh=plan["mesh"], parallel=parallel)


RUNS: dict[str, tuple[RunConfig, str]] = {
    "OLMo-2 7B": (
        _run(
            (100_352, 4096, 32),
            AttentionConfig(heads=32, kv_heads=32, head_dim=128, qk_norm="all"),
            11_008,
            tied=False,
            block={"norms": "post"},
            mesh="fsdp=16",
            rows=32,
            seq_len=4096,
        ),
        "h100:2x8",
    ),
    "Qwen2.5 1.5B": (
        _run(
            (151_936, 1536, 28),
            AttentionConfig(heads=12, kv_heads=2, head_dim=128, bias="qkv"),
            8960,
            tied=True,
            remat="elementwise",
            mesh="data=1",
            rows=4,
            seq_len=4096,
        ),
        "h200:1x1",
    ),
    "Llama 3.2 3B, tensor": (
        _run(
            (128_256, 3072, 28),
            AttentionConfig(heads=24, kv_heads=8, head_dim=128),
            8192,
            tied=True,
            mesh="fsdp=4,tensor=2",
            rows=8,
            seq_len=8192,
        ),
        "h100:1x8",
    ),
    "Qwen3 0.6B": (
        _run(
            (151_936, 1024, 28),
            AttentionConfig(heads=16, kv_heads=8, head_dim=128, qk_norm="head"),
            3072,
            tied=True,
            mesh="fsdp=8",
            rows=16,
            seq_len=4096,
        ),
        "v5e:2x4",
    ),
    "Mistral 7B, window": (
        _run(
            (32_768, 4096, 32),
            AttentionConfig(heads=32, kv_heads=8, head_dim=128, window=4096),
            14_336,
            tied=False,
            mesh="fsdp=16",
            rows=16,
            seq_len=8192,
        ),
        "v6e:4x4",
    ),
    "Phi-3 mini": (
        _run(
            (32_064, 3072, 32),
            AttentionConfig(heads=32, kv_heads=32, head_dim=96),
            8192,
            tied=False,
            remat="elementwise",
            mesh="fsdp=4",
            rows=8,
            seq_len=4096,
        ),
        "h100:1x4",
    ),
}
"""Runs on topologies, of models and meshes that are in no other table."""


def predicted(name: str) -> float:
    """Seconds of a step by formula."""
    run, on = RUNS[name]
    return step_time.predict(run, Cluster.parse(on), MeshSpec.parse(run.mesh)).seconds


def compile_run(name: str) -> dict[str, Any]:
    """Seconds of the compiled step's timeline, its parts, and versions."""
    run, on = RUNS[name]
    cluster, mesh = Cluster.parse(on), MeshSpec.parse(run.mesh)
    with tempfile.TemporaryDirectory() as folder:
        report = compile_for(run, on, keep=Path(folder) / "program.json")
        text, placement = aot.kept(Path(folder) / "program.json")
    made = timeline(program_walker.read(text, placement), rates_of(cluster, mesh, DEFAULT))
    parts = {"seconds": made.seconds, "compute": made.compute, "exposed": sum(made.exposed.values())}
    return {**parts, "jax": report.jax, "compiler": report.compiler}


def stored() -> dict[str, dict[str, Any]]:
    """Stored figures of the compiled steps."""
    return json.loads(STORED.read_text()) if STORED.is_file() else {}


@proof("plan", cases=tuple(RUNS), sample=6, bound={"seconds": 0.15})
def unseen(name: str) -> dict[str, float]:
    """Predicted over stored, less one."""
    return {"seconds": abs(predicted(name) / stored()[name]["seconds"] - 1)}


QUICK = ("Qwen2.5 1.5B",)
"""Compiled in two minutes."""


@proof("plan", cases=QUICK, sample=1, bound={"seconds": 0.15, "stored": 0.03})
def unseen_recompiled(name: str) -> dict[str, float]:
    """Predicted over the step compiled now, less one; and that over the stored one, less one."""
    seconds = compile_run(name)["seconds"]
    return {"seconds": abs(predicted(name) / seconds - 1), "stored": abs(seconds / stored()[name]["seconds"] - 1)}


def main(names: list[str]) -> None:
    """Compiles runs and stores each as it comes."""
    for name in names or [name for name in RUNS if name not in stored()]:
        found = compile_run(name)
        write_json(STORED, dict(sorted({**stored(), name: found}.items())))
        print(f"{name}: compiled {found['seconds']:.4f} s, predicted {predicted(name):.4f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
