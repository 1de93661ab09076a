"""`jaxllm compile`: reports for absent devices."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from jaxllm import cli
from jaxllm.compiler.aot import CompileReport
from sharding.isolate import IsolatedError, OutOfDeviceMemory
from tests.compiler.test_aot import REPORT

SMALL = ("--model.layers", "2", "--model.embed-dim", "64", "--data.seq-len", "32", "--data.batch-size", "8")


@pytest.mark.drawn(0.3)
def test_a_report_is_printed_and_saved(tmp_path, capsys):
    saved, shown = tmp_path / "report.json", tmp_path / "report.html"
    argv = ["compile", "quickstart", "--on", "cpu:4", "--mesh", "fsdp=4", "--save", str(saved), "--html", str(shown)]
    assert cli.main([*argv, *SMALL]) == 0
    said = capsys.readouterr().out
    report = CompileReport.from_json(json.loads(saved.read_text()))
    assert report.num_devices == 4
    assert "all-gather" in {row.kind for row in report.collectives}
    assert str(report) in said
    assert report.argument_bytes > 0
    assert {"saved for the backward pass", "fsdp"} <= set(re.findall(r"<td>([^<]*)</td>", shown.read_text()))


@pytest.mark.drawn(0.3)
def test_a_plans_page_has_the_bytes_of_both_tiers(tmp_path, capsys):
    """The most that the page draws in the host's memory is what the TPU compiler allocates there for four layers."""
    sizes = [*SMALL, "--model.layers", "4", "--data.seq-len", "128"]
    page, saved = tmp_path / "plan.html", tmp_path / "plan.json"
    argv = [
        "plan",
        "quickstart",
        "--on",
        "v6e:2x2",
        "--mesh",
        "fsdp=4",
        "--as-is",
        "--explain",
        "1",
        "--html",
        str(page),
    ]
    assert cli.main([*argv, "--json", str(saved), "--model.remat", "offload", *sizes]) == 0
    assert f"written: {page}" in capsys.readouterr().out
    (found,) = json.loads(saved.read_text())
    assert found["compiled"]["host_bytes"] > 0
    _, drawn = page.read_text().split("memory of the host over the schedule", 1)
    host = re.search(r"([\d.e-]+) GiB at", drawn)
    assert host is not None
    assert float(host[1]) == pytest.approx(found["compiled"]["host_bytes"] / 2**30, rel=0.01)


@pytest.mark.parametrize("left_out", ["--explain", "--compile"])
def test_a_page_is_of_a_compiled_layout(left_out, capsys):
    argv = ["plan", "quickstart", "--on", "v6e:2x2", "--html", "p.html"]
    more = {"--explain": [], "--compile": ["--explain", "1", "--no-compile"]}[left_out]
    assert cli.main([*argv, *more]) == 2
    assert "give --explain N, and compile" in capsys.readouterr().err


@pytest.mark.parametrize("anyway", [False, True])
def test_what_does_not_fit_is_a_table(anyway, monkeypatch, capsys):
    def run_isolated(target, on, arguments, *, progress, env=None):
        """The compiler, which with ``anyway`` may not finish a program."""
        if env is not None:
            raise IsolatedError("JaxRuntimeError: INVALID_ARGUMENT: Invalid TPU program.", "JaxRuntimeError")
        raise OutOfDeviceMemory(on, 40 * 2**30, 31 * 2**30)

    monkeypatch.setattr("jaxllm.train.compile_step.run_isolated", run_isolated)
    more = ["--anyway"] if anyway else []
    assert cli.main(["compile", "llama3_8b", "--on", "v6e:2x2", "--data.batch-size", "4", *more]) == 1
    said = capsys.readouterr().out
    sizes = {label: float(size) for label, size in re.findall(r"^  (\D+?) +([\d.]+)$", said, re.MULTILINE)}
    assert sizes["parameters"] == pytest.approx(8.03e9 * 4 / 4 / 2**30, rel=1e-3)
    assert sizes["optimizer's state"] == pytest.approx(2 * sizes["parameters"], rel=1e-3)
    *parts, needed, there, over = sizes.values()
    assert sum(parts) == pytest.approx(needed, abs=0.01)
    assert (needed, there, over) == (40, 31, 9)
    assert "--accumulate" in said
    assert ("not finish" if anyway else "--anyway lists") in said


@pytest.mark.drawn(3)
@pytest.mark.parametrize("over", [0, 2**30])
def test_a_budget_chooses_what_of_the_optimizer_state_stays(monkeypatch, capsys, over):
    """The small state has room on the device, as compiled too: the largest share is taken; or not as compiled."""
    asked: list[float] = []

    def compile_for(config, on, **_):
        asked.append(config.host.persistent)
        sizes = dict.fromkeys(("output_bytes", "alias_bytes", "temp_bytes", "code_bytes"), 0)
        more = over if config.host.persistent else 0
        return dataclasses.replace(REPORT, topology=on, argument_bytes=2**31 + more, **sizes)

    monkeypatch.setattr("jaxllm.train.compile_step.compile_for", compile_for)
    words = ["quickstart", "--on", "v5e:2x2", "--mesh", "fsdp=4", "--host.optimizer", *SMALL]
    assert cli.main(["compile", *words, "--within", "2.5", "--host", "1"]) == 0
    rows = re.findall(r"^(0\S*) .* chosen *$", capsys.readouterr().out, re.MULTILINE)
    assert rows == ["0" if over else "0.9375"]
    assert asked[-1] == float(rows[0])
    assert asked[0] == 0
    assert len(set(asked)) == (4 if over else 2), "three shares at most are compiled"


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["quickstart", "--on", "v6e:3x3"], "The nearest: v6e:2x4"),
        (["quickstart", "--on", "v9:2x2"], "unknown topology"),
        (["quickstar", "--on", "v6e:2x2"], "Did you mean 'quickstart'?"),
        (["quickstart", "--on", "cpu:8", "--mesh", "tensor=7"], "The nearest meshes of 8 devices that this model and"),
    ],
)
def test_mistakes_say_what_is_legal(argv, says, capsys):
    assert cli.main(["compile", *argv]) == 2
    assert says in capsys.readouterr().err
