"""Sampling defaults of the model in requests: given where a request says nothing, and shown in the list of models."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import httpx

from jaxllm.infer import SamplingParams
from tests.serve import servers


class Recorder(servers.FixedRate):
    """Stub engine that keeps the sampling parameters that it gets."""

    def __init__(self) -> None:
        super().__init__(0.0001)
        self.seen: list[SamplingParams] = []
        self.sampling = {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}

    def stream(self, prompt: Any, params: SamplingParams, **fields: Any) -> AsyncGenerator[Any, None]:
        """Streams letters."""
        self.seen.append(params)
        return super().stream(prompt, params, **fields)


def test_requests_have_the_models_defaults_and_their_own_values_win():
    backend = Recorder()
    chat: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    text: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    with servers.running(servers.opener(backend)) as (_, url), httpx.Client(base_url=url) as client:
        assert client.get("/v1/models").json()["data"][0]["sampling"] == backend.sampling
        for path, body in (("chat/completions", chat), ("completions", text)):
            for more in ({}, {"temperature": 1.0, "top_p": None, "repetition_penalty": 1.0}, {"beams": 2, "n": 2}):
                assert client.post(f"/v1/{path}", json=body | more).status_code == 200
    found = [(one.temperature, one.top_p, one.repetition_penalty) for one in backend.seen]
    assert found == [(0.2, 0.9, 1.1), (1.0, 0.9, 1.0), (1.0, 1.0, 1.0)] * 2
