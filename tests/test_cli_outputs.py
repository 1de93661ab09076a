"""Files that commands write at their end: refused before the work, in directories that are made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jaxllm import cli
from jaxllm.cli.command_parser import check_outputs

COMMANDS = {
    "compile quickstart --on v6e:2x2": ["--html", "--save"],
    "plan quickstart --on v6e:2x2": ["--save", "--json"],
    "plan quickstart --on v6e:2x2 --explain 1": ["--html"],
    "plan quickstart --on v6e:2x2 --capacity": ["--json"],
    "plan quickstart --serve --trace poisson:4": ["--json"],
    "simulate quickstart --on v6e:1": ["--html", "--json"],
    "roofline quickstart --on v6e:2x2 --phase decode": ["--html", "--save"],
    "tune matmul": ["--save"],
    "bench quickstart": ["--record", "--tiers"],
    "bench serve --url http://localhost:1": ["--json"],
    "bench --links": ["--out"],
}
"""Options of output files by the command that has them."""
CASES = [(command, option) for command, options in COMMANDS.items() for option in options]


@pytest.mark.parametrize(("command", "option"), CASES)
def test_what_cannot_be_written_is_refused_before_the_work(
    command: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Below something that is a file, and where a directory is: the option, the path, and what to give."""
    (tmp_path / "file").write_text("")
    assert cli.main([*command.split(), option, str(tmp_path / "file" / "out")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith(f"error: {option} {tmp_path / 'file' / 'out'}: no file can be made in {tmp_path / 'file'} (")
    assert said.endswith("; give another path.")
    assert cli.main([*command.split(), option, str(tmp_path)]) == 2
    assert f"{option} {tmp_path} is a directory; give the path of a file." in capsys.readouterr().err


def test_the_disk_to_measure_is_checked_too(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Before the model is opened."""
    (tmp_path / "file").write_text("")
    command = ["bench", "quickstart", "--tiers", str(tmp_path / "rates.json"), "--tiers-disk", str(tmp_path / "file")]
    assert cli.main(command) == 2
    assert re.match(f"error: --tiers-disk {tmp_path / 'file'}: no file can be made in ", capsys.readouterr().err)


def test_directories_are_made(tmp_path: Path) -> None:
    """With parents; a file that is there stays, and nothing else is."""
    old = tmp_path / "old.json"
    old.write_text("1")
    check_outputs(json=tmp_path / "a" / "b" / "figures.json", html=None, save=old)
    assert sorted(tmp_path.rglob("*")) == sorted([tmp_path / "a", tmp_path / "a" / "b", old])
    assert old.read_text() == "1"
