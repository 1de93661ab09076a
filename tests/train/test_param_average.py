"""Parameter average: its definition, runs that stop and resume, evaluation, export, and its memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.checkpoint import Checkpointer
from jaxllm.config import ConfigError
from jaxllm.convert.convert import convert
from jaxllm.convert.load import load_model
from jaxllm.data import DataConfig
from jaxllm.hub import HubError
from jaxllm.models import functional
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.plan.formulas.memory_estimate import predict
from jaxllm.train import RunConfig, SpikeConfig, init_state, train
from jaxllm.train.evaluate import Evaluator
from jaxllm.train.host_offload import HostConfig
from jaxllm.train.run import Run, build_value_and_grad, fitting_mesh
from jaxllm.train.step.param_average import EmaConfig
from jaxllm.train.step.step_builder import build_optimizer, build_step, run_state, step_links
from jaxllm.train.step.step_chain import link_states
from sharding import MeshSpec, shardings_of
from sharding.topology import Topology
from tests import quick, tiny
from tests.train.runs import losses, run_config, stopped_at

DECAY, STEPS, BAD = 0.4, 6, 4
CONSTANT = ScheduleConfig("constant", peak=3e-2, warmup=0.0)


def a_run(**fields: Any) -> RunConfig:
    run = RunConfig(
        model=tiny.decoder(kv_heads=4, remat="full"),
        optim=OptimConfig(CONSTANT),
        steps=STEPS,
        mesh="fsdp=4,tensor=2",
        ema=EmaConfig(DECAY),
        data=DataConfig(batch_size=8, seq_len=8),
    )
    return dataclasses.replace(run, **fields)


RUNS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "skipped step": {"spikes": SpikeConfig("skip", window=4)},
    "lomo": {"optim": OptimConfig(CONSTANT, kind="lomo", clip_norm=None)},
}


def average_error(name: str) -> float:
    """Error of the average on eight devices; a skipped step, whose parameters are those before, does not count."""
    run = a_run(**RUNS[name])
    skips = run.spikes.action == "skip"
    model = functional(run.model, run.parallel.rules())
    mesh = fitting_mesh(run, model, 8).build()
    transform = build_optimizer(run, model)
    abstract = run_state(run, model, transform, mesh)
    same = jax.tree.map(lambda e, p: e.sharding == p.sharding, abstract.extras["ema"], abstract.params)
    assert all(jax.tree.leaves(same))
    plain = build_value_and_grad(run, model, mesh)

    def grads(params: Any, batch: Any) -> Any:
        sums, found = plain(params, batch)
        return sums, jax.tree.map(lambda g: jnp.where(jnp.all(batch.targets[:, 0] < 0), jnp.nan, g), found)

    step = quick.jit(build_step(run, model, grads, transform), out_shardings=(shardings_of(abstract), None))
    with jax.set_mesh(mesh):
        start = jax.device_put(quick.params(run.model), shardings_of(abstract.params))
        state = init_state(model, transform, mesh, 0, abstract, start, link_states(step_links(run)))
        want, there = jax.device_get(start), jax.NamedSharding(mesh, model.rules.spec(("batch", "seq"), mesh))
        for number in range(STEPS):
            batch = tiny.batch(number, 8, 8, run.model.vocab_size, packed=True)
            if skips and number == BAD:
                batch.targets[:, 0] = -1
            state, metrics = step(state, jax.device_put(batch, there))
            assert ("skipped" in metrics and bool(metrics["skipped"])) == (skips and number == BAD)
            if skips and number == BAD:
                continue
            decay = min(DECAY, (2 + number) / (11 + number))
            now = jax.device_get(state.params)
            want = jax.tree.map(lambda e, p, d=decay: d * e + (1 - d) * p, want, now)
    assert tiny.leaf_error(want, jax.device_get(state.params)) > 1e-6
    return tiny.leaf_error(jax.device_get(state.extras["ema"]), want)


@pytest.mark.drawn(0.3)
def test_it_is_the_average_by_definition(float64):
    """Of AdamW with a skipped step; others: `make proof seams ONLY=averages_by_definition`."""
    assert average_error("skipped step") < 1e-13


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Directory of a finished run with an average, and its folder."""
    folder = tmp_path_factory.mktemp("average")
    return train(run_config(folder, ema=EmaConfig(0.9))).directory, folder


@pytest.mark.drawn(0.3)
def test_a_stopped_run_resumes_bit_for_bit_with_its_average(whole):
    directory, folder = whole
    stopped_at(folder, 6, ema=EmaConfig(0.9), name="parts")
    resumed = train(run_config(folder, ema=EmaConfig(0.9), name="parts")).directory
    assert losses(resumed) == losses(directory)
    states = [Checkpointer(one / "checkpoints", read_only=True).restore()[0] for one in (directory, resumed)]
    assert set(states[0]) == {"params", "opt_state", "step", "rng", "ema"}
    jax.tree.map(np.testing.assert_array_equal, states[0]["ema"], states[1]["ema"])
    assert tiny.leaf_error(states[0]["ema"], states[0]["params"]) > 1e-4


