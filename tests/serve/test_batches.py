"""OpenAI's own client drives files and batches over a tiny random model; kills are in `make proof apis`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from jaxllm.files import DataError
from jaxllm.infer.engine.stream_output import OutputDelta
from jaxllm.serve import ServeConfig
from jaxllm.serve.app import ApiService
from jaxllm.serve.batches.batch_endpoints import PRIORITY
from jaxllm.serve.batches.batch_journal import BatchJournal
from jaxllm.serve.batches.batch_manager import BatchManager
from jaxllm.serve.batches.batch_record import BatchRecord
from jaxllm.serve.batches.batch_slots import BatchSlots
from jaxllm.serve.batches.offline_batch import BatchPaths, BatchProgress, open_batch, run_offline
from tests.serve import servers
from tests.serve.batch_features import BATCH_FEATURES, begun, ended, line, rows_of, text_of


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[openai.OpenAI]:
    config = ServeConfig(port=0, name="tiny", batch_dir=str(tmp_path_factory.mktemp("batches")))
    with (
        servers.running(servers.tiny_backend, config) as (_, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as made,
    ):
        yield made


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize("feature", BATCH_FEATURES)
def test_feature(client, feature):
    BATCH_FEATURES[feature](client)


def opened(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)


def test_without_a_directory_the_routes_refuse_by_name():
    with servers.running(servers.opener(servers.FixedRate())) as (_, url), opened(url) as client:
        for ask in (client.files.list, client.batches.list):
            with pytest.raises(openai.PermissionDeniedError, match="--batch-dir"):
                ask()


def test_a_server_resumes_the_batches_of_the_one_before(tmp_path):
    config = ServeConfig(port=0, name="tiny", batch_dir=str(tmp_path / "new" / "dir"))
    with (
        servers.running(servers.opener(servers.FixedRate(0.01, sequences=4)), config) as (_, url),
        opened(url) as client,
    ):
        batch = begun(client, [line(number, max_tokens=10) for number in range(30)])
        while (seen := client.batches.retrieve(batch.id)).request_counts.completed < 5:
            assert seen.status in ("validating", "in_progress")
    again = servers.FixedRate(0.0, sequences=4)
    with servers.running(servers.opener(again), config) as (_, url), opened(url) as client:
        done = ended(client, batch)
        assert done.request_counts.to_dict() == {"total": 30, "completed": 30, "failed": 0}
        assert [row["custom_id"] for row in rows_of(client, done.output_file_id)] == [f"c{n}" for n in range(30)]
        assert again.begun <= 25, "a line that had its answer was generated again"


def test_two_servers_cannot_share_a_directory(tmp_path):
    config = ServeConfig(port=0, name="tiny", batch_dir=str(tmp_path))
    with servers.running(servers.opener(servers.FixedRate()), config):
        second = servers.Server(config, servers.opener(servers.FixedRate()))
        second.run()
        assert isinstance(second.failure, OSError)
        assert "another server" in str(second.failure)


def test_batches_leave_room_and_come_last(tmp_path):
    backend = servers.FixedRate(0.005, sequences=8)
    config = ServeConfig(port=0, name="tiny", batch_dir=str(tmp_path))
    with servers.running(servers.opener(backend), config) as (_, url), opened(url) as client:
        batch = begun(client, [line(number, max_tokens=20) for number in range(20)])
        most = 0
        while client.batches.retrieve(batch.id).status != "completed":
            most = max(most, backend.held)
        assert 1 < most <= 6
        assert {service.priority for service in backend.services if service is not None} == {PRIORITY}
        assert client.batches.retrieve(batch.id).request_counts.completed == 20


def journal_rows(path: Path) -> list[Any]:
    return [json.loads(row) for row in path.read_text().splitlines()]


def test_a_journal_drops_a_row_that_was_cut_short(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = BatchJournal(path)
    journal.state(total=3)
    journal.answer(2, "output", {"a": 2})
    journal.answer(1, "error", {"a": 1})
    journal.answer(2, "output", {"a": "again"})
    journal.close()
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        found = BatchJournal(path)
        rows = whole[:cut].count(b"\n")
        assert (1 in found, 2 in found) == (rows >= 3, rows >= 2)
        found.answer(3, "output", {"a": 3})
        found.close()
        assert len(journal_rows(path)) == rows + 1
        again = BatchJournal(path)
        assert 3 in again
        again.close()
    path.write_bytes(whole)
    found = BatchJournal(path)
    found.answer(0, "output", {"a": 0})
    assert [json.loads(row)["a"] for row in found.rows("output")] == [0, 2]
    assert found.counts == {"output": 2, "error": 1}
    found.close()
    path.write_bytes(b"{\n" + whole)
    with pytest.raises(DataError, match="1: the journal is damaged"):
        BatchJournal(path)


def test_a_batch_without_a_server_is_resumed(tmp_path):
    source, paths = tmp_path / "in.jsonl", BatchPaths(tmp_path / "in.jsonl", tmp_path / "new" / "out.jsonl")
    source.write_bytes(text_of([line(0), line(1, "/v1/chat/completions"), b"{", *[line(n) for n in range(3, 9)]]))
    config, seen = ServeConfig(name="tiny"), list[BatchProgress]()

    class Stopped(Exception):
        """What stops the first run."""

    def stop(progress: BatchProgress) -> None:
        seen.append(progress)
        if progress.completed >= 3:
            raise Stopped

    lines, journal = open_batch(paths)
    with pytest.raises(Stopped):
        run_offline(lines, journal, paths, config, servers.opener(servers.FixedRate(0.0, sequences=2)), stop)
    assert not paths.out.exists()
    again = servers.FixedRate(0.0, sequences=2)
    lines, journal = open_batch(paths)
    before = journal.counts["output"]
    assert 3 <= before < 8
    ended = run_offline(lines, journal, paths, config, servers.opener(again), seen.append)
    assert ended == seen[-1] == BatchProgress(9, 8, 1)
    assert again.begun == 8 - before
    assert [row["custom_id"] for row in journal_rows(paths.out)] == [f"c{n}" for n in (0, 1, *range(3, 9))]
    assert ["line 3" in row["error"]["message"] for row in journal_rows(paths.errors)] == [True]
    assert not paths.journal.exists()
    with pytest.raises(DataError, match="exists"):
        open_batch(paths)
    paths.out.unlink()
    open_batch(paths)[1].close()
    source.write_bytes(text_of([line(1)]))
    with pytest.raises(DataError, match="another input"):
        open_batch(paths)
    with pytest.raises(DataError, match="cannot be read"):
        open_batch(BatchPaths(tmp_path / "none", paths.out))


@pytest.mark.parametrize("ahead", [0, 3])
def test_the_engine_is_given_lines_ahead(tmp_path, ahead):
    """All that it runs at a time, and the lines beyond them that a policy chooses among."""
    source, paths = tmp_path / "in.jsonl", BatchPaths(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    source.write_bytes(text_of([line(n, max_tokens=3) for n in range(20)]))
    given = list[int]()

    class Watched(servers.FixedRate):
        async def stream(self, *args: Any, **options: Any) -> AsyncGenerator[OutputDelta, None]:
            given.append(1 + self.begun - self.closed)
            async for delta in super().stream(*args, **options):
                yield delta

    lines, journal = open_batch(paths)
    opener = servers.opener(Watched(0.01, sequences=4))
    run_offline(lines, journal, paths, ServeConfig(name="tiny"), opener, lambda progress: None, ahead)
    assert max(given) == 4 + ahead


def test_other_requests_are_those_that_are_not_the_batchs(monkeypatch):
    """Of 8 sequences a batch that has 5 may have 3 more, and 1 more beside two of other requests."""
    engine = SimpleNamespace(backend=SimpleNamespace(max_sequences=8), open=5)
    service = ApiService(ServeConfig())
    monkeypatch.setattr(service, "ready", lambda: engine)
    slots = BatchSlots(service, share=1.0)

    async def run() -> list[int]:
        found = []
        async with slots.taken(5):
            for engine.open in (0, 5, 7):
                found.append(slots.most_beside_others)
        return found

    assert asyncio.run(run()) == [8, 8, 6]


def test_a_batch_ends_once_whatever_is_cancelled_meanwhile(tmp_path):
    """The end is written in a thread; a request to cancel waits for it and is then refused."""
    backend = servers.FixedRate(0.0, sequences=4)
    config = ServeConfig(port=0, name="tiny", batch_dir=str(tmp_path))
    with servers.running(servers.opener(backend), config) as (_, url), opened(url) as client:
        for number in range(12):
            batch = begun(client, [line(0, max_tokens=1)])
            time.sleep(0.004 * number)
            with contextlib.suppress(openai.BadRequestError):
                client.batches.cancel(batch.id)
            done = ended(client, batch)
            assert done.status in ("completed", "cancelled")
            assert done.request_counts.completed + done.request_counts.failed == 1


@pytest.mark.parametrize("moment", ["begin", "lines"])
def test_a_batch_is_cancelled_between_its_begin_and_its_first_line(tmp_path, monkeypatch, moment):
    """Both are on disk, so in a thread. A batch that had no task to cancel then answered all its lines first."""
    reached, go_on, ready = threading.Event(), threading.Event(), threading.Event()
    plain = {"begin": BatchRecord.begin, "lines": BatchRecord.lines.fget}[moment]

    def slow(record: BatchRecord) -> Any:
        if ready.is_set():  # not while it is created
            reached.set()
            go_on.wait(60)
        return plain(record)

    monkeypatch.setattr(BatchRecord, moment, slow if moment == "begin" else property(slow))
    notify = BatchManager.notify
    monkeypatch.setattr(BatchManager, "notify", lambda manager: (ready.set(), notify(manager)))
    backend = servers.FixedRate(0.0, sequences=4)
    config = ServeConfig(port=0, name="tiny", batch_dir=str(tmp_path))
    with servers.running(servers.opener(backend), config) as (_, url), opened(url) as client:
        batch = begun(client, [line(number, max_tokens=5) for number in range(6)])
        assert reached.wait(60)
        assert client.batches.cancel(batch.id).status == "cancelling"
        go_on.set()
        done = ended(client, batch)
    assert done.status == "cancelled"
    assert done.request_counts.to_dict() == {"total": 6, "completed": 0, "failed": 6}
