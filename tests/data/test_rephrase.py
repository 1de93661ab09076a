"""Rephrasing job against a local server: its requests, its handling of failures, resuming."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from jaxllm import data
from jaxllm.data.quality.rephrase import STYLES, Endpoint, EndpointError, rephrase, text_hash
from jaxllm.data.sources.documents import Document
from jaxllm.files import DataError


class Server(ThreadingHTTPServer):
    """Answers with the text in capitals; `plan` maps the number of a request to another status or body."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen, self.plan, self.lock = [], {}, threading.Lock()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            number = len(self.server.seen)
            self.server.seen.append((self.path, dict(self.headers), body))
        text = body["messages"][0]["content"].split("The text:\n", 1)[1]
        status, answer = 200, {"choices": [{"message": {"content": f" {text.upper()} "}, "finish_reason": "stop"}]}
        if number in self.server.plan:
            status, answer = self.server.plan[number]
        raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    running = Server()
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


DOCUMENTS = [Document(f"text number {n}", Path("a.txt"), n + 1) for n in range(12)]
TWO = {name: STYLES[name] for name in ("easy", "qa")}


def endpoint(server, **more):
    return Endpoint(f"http://127.0.0.1:{server.server_port}/v1", "tiny", key="secret", wait=0.001, **more)


def rows(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_document_in_every_style_once(server, tmp_path):
    out = tmp_path / "deep" / "out.jsonl"
    made = rephrase([*DOCUMENTS, DOCUMENTS[0]], TWO, endpoint(server), out)
    assert (made.written, made.before, made.refused, made.failed) == (24, 2, 0, ())
    found = {(row["of"], row["style"]): row["text"] for row in rows(out)}
    assert found == {(text_hash(d.text), style): d.text.upper() for d in DOCUMENTS for style in TWO}
    path, headers, body = server.seen[0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer secret"
    assert body["model"] == "tiny"
    assert any(body["messages"][0]["content"].startswith(style) for style in TWO.values())


def test_a_stopped_job_goes_on(server, tmp_path):
    out = tmp_path / "out.jsonl"
    rephrase(DOCUMENTS[:5], TWO, endpoint(server), out)
    with out.open("ab") as file:
        file.write(b'{"text": "cut by a ki')
    made = rephrase(DOCUMENTS, TWO, endpoint(server), out)
    assert (made.written, made.before) == (14, 10)
    assert len(server.seen) == 24
    assert len({(row["of"], row["style"]) for row in rows(out)}) == 24
    (tmp_path / "other.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(DataError, match=r"other.jsonl:1: not a row of a rephrasing job"):
        rephrase(DOCUMENTS, TWO, endpoint(server), tmp_path / "other.jsonl")


def test_what_a_server_may_do(server, tmp_path):
    """Requests with busy, broken and truncated responses are repeated; an empty or truncated text is left out."""
    choice = {"message": {"content": "x"}, "finish_reason": "length"}
    server.plan = {
        0: (429, {"error": "slow down"}),
        1: (503, b"down"),
        2: (200, b"no json"),
        3: (200, {"choices": []}),
        6: (200, {"choices": [choice]}),
        7: (200, {"choices": [{"message": {"content": None}, "finish_reason": "stop"}]}),
    }
    out = tmp_path / "out.jsonl"
    made = rephrase(DOCUMENTS, {"easy": "Say it simply."}, endpoint(server), out, concurrency=1)
    assert (made.written, made.refused, made.failed) == (10, 2, ())
    assert len(server.seen) == 16


def test_after_all_retries_the_document_is_named_and_asked_for_again(server, tmp_path):
    server.plan = dict.fromkeys(range(3), (500, b"broken"))
    out = tmp_path / "out.jsonl"
    made = rephrase(DOCUMENTS[:4], {"easy": "x"}, endpoint(server, retries=2), out, concurrency=1)
    assert made.written == 3
    assert len(made.failed) == 1
    assert made.failed[0].startswith("a.txt:1 (easy): http://")
    assert "failed 3 times; the last error is status 500: broken" in made.failed[0]
    assert rephrase(DOCUMENTS[:4], {"easy": "x"}, endpoint(server), out).written == 1


def test_a_refusal_of_the_request_ends_the_job(server, tmp_path):
    server.plan = {n: (401, {"error": "who are you?"}) for n in range(40)}
    with pytest.raises(EndpointError, match=r"rejects the request with status 401: .*who are you"):
        rephrase(DOCUMENTS, TWO, endpoint(server), tmp_path / "out.jsonl")
    with pytest.raises(EndpointError, match="must begin with http:// or https://"):
        rephrase(DOCUMENTS, TWO, Endpoint("file:///etc", "x"), tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match="one or more of each"):
        rephrase(DOCUMENTS, {}, endpoint(server), tmp_path / "out.jsonl")


def test_original_and_rephrased_blend_by_exact_shares(server, tmp_path):
    """WRAP's one to one, at every step."""
    out, original = tmp_path / "out.jsonl", tmp_path / "original.jsonl"
    original.write_text("".join(json.dumps({"text": one.text}) + "\n" for one in DOCUMENTS))
    rephrase(DOCUMENTS, {"qa": STYLES["qa"]}, endpoint(server), out)
    config = data.DataConfig(
        mixture=(data.SourceConfig("real", str(original)), data.SourceConfig("rephrased", str(out))),
        tokenizer="byte",
        seq_len=20,
        batch_size=6,
        heldout_fraction=0.0,
        cache_dir=str(tmp_path / "cache"),
    )
    dataset = data.load_dataset(config)
    for step in range(30):
        texts = [dataset.tokenizer.decode(row) for row in dataset.train.batch_at(step).tokens]
        assert sum(any(c.isupper() for c in text) for text in texts) == 3
    assert "50.0% of" in dataset.summary
