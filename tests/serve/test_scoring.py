"""Scores: cosines of an embedding model, rewards of a reward model; a model that only generates refuses by name."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.data.chat_encoding import ChatEncoder
from jaxllm.infer.embedder import Embedder
from jaxllm.models import Segments
from jaxllm.serve import ServeConfig
from jaxllm.serve.scoring.text_scorer import EmbeddingScorer, RewardScorer, reward_token_of, sigmoid
from tests.serve import servers

ROUTES = ("/score", "/rerank", "/pooling", "/classify")
BODIES: dict[str, dict[str, Any]] = {
    "/score": {"text_1": "a", "text_2": "b"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/pooling": {"input": "a"},
    "/classify": {"input": "a"},
}


class Asking:
    """Sends bodies to a server of the model "tiny"."""

    def __init__(self, url: str):
        self.url = url

    def __call__(self, path: str, status: int = 200, **body: Any) -> Any:
        answer = httpx.post(self.url + path, json={"model": "tiny", **body}, timeout=120)
        assert answer.status_code == status, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def embedding() -> Iterator[Asking]:
    stub = servers.FixedRate()
    stub.scorer = EmbeddingScorer(stub.tokenizer, functools.partial(stub.embed, pooling="mean"), 100)
    with servers.running(servers.opener(stub)) as (_, url):
        yield Asking(url)


@pytest.fixture(scope="module")
def reward() -> Iterator[Asking]:
    stub = servers.FixedRate()
    # The reward of a text: its length, less 20.
    stub.scorer = RewardScorer(stub.tokenizer, servers.TEMPLATE, lambda ids: len(ids) - 20.0, 100)
    with servers.running(servers.opener(stub)) as (_, url):
        yield Asking(url)


def test_scores_are_cosines_of_embeddings(embedding):
    texts = ["a cat sat", "the sea", "rockets"]
    rows = embedding("/v1/embeddings", input=texts)["data"]
    vectors = np.array([row["embedding"] for row in rows])
    for path in ("/score", "/v1/score"):
        found = embedding(path, text_1=texts[0], text_2=texts)
        assert np.allclose([one["score"] for one in found["data"]], vectors @ vectors[0], atol=1e-6)
    each = embedding("/score", text_1=texts, text_2=texts[::-1])["data"]
    assert np.allclose([one["score"] for one in each], np.sum(vectors * vectors[::-1], axis=1), atol=1e-6)
    # A text is read once, however many pairs it is in.
    assert found["usage"]["total_tokens"] == sum(embedding("/tokenize", prompt=text)["count"] for text in texts)
    assert np.allclose([one["data"] for one in embedding("/pooling", input=texts)["data"]], vectors, atol=1e-6)


def test_documents_are_sorted_by_relevance(embedding):
    texts = ["xyz", "a cat sat", "acat"]
    scores = [one["score"] for one in embedding("/score", text_1="a cat sat", text_2=texts)["data"]]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        found = embedding(path, query="a cat sat", documents=[*texts[:2], {"text": texts[2]}])["results"]
        assert [one["relevance_score"] for one in found] == sorted(scores, reverse=True)
        assert [one["document"]["text"] for one in found] == [texts[one["index"]] for one in found]
    assert found[0]["index"] == 1
    best = embedding("/rerank", query="a cat sat", documents=texts, top_n=1, return_documents=False)["results"]
    assert best == [{"index": 1, "relevance_score": scores[1]}]


def test_a_reward_model_scores_answers(reward):
    prompt, answer = "hi", "a long answer"
    length = len(f"<user>{prompt}\n<assistant>{answer}")
    (one,) = reward("/score", text_1=prompt, text_2=answer)["data"]
    assert one["score"] == pytest.approx(float(sigmoid(np.array([length - 20.0]))[0]))
    found = reward("/rerank", query=prompt, documents=["short", answer])["results"]
    assert [row["index"] for row in found] == [1, 0]
    count = reward("/tokenize", prompt="abc")["count"]
    (pooled,) = reward("/pooling", input="abc")["data"]
    assert pooled["data"] == [count - 20.0]
    (classes,) = reward("/classify", input="abc")["data"]
    assert (classes["label"], classes["num_classes"]) == ("LABEL_0", 1)
    assert classes["probs"] == pytest.approx(sigmoid(np.array([count - 20.0])).tolist())


@pytest.mark.parametrize("path", ROUTES)
def test_a_model_that_only_generates_refuses_in_a_sentence(path):
    with servers.running(servers.opener(servers.FixedRate())) as (_, url):
        error = Asking(url)(path, 400, **BODIES[path])["error"]
        assert (error["param"], error["code"]) == ("model", "no_scores")
        assert "--pooling" in error["message"]


def test_refusals_name_the_field(embedding):
    for path, body, param in (
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": "x" * 200}, "text_2"),
        ("/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["title"]}, "rank_fields"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("/classify", {"input": "a"}, "model"),
    ):
        assert embedding(path, 400, **body)["error"]["param"] == param
    assert embedding("/rerank", 404, query="a", documents=["b"], model="gpt")["error"]["code"] == "model_not_found"


def test_the_reward_is_that_of_training():
    """The final hidden state at the token before the answer's end, times the head's row of the reward token."""
    made = servers.tiny_engine()
    model, params, token = made.runner.model, made.runner.params, 7
    embedder = Embedder(model, params, made.max_len)
    scorer = RewardScorer(
        servers.ByteTokenizer(), servers.TEMPLATE, functools.partial(embedder.reward, token=token), made.max_len
    )
    found = float(scorer.pair("hi", "well", {}).values[0])
    encoder = ChatEncoder(servers.ByteTokenizer(), servers.TEMPLATE)
    whole = encoder.encode_answer([{"role": "user", "content": "hi"}], [{"role": "assistant", "content": "well"}])
    assert whole.loss_mask is not None
    last = int(np.flatnonzero(whole.loss_mask)[-1])
    tokens = jnp.asarray(whole.ids)[None]
    hidden, _ = model.forward(params, tokens, jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], Segments())
    states, head = model.unembed(params, hidden)
    expected = float(np.asarray(states)[0, last - 1] @ np.asarray(head)[token])
    assert found == pytest.approx(float(sigmoid(np.array([expected]))[0]), abs=1e-5)


def test_a_reward_model_is_known_by_its_objective():
    def meta(name: str, *options: str) -> dict[str, Any]:
        return json.loads(json.dumps({"config": {"objective": {"name": name, "options": options}}}))

    assert reward_token_of(meta("reward_model", "center=0.01")) == 0
    assert reward_token_of(meta("reward_model", "reward_token=9")) == 9
    assert reward_token_of(meta("dpo")) is None
    assert reward_token_of({}) is None


def test_texts_that_are_too_many_are_refused():
    stub = servers.FixedRate()
    stub.scorer = EmbeddingScorer(stub.tokenizer, functools.partial(stub.embed, pooling="mean"), 100)
    with servers.running(servers.opener(stub), ServeConfig(port=0, name="tiny", max_prompts=2)) as (_, url):
        assert Asking(url)("/pooling", 400, input=["a"] * 3)["error"]["param"] == "input"
