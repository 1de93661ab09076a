"""Load benchmark for servers: its requests, and its figures."""

from __future__ import annotations

import json

import pytest

from jaxllm.cli import main
from jaxllm.files import DataError
from jaxllm.serve import ServeConfig
from jaxllm.serve.load_benchmark import RequestResult, random_requests, read_trace, summary
from tests.serve import servers


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("way", [["--clients", "3"], ["--rate", "200"], ["--rate", "inf"], ["--trace"]], ids=" ".join)
def test_every_request_is_sent_and_counted(way, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAXLLM_API_KEY", "k")
    backend = servers.FixedRate(0.002, sequences=4)
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"at": n / 100, "prompt": "a", "max_tokens": 5}) + "\n" for n in range(12)))
    with servers.running(servers.opener(backend), ServeConfig(port=0, name="tiny", api_keys=("k",))) as (_, url):
        asked = [*way, *([str(trace)] if way == ["--trace"] else []), "--url", url, "--requests", "12", "--tokens", "5"]
        files = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
        assert main(["bench", "serve", *asked, *files]) == 0
    assert backend.begun == backend.closed == 12
    figures = json.loads((tmp_path / "out.json").read_text())
    assert (figures["requests"], figures["failed"]) == (12, 0)
    assert figures["tokens_per_second"] * figures["seconds"] == pytest.approx(60)
    assert "12 requests" in capsys.readouterr().out
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_figures():
    seen = [
        RequestResult(due=0, sent=0, chunks=[1.0, 1.5, 2.0], tokens=3, end=2.0),
        RequestResult(due=1, sent=2, chunks=[4.0, 4.1], tokens=2, end=4.0),
        RequestResult(due=0, sent=0, error="refused", end=0.1),
    ]
    figures = summary(seen, ttft=2, tpot=1)
    assert figures["ttft"]["mean"] == 2
    assert figures["tpot"]["mean"] == pytest.approx(0.3)
    assert figures["itl"]["p50"] == pytest.approx(0.5)
    assert figures["within_slo"] == pytest.approx(1 / 3)
    assert figures["goodput"] == pytest.approx(1 / 4)
    assert (figures["failed"], figures["errors"]) == (1, {"refused": 1})
    with pytest.raises(DataError, match="refused"):
        summary(seen[2:], 1, 1)


def test_arrivals(tmp_path):
    asks = random_requests(4000, 10, 8, 5, seed=1)
    assert asks[-1].at / 4000 == pytest.approx(0.1, rel=0.1)
    assert len({ask.prompt for ask in asks}) > 3900
    assert random_requests(5, float("inf"), 8, 5, seed=1)[-1].at == 0
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"at": 1, "prompt": "a", "max_tokens": 1}\n{"at": 2}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl:2"):
        read_trace(bad)
    assert main(["bench", "serve", "--rate", "1", "--clients", "2"]) == 2
