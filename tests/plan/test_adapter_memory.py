"""Memory of runs with adapters by formula: parameters as they are stored, packed bases included."""

from __future__ import annotations

import dataclasses
import math

import jax
import pytest

from jaxllm.data import DataConfig
from jaxllm.models.param_subset import select
from jaxllm.peft import AdapterConfig
from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.plan.formulas.memory_estimate import predict
from jaxllm.train import RunConfig
from jaxllm.train.run_model import run_model, trained_params
from recipes.llama3 import llama3_70b
from sharding import MeshSpec
from sharding.topology import Topology
from tests import tiny


@pytest.mark.parametrize("kind", ["lora", "dora", "qlora", "lora_ga", "longlora"])
def test_parameters_are_those_of_the_state(kind: str) -> None:
    """Bytes of all leaves of the adapted model, and of those with gradients."""
    model = tiny.decoder(heads=4, kv_heads=2, head_dim=64, embed_dim=128, mlp=256, layers=2, dtype="float32")
    config = AdapterConfig(kind, rank=4, targets=("*",))  # type: ignore[arg-type]
    run = RunConfig(model=model, adapter=config, data=DataConfig(batch_size=2, seq_len=16))
    functional = run_model(run)
    abstract = functional.abstract()
    mesh = MeshSpec.parse("data=1")
    assert predict(run, mesh, Topology.parse("h100:1x8")).parameters == sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract)
    )
    trained = select(trained_params(run, functional), abstract)
    work = DeviceWork.of(run, mesh)
    assert sum(math.prod(w.shape) for w in work.trained) == sum(leaf.size for leaf in jax.tree.leaves(trained))


def test_70b_in_nf4_fits_one_h200() -> None:
    """The figure of docs/train/adapters.md, in GiB."""
    run = llama3_70b()
    run = dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, remat="full", param_dtype="bfloat16"),
        data=dataclasses.replace(run.data, batch_size=1, seq_len=4096),
        accumulate=1,
        adapter=AdapterConfig("qlora", targets=("*",)),
        mesh="data=1",
    )
    assert predict(run, MeshSpec.parse("data=1"), Topology.parse("h200:1x1")).total / 2**30 == pytest.approx(
        50.6, abs=0.3
    )
