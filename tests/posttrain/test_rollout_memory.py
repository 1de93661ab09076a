"""What a policy's engine takes beside the training step: by formula, in programs for absent devices, in a real one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import pytest

from jaxllm.config import ConfigError
from jaxllm.models import functional
from jaxllm.plan.formulas.engine_memory import engine_bytes
from jaxllm.posttrain.compile_rollouts import compile_rollouts_for
from jaxllm.posttrain.policy_config import PolicyRunConfig
from jaxllm.posttrain.rollouts import RolloutEngine
from jaxllm.text import ByteTokenizer
from sharding import MeshSpec
from tests import quick
from tests.posttrain.tiny_policy import MODEL, policy_run

WIDE = dataclasses.replace(MODEL, dtype="bfloat16", param_dtype="float32")
"""In float32 as training keeps it, for an engine that computes in bfloat16."""


def run_of(folder: Path, mesh: str, rollout_mesh: str) -> PolicyRunConfig:
    """The tiny policy on a mesh."""
    run = policy_run(folder, rollout_mesh=rollout_mesh)
    return dataclasses.replace(run, model=WIDE, mesh=mesh)


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize(("on", "mesh", "own"), [("cpu:8", "fsdp=8", "data=4,tensor=2"), ("cpu:1", "data=1", "")])
def test_compiled_programs_take_what_the_formula_says(tmp_path: Path, on: str, mesh: str, own: str):
    run = run_of(tmp_path, mesh, own)
    found = compile_rollouts_for(run, on)
    assert set(found) == {"prompt-64-full", "decode-8-full", "swap"}
    want = engine_bytes(WIDE, run.engine_beside, MeshSpec.parse(mesh), "cpu").total
    for name, report in found.items():
        if name != "swap":
            inputs = report.argument_bytes - want  # tokens, page tables, masks
            assert 0 < inputs < 64 * 2**10, name
    assert found["swap"].output_bytes < 0.6 * found["swap"].argument_bytes, "matrices in half of the bytes"


@pytest.mark.drawn(0.5)
def test_an_engine_has_the_bytes_of_the_formula(tmp_path: Path):
    run = run_of(tmp_path, "fsdp=2,tensor=2", "")
    mesh = MeshSpec.parse(run.mesh).build(jax.devices()[:4])
    model = functional(WIDE)
    params = model.in_compute_dtype(quick.params(WIDE))
    longest = run.data.seq_len + 1
    engine = RolloutEngine(model, params, ByteTokenizer(), mesh, longest, run.rollout.max_sequences).engine.runner
    want = engine_bytes(WIDE, run.engine_beside, MeshSpec.parse(run.mesh), "cpu")
    of_a_device = lambda tree: sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))  # noqa: E731
    assert of_a_device(engine.params) == want.weights
    assert of_a_device(engine.pools) == want.cache
    assert of_a_device(engine.state) == want.state


def test_rollouts_on_some_of_the_devices_are_not_compiled(tmp_path: Path):
    with pytest.raises(ConfigError, match="samples on 2 of 4 devices"):
        compile_rollouts_for(run_of(tmp_path, "fsdp=4", "tensor=2"), "cpu:4")
