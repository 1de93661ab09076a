"""Slices of dense feed-forward layers: in slots, in files and on the host's processor, with the same results."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.hub import HubError
from jaxllm.infer.streaming.experts.expert_schedule import ExpertCosts
from jaxllm.infer.streaming.experts.mlp_slices import SlicedLayers, cut, sliced_model
from jaxllm.infer.streaming.layer_store import LoadedLayers, units_of
from jaxllm.infer.streaming.offload_budget import OffloadBudget
from jaxllm.infer.streaming.open_streamed import open_streamed
from jaxllm.infer.streaming.streamed_runner import StreamedRunner
from jaxllm.infer.streaming.streamed_weights import WeightPlacement
from jaxllm.models import functional
from jaxllm.quant.formats.format_table import packing
from jaxllm.quant.packing import packed_weight
from tests import quick
from tests.infer import engines

COSTS = ExpertCosts(load=1.0, device=0.5, rows=(1, 4, 16), host=(1.0, 1.5, 3.0))


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize(("name", "slices"), [("llama", 4), ("gemma2", 3), ("deepseek_v3", 2)])
def test_a_layer_is_the_sum_of_its_slices(name, slices, rng, float64):
    """The sliced model's logits; layers that are mixtures stay what they are."""
    config, params = engines.model_of(name, "float64"), engines.params_of(name, "float64")
    model, store = functional(config), LoadedLayers(params)
    layers, device = SlicedLayers(store, config, slices), jax.devices()[0]
    of_segment: dict[int, list[object]] = {}
    for unit in units_of(config.segments):
        of_segment.setdefault(unit.segment, []).append(layers.read(unit, device))
    apart = params | {"segments": {str(n): jax.tree.map(lambda *x: np.stack(x), *own) for n, own in of_segment.items()}}
    tokens = rng.integers(0, engines.VOCAB, (2, 9))
    cut_config = sliced_model(model, slices).config
    assert [b.mlp.mixture.experts for b in cut_config.blocks] == [
        slices if b.mlp.mixture is None else b.mlp.experts for b in config.blocks
    ]
    np.testing.assert_allclose(
        quick.logits(cut_config, apart, tokens), quick.logits(config, params, tokens), rtol=1e-12, atol=1e-12
    )


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize(
    ("model", "slices", "slots", "absent", "in_files"),
    [("llama", 4, 2, "schedule", False), ("qwen3", 8, 3, "host", True), ("gemma3", 4, 1, "load", False)],
)
def test_slices_that_are_not_on_the_device_change_no_token(
    model, slices, slots, absent, in_files, rng, float64, tmp_path
):
    config = engines.ENGINES["tight, recompute"]
    files = {"host_units": 0, "disk": tmp_path, "expert_host_bytes": 3000} if in_files else {}
    placement = WeightPlacement(1, 1, expert_slots=slots, absent=absent, expert_costs=COSTS, **files)
    engine = engines.build(config, model, "float64", placement=placement, slices=slices)
    made = engines.serve(engine, engines.traffic(rng, config, 4))
    assert engines.error(model, "float64", made) <= 1e-10
    assert isinstance(engine.runner, StreamedRunner)
    stage = engine.runner.experts
    assert stage is not None
    counts, layers = stage.counts, len(stage.slots)
    assert counts.wanted == slices * layers * engine.metrics.steps, "each step wants all slices"
    assert (counts.on_host > 0) == (absent != "load")
    if absent == "host":  # free slots are filled once; from then on nothing is copied
        assert counts.loads == slots * layers
        assert counts.on_host == (slices - slots) * layers * engine.metrics.steps
    whole = sum(x.nbytes for x in jax.tree.leaves(stage.slots and stage._buffers))
    dense = engines.model_of(model, "float64").blocks
    assert whole == sum(3 * 8 * b.mlp.hidden * 16 * slots // slices for b in dense), "bytes of the slots"
    assert engine.runner.program_cache.counts.late == 0  # type: ignore[union-attr]


def test_what_cannot_be_cut_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"do not divide the 12 hidden units; legal: \[2, 3, 4, 6, 12\]"):
        sliced_model(functional(engines.MODELS["gemma2"]), 5)
    with pytest.raises(ValueError, match="gated"):
        sliced_model(functional(engines.MODELS["gpt2"]), 2)
    with pytest.raises(ValueError, match="mixtures"):
        sliced_model(functional(engines.MODELS["mixtral"]), 2)
    with pytest.raises(ValueError, match="2 or more"):
        sliced_model(functional(engines.MODELS["llama"]), 1)
    mixed = engines.MIXTURES["deepseek_v3"]
    router = dataclasses.replace(mixed.pattern[0].mlp.router, input="previous")
    mlp = dataclasses.replace(mixed.pattern[0].mlp, router=router)
    pattern = (dataclasses.replace(mixed.pattern[0], mlp=mlp),)
    with pytest.raises(ValueError, match="reads the input of the mixture before"):
        sliced_model(functional(dataclasses.replace(mixed, pattern=pattern)), 2)
    packed = packed_weight(packing("int8").make(-2), jnp.ones((64, 64)))
    with pytest.raises(ValueError, match="these are packed"):
        cut({"gate": packed, "up": packed, "down": packed}, 2)
    with pytest.raises(ValueError, match="give experts=SLOTS"):
        OffloadBudget.parse("window=1,slices=4")
    budget = OffloadBudget.parse("window=1,experts=2,slices=4,absent=host")
    assert OffloadBudget.parse(str(budget)) == budget
    for weights, said in (("packed", "packed"), ("plain", r"legal|divide")):
        with pytest.raises(HubError, match=said):
            open_streamed("smollm2", OffloadBudget.parse("window=1,experts=2,slices=5"), weights=weights)
