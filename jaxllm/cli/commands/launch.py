"""The command ``launch``: processes of this machine under a supervisor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import tyro

from jaxllm.cli.command_table import COMMANDS
from jaxllm.cli.errors import UsageError
from jaxllm.parallel.supervisor import Patience, Process, Supervisor, local

USAGE = """usage: jaxllm launch local -n 4 [...] -- train RECIPE ...     processes on this machine
       jaxllm launch supervise [...] -- train RECIPE ...      one process, in the place that a scheduler gave it

What comes after -- is a command of jaxllm, or any program. `jaxllm launch local --help` lists the options."""


def launch(argv: list[str]) -> int:
    """Start processes under a supervisor that restarts them: `jaxllm launch local -n 4 -- train RECIPE`."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    kind, rest = argv[0], argv[1:]
    if kind not in ("local", "supervise"):
        raise UsageError(f"launch {kind!r} is neither local nor supervise.\n{USAGE}")
    cut = rest.index("--") if "--" in rest else len(rest)
    options, words = rest[:cut], rest[cut + 1 :]

    def command() -> tuple[str, ...]:
        if not words:
            raise UsageError(f"nothing to run: write it after --.\n{USAGE}")
        # -P: what lies in the directory it is started in plays no part.
        return (sys.executable, "-P", "-m", "jaxllm.cli", *words) if words[0] in COMMANDS else tuple(words)

    def run_local(
        processes: int,
        devices: int = 0,
        logs: Path = Path("runs/logs"),
        patience: Patience = Patience(),  # noqa: B008 - frozen
        dry_run: bool = False,
    ) -> int:
        """Several processes of this machine that find each other; process 0 speaks, the others write logs.

        When one is lost all are started again and go on from the newest checkpoint. A mistake of the user's is not
        repeated; SIGTERM, Ctrl-C and SIGUSR2 are passed on.

        Args:
            processes: how many; also -n.
            devices: of each: CPU devices where JAX_PLATFORMS=cpu, else its share of the accelerators; 0: as jax finds.
            logs: what process 1 and the further ones say goes here.
            patience: how often and how soon to start again.
            dry_run: prints what would be run.
        """
        words = command()
        return supervise(lambda: local(words, processes, devices=devices, logs=logs), patience, dry_run)

    def run_one(patience: Patience = Patience(), dry_run: bool = False) -> int:  # noqa: B008 - frozen
        """One process that is started again when it fails; a scheduler has said which of several it is.

        Args:
            patience: how often and how soon to start again.
            dry_run: prints what would be run.
        """
        words = command()
        return supervise(lambda: [Process(words)], patience, dry_run)

    options = [f"--processes{word[2:]}" if word.split("=")[0] == "-n" else word for word in options]
    return tyro.cli(run_local if kind == "local" else run_one, args=options, prog=f"jaxllm launch {kind}")


def supervise(make: Callable[[], Sequence[Process]], patience: Patience, dry_run: bool) -> int:
    """Runs, or prints what would be run."""
    if dry_run:
        for process in make():
            print(process)
        return 0
    return Supervisor(make, patience).run()
