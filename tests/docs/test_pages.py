"""Pages whose blocks proofs run, README.md and docs/commands.md contain only code that can run."""

from __future__ import annotations

import ast
import importlib
import re

import pytest

from jaxllm import cli
from tests.docs.pages import blocks
from tests.docs.readme import ADDED, COMMANDS, ELSEWHERE, printed
from tests.environment import ROOT
from tests.proofs.front.pages import PAGES


@pytest.mark.parametrize("page", [ROOT / "docs/commands.md", *PAGES], ids=lambda page: page.name)
def test_python_that_is_printed_parses_and_finds_what_it_imports(page):
    found = [text for language, _, text in blocks(page) if language == "python"]
    assert found or page.name == "tutorial.md"
    for text in found:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module or "")
                for alias in node.names:
                    assert hasattr(module, alias.name) or importlib.import_module(f"{node.module}.{alias.name}")


def test_every_command_of_the_readme_is_tried_somewhere():
    assert len(COMMANDS) > 10
    for command in printed():
        assert command in COMMANDS or any(command.startswith(start) for start in ELSEWHERE), command
        if command.startswith("jaxllm"):
            assert command.split()[1] in cli.COMMANDS
    for start in [*ADDED, *ELSEWHERE]:
        assert any(command.startswith(start) for command in [*printed(), *COMMANDS]), f"{start}: not printed any more"


def test_the_tutorial_goes_through_the_commands():
    text = (ROOT / "docs/tutorial.md").read_text()
    assert {"train", "report", "eval", "generate", "compare", "shard", "plan", "inspect", "convert"} <= set(
        re.findall(r"^jaxllm (\w+)", text, re.MULTILINE)
    )


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 900
    assert "![" in text[: text.index("## ")], "a picture before the first heading"
