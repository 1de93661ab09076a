"""Speculation that streamed weights do not go with is refused by name, with what is legal.

What goes with them is compared in `make proof offload ONLY=speculation_over_streamed_layers`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jaxllm.config import ConfigError
from jaxllm.infer import EngineConfig
from jaxllm.infer.speculate.ngram import NgramProposer
from jaxllm.infer.streaming.blocks.cache_placement import CachePlacement
from jaxllm.infer.streaming.streamed_weights import WeightPlacement
from tests.infer import engines

ALL, ALONE = r"use draft:MODEL, tree:MODEL,BUDGET or ngram", r"\(give 'ngram'\)"
CONFIG = engines.ENGINES["roomy"]


@pytest.mark.parametrize(
    ("speculate", "batches", "said"),
    [
        ("self:1", 0, rf"'self:1' drafts with the model's own layers, which are streamed; {ALL}"),
        ("mtp", 0, rf"a draft head.*layer_window = 2.*to speculate, {ALL}"),
        ("mtp", 2, rf"a draft head.*layer_window = 2.*to speculate, {ALL}"),
        ("self:1", 2, ALL),
        ("draft:smollm2", 2, rf"'draft:smollm2' {ALONE} does not go with batches by turns"),
        ("tree:smollm2,4", 2, rf"'tree:smollm2,4' {ALONE} does not go with batches by turns"),
    ],
)
def test_refused_proposers(speculate, batches, said):
    """Before a draft is loaded."""
    placement = WeightPlacement(2, cache=CachePlacement(batches) if batches else None)
    with pytest.raises(ConfigError, match=said):
        engines.build(dataclasses.replace(CONFIG, speculate=speculate), placement=placement)


class DraftsOfOneBatch:
    """Proposer that drafts for all sequences of a step at once."""

    def propose_all(self, wanted: Any) -> Any:
        raise AssertionError("it is refused")

    def swap(self, params: Any) -> None:
        raise AssertionError("it is refused")


def test_refused_objects():
    """Proposers and fields that are given in Python."""
    verifying = dataclasses.replace(CONFIG, verify_tokens=3)
    blocks: Any = {"placement": WeightPlacement(2, cache=CachePlacement(2)), "proposer": DraftsOfOneBatch()}
    with pytest.raises(ConfigError, match=rf"DraftsOfOneBatch, whose drafts are of one batch {ALONE}"):
        engines.build(verifying, **blocks)
    with pytest.raises(ConfigError, match=rf"a tree of draft tokens {ALONE}"):
        engines.build(dataclasses.replace(verifying, draft_trees=True), **blocks | {"proposer": NgramProposer(2)})
    with pytest.raises(ConfigError, match=rf"to speculate, {ALL}"):
        EngineConfig(layer_window=1, draft_features=True, verify_tokens=3)
