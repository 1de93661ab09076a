"""``jaxllm launch``: runs processes under a supervisor that restarts them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jaxllm.cli.command_parser import parse_command
from jaxllm.cli.command_table import COMMANDS
from jaxllm.cli.errors import UsageError
from jaxllm.parallel.elastic.elastic_supervisor import ElasticSupervisor
from jaxllm.parallel.elastic.membership import ElasticPolicy
from jaxllm.parallel.supervisor import ProcessSpec, RestartPolicy, Supervisor, local_processes

USAGE = """usage: jaxllm launch local -n 4 [...] -- train RECIPE ...     processes on this machine
       jaxllm launch supervise [...] -- train RECIPE ...      one process of a job that a scheduler has started

After -- comes a command of jaxllm, or any program. `jaxllm launch local --help` lists the options."""

WARM_MODULES = ("jaxllm.cli.recipe_arguments", "jaxllm.train.loop", "jaxllm.checkpoint.memory.memory_snapshots")
"""Modules that processes of an elastic run find imported when they start."""


def launch(argv: list[str]) -> int:
    """Launch processes and restart them: `jaxllm launch local -n 4 -- train RECIPE`."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    kind, rest = argv[0], argv[1:]
    if kind not in ("local", "supervise"):
        raise UsageError(f"unknown launcher {kind!r}; legal: local, supervise.\n{USAGE}")
    cut = rest.index("--") if "--" in rest else len(rest)
    options, words = rest[:cut], rest[cut + 1 :]

    def command() -> tuple[str, ...]:
        if not words:
            raise UsageError(f"no command to run; give it after --.\n{USAGE}")
        # -P: modules in the working directory must not shadow installed ones.
        return (sys.executable, "-P", "-m", "jaxllm.cli", *words) if words[0] in COMMANDS else tuple(words)

    def run_local(
        processes: int,
        devices: int = 0,
        logs: Path = Path("runs/logs"),
        patience: RestartPolicy = RestartPolicy(),  # noqa: B008 - frozen
        elastic: ElasticPolicy = ElasticPolicy(),  # noqa: B008 - frozen
        dry_run: bool = False,
    ) -> int:
        """Runs a distributed job of several processes on this machine; process 0 prints, the others write logs.

        If a process dies, all are restarted and resume from the last checkpoint; with `train RECIPE --elastic` the run
        goes on with the processes left. User errors are not retried. SIGTERM, Ctrl-C and SIGUSR2 are forwarded to the
        processes.

        Args:
            processes: number of processes; also -n.
            devices: devices per process: CPU devices with JAX_PLATFORMS=cpu, else accelerators; 0: jax decides.
            logs: directory for the logs of all processes but process 0.
            patience: number and delay of restarts.
            elastic: what counts as a failure of an elastic run, and how long a failed process stays out.
            dry_run: print the commands without running them.
        """
        if is_elastic(words) and not dry_run:

            def make(slots: Sequence[int], variables: Mapping[str, str]) -> list[ProcessSpec]:
                return local_processes(words, len(slots), devices=devices, logs=logs, slots=slots, variables=variables)

            entry = "jaxllm.cli.main:main"
            return ElasticSupervisor(make, processes, entry, WARM_MODULES, patience, elastic).run()
        words_of_one = command()
        return supervise(
            lambda: local_processes(words_of_one, processes, devices=devices, logs=logs), patience, dry_run
        )

    def run_one(patience: RestartPolicy = RestartPolicy(), dry_run: bool = False) -> int:  # noqa: B008 - frozen
        """Runs one process of a distributed job and restarts it when it fails; the scheduler's environment names it.

        Args:
            patience: number and delay of restarts.
            dry_run: print the command without running it.
        """
        if is_elastic(words):
            raise UsageError(
                "--elastic needs one supervisor for all processes: `jaxllm launch local`. Leave it out here; then all "
                "processes restart when one is lost."
            )
        one = command()
        return supervise(lambda: [ProcessSpec(one)], patience, dry_run)

    options = [f"--processes{word[2:]}" if word.split("=")[0] == "-n" else word for word in options]
    return parse_command(run_local if kind == "local" else run_one, options, f"jaxllm launch {kind}")


def is_elastic(words: Sequence[str]) -> bool:
    """Whether a command trains an elastic run."""
    return words[:1] == ["train"] and any(word.partition("=")[0] == "--elastic" for word in words)


def supervise(make: Callable[[], Sequence[ProcessSpec]], patience: RestartPolicy, dry_run: bool) -> int:
    """Runs processes under a supervisor and returns the exit status; a dry run prints them."""
    if dry_run:
        for process in make():
            print(process)
        return 0
    return Supervisor(make, patience).run()
