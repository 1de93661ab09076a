"""Deployments of `jaxllm plan --serve` beside their largest programs, compiled for a TPU and a GPU."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jaxllm.infer import EngineConfig
from jaxllm.plan.hardware import Cluster
from jaxllm.simulate import Deployment
from jaxllm.simulate.search.compiled_deployment import compile_deployment
from recipes.llama3 import llama3_8b
from sharding import MeshSpec
from tests.proofs.harness import proof


class Case(NamedTuple):
    """Devices, serving mesh, and formats of weights and KV cache."""

    on: str
    mesh: str
    weights: str = "bfloat16"
    kv_dtype: str = "auto"

    def __str__(self) -> str:
        return f"{self.on} {self.mesh} {self.weights} {self.kv_dtype}"


CASES = (
    Case("v6e:1x1", "tensor=1"),
    Case("v6e:2x2", "tensor=4", "int8", "int8"),
    Case("v6e:2x2", "data=2,tensor=2"),
    Case("v6e:2x2", "context=2,tensor=2"),
    Case("h100:1x1", "tensor=1", "int8"),
    Case("h100:1x2", "tensor=2", "bfloat16", "fp8"),
    Case("h100:1x4", "data=2,tensor=2"),
)


@proof("simulation", cases=CASES, sample=1, quick=(CASES[4],), bound=0.01)
def deployments_are_the_compiled_programs(case: Case) -> float:
    """Weights and KV cache of a device as planned, and the arguments of the compiled programs, relative to these.

    Four layers of 8B at their real widths, with as many pages as the plan has room for: both programs fit.
    """
    model = dataclasses.replace(llama3_8b().model, layers=4, dtype="bfloat16", param_dtype="bfloat16", remat="none")
    sizes = EngineConfig(
        max_sequences=64, max_batched_tokens=512, max_len=2048, page_size=128, samplers=("plain",),
        kv_dtype=case.kv_dtype,
    )  # type: ignore[arg-type]  # fmt: skip
    cluster = Cluster.parse(case.on)
    found = compile_deployment(Deployment(model, cluster, MeshSpec.parse(case.mesh), sizes, case.weights))
    planned, worst = found.planned, 0.0
    assert {name.split("-")[0] for name in found.programs} == {"prompt", "decode"}
    for report in found.programs.values():
        assert report.fits
        assert report.total_bytes <= cluster.hardware.hbm_bytes
        worst = max(worst, abs(report.argument_bytes / (planned.weights + planned.cache) - 1))
    return worst
