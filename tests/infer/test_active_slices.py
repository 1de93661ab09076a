"""Active slices of ReLU layers: predictors keep to their recall, and only what they take is loaded and computed.

What is served is compared in `make proof offload ONLY=active_slices_are_dense_ones`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.hub import HubError
from jaxllm.infer.streaming.experts.active_slices import NEVER, ActiveSlices, activity, fit_predictor, learn
from jaxllm.infer.streaming.experts.expert_slots import wanted_experts
from jaxllm.infer.streaming.experts.mlp_slices import SlicedLayers, sliced_model
from jaxllm.infer.streaming.layer_store import LoadedLayers, units_of
from jaxllm.infer.streaming.offload_budget import OffloadBudget
from jaxllm.infer.streaming.open_streamed import open_streamed
from jaxllm.infer.streaming.streamed_runner import StreamedRunner
from jaxllm.infer.streaming.streamed_weights import WeightPlacement
from jaxllm.models import Functional, MoeConfig, RouterConfig, Segments, functional
from jaxllm.models.moe.router import route
from recipes.active_slices import main
from tests.infer import engines

MODEL = "relu llama"
NOTHING = np.zeros((1, 2), np.int32)


def parts() -> tuple[Functional, Any, LoadedLayers]:
    params = engines.params_of(MODEL, "float32")
    ends = {name: x for name, x in params.items() if name != "segments"}
    return functional(engines.model_of(MODEL, "float32")), ends, LoadedLayers(params)


def test_a_predictor_takes_so_many_of_the_active_ones(rng):
    """Of those that it was made of, exactly; of others that a linear rule decides, about as many, and few in vain."""
    rule = rng.normal(size=(12, 5))
    h, others = rng.normal(size=(4000, 12)), rng.normal(size=(4000, 12))
    active = h @ rule > 2.0
    active[:, 4] = False
    for recall in (0.9, 0.99, 1.0):
        router, bias = fit_predictor(h, active, recall)
        taken = h @ router + bias > 0
        for one in range(4):
            found = taken[active[:, one], one].mean()
            assert recall <= found <= recall + 6 / active[:, one].sum()  # thresholds have a margin for rounding
        assert not taken[:, 4].any()
        assert bias[4] == -NEVER
    assert fit_predictor(h, active, 1e-17)[1].shape == (5,)
    router, bias = fit_predictor(h, active, 0.95)
    taken, real = (others @ router + bias > 0)[:, :4], (others @ rule > 2.0)[:, :4]
    assert taken[real].mean() == pytest.approx(0.95, abs=0.03)
    assert taken.mean() < 2 * real.mean()


def test_routers_by_step_take_all_above_zero():
    """Weights are 1 or 0; those of 0 are wanted by nobody."""
    logits = jnp.asarray([[[-1.0, 0.5, 0.0, 2.0], [-1.0, -1.0, -1.0, -1.0]]])
    routing = route(RouterConfig("step", normalize=False, bias=True), 4, logits, None)
    for row, want in zip(range(2), ({1, 3}, set()), strict=True):
        chosen = {int(e) for e, w in zip(routing.experts[0, row], routing.weights[0, row], strict=True) if w == 1.0}
        assert chosen == want
        assert float(jnp.sum(routing.weights[0, row])) == len(want)
    assert float(routing.shares[0, 0].sum()) == 1.0
    numbers = np.where(np.asarray(routing.weights[0]) == 0, 4, np.asarray(routing.experts[0]))
    assert sorted(wanted_experts(numbers, 2, 4)) == [1, 3]
    assert wanted_experts(numbers[1:], 1, 4) == []


def test_activity_is_that_of_the_model():
    """Units that are zero for a token at a layer may have any weights down; those that are not may not."""
    model, ends, layers = parts()
    config, params = engines.model_of(MODEL, "float32"), engines.params_of(MODEL, "float32")
    token = jnp.asarray([[7]], jnp.int32)
    seen = list(activity(model, ends, layers, np.asarray(token)))
    assert [layer for layer, *_ in seen] == list(range(config.layers))

    def logits(layer: int, units: np.ndarray) -> jax.Array:
        changed = jax.tree.map(lambda x: x, params)
        mlp = changed["segments"]["0"]["0"]["mlp"]
        mlp["down"] = jnp.asarray(np.array(mlp["down"])).at[layer, units].set(1e3)
        return model.head(changed, model.forward(changed, token, jnp.zeros((1, 1), jnp.int32), Segments())[0])

    for layer, h, gate, weight in seen:
        np.testing.assert_allclose(gate, h @ weight, rtol=1e-4, atol=1e-5)
        live = gate[0] > 0
        assert 0 < live.sum() < len(live)
        plain = logits(layer, np.zeros(0, np.int32))
        np.testing.assert_allclose(logits(layer, np.flatnonzero(~live)), plain, rtol=1e-4, atol=1e-4)
        for one in np.flatnonzero(live)[:3]:
            assert not np.allclose(logits(layer, np.asarray([one])), plain, rtol=1e-2, atol=1e-2)


@pytest.mark.drawn(8)
def test_what_is_not_active_is_not_loaded(rng, float64, tmp_path):
    """With a recall of 1 on the tokens that are served nothing is lost: tokens of the dense model, fewer loads."""
    params = engines.params_of(MODEL, "float64")
    ends = {name: x for name, x in params.items() if name != "segments"}
    model, config = functional(engines.model_of(MODEL, "float64")), engines.ENGINES["roomy"]
    plain = engines.build(config, MODEL, "float64")
    requests = [one | {"cancel": None} for one in engines.traffic(rng, config, 4)]
    want = [s.tokens for r in engines.serve(plain, requests) for s in r.sequences]
    longest = max(map(len, want))
    rows = np.asarray([[*tokens, *[0] * (longest - len(tokens))] for tokens in want], np.int32)
    hidden = engines.model_of(MODEL, "float64").blocks[0].mlp.hidden
    said = list[str]()
    active = learn(model, ends, LoadedLayers(params), rows, hidden, 1.0, tell=said.append)
    assert len(said) == len(active.layers)
    assert "100.0% of the active ones" in said[0]
    active.write(file := tmp_path / "active.safetensors")
    again = ActiveSlices.read(file)
    placement = WeightPlacement(1, 99, expert_slots=hidden // 2, expert_host_bytes=0, disk=tmp_path)
    engine = engines.build(config, MODEL, "float64", placement=placement, slices=hidden, active=again)
    made = engines.serve(engine, requests)
    assert [s.tokens for r in made for s in r.sequences] == want
    assert engines.error(MODEL, "float64", made) <= 1e-10
    assert isinstance(engine.runner, StreamedRunner)
    stage = engine.runner.experts
    assert stage is not None
    assert stage.counts.wanted < hidden * len(active.layers) * engine.metrics.steps
    assert stage.files[0].counts.reads == stage.counts.loads
    engine.runner.close()


def test_what_does_not_fit_is_refused(tmp_path, capsys):
    model, ends, layers = parts()
    config = engines.model_of(MODEL, "float32")
    hidden = config.blocks[0].mlp.hidden
    layer = np.zeros((config.embed_dim, 4), np.float32), np.zeros(4, np.float32)
    good = ActiveSlices(dict.fromkeys(range(config.layers), layer))
    SlicedLayers(layers, config, 4, good)
    with pytest.raises(ValueError, match=f"slices = {hidden}: give slices=4"):
        SlicedLayers(layers, config, hidden, good)
    with pytest.raises(ValueError, match=r"are of layers \[0\]"):
        SlicedLayers(layers, config, 4, ActiveSlices({0: layer}))
    with pytest.raises(ValueError, match="activation is 'silu': leave active=FILE out"):
        sliced_model(functional(engines.model_of("llama", "float32")), 4, active=True)
    other = engines.params_of("llama", "float32")
    with pytest.raises(ValueError, match="layer 0 has the activation 'silu'"):
        next(activity(functional(engines.model_of("llama", "float32")), ends, LoadedLayers(other), NOTHING))
    signed = learn(model, ends, layers, NOTHING, 4)
    SlicedLayers(layers, config, 4, signed).read(units_of(config.segments)[0], jax.devices()[0])
    elsewhere = LoadedLayers(engines.params_of(MODEL, "float32", 5))
    with pytest.raises(ValueError, match="layer 0 were learned with other weights"):
        SlicedLayers(elsewhere, config, 4, signed).read(units_of(config.segments)[0], jax.devices()[0])
    with pytest.raises(ValueError, match="normalize = False"):
        RouterConfig("step")
    with pytest.raises(ValueError, match=r"capacity = 1\.0 counts"):
        MoeConfig(4, 4, 8, router=RouterConfig("step", normalize=False), capacity=1.0)
    with pytest.raises(ValueError, match=r"recall = 1\.5"):
        learn(model, ends, layers, NOTHING, 4, 1.5)
    (tmp_path / "bad").write_bytes(b"no file of tensors")
    for name in ("bad", "none"):
        with pytest.raises(ValueError, match="no predictors of active slices"):
            ActiveSlices.read(tmp_path / name)
    with pytest.raises(HubError, match="no predictors of active slices"):
        open_streamed("smollm2", OffloadBudget.parse(f"experts=2,slices=4,active={tmp_path / 'none'}"))
    with pytest.raises(ValueError, match="give slices=N"):
        OffloadBudget.parse("experts=2,active=file")
    budget = OffloadBudget.parse("experts=2,slices=4,active=file")
    assert OffloadBudget.parse(str(budget)) == budget
    good.write(tmp_path / "good")
    with pytest.raises(HubError, match="activation is 'silu'"):
        open_streamed("smollm2", OffloadBudget.parse(f"experts=2,slices=4,active={tmp_path / 'good'}"))
    text = tmp_path / "text"
    text.write_text("The sea.")
    asked = ["smollm2", "--slices", "4", "--calibrate", str(text), "--out", str(tmp_path / "out")]
    assert main(asked) == 2
    assert "ReLU leaves something of" in capsys.readouterr().err
