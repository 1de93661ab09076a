"""OpenAI's own client on files and batches, feature by feature; for any model behind it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest

BATCH_FEATURES: dict[str, Callable[[openai.OpenAI], None]] = {}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 5,
        "temperature": 0,
    },
    "/v1/completions": {"prompt": "Once upon", "max_tokens": 5, "temperature": 0},
    "/v1/embeddings": {"input": "a cat sat", "encoding_format": "float"},
    "/v1/responses": {"input": "Say hello.", "max_output_tokens": 5, "temperature": 0},
}


def feature(check: Callable[[openai.OpenAI], None]) -> Callable[[openai.OpenAI], None]:
    BATCH_FEATURES[check.__name__] = check
    return check


def line(number: int, url: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", **BODIES[url], **fields}
    return {"custom_id": f"c{number}", "method": "POST", "url": url, "body": body}


def text_of(rows: list[Any]) -> bytes:
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


def uploaded(client: openai.OpenAI, rows: list[Any]) -> Any:
    return client.files.create(file=("in.jsonl", text_of(rows)), purpose="batch")


def begun(client: openai.OpenAI, rows: list[Any], endpoint: Any = "/v1/completions", **fields: Any) -> Any:
    file = uploaded(client, rows)
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)


def ended(client: openai.OpenAI, batch: Any, seconds: float = 300) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        batch = client.batches.retrieve(batch.id)
        if batch.status in ("completed", "expired", "cancelled", "failed"):
            return batch
        time.sleep(0.05)
    raise AssertionError(f"the batch is {batch.status}")


def rows_of(client: openai.OpenAI, name: str | None) -> list[dict[str, Any]]:
    if name is None:
        return []
    return [json.loads(row) for row in client.files.content(name).text.splitlines()]


@feature
def files_are_uploaded_read_and_deleted(client: openai.OpenAI) -> None:
    rows = [line(1), line(2)]
    file = uploaded(client, rows)
    assert (file.object, file.filename, file.purpose, file.bytes) == ("file", "in.jsonl", "batch", len(text_of(rows)))
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == text_of(rows)
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


@feature
def files_are_listed_in_pages(client: openai.OpenAI) -> None:
    made = [uploaded(client, [line(number)]).id for number in range(3)]
    listed = [file.id for file in client.files.list(limit=2, purpose="batch")]
    assert set(made) <= set(listed)
    assert len(listed) == len(set(listed))
    assert client.files.list(order="asc", limit=1).data[0].id == listed[-1]


@feature
def every_endpoint_can_be_in_a_batch(client: openai.OpenAI) -> None:
    for endpoint in BODIES:
        batch = ended(client, begun(client, [line(7, endpoint)], endpoint))
        assert batch.request_counts.to_dict() == {"total": 1, "completed": 1, "failed": 0}
        (row,) = rows_of(client, batch.output_file_id)
        assert (row["custom_id"], row["error"], row["response"]["status_code"]) == ("c7", None, 200)
        assert batch.error_file_id is None


@feature
def an_answer_is_that_of_the_route(client: openai.OpenAI) -> None:
    batch = ended(client, begun(client, [line(1)]))
    body = rows_of(client, batch.output_file_id)[0]["response"]["body"]
    direct = client.completions.create(model="tiny", **BODIES["/v1/completions"])
    assert body["choices"][0]["text"] == direct.choices[0].text
    assert body["usage"]["completion_tokens"] == 5


@feature
def answers_are_in_the_order_of_the_lines(client: openai.OpenAI) -> None:
    rows = [line(number, max_tokens=1 + number % 7) for number in range(20)]
    batch = ended(client, begun(client, rows))
    assert [row["custom_id"] for row in rows_of(client, batch.output_file_id)] == [row["custom_id"] for row in rows]


@feature
def bad_lines_are_in_the_error_file(client: openai.OpenAI) -> None:
    rows = [
        line(1),
        b"{",
        {**line(3), "method": "GET"},
        {**line(4), "url": "/v1/embeddings"},
        {**line(5), "body": "text"},
        {**line(6), "extra": 1},
        line(1),
        line(8, temperature=9),
        line(9, stream=True),
        {**line(10), "body": {**BODIES["/v1/completions"], "model": "gpt"}},
        line(11),
    ]
    batch = ended(client, begun(client, rows))
    assert batch.status == "completed"
    assert batch.request_counts.to_dict() == {"total": 11, "completed": 2, "failed": 9}
    assert [row["custom_id"] for row in rows_of(client, batch.output_file_id)] == ["c1", "c11"]
    found = rows_of(client, batch.error_file_id)
    assert [row["custom_id"] for row in found] == [None, "c3", "c4", "c5", "c6", "c1", "c8", "c9", "c10"]
    for number, row in zip(range(2, 8), found[:6], strict=True):
        assert (row["response"], row["error"]["code"]) == (None, "invalid_line")
        assert f"line {number}" in row["error"]["message"]
    assert [row["response"]["status_code"] for row in found[6:]] == [400, 400, 404]
    assert found[6]["response"]["body"]["error"]["param"] == "temperature"


@feature
def batches_are_retrieved_and_listed(client: openai.OpenAI) -> None:
    batch = begun(client, [line(1)], metadata={"a": "b"})
    assert (batch.object, batch.endpoint, batch.completion_window) == ("batch", "/v1/completions", "24h")
    assert batch.metadata == {"a": "b"}
    done = ended(client, batch)
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at < done.expires_at
    listed = [one.id for one in client.batches.list(limit=2)]
    assert listed[0] == batch.id
    assert len(listed) == len(set(listed))


@feature
def a_batch_is_cancelled(client: openai.OpenAI) -> None:
    rows = [line(number, max_tokens=300, ignore_eos=True) for number in range(40)]
    batch = begun(client, rows)
    client.batches.cancel(batch.id)
    batch = ended(client, batch)
    assert batch.status == "cancelled"
    assert batch.cancelling_at <= batch.cancelled_at
    counts = batch.request_counts
    assert counts.completed + counts.failed == counts.total == 40
    assert counts.failed > 0
    assert {row["error"]["code"] for row in rows_of(client, batch.error_file_id)} == {"batch_cancelled"}
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        client.batches.cancel(batch.id)


@feature
def an_input_file_may_be_deleted(client: openai.OpenAI) -> None:
    batch = begun(client, [line(1)])
    client.files.delete(batch.input_file_id)
    assert ended(client, batch).request_counts.completed == 1


@feature
def an_empty_batch_ends(client: openai.OpenAI) -> None:
    batch = ended(client, begun(client, [b"", b"  "]))
    assert (batch.status, batch.request_counts.total, batch.output_file_id) == ("completed", 0, None)


@feature
def refusals_name_the_field(client: openai.OpenAI) -> None:
    file = uploaded(client, [line(1)])
    asked: dict[str, Any] = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    for fields, param in (
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "output_expires_after"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.batches.create(**{**asked, **fields})
        assert caught.value.param == param
    with pytest.raises(openai.NotFoundError) as missing:
        client.batches.create(**{**asked, "input_file_id": "file-" + "0" * 24})
    assert missing.value.param == "input_file_id"
    with pytest.raises(openai.BadRequestError):
        client.files.create(file=("x", b"x"), purpose="fine-tune")
    with pytest.raises(openai.BadRequestError):
        client.files.create(file=("x", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
    batch = ended(client, begun(client, [line(1)]))
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.batches.create(**{**asked, "input_file_id": batch.output_file_id})
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_" + "0" * 24)


@feature
def other_requests_go_on_beside_a_batch(client: openai.OpenAI) -> None:
    batch = begun(client, [line(number, max_tokens=100, ignore_eos=True) for number in range(12)])
    assert client.completions.create(model="tiny", prompt="x", max_tokens=3).choices
    assert client.batches.retrieve(batch.id).request_counts.total == 12
    assert ended(client, batch).request_counts.completed == 12
