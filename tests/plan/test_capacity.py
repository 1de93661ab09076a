"""Capacity tables: `jaxllm plan --capacity`, and the refusals of runs that a place does not go with."""

from __future__ import annotations

import json

import pytest

from benchmarks.memory import published_capacity
from jaxllm import cli
from jaxllm.cli.errors import UsageError
from jaxllm.plan.formulas.tier_bytes import TierBytes, placed, transformer_bytes

ASKED = ("--capacity", "--on", "h100:1x8", "--mesh", "fsdp", "--data.batch-size", "8")


def table(tmp_path, *argv: str) -> tuple[int, list[dict]]:
    file = tmp_path / "table.json"
    status = cli.main(["plan", *argv, "--json", str(file)])
    return status, json.loads(file.read_text())["rows"]


def test_larger_models_fit_in_farther_tiers(tmp_path, capsys):
    """8B fits the devices; 70B streams its layers; with no disk nothing holds it, and what lacks is said."""
    status, rows = table(tmp_path, "llama3_8b,llama3_70b", *ASKED, "--host", "64GiB", "--disk", "1TiB")
    assert status == 0
    small, large = rows[:6], rows[6:]
    assert all(row["fits"] for row in small)
    assert [row["fits"] for row in large] == [False] * 4 + [True, True]
    parameters = 8.03e9 / 8 * 4
    assert small[0]["bytes"]["host"] == small[0]["bytes"]["disk"] == 0
    assert small[0]["bytes"]["device"] > 4 * parameters  # parameters, gradients, two moments
    assert small[3]["bytes"]["disk"] == pytest.approx(2 * 2 * parameters, rel=1e-3)  # twice, for a checkpoint
    assert small[1]["bytes"]["host"] < 2 * parameters < small[2]["bytes"]["host"]
    assert all(row["bytes"]["device"] < small[0]["bytes"]["device"] for row in small[1:])
    capsys.readouterr()
    status, rows = table(tmp_path, "llama3_70b", *ASKED, "--host", "64GiB", "--within", "24GiB")
    assert status == 1
    assert not any(row["fits"] for row in rows)
    said = capsys.readouterr().out
    assert "more on disk" in said
    assert "more on the device" in said


def test_a_place_that_settings_do_not_go_with_is_refused(tmp_path, capsys):
    status, rows = table(tmp_path, "quickstart", *ASKED, "--optim.kind", "muon", "--host", "64GiB", "--disk", "1TiB")
    assert status == 0
    assert [bool(row["refusal"]) for row in rows] == [False] + [True] * 5
    assert 'does not go with optim.kind = "muon"' in capsys.readouterr().out
    with pytest.raises(UsageError, match="leave it out"):
        cli.COMMANDS["plan"](["quickstart", *ASKED, "--host.optimizer"])
    with pytest.raises(UsageError, match="the remat that saves least"):
        cli.COMMANDS["plan"](["quickstart", *ASKED, "--model.remat", "none"])


def test_a_larger_window_takes_more_of_host_and_device(tmp_path, capsys):
    """Buffers of eight layers, instead of four, in the host's memory; eight on their way from the device."""
    (_, four), (_, eight) = (table(tmp_path, "llama3_8b", *ASKED, "--disk.window", n) for n in ("4", "8"))
    assert "8.03 B parameters" in capsys.readouterr().out
    layer = (8.03e9 - 2 * 128256 * 4096) / 32 / 8 * 4  # bytes of a layer's parameters on a device
    more = [
        {tier: b["bytes"][tier] - a["bytes"][tier] for tier in b["bytes"]} for a, b in zip(four, eight, strict=True)
    ]
    assert more[0] == more[1] == more[2] == {"device": 0, "host": 0, "disk": 0}
    assert more[3]["host"] == pytest.approx(4 * 2 * layer, rel=1e-3)
    assert more[4]["host"] == pytest.approx(4 * 3 * layer, rel=1e-3)
    assert more[4]["device"] == more[5]["device"] == pytest.approx(4 * 3 * layer, rel=1e-3)


def test_bytes_of_a_small_transformer_by_hand():
    """Two layers of width 4: 384 parameters; two rows of three tokens, one head."""
    model = transformer_bytes(2, 4, 1, rows=2, length=3)
    assert model[:3] == (768, 768, 16 * 384)
    assert model.activations == 2 * 6 * 4 * 2
    assert model.working == 16 * 16 + 6 * (16 * 4 + 2 * 3)
    split = published_capacity.ZERO_PLACEMENTS["ZeRO-Offload"]
    assert placed(model, split, 2) == TierBytes(model.working + 768 + 96, (768 + 6144) / 2, 0)


def test_published_claims_are_listed():
    shown = published_capacity.table().splitlines()
    assert len(shown) == 2 + len(published_capacity.CLAIMS)
    assert not any("| NO |" in line for line in shown)
