"""Policies trained at the same time, each an adapter of one base: as each alone, and stopped policies."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.models import AttentionConfig, BlockConfig, MlpConfig
from jaxllm.peft.adapter_method import AdapterConfig
from jaxllm.posttrain import PolicyRunConfig, train_policies_together, train_policy
from jaxllm.posttrain import policies_together as policy_module
from jaxllm.posttrain.policies_together import RolloutsTogether
from tests.posttrain.tiny_policy import MODEL, policy_run
from tests.proofs.harness import proof
from tests.proofs.posttraining.policies import rows_of

HERE = "tests.posttrain.tiny_policy:"
BLOCK = BlockConfig(AttentionConfig(heads=2, kv_heads=1, head_dim=16), MlpConfig(hidden=64))
FLOAT64 = dataclasses.replace(MODEL, embed_dim=64, pattern=(BLOCK,), dtype="float64", param_dtype="float64")
ATTENTION = AdapterConfig("lora", rank=4, targets=("attention", "mlp"))
SCALARS = ("loss", "grad_norm", "reward", "entropy", "completion_tokens", "learning_rate")
CASES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "rslora, dapo": {"adapter": dataclasses.replace(ATTENTION, kind="rslora"), "algorithm": "dapo"},
    "qlora": {"adapter": AdapterConfig("qlora", rank=4, targets=("q,k,v", "mlp"))},
    "tensor": {"mesh": "data=2,fsdp=2,tensor=2"},
    "environment": {"max_tokens": 20, "rewards": (), "environment": "tests.posttrain.environments:Short"},
}


def policies(folder: Path, base: Path, **fields: Any) -> list[PolicyRunConfig]:
    """Two policies of one base in float64, which differ in seed, and in reward where they have no environment."""
    folder.mkdir(exist_ok=True)
    shared: dict[str, Any] = {"model": FLOAT64, "init_from": str(base), "adapter": ATTENTION} | fields
    other = {"seed": 5} if "environment" in fields else {"seed": 5, "rewards": (f"{HERE}large_bytes",)}
    found = [policy_run(folder, name="one", **shared), policy_run(folder, name="two", **(shared | other))]
    rows = 16 if "environment" in fields else 8
    return [dataclasses.replace(one, data=dataclasses.replace(one.data, batch_size=rows)) for one in found]


def written(directory: Path) -> list[dict[str, Any]]:
    """Episodes of a run, as they were logged."""
    return [json.loads(line) for line in (directory / "episodes.jsonl").read_text().splitlines()]


@proof("posttraining", cases=list(CASES), sample=1, float64=True, bound={"curves": 1e-8, "mismatch": 1e-6, "late": 0})
def policies_together_are_each_alone(case: str) -> dict[str, float]:
    """Every completion of two policies over 4 steps is that of the policy alone, whose adapter is merged for sampling.

    Relative errors of the curves; log-probabilities when sampled less those of the training step; late compiles.
    """
    late: list[int] = []

    class Counted(RolloutsTogether):
        def metrics(self, number: int, step: int) -> dict[str, float]:
            assert self.engine is not None
            late.append(self.engine.engine.runner.program_cache.counts.late)  # type: ignore[attr-defined]
            return super().metrics(number, step)

    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy_module, "RolloutsTogether", Counted)
        folder = Path(name)
        base = train_policy(policy_run(folder, name="base", model=FLOAT64, steps=1)).directory
        assert all(one.complete for one in train_policies_together(policies(folder / "both", base, **CASES[case])))
        curves = mismatch = 0.0
        for config in policies(folder / "alone", base, **CASES[case]):
            own, alone = folder / "both/runs" / config.name, train_policy(config).directory
            for one, other in zip(written(own), written(alone), strict=True):
                assert [one[key] for key in ("step", "prompt", "completion", "versions")] == [
                    other[key] for key in ("step", "prompt", "completion", "versions")
                ]
            for one, other in zip(rows_of(own), rows_of(alone), strict=True):
                assert one.keys() == other.keys()
                curves = max(curves, *(abs(one[key] - other[key]) / max(abs(other[key]), 1e-3) for key in SCALARS))
                mismatch = max(mismatch, one["mismatch"])
            assert len(rows_of(own)) == 4
        texts = [[row["completion"] for row in written(folder / "both/runs" / run)] for run in ("one", "two")]
        assert texts[0] != texts[1]
        assert np.isfinite(curves)
    assert len(late) == 8
    return {"curves": curves, "mismatch": mismatch, "late": float(max(late))}
