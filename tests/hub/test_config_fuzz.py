"""Fuzzed ``config.json``: each gives an architecture, or an error that names the problem."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.hub import HubError, decoder_config
from jaxllm.hub.huggingface import read_config
from tests.hub import peers

EVERY = peers.FAMILIES | peers.MIXTURES
VALUES = [
    0, -1, 1, 3, 10**4, 10**9, 2**70, 1.5, -1.0, 0.0, 1e300, float("nan"), float("inf"),
    "x", "", None, True, False, [], {}, [1], {"a": 1}, [None] * 3,
]  # fmt: skip


def fields(given: Mapping[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all fields."""
    for name, value in given.items():
        yield (*before, name)
        if isinstance(value, dict):
            yield from fields(value, (*before, name))


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("family", EVERY)
def test_any_value_of_any_field(family: str, rng: np.random.Generator) -> None:
    config = json.loads(EVERY[family](rng).to_json_string())
    understood = 0
    for path in list(fields(config)):
        for value in VALUES:
            changed = copy.deepcopy(config)
            inner = changed
            for name in path[:-1]:
                inner = inner[name]
            inner[path[-1]] = value
            try:
                decoder_config(changed)
            except HubError:
                continue
            understood += 1
    assert understood > len(VALUES)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' * 50_000, "1" * 5000, "nul", "\ufeff{}", "[]"])
def test_files_that_are_no_config(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(HubError, match=r"config.json (cannot be read|is not a JSON object)"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(HubError, match=r"config.json cannot be read"):
        read_config(tmp_path)
