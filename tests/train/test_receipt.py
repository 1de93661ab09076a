"""Receipts: a repeated run gives equal bits, and a modified receipt is refused."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from jaxllm import cli
from jaxllm.config import ConfigError
from jaxllm.train.records.receipt import (
    ReceiptError,
    compare_receipts,
    git_commit,
    read_receipt,
    reproduction_config,
    versions,
)
from tests import environment


@pytest.fixture
def receipt(finished: Path) -> dict[str, Any]:
    return read_receipt(finished / "runs" / "tiny" / "receipt.json")


def changed(receipt: dict[str, Any], *path: str, to: Any) -> dict[str, Any]:
    other = copy.deepcopy(receipt)
    inner = other
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return other


@pytest.mark.drawn(0.3)
def test_reproduce_gives_equal_bits(finished, tmp_path, capsys):
    file = finished / "runs" / "tiny" / "receipt.json"
    assert cli.main(["reproduce", str(file), "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "reproduced" in said
    assert "NOT" not in said
    assert said.count("equal to the last bit") == 3
    again = read_receipt(tmp_path / "tiny" / "receipt.json")
    assert again["result"] == read_receipt(file)["result"]


def test_a_tampered_result_is_not_reproduced(finished, receipt, tmp_path, capsys, monkeypatch):
    """By one part in 10^12; instead of training again, the run itself is compared."""
    tampered = changed(receipt, "result", "nll", to=receipt["result"]["nll"] * (1 + 1e-12))
    (tmp_path / "receipt.json").write_text(json.dumps(tampered))
    monkeypatch.setattr("jaxllm.train.train", fake_training(finished))
    assert cli.main(["reproduce", str(tmp_path / "receipt.json"), "--out", str(tmp_path / "out")]) == 1
    assert "NOT reproduced" in capsys.readouterr().out


def fake_training(finished: Path) -> Any:
    from jaxllm.train import TrainResult

    return lambda config: TrainResult(finished / "runs" / "tiny", 12, True, None, None)


def test_equal_surroundings_must_give_equal_bits(receipt):
    assert compare_receipts(receipt, receipt)[0]
    for key in ("nll", "heldout_nll", "heldout_bits_per_byte"):
        near = changed(receipt, "result", key, to=math.nextafter(receipt["result"][key], 9))
        good, text = compare_receipts(receipt, near)
        assert not good
        assert f"{key}: {receipt['result'][key]!r} then, {near['result'][key]!r} now" in text


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("commit",), "0" * 40),
        (("versions", "jax"), "0.0.1"),
        (("device", "count"), 4),
        (("device", "kind"), "TPU v6 lite"),
        (("config", "mesh"), "fsdp"),
    ],
)
def test_other_surroundings_allow_a_per_cent_and_are_named(path, value, receipt):
    other = changed(receipt, *path, to=value)
    nll = receipt["result"]["nll"]
    good, text = compare_receipts(receipt, changed(other, "result", "nll", to=nll * 1.009))
    assert good
    assert str(value) in text
    assert path[0 if path[0] != "config" else 1] in text
    assert not compare_receipts(receipt, changed(other, "result", "nll", to=nll * 1.011))[0]


@pytest.mark.parametrize("key", ["config_hash", "data_hash"])
def test_other_work_is_no_reproduction_whatever_its_result(key, receipt):
    good, text = compare_receipts(receipt, changed(receipt, key, to="another"))
    assert not good
    assert key in text


@pytest.mark.parametrize("result", [{}, {"steps": 12}, {"nll": math.nan}, {"nll": 1.0}])
def test_a_receipt_without_figures_proves_nothing(result, receipt):
    assert not compare_receipts(changed(receipt, "result", to=result), receipt)[0]


def test_figures_that_are_missing_or_nan_now_are_not_reproduced(receipt):
    assert not compare_receipts(receipt, changed(receipt, "result", to={"nll": receipt["result"]["nll"]}))[0]
    assert not compare_receipts(receipt, changed(receipt, "result", "nll", to=math.nan))[0]


def test_a_changed_configuration_is_refused_before_it_is_trained(receipt, tmp_path):
    touched = changed(receipt, "config", "optim", "b2", to=0.9)
    with pytest.raises(ReceiptError, match=f"its config_hash is {receipt['config_hash']}"):
        reproduction_config(touched, tmp_path)
    with pytest.raises(ConfigError, match=r"unknown key 'stepz'. Did you mean 'steps'\?"):
        reproduction_config(changed(receipt, "config", "stepz", to=3), tmp_path)
    # Where it ran and how often it logged does not matter.
    elsewhere = changed(changed(receipt, "config", "out", to="elsewhere"), "config", "log_every", to=99)
    assert reproduction_config(elsewhere, tmp_path).out == str(tmp_path)


def test_a_run_that_is_there_is_not_gone_on_with(receipt, tmp_path):
    (tmp_path / "tiny").mkdir()
    with pytest.raises(ReceiptError, match="exists; choose another --out"):
        reproduction_config(receipt, tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no .*receipt.json"),
        (b"{", "cannot be read as a receipt"),
        (b"\xff\xfe", "cannot be read as a receipt"),
        (b"[]", "is not a receipt: it has no commit"),
        (b'{"commit": null, "versions": {}}', "it has no device, config, config_hash, data_hash, result"),
    ],
)
def test_files_that_are_no_receipts(content, words, tmp_path):
    file = tmp_path / "receipt.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ReceiptError, match=words):
        read_receipt(file)


def test_it_says_what_decides_the_last_bits(receipt):
    assert receipt["versions"] == versions()
    assert {"python", "jax", "jaxlib", "numpy"} <= versions().keys()
    head = environment.git("rev-parse", "HEAD")
    assert (git_commit() or "").startswith(head)
    assert receipt["device"] == {"kind": "cpu", "platform": "cpu", "count": environment.DEVICES}
