"""Pre-gated mixtures: trained beside plain ones, and served with experts that are always there when they are wanted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib import resources
from typing import Any

import jax
import pytest

from jaxllm.infer import EngineConfig, SamplingParams
from jaxllm.infer.engine.engine import Engine
from jaxllm.infer.streaming.experts.expert_slots import ExpertSlots
from jaxllm.infer.streaming.layer_store import LoadedLayers
from jaxllm.infer.streaming.streamed_runner import StreamedRunner
from jaxllm.infer.streaming.streamed_weights import StreamedWeights, WeightPlacement
from jaxllm.models import DecoderConfig, MoeConfig, RouterConfig, functional
from tests import quick
from tests.proofs.harness import proof
from tests.proofs.offload.trained_mixture import ACTIVE, BLOCK, CONFIG, EXPERTS, HIDDEN, LAYERS, held_out_loss, trained

PRE_GATED = dataclasses.replace(
    CONFIG,
    pattern=(
        dataclasses.replace(BLOCK, mlp=MoeConfig(EXPERTS, ACTIVE, HIDDEN, router=RouterConfig(input="previous"))),
    ),
)
"""The mixture of the other proofs with routers that read the layer before."""
PROMPT, TOKENS = 8, 56


class CountingSlots(ExpertSlots):
    """Slots that count the experts that were there when they were wanted."""

    wanted = hits = 0

    def rounds(self, wanted: Sequence[int]) -> Any:
        self.wanted += len(wanted)
        self.hits += sum(map(self.has, wanted))
        return super().rounds(wanted)


def hit_rates(config: DecoderConfig, params: Any, slots: int, tokens: int) -> list[float]:
    """Share of wanted experts that were in a slot of each layer, of steps with so many tokens at most."""
    ends = {name: value for name, value in params.items() if name != "segments"}
    placement = WeightPlacement(1, device_units=LAYERS, expert_slots=slots)
    weights = StreamedWeights.of(functional(config), ends, LoadedLayers(params), placement)
    engine_config = EngineConfig(
        max_sequences=tokens, max_batched_tokens=tokens, max_len=PROMPT + TOKENS, layer_window=1, buckets=(tokens,),
        samplers=("plain",), prefix_cache=False,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", quick.jit)
        engine = Engine.of(functional(config), weights, engine_config)
    runner = engine.runner
    assert isinstance(runner, StreamedRunner)
    assert runner.experts is not None
    held = {key: CountingSlots(EXPERTS, slots) for key in runner.experts.slots}
    runner.experts.slots = dict(held)
    text = resources.files("jaxllm.data.corpus").joinpath("heldout.txt").read_bytes()
    for n in range(tokens):
        engine.submit(text[500 * n : 500 * n + PROMPT], SamplingParams(max_tokens=TOKENS, seed=n))
    while engine.busy:
        engine.step()
    runner.close()
    counts = runner.experts.counts
    assert counts.predicted >= counts.predicted_hits
    if config is PRE_GATED:
        assert counts.predicted == counts.predicted_hits
    return [slots.hits / slots.wanted for slots in held.values()]


@proof(
    "offload", cases=range(3), sample=1,
    bound={"missed": 0.0, "behind": 0.2}, counts=("plain_loss", "pre_gated_loss", "guessed_hits"),
)  # fmt: skip
def pre_gated_experts_are_there(seed: int) -> dict[str, float]:
    """A mixture whose routers read the layer before, trained as long as one whose routers read their own: how far its
    held-out loss is behind, in nats a byte, which the draw of the weights changes by as much. And served with slots for
    as many experts as a step can want, the share of wanted experts that were not in a slot, of all layers but the
    first. No expert is loaded in vain.

    Held-out losses, and the share that the other mixture finds in slots by asking its next router too early, are kept.
    """
    params = {name: trained(seed, config) for name, config in (("plain", CONFIG), ("pre_gated", PRE_GATED))}
    plain = held_out_loss(functional(CONFIG))(params["plain"])
    gated = held_out_loss(functional(PRE_GATED))(params["pre_gated"])
    missed = 0.0
    for tokens in (1, 4):
        slots = min(EXPERTS, ACTIVE * tokens)
        first, *rest = hit_rates(PRE_GATED, params["pre_gated"], slots, tokens)
        assert first < 1
        missed = max(missed, 1 - min(rest))
    guessed = min(hit_rates(CONFIG, params["plain"], ACTIVE, 1)[1:])
    assert guessed < 1
    return {
        "missed": missed, "behind": gated - plain, "plain_loss": plain, "pre_gated_loss": gated,
        "guessed_hits": guessed,
    }  # fmt: skip
