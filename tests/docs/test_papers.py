"""Table of papers: every row's module names the paper, its test exists, its command is valid."""

from __future__ import annotations

import re
import shlex

import pytest

from jaxllm import cli
from tests.docs.papers import FOLDER, page, papers
from tests.environment import ROOT

PAPERS = papers()


def test_the_page_is_the_table():
    """`python -m tests.docs.papers` writes it."""
    assert (FOLDER / "papers.md").read_text() == page()
    assert len({(row.paper, row.name) for row in PAPERS}) == len(PAPERS) > 50


def test_the_page_says_what_is_missing():
    partial = [line for line in page().splitlines() if "**in part**, missing: " in line]
    assert len(partial) == sum(bool(row.missing) for row in PAPERS)
    for name in (
        "Galvatron",
        "vTrain",
        "Moccasin",
        "MEMO",
        "PipeOffload",
        "LLM-Viewer",
        "S3",
        "BatchLLM",
    ):
        assert any(f" {name}" in line or f"({name}" in line for line in partial), name


@pytest.mark.parametrize("row", PAPERS, ids=lambda row: row.paper)
def test_a_row_is_true(row):
    assert row.paper in (ROOT / row.module).read_text(), f"{row.module} does not name arXiv:{row.paper}"
    assert re.search(r"^(async )?def \w+|^@pytest", (ROOT / row.test).read_text(), re.MULTILINE)
    program, *words = shlex.split(row.command)
    if program == "pytest":
        assert words == [row.test]
    elif program == "make":
        target, issue, *only = words
        assert target == "proof"
        proofs = "".join(file.read_text() for file in (ROOT / "tests/proofs" / issue).glob("*.py"))
        assert "@proof(" in proofs, row.command
        assert all(f"def {one.removeprefix('ONLY=')}(" in proofs for one in only), row.command
    else:
        assert program == "jaxllm", row.command
        assert words[0] in cli.COMMANDS, row.command


TRAINED = sorted({row.command for row in PAPERS if row.command.startswith("jaxllm train")})


@pytest.mark.parametrize("command", TRAINED)
def test_commands_that_train_name_settings_that_exist(command):
    """A setting without effect would make the row a lie: it is another configuration than without."""
    from recipes.quickstart import quickstart

    _, _, recipe, *settings = shlex.split(command)
    assert recipe == "quickstart"
    run = cli.configure(quickstart, settings, prog="jaxllm train")
    field, value = settings[0].removeprefix("--").split("."), settings[1]
    here = run
    for name in field:
        here = getattr(here, name.replace("-", "_"))
    assert here == value
