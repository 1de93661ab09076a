"""``jaxllm launch``: runs processes under a supervisor that restarts them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jaxllm.cli.command_parser import parse_command
from jaxllm.cli.command_table import COMMANDS
from jaxllm.cli.errors import UsageError
from jaxllm.parallel.cluster_environment import ClusterError, detect, tpu_metadata
from jaxllm.parallel.elastic.elastic_supervisor import ElasticSupervisor
from jaxllm.parallel.elastic.host_agent import HostAgent
from jaxllm.parallel.elastic.membership import ElasticPolicy
from jaxllm.parallel.elastic.process_starts import HostStarts, LocalStarts
from jaxllm.parallel.supervisor import ProcessSpec, RestartPolicy, Supervisor, local_processes, process_variables

USAGE = """usage: jaxllm launch local -n 4 [...] -- train RECIPE ...     processes on this machine
       jaxllm launch supervise [...] -- train RECIPE ...      one process of a job that a scheduler has started,
                                                              on each of its hosts

After -- comes a command of jaxllm, or any program. `jaxllm launch local --help` lists the options."""

ENTRY = "jaxllm.cli.main:main"
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
            slots = processes + elastic.spares
            check_excluded(elastic, slots)

            def make(slots: Sequence[int], coordinator: str, variables: Mapping[str, str]) -> list[ProcessSpec]:
                places = {"slots": slots, "coordinator": coordinator, "variables": variables}
                return local_processes(words, len(slots), devices=devices, logs=logs, **places)

            own = local_processes(words, 1, devices=devices)[0].environment
            shared = {name: value for name, value in own.items() if not name.startswith("JAXLLM_")}
            starts = LocalStarts(slots, ENTRY, WARM_MODULES, shared)
            return ElasticSupervisor(make, slots, starts, patience=patience, policy=elastic).run()
        check_unused(elastic)
        words_of_one = command()
        return supervise(
            lambda: local_processes(words_of_one, processes, devices=devices, logs=logs), patience, dry_run
        )

    def run_one(
        patience: RestartPolicy = RestartPolicy(),  # noqa: B008 - frozen
        elastic: ElasticPolicy = ElasticPolicy(),  # noqa: B008 - frozen
        dry_run: bool = False,
    ) -> int:
        """Runs one process of a distributed job and restarts it when it fails; the scheduler's environment names it.

        With `train RECIPE --elastic` the first host supervises all others: the run goes on with the hosts left.

        Args:
            patience: number and delay of restarts.
            elastic: what counts as a failure of an elastic run, which hosts are held or excluded, and how long a failed
                one stays out.
            dry_run: print the command without running it.
        """
        if is_elastic(words) and not dry_run:
            return run_elastic_host(words, patience, elastic)
        check_unused(elastic)
        one = command()
        return supervise(lambda: [ProcessSpec(one)], patience, dry_run)

    def check_unused(policy: ElasticPolicy) -> None:
        if policy != ElasticPolicy() and not is_elastic(words):
            raise UsageError(
                "--elastic.* are options of elastic runs, and this command is none: after -- give `train RECIPE "
                "--elastic`, or leave them out; then all processes restart when one is lost."
            )

    options = [f"--processes{word[2:]}" if word.split("=")[0] == "-n" else word for word in options]
    return parse_command(run_local if kind == "local" else run_one, options, f"jaxllm launch {kind}")


def run_elastic_host(words: Sequence[str], patience: RestartPolicy, policy: ElasticPolicy) -> int:
    """Runs one host of an elastic run over several: the first supervises all, the others start what it asks for.

    Raises:
        UsageError: the environment describes no job of several processes, or too few for the policy.
    """
    try:
        cluster = detect(os.environ, tpu_metadata)
    except ClusterError as error:
        raise UsageError(str(error)) from error
    if cluster.processes == 1:
        raise UsageError(
            "--elastic under `jaxllm launch supervise` needs a job of several hosts, and the environment describes one "
            "process (docs/train/distributed.md). For the processes of one machine: `jaxllm launch local -n PROCESSES`."
        )
    host, _, port = cluster.coordinator.rpartition(":")
    address = host, int(port)
    if cluster.rank:
        return HostAgent(address, cluster.rank, ENTRY, WARM_MODULES, policy.gather, say).run()
    check_excluded(policy, cluster.processes)

    def make(slots: Sequence[int], coordinator: str, variables: Mapping[str, str]) -> list[ProcessSpec]:
        own = [process_variables(rank, len(slots), coordinator) for rank in range(len(slots))]
        return [ProcessSpec(tuple(words), {**variables, **one}) for one in own]

    try:
        starts = HostStarts(cluster.processes, address, ENTRY, WARM_MODULES)
    except OSError as error:
        raise UsageError(
            f"--elastic: the first host cannot listen for the others at port {port} ({error}); name a free port of it, "
            "as the scheduler's variables do (docs/train/distributed.md)."
        ) from error
    return ElasticSupervisor(make, cluster.processes, starts, host, patience, policy, say).run()


def check_excluded(policy: ElasticPolicy, slots: int) -> None:
    """Refuses a policy that leaves no slot.

    Raises:
        UsageError: names what is wrong.
    """
    wrong = [word for word in policy.excluded if word.isdecimal() and int(word) >= slots]
    if wrong:
        raise UsageError(f"--elastic.exclude: no slot is called {wrong[0]}; the slots are 0 to {slots - 1}.")
    left = slots - len(set(policy.excluded))
    if left < max(policy.least, 1) or policy.spares >= slots:
        raise UsageError(
            f"--elastic.spares {policy.spares} and --elastic.exclude {policy.exclude or 'nobody'} leave too few of "
            f"{slots} slots for a run of {policy.least} or more processes (--elastic.least)."
        )


def say(text: str) -> None:
    """Prints a line for the user."""
    print(f"launch: {text}", file=sys.stderr, flush=True)


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
