"""Entry point of the ``jaxllm`` command: looks up the subcommand in the table and runs it."""

from __future__ import annotations

import importlib.metadata
import sys

from jaxllm.cli.command_table import COMMANDS
from jaxllm.cli.errors import guarded
from jaxllm.cli.option_synonyms import check_option_names
from jaxllm.cli.runtime import end_process
from jaxllm.config import closest


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns the exit status; without ``argv``, the process's own, which it may end."""
    if argv is None:
        return end_process(main(sys.argv[1:]))
    if not argv or argv[0] in ("-h", "--help"):
        print(overview())
        return 0
    name, rest = argv[0], argv[1:]
    if name == "--version":
        print(importlib.metadata.version("jaxllm"))
        return 0
    if name not in COMMANDS:
        print(f"jaxllm: no command {name!r}.{closest(name, COMMANDS)}\n\n{overview()}", file=sys.stderr)
        return 2

    def run() -> int:
        check_option_names(name, rest)
        return COMMANDS[name](rest)

    return guarded(run)


def overview() -> str:
    """Text of ``jaxllm --help``."""
    lines = [
        "usage: jaxllm COMMAND ...",
        "",
        "Plan, train, adapt, compress and serve language models.",
        "",
        "commands:",
    ]
    lines += [f"  {name:10} {command.summary}" for name, command in COMMANDS.items()]
    lines += ["", "`jaxllm COMMAND --help` explains a command; `jaxllm train RECIPE --help` lists every setting."]
    return "\n".join(lines)