def check_evaluation(folder: Path, evaluate: bool) -> None:
    """A run in the folder evaluates its average, or its parameters."""
    config = run_config(folder, ema=EmaConfig(0.9, evaluate), name=f"evaluated{evaluate}")
    result = train(config)
    model = load_model(result.directory, ema=evaluate)
    run = Run(config)
    found = Evaluator(model.model, model.mesh, run.data.heldout)(model.params)
    other = Evaluator(model.model, model.mesh, run.data.heldout)(load_model(result.directory, ema=not evaluate).params)
    assert result.evaluation is not None
    assert result.evaluation.nll == pytest.approx(found.nll, rel=1e-6)
    assert abs(found.nll - other.nll) > 1e-4


@pytest.mark.drawn(3)
def test_evaluations_use_the_average(tmp_path):
    """Or the trained parameters, as the configuration says: `make proof seams ONLY=evaluated_parameters`."""
    check_evaluation(tmp_path, True)


def test_an_export_has_the_average_where_it_is_asked_for(whole, tmp_path):
    directory, _ = whole
    convert(directory, tmp_path / "trained", "hf")
    convert(directory, tmp_path / "average", "hf", ema=True)
    for ema, name in ((False, "trained"), (True, "average")):
        exported, own = load_model(tmp_path / name).params, load_model(directory, ema=ema).params
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(exported), jax.device_get(own))
    with pytest.raises(HubError, match="no parameter average"):
        convert(tmp_path / "trained", tmp_path / "again", "hf", ema=True)
    convert(directory, tmp_path / "plain", "jaxllm")
    with pytest.raises(HubError, match=r"ema\.decay = 0"):
        load_model(tmp_path / "plain", ema=True)


@pytest.mark.drawn(0.3)
def test_the_average_of_bfloat16_parameters_is_float32(tmp_path):
    """An average moves by less than bfloat16's last place; loading it rounds it to the parameters' dtype."""
    config = run_config(tmp_path, ema=EmaConfig(0.9), steps=4)
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, param_dtype="bfloat16", dtype="bfloat16")
    )
    directory = train(config).directory
    saved = Checkpointer(directory / "checkpoints", read_only=True).restore()[0]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(saved["ema"])} == {"float32"}
    kinds = {leaf.dtype.name for leaf in jax.tree.leaves(load_model(directory, ema=True).params)}
    assert kinds == {leaf.dtype.name for leaf in jax.tree.leaves(saved["params"])}
    assert convert(directory, tmp_path / "out", "hf", ema=True).dtype == "float32"


def test_the_planner_counts_its_bytes():
    mesh = MeshSpec.parse("fsdp=4,tensor=2")
    for dtype in ("float32", "bfloat16"):
        model = tiny.decoder(kv_heads=4, dtype=dtype)
        run = a_run(model=model)
        state = run_state(run, functional(model), build_optimizer(run, functional(model)), mesh.abstract())
        leaves = jax.tree.leaves(state.extras["ema"])
        want = sum(4 * int(np.prod(leaf.sharding.shard_shape(leaf.shape))) for leaf in leaves)
        with_average, without = (
            predict(one, mesh, Topology.parse("h100:1x8")) for one in (run, a_run(model=model, ema=EmaConfig()))
        )
        assert with_average.total - without.total == want


def test_a_state_without_the_average_is_refused():
    run = a_run(model=tiny.decoder(kv_heads=4, dtype="float32"))
    model = functional(run.model)
    mesh = MeshSpec.parse("dp").build(jax.devices()[:1])
    transform = build_optimizer(run, model)
    bare = run_state(dataclasses.replace(run, ema=EmaConfig()), model, transform, mesh)
    step = build_step(run, model, build_value_and_grad(run, model, mesh), transform)
    with pytest.raises(ValueError, match="link 'ema', but the train state has no such extras"), jax.set_mesh(mesh):
        jax.eval_shape(step, bare, tiny.batch(0, 8, 8, run.model.vocab_size, packed=True))


def test_what_makes_no_sense_is_refused():
    for fields in ({"decay": 1.0}, {"decay": -0.1}, {"evaluate": False}):
        with pytest.raises(ValueError, match="ema:"):
            EmaConfig(**fields)
    optim = OptimConfig(CONSTANT, kind="lomo", clip_norm=None)
    run = a_run(
        model=tiny.decoder(kv_heads=4, dtype="float32", remat="full"), optim=optim, host=HostConfig(params=True)
    )
    with pytest.raises(ConfigError, match=r"ema\.decay to 0"):
        fitting_mesh(run, functional(run.model), 8)
