"""The faster form of layers is taken where its programs are there, and never compiled for its own sake."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.infer import Engine, EngineConfig, SamplingParams
from jaxllm.models import functional, has_unstacked_layers
from jaxllm.quant import pack_params
from tests.infer import engines

CONFIG = EngineConfig(
    max_sequences=2, max_batched_tokens=8, max_len=32, page_size=8, pages=8, buckets=(8,), samplers=("plain",)
)
ASKED = [{"prompt": [3, 1, 4, 1, 5], "params": SamplingParams(max_tokens=6, temperature=0.0)}]


def tokens_of(engine: Engine) -> list[int]:
    """Tokens of one greedy completion."""
    return engines.serve(engine, ASKED)[0].sequences[0].tokens


def started(manifest: Path, config: EngineConfig = CONFIG, **fields: Any) -> Engine:
    """An engine over a copy of the weights, which it may free."""
    held = jax.tree.map(lambda x: jax.numpy.array(np.asarray(x)), engines.params_of("llama", "float32"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "params_of", lambda model, dtype: held)
        return engines.build(config, manifest=manifest, **fields)


@pytest.mark.drawn(0.4)
def test_layers_are_apart_where_all_programs_for_that_are_there(tmp_path):
    plain = started(tmp_path, layers="auto")
    assert not has_unstacked_layers(plain.runner.params), "nothing was compiled for it"
    ahead = started(tmp_path, apart=True)
    chosen = started(tmp_path, layers="auto")
    assert has_unstacked_layers(chosen.runner.params)
    assert chosen.runner.program_cache.counts.compiled == 0
    assert tokens_of(chosen) == tokens_of(plain) == tokens_of(ahead)
    given = started(tmp_path)
    assert not has_unstacked_layers(given.runner.params), "who does not ask keeps what they gave"
    (kept,) = ahead.runner.program_cache.folder.glob("complete-*.json")
    kept.unlink()  # as if that start had been stopped before its last program
    assert not has_unstacked_layers(started(tmp_path, layers="auto").runner.params)


@pytest.mark.drawn(0.3)
def test_packed_layers_stay_stacked_on_a_cpu(tmp_path, monkeypatch):
    """Apart, XLA:CPU would write the dequantised matrices of many layers at once."""
    model = functional(engines.model_of("llama", "float32"))
    packed = pack_params(model, engines.params_of("llama", "float32"), "int8")
    monkeypatch.setattr(engines, "params_of", lambda model, dtype: packed)
    engines.build(CONFIG, manifest=tmp_path, apart=True)
    chosen = engines.build(CONFIG, manifest=tmp_path, layers="auto")
    assert not has_unstacked_layers(chosen.runner.params)


@pytest.mark.drawn(0.3)
def test_drafts_keep_layers_as_they_are(tmp_path):
    """A draft of the model's own layers may share them."""
    config = replace(CONFIG, speculate="ngram:2", draft_length="fixed")
    started(tmp_path, config, apart=True)
    assert not has_unstacked_layers(started(tmp_path, config, layers="auto").runner.params)
