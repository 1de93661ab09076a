"""The benchmark of speculative decoding goes on where it was stopped, and judges the adaptive length."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from benchmarks.serving import speculation


def row(text: str, batch: int, side: str, ratio: float) -> dict[str, Any]:
    figures = {"tokens_per_second": 10 * ratio, "tokens_per_pass": 1.5, "acceptance": 0.25, "whole": 1.02}
    return {"text": text, "batch": batch, "side": side, "ratio": ratio, "ratios": [ratio, ratio + 0.1], **figures}


def test_cells_are_measured_once(tmp_path, monkeypatch, capsys):
    measured = []

    def cell(args: argparse.Namespace, text: str, batch: int) -> list[dict[str, Any]]:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append((text, batch))
        return [row(text, batch, side, r) for side, r in (("plain", 1.0), ("ngram", 1.14), ("ngram, 2 fixed", 1.2))]

    monkeypatch.setattr(speculation, "measure_cell", cell)
    words = ["--json", str(tmp_path / "rows.json"), "--batches", "1,16"]
    with pytest.raises(KeyboardInterrupt):
        speculation.main(words)
    assert measured == [("code", 1), ("code", 16)]
    measured.clear()
    speculation.main(words)
    assert measured == [("repeating", 1), ("repeating", 16)]
    assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == 12
    out = capsys.readouterr().out
    assert "| code | 16 | ngram | 11.4 | 1.14 (1.14-1.24) | 1.50 | 25% | 1.02 |" in out
    assert "repeating, batch 1: adaptive n-grams have 0.95 of the best fixed length (ngram, 2 fixed)" in out
    with pytest.raises(SystemExit):
        speculation.main([*words, "--rounds", "9"])
    assert "is of other settings" in capsys.readouterr().err
