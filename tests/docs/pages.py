"""Runs the code blocks of a page in order: python in one namespace, bash line by line, titled blocks as files.

python -m tests.docs.pages PAGE    in the current directory
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"^```(python|bash)(?: title=\"([\w./]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """(language, title, text) of each block that can be run."""
    return [(found[1], found[2] or "", found[3]) for found in BLOCK.finditer(page.read_text())]


def run(page: Path) -> int:
    """Runs them; returns how many. A command that fails ends it."""
    from jaxllm import cli

    space: dict[str, Any] = {"__name__": "__main__"}
    for number, (language, title, text) in enumerate(blocks(page), 1):
        if title:
            Path(title).write_text(text)
        elif language == "python":
            exec(compile(text, f"{page.name}, block {number}", "exec"), space)
        else:
            for line in filter(None, (line.split("  #")[0].strip() for line in text.splitlines())):
                program, *words = shlex.split(line)
                assert program == "jaxllm", f"{page.name}: {line}: only jaxllm's commands are run"
                print(f"$ {line}", flush=True)
                assert cli.main(words) == 0, f"{page.name}: {line}"
    return len(blocks(page))


if __name__ == "__main__":
    print(f"{run(Path(sys.argv[1]))} blocks")
