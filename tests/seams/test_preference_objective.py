"""DPO with a frozen reference, one new file and one row: trained, compiled, saved, resumed."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxllm.checkpoint import Checkpointer
from jaxllm.config import ConfigError, to_dict
from jaxllm.data import Batch, ByteTokenizer, Dataset, DataSource
from jaxllm.data.dataset import ResumableDataset, shard_rows
from jaxllm.models import Segments, functional
from jaxllm.optim import optimizer
from jaxllm.train import ResumeError, Run, RunConfig, train
from jaxllm.train.compile_step import compile_here
from jaxllm.train.records.run_directory import RunDirectory
from jaxllm.train.step.objective import OBJECTIVES, ObjectiveConfig, make_objective
from jaxllm.train.step.train_state import initial_params
from sharding.topology import Topology
from tests import tiny
from tests.environment import ROOT
from tests.seams.preference_objective import DPOObjective
from tests.train import runs

OBJECTIVES["row_pairs"] = DPOObjective  # the row

MODEL = tiny.decoder(dtype="float64", vocab_size=272, layers=1, heads=4, kv_heads=4, remat="full")
BETA, STEPS, ROWS, LENGTH = 0.7, 4, 8, 8


class PairSource(ResumableDataset):
    """Random pairs: the first half of the rows is chosen, the second half rejected; prompts and padding are masked."""

    def __init__(self, seed: int = 0):
        self.identity, self.batch_size = {"pairs": seed}, ROWS

    def batch_at(self, step: int, *, shard: int = 0, num_shards: int = 1) -> Batch:
        drawn = tiny.batch(1000 * self.identity["pairs"] + step, ROWS, LENGTH, 272, packed=False)
        targets = drawn.targets.copy()
        targets[:, :2] = -1
        targets[1, 5:] = -1
        begin, end = shard_rows(ROWS, shard, num_shards)
        whole = drawn._replace(targets=targets)
        return Batch(*(part[begin:end] for part in whole.arrays))


def dataset(config: RunConfig, seed: int = 0) -> Dataset:
    source = PairSource(seed)
    assert isinstance(source, DataSource)
    return Dataset(config.data, source, None, ByteTokenizer(), "pairs")


def dpo_run(folder: Path, **fields: Any) -> RunConfig:
    shared: dict[str, Any] = {
        "model": MODEL,
        "mesh": "data=2,fsdp=2,tensor=2",
        "accumulate": 2,
        "objective": ObjectiveConfig("row_pairs", (f"beta={BETA}",)),
        "reference": "start",
        "steps": STEPS,
        "batch_size": ROWS,
        "seq_len": LENGTH,
        "every": 2,
    }
    return runs.run_config(folder, **(shared | fields))


def reference_steps(config: RunConfig) -> tuple[Any, list[float]]:
    """Parameters and losses of the same steps on one device, with all logits at once and no gradient accumulation."""
    model = functional(config.model)
    frozen = params = initial_params(model, config.seed, None)
    transform = optimizer(config.optim, config.steps, model.logical_axes())

    def ratios(params: Any, batch: Batch) -> Any:
        hidden, _ = model.forward(params, *map(jnp.asarray, (batch.tokens, batch.positions)), Segments(None))
        logprobs = jax.nn.log_softmax(model.head(params, hidden))
        found = jnp.take_along_axis(logprobs, jnp.maximum(batch.targets, 0)[..., None], axis=-1)[..., 0]
        return jnp.sum(jnp.where(batch.targets >= 0, found, 0.0), axis=1)

    @jax.jit
    def step(params: Any, state: Any, batch: Batch) -> Any:
        def loss(params: Any) -> Any:
            ratio = ratios(params, batch) - ratios(frozen, batch)
            return -jnp.mean(jax.nn.log_sigmoid(BETA * (ratio[: ROWS // 2] - ratio[ROWS // 2 :])))

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, values = transform.init(params), []
    for number in range(config.steps):
        params, state, value = step(params, state, PairSource().batch_at(number))
        values.append(float(value))
    return params, values


def restored(directory: Path) -> tuple[Any, dict[str, Any]]:
    """Parameters and metadata of the newest checkpoint."""
    with Checkpointer(directory / "checkpoints", read_only=True) as checkpointer:
        abstract = functional(MODEL).abstract()
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), abstract)
        return *checkpointer.restore_params(placed)[:1], checkpointer.read_meta()


def trained_error(config: RunConfig) -> float:
    """Error of losses and saved parameters against the same steps on one device."""
    result = train(config, data=dataset(config))
    params, values = reference_steps(config)
    rows = RunDirectory(result.directory).read_metrics()
    assert values[0] == pytest.approx(np.log(2), rel=1e-12), "the policy starts as its reference"
    assert rows[-1]["accuracy"] in (0.0, 0.25, 0.5, 0.75, 1.0)
    saved, meta = restored(result.directory)
    assert meta["reference"]["source"] == "start"
    with Checkpointer(result.directory / "checkpoints", read_only=True) as checkpointer:
        leaves = checkpointer.manifest(STEPS).leaves
    assert {path.split("/")[0] for path in leaves} == {"params", "opt_state", "step", "rng"}, (
        "the reference is not saved"
    )
    losses = np.array([row["loss"] for row in rows])
    return max(tiny.leaf_error(saved, params), np.abs(losses / values - 1).max())


@pytest.mark.drawn(0.3)
def test_eight_devices_train_as_one_does(tmp_path, float64):
    """On one mesh; others: `make proof seams ONLY=preferences_are_trained`."""
    assert trained_error(dpo_run(tmp_path)) < 1e-10


@pytest.mark.drawn(0.3)
def test_a_stopped_run_resumes_bit_for_bit(tmp_path):
    """Its own data source goes on at its cursor, and the reference is loaded again."""
    model = dataclasses.replace(MODEL, dtype="float32", param_dtype="float32")
    whole, parts = (dpo_run(tmp_path, model=model, name=name) for name in ("whole", "parts"))
    train(whole, data=dataset(whole))
    with pytest.MonkeyPatch.context() as monkeypatch:
        runs.signal_at(monkeypatch, 2)
        assert not train(parts, data=dataset(parts)).complete
    with pytest.raises(ResumeError, match=r"reference: start -> "):
        train(dataclasses.replace(parts, reference=str(tmp_path / "runs" / "whole")), data=dataset(parts))
    with pytest.raises(ValueError, match="pairs was 0, is now 1"):
        train(parts, data=dataset(parts, seed=1))
    assert train(parts, data=dataset(parts)).complete
    assert runs.losses(tmp_path / "runs" / "parts") == runs.losses(tmp_path / "runs" / "whole")

    # Another run's parameters as the reference, which are others when it resumes:
    # `make proof seams ONLY=another_reference_is_refused`.


def test_the_reference_lies_as_the_trained_parameters_do(tmp_path):
    config = dpo_run(tmp_path, model=dataclasses.replace(MODEL, dtype="float32", param_dtype="float32"))
    run = Run(config, data=dataset(config))
    assert run.reference is not None
    jax.tree.map(lambda a, b: _same(a.sharding, b.sharding), run.reference.params, run.abstract.params)


def _same(one: Any, other: Any) -> None:
    assert one == other


@pytest.mark.drawn(0.3)
def test_it_compiles_for_a_topology():
    run = dpo_run(Path("/nowhere"), model=dataclasses.replace(MODEL, dtype="float32", param_dtype="float32"))
    report = compile_here(Topology.parse("cpu:8"), to_dict(run))
    plain = dataclasses.replace(run, objective=ObjectiveConfig(), reference="")
    less = compile_here(Topology.parse("cpu:8"), to_dict(plain))
    # One more argument: a float32 for each of the device's tokens, which are split over data and fsdp.
    assert report["argument_bytes"] - less["argument_bytes"] == 4 * ROWS * LENGTH // 4
    assert report["collectives"]


def test_what_it_cannot_do_is_refused_by_name(tmp_path, monkeypatch):
    model = dataclasses.replace(MODEL, dtype="float32", param_dtype="float32", layers=2)
    config = dpo_run(tmp_path, model=model)

    def refusal(**fields: Any) -> str:
        changed = dataclasses.replace(config, **fields)
        with pytest.raises(ConfigError) as caught:
            Run(changed, data=dataset(changed))
        return str(caught.value)

    assert "a device of a pipeline sees only its own rows" in refusal(mesh="stage=2,data=4", reference="")
    assert "reads reference_logprobs, which the data source's batches do not have. Name a reference" in refusal(
        reference=""
    )
    assert "'cross_entropy' reads no reference_logprobs".replace("'", '"') in refusal(objective=ObjectiveConfig())
    assert "unknown key 'betta'. Did you mean 'beta'?" in refusal(objective=ObjectiveConfig("row_pairs", ("betta=1",)))
    assert "'beta' has no value" in refusal(objective=ObjectiveConfig("row_pairs", ("beta",)))
    assert "has no z-loss; set z_loss to 0" in refusal(z_loss=0.1)
    monkeypatch.delitem(OBJECTIVES, "row_pairs")
    assert "objective.name = 'row_pairs'; legal: cross_entropy" in refusal()


def test_the_configuration_is_stored(tmp_path):
    config = dpo_run(tmp_path)
    stored = json.loads(json.dumps(to_dict(config)))
    assert stored["objective"] == {"name": "row_pairs", "options": [f"beta={BETA}"]}
    assert make_objective(config.objective) == DPOObjective(BETA)


def test_it_is_one_file():
    """No other Python file of the repository names it but this one."""
    named = {
        path.relative_to(ROOT).as_posix()
        for folder in ("jaxllm", "pallas_kernels", "sharding", "recipes", "benchmarks", "tests")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"\b(DPOObjective|preference_objective)\b", path.read_text(encoding="utf-8"))
    }
    own = "tests/seams/preference_objective.py"
    assert named == {own, "tests/seams/test_preference_objective.py"}
