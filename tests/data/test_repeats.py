"""Repeated data: runs with more epochs than are free say so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxllm.data import DataConfig, SourceConfig, load_dataset
from jaxllm.data.repeated_data import effective_data, epochs_per_source, repetition_warnings
from tests.train.runs import write_text


def test_epochs_are_rows_read_over_rows_there(tmp_path):
    text = str(write_text(tmp_path))
    config = DataConfig(text, tokenizer="byte", seq_len=16, batch_size=8, cache_dir=str(tmp_path / "cache"))
    single = load_dataset(config).train
    rows = single.rows_per_epoch
    ((name, often),) = epochs_per_source(single, rows).items()
    assert often == 8
    assert repetition_warnings(single, rows // 2) == [], "four epochs are free"
    (line,) = repetition_warnings(single, rows)
    worth = f"{effective_data(8, 1):.1f} times as many fresh tokens (arXiv:2305.16264)"
    assert line == f"{name} is read 8.0 times, which is worth {worth}"
    assert effective_data(8, 1) == pytest.approx(6.62, abs=0.01)
    sources = tuple(SourceConfig(name, text, weight=weight) for name, weight in (("few", 1), ("many", 3)))
    mixed = load_dataset(replace(config, source=DataConfig.source, mixture=sources)).train
    assert epochs_per_source(mixed, rows) == {"few": 2, "many": 6}
    assert [line.split()[0] for line in repetition_warnings(mixed, rows)] == ["many"]
