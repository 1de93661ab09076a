"""lm-eval's client of completions scores as the same engine does in this process."""

from __future__ import annotations

import warnings

import numpy as np

from jaxllm.evals import Scorer
from jaxllm.infer import LLM
from jaxllm.text.byte_tokenizer import ByteTokenizer
from tests.serve import servers


def test_local_completions_score_as_in_process(tmp_path, rng):
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    engine = servers.tiny_engine()
    engine.tokenizer.save(tmp_path)

    llm = LLM.__new__(LLM)  # of an engine that is there already
    # lm-eval's client puts no token before a text unless it is told to.
    llm.engine, llm.tokenizer = engine, ByteTokenizer()
    llm.tokenizer.adds_bos = False
    words = ["sea", "ship", "a long word", "x", "1 + 1 = 2", "no"]
    pairs = [(f"The {words[i]} and", f" {words[j]}") for i, j in rng.integers(0, len(words), (8, 2))]
    made = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    with servers.running(servers.tiny_backend) as (_, url), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        client = LocalCompletionsAPI(
            base_url=f"{url}/v1/completions", model="tiny", tokenizer=str(tmp_path), max_length=128, num_concurrent=1
        )
        there = client.loglikelihood(made, disable_tqdm=True)
    here = Scorer(llm).continuations(pairs)
    assert np.allclose([value for value, _ in there], [value for value, _ in here], atol=1e-3)
    assert [greedy for _, greedy in there] == [greedy for _, greedy in here]
