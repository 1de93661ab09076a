"""Roles by bandwidth: the table of docs/train/low_communication.md is what the command gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.replicas.averaging_roles import MEGABIT, PEERS, main, peers_of, shown

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_table_is_what_the_command_gives(tmp_path, capsys):
    stored = json.loads((DOCS / "figures/averaging_roles.json").read_text("utf-8"))
    page = (DOCS / "train/low_communication.md").read_text("utf-8")
    assert main(["--json", str(tmp_path / "found.json")]) == 0
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text("utf-8"))
    assert found["options"] == stored["options"]
    assert set(found["rows"]) == set(stored["rows"]) == set(PEERS)
    for name, row in stored["rows"].items():
        assert found["rows"][name] == pytest.approx(row, rel=1e-6)
        assert shown(name, row) in page
        assert shown(name, row) in printed


def test_own_peers(capsys):
    assert main(["--peers", "2x1000/1000/20", "3x20/100/5/client"]) == 0
    assert "| 4 | yes | 0.0000 |" in capsys.readouterr().out
    peers = peers_of(["2x1000/800/20", "20/100/5/client"])
    assert [peer.upload / MEGABIT for peer in peers] == [1000, 1000, 20]
    assert [peer.download / MEGABIT for peer in peers] == [800, 800, 100]
    assert [peer.rows for peer in peers] == [20, 20, 5]
    assert [peer.reachable for peer in peers] == [True, True, False]


@pytest.mark.parametrize(("own", "says"), [("2y100", "give [COUNTx]"), ("0/100/5", "upload = 0.0")])
def test_own_peers_that_are_refused(own, says, capsys):
    with pytest.raises(SystemExit):
        main(["--peers", own])
    assert says in capsys.readouterr().err
