"""Subtasks over HTTP: completions may be longer than the context; what is wrong is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve import servers

MARKERS = {"subtask_markers": ["<", ">"], "subtasks_kept": 0}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with servers.running(servers.tiny_backend) as (_, url), httpx.Client(base_url=url, timeout=60) as made:
        yield made


def asked(client: httpx.Client, **body: Any) -> httpx.Response:
    given = {"model": "tiny", "prompt": "Plan: ", "temperature": 0, **body}
    return client.post("/v1/completions", json=given)


def test_a_completion_may_be_longer_than_the_context(client: httpx.Client) -> None:
    length = servers.tiny_engine().max_len
    subtasks = (length + 60) // 22
    body = {"max_tokens": 2 * length, "guided_regex": f"(<[a-z]{{20}}>){{{subtasks}}}"}
    assert asked(client, **body).status_code == 400
    answer = asked(client, **body, **MARKERS).json()
    assert answer["usage"]["completion_tokens"] >= 22 * subtasks > length
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["text"].count(">") == subtasks
    report = client.get("/config").json()["backend"]["cache"]["subtasks"]
    assert report["cut_tokens"] == 20 * (subtasks - 1)  # the last one ends the completion
    assert report["returned_pages"] > 0


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"subtask_markers": ["<", "<"]}, "subtask_markers", "give two different markers"),
        ({"subtasks_kept": 2}, "subtasks_kept", "is for subtask_markers"),
        ({**MARKERS, "beams": 2}, "subtask_markers", "does not go with a beam search"),
    ],
)
def test_what_is_wrong_is_named(client: httpx.Client, body: dict[str, Any], param: str, message: str) -> None:
    answer = asked(client, max_tokens=3, **body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
