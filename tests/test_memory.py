"""When a test worker forgets its compiled programs."""

from __future__ import annotations

import sys

import pytest

from tests import memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts what Linux tells of a process")


@pytest.fixture(autouse=True)
def just_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_least", memory.resident())


def test_half_of_the_mappings_are_too_many(tmp_path, monkeypatch):
    limit = tmp_path / "max_map_count"
    monkeypatch.setattr(memory, "LIMIT", limit)
    now = memory.mappings()
    limit.write_text(f"{2 * now - now // 5}\n")
    assert memory.crowded()
    limit.write_text(f"{2 * now + now // 5}\n")
    assert not memory.crowded()


def test_growth_is_too_much(monkeypatch):
    monkeypatch.setattr(memory, "MAPPINGS", 1.0)
    assert not memory.crowded()
    monkeypatch.setattr(memory, "_least", memory.resident() - memory.GROWTH)
    assert memory.crowded()
