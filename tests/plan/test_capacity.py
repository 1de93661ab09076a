"""Capacity tables: `jaxllm plan --capacity`, and the refusals of runs that a place does not go with."""

from __future__ import annotations

import json

import pytest

from benchmarks.memory import published_capacity
from jaxllm import cli
from jaxllm.cli.errors import UsageError
from jaxllm.plan import capacity_table
from jaxllm.plan.formulas.tier_bytes import TierBytes, placed, transformer_bytes
from jaxllm.train.compile_step import StepMemory
from tests import environment

LLAMA = f"{environment.ROOT / 'recipes' / 'llama2.py'}:llama2_7b"
GPU = ("--capacity", "--on", "rtx4090:1x1", "--host", "59GiB", "--disk", "200GiB")
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


def test_bytes_of_a_place_by_kind(tmp_path, capsys):
    """Llama 2 7B streamed on one GPU by hand, in float32: three layers run, two leave, two are in the host's memory."""
    status, rows = table(tmp_path, LLAMA, *GPU, "--explain", "5")
    assert status == 0
    assert [row["fits"] for row in rows] == [False] * 4 + [True, True]
    assert [row["window"] for row in rows] == [4] * 4 + [2, 2]
    layer = 4 * (4 * 4096**2 + 3 * 4096 * 11_008 + 2 * 4096)
    ends, hidden = 4 * (2 * 32_000 * 4096 + 4096), 2 * 2048 * 4096
    kinds = rows[4]["kinds"]
    assert kinds["parameters"] == {
        "device": ends + 5 * layer, "host": 2 * layer, "disk": 2 * 32 * layer
    }  # fmt: skip
    assert kinds["gradients"] == {"device": ends + 3 * layer, "host": 0, "disk": 0}
    assert kinds["optimizer state"] == {
        "device": 4 * ends + 10 * layer, "host": 4 * layer + 2 * ends, "disk": 4 * (32 * layer + ends)
    }  # fmt: skip
    assert kinds["activations"] == {"device": 12 * hidden, "host": 32 * 8 * hidden, "disk": 0}
    for tier, size in rows[4]["bytes"].items():
        assert sum(kind[tier] for kind in kinds.values()) == pytest.approx(size)
    assert rows[4]["compiled"] is None
    shown = capsys.readouterr().out
    assert "fits with --disk.window 2" in shown
    assert f"{(ends + 3 * layer) / 2**30:.2f}" in shown
    with pytest.raises(UsageError, match="the number of a place, 1 to 6"):
        cli.COMMANDS["plan"]([LLAMA, *GPU, "--explain", "7"])


@pytest.mark.drawn(2)
def test_7b_is_fine_tuned_on_a_gpu_of_24_gb(tmp_path, capsys):
    """Its programs as compiled for a GPU: AdamW with a disk, and Adafactor with no more than the host's memory."""
    status, rows = table(tmp_path, LLAMA, *GPU, "--compile")
    assert status == 0
    (found,) = [row for row in rows if row["compiled"] is not None]
    took = found["compiled"]
    assert (found["parameters"], found["optimizer"], found["activations"]) == ("disk", "disk", "host")
    assert took["device"] <= 24e9
    assert took["host"] <= 64e9
    assert took["device"] == pytest.approx(found["bytes"]["device"], rel=0.05)
    assert took["host"] == pytest.approx(found["bytes"]["host"], rel=1e-3)
    assert {"embed", "forward 0", "head", "backward 0", "update 0", "ends"} < set(took["programs"])
    assert max(took["programs"].values()) < took["device"]
    assert "compiled for h100:1x1: no compiler has rtx4090 without one" in capsys.readouterr().out
    asked = ["--compile", "--optim.kind", "adafactor", "--host", "10GiB", "--disk", "49GiB"]
    status, rows = table(tmp_path, LLAMA, *GPU[:3], *asked)
    assert status == 0
    (found,) = [row["compiled"] for row in rows if row["compiled"] is not None]
    assert found["host"] + found["disk"] <= 64e9, "files in a file system of the host's memory"
    assert found["device"] <= 24e9


@pytest.mark.drawn(3)
def test_each_place_is_compiled_where_a_compiler_takes_it(tmp_path, capsys):
    asked = ("quickstart", *GPU, "--data.batch-size", "4", "--data.seq-len", "128", "--compile")
    for number, programs in ((1, {"step"}), (4, {"gradients", "updates", "updates 0", "puts 0", "finish"})):
        status, rows = table(tmp_path, *asked, "--explain", str(number))
        assert status == 0
        compiled = rows[number - 1]["compiled"]
        assert set(compiled["programs"]) == programs
        assert 0 < compiled["temporaries"] < compiled["device"]
    capsys.readouterr()
    status, rows = table(tmp_path, *asked, "--explain", "2")
    assert status == 1
    assert "takes only where there is a GPU" in capsys.readouterr().out


def test_places_are_compiled_until_one_fits(tmp_path, monkeypatch, capsys):
    seen = []

    def memory(run, on, progress):
        seen.append((run.disk.activations, on))
        return StepMemory((40 if not run.disk.activations else 20) << 30, 0, 1 << 30, {"a": 1, "b": 2})

    monkeypatch.setattr(capacity_table, "step_memory_for", memory)
    status, rows = table(tmp_path, LLAMA, *GPU, "--compile")
    assert seen == [(False, "h100:1x1"), (True, "h100:1x1")]
    assert status == 0
    said = capsys.readouterr().out
    assert "as compiled it needs 18.3 more on the device" in said
    assert "each program by itself" in said
    assert rows[4]["compiled"]["device"] == 40 << 30
    status, _ = table(tmp_path, LLAMA, *GPU, "--compile", "--explain", "5")
    assert status == 1


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
