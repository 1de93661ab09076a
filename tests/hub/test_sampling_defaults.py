"""Sampling defaults of models: read from their files, given to commands and requests that say nothing else."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxllm.files import DataError
from jaxllm.hub.sampling_defaults import SMOLLM2, sampling_defaults_of, sampling_defaults_of_gguf
from jaxllm.infer.sampling_params import with_sampling_defaults


def test_generation_config_is_read_and_its_lengths_are_not(tmp_path):
    assert sampling_defaults_of(tmp_path) == {}
    said = {
        "do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05,
        "max_new_tokens": 7, "eos_token_id": [1, 2], "min_p": None,
    }  # fmt: skip
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    found = sampling_defaults_of(tmp_path)
    assert found == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
    params = with_sampling_defaults({"temperature": 0.0, "top_p": None}, found, max_tokens=3, seed=4)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens, params.seed) == (0, 0.95, 20, 3, 4)


@pytest.mark.parametrize(
    "said", [{"temperature": -1}, {"top_p": 0}, {"top_k": 1.5}, {"min_p": "low"}, {"repetition_penalty": True}]
)
def test_what_is_not_legal_is_named_with_the_way_out(said, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    with pytest.raises(DataError, match=rf"generation_config.json.*{next(iter(said))}.*--generation-config none"):
        sampling_defaults_of(tmp_path)


def test_metadata_of_gguf_files_is_rounded_from_float32():
    said = {
        "general.sampling.temp": np.float32(0.7),
        "general.sampling.top_p": np.float32(0.95),
        "general.sampling.top_k": np.int32(-1),
        "general.name": "x",
    }
    assert sampling_defaults_of_gguf(said, "x.gguf") == {"temperature": 0.7, "top_p": 0.95, "top_k": 0}


def test_smollm2_has_the_defaults_of_its_model_card():
    from jaxllm.hub import find_model, open_source

    assert open_source(find_model("smollm2")).sampling == SMOLLM2 == {"temperature": 0.2, "top_p": 0.9}
