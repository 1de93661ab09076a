"""Process group: several processes start together, agree on the run, and end together.

    with running(detect(os.environ), DistributedConfig()) as group:
        group.agree("the run", facts)      # before anything is compiled
        ...                                # every process runs the same program on its own devices

A single process starts nothing, and its group answers at once. Messages between processes go through the key-value
store of ``jax.distributed``, which runs in process 0; arrays never do.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm._compat import share_compiled_programs_of_cpus
from jaxllm.parallel.cluster_environment import ClusterEnvironment
from jaxllm.parallel.heartbeat import RESUME, Heartbeat

PATIENCE = 24 * 3600.0
"""Seconds to wait for a live process; when one vanishes, the heartbeat ends this process much earlier."""


class DistributedError(RuntimeError):
    """Processes that cannot run together; each of them raises it, and the message names the differences by process."""

    of_all = True  # every process raises it by itself, so none has to be told


class StoppedError(DistributedError):
    """A signal ended one process of a group; the others are told, and end as well.

    Args:
        what: what the process was doing, as in "while it loaded the model".
        number: the signal's.
    """

    of_all = False

    def __init__(self, what: str, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name} {what}.")
        self.code = 128 + number


@dataclass(frozen=True)
class DistributedConfig:
    """Timeouts between processes.

    Attributes:
        start_timeout: seconds for all processes to connect, and to send the facts of the run that must agree.
        lost_after: seconds without a heartbeat after which a process counts as lost, and the others end.
    """

    start_timeout: float = 300.0
    lost_after: float = 100.0

    def __post_init__(self) -> None:
        for name in ("start_timeout", "lost_after"):
            if getattr(self, name) < 1:
                raise ValueError(f"distributed.{name} = {getattr(self, name)}; give 1 second or more.")


class ProcessGroup:
    """Process group: host-side gather, broadcast and barrier of strings; a group of one process answers at once.

    Every process must make its calls under one topic in the same order.

    Attributes:
        rank: index of this process.
        size: number of processes.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None, patience: float = PATIENCE):
        self.rank, self.size = rank, size
        self._store, self._patience = store, patience
        self._turns: dict[str, int] = {}
        self._forgotten: dict[str, int] = {}

    @property
    def is_leader(self) -> bool:
        """Whether this is process 0, which logs and writes for all."""
        return self.rank == 0

    def gather(self, topic: str, text: str, timeout: float | None = None) -> list[str]:
        """Texts of all processes by rank, in process 0; the others get an empty list and do not wait.

        Raises:
            DistributedError: in process 0, after ``timeout`` seconds; names the processes that are missing.
        """
        if self.size == 1:
            return [text]
        key = self._key(topic)
        if not self.is_leader:
            self._store.key_value_set(f"{key}/{self.rank}", text)
            return []
        said, missing = [text], []
        for rank in range(1, self.size):
            # After the first timeout the other processes have had that time too: poll them without waiting again.
            limit = 1.0 if missing else self._patience if timeout is None else timeout
            answer = self._get(f"{key}/{rank}", limit)
            said.append(answer or "")
            if answer is None:
                missing.append(rank)
        if missing:
            raise DistributedError(
                f"{_processes(missing)} of {self.size} sent nothing about {topic} for {timeout or self._patience:g} s."
            )
        self._store.key_value_delete(f"{key}/")
        return said

    def broadcast(self, topic: str, text: str = "", timeout: float | None = None) -> str:
        """Text of process 0, in every process.

        Raises:
            DistributedError: process 0 sends nothing for ``timeout`` seconds.
        """
        if self.size == 1:
            return text
        key = self._key(topic)
        if self.is_leader:
            self._store.key_value_set(key, text)
            return text
        answer = self._get(key, self._patience if timeout is None else timeout)
        if answer is None:
            raise DistributedError(f"process 0 sent nothing about {topic} for {timeout or self._patience:g} s.")
        return answer

    def delete_broadcasts(self, topic: str, turns: int) -> None:
        """Frees, in process 0, the first ``turns`` broadcasts of a topic, which all processes have received."""
        for turn in range(self._forgotten.get(topic, 0) + 1, turns + 1):
            self._store.key_value_delete(f"jaxllm/{topic}/{turn}")
        self._forgotten[topic] = max(turns, self._forgotten.get(topic, 0))

    def post(self, topic: str, text: str) -> None:
        """Leaves a text that all processes can read (``posted``); it replaces this process's last one."""
        if self.size > 1:
            self._store.key_value_set(f"jaxllm/{topic}/{self.rank}", text, True)

    def posted(self, topic: str) -> dict[int, str]:
        """Last texts of the processes that have posted any, by rank; does not wait."""
        if self.size == 1:
            return {}
        found = self._store.key_value_dir_get(f"jaxllm/{topic}/")
        return {int(key.rsplit("/", 1)[1]): text for key, text in found}

    def barrier(self, topic: str) -> None:
        """Barrier: returns when all processes have called it."""
        self.gather(topic, "")
        self.broadcast(topic)

    def agree(self, topic: str, facts: Mapping[str, Any], timeout: float | None = None) -> None:
        """Checks that all processes give the same ``facts``; returns when they do.

        Args:
            facts: JSON values by name; their order does not matter.
            timeout: seconds.

        Raises:
            DistributedError: in every process; names each fact that differs with its value in each process. Also when
                a process does not answer in time.
        """
        if self.size == 1:
            return
        try:
            said = self.gather(topic, json.dumps(dict(facts), sort_keys=True), timeout)
            different = _differences([json.loads(text) for text in said]) if self.is_leader else ""
            verdict = f"the processes disagree about {topic}:{different}" if different else ""
        except DistributedError as error:
            verdict = str(error)
        # Process 0 also answers after its own timeout, so the others wait a little longer than it does.
        verdict = self.broadcast(topic, verdict, None if timeout is None else timeout + 10 + self.size)
        if verdict:
            raise DistributedError(verdict)

    def _key(self, topic: str) -> str:
        turn = self._turns[topic] = self._turns.get(topic, 0) + 1
        return f"jaxllm/{topic}/{turn}"

    def _get(self, key: str, timeout: float) -> str | None:
        """Value of ``key``; None after ``timeout`` seconds."""
        try:
            return self._store.blocking_key_value_get(key, int(timeout * 1000))
        except Exception as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise


_group = ProcessGroup()


def group() -> ProcessGroup:
    """Process group of this process; a group of one outside ``running``."""
    return _group


@contextlib.contextmanager
def running(
    cluster: ClusterEnvironment,
    config: DistributedConfig | None = None,
    *,
    plain: Callable[[BaseException], bool] | None = None,
    advice: str = RESUME,
) -> Iterator[ProcessGroup]:
    """Context manager: joins the process group for the time of the block. Enter it before a JAX backend starts.

    An exception inside ends the whole group: it is printed, the other processes are notified, and this process exits
    without waiting for them. When a process vanishes, the others end within ``config.lost_after`` seconds.

    Args:
        plain: whether an exception is a user error, which is printed without a stack trace.
        advice: what a user does after another process was lost.
    """
    global _group
    if cluster.processes == 1:
        yield _group
        return
    config = config or DistributedConfig()
    with Heartbeat(cluster, config.lost_after, advice) as watch:
        store = _join(cluster, config, watch)
        _group = ProcessGroup(cluster.rank, cluster.processes, store)
        watch.begin(store, socket.gethostname())
        try:
            yield _group
            # No process leaves before all are here: leaving would look like a lost process.
            store.wait_at_barrier("jaxllm/end", int(PATIENCE * 1000))
        except BaseException as error:
            watch.fail(error, plain is not None and plain(error))  # does not return
        finally:
            _group = ProcessGroup()
    import jax

    jax.distributed.shutdown()


def _join(cluster: ClusterEnvironment, config: DistributedConfig, watch: Heartbeat) -> Any:
    """Key-value store of ``jax.distributed``, which this starts."""
    import jax

    share_compiled_programs_of_cpus()
    if not os.environ.get("JAX_CPU_COLLECTIVES_IMPLEMENTATION"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # The SIGTERM handler of the preemption service would replace that of the training loop.
    jax.config.update("jax_enable_preemption_service", False)
    # At a timeout JAX aborts the process in C++ with a stack trace: our own message has to come first.
    late = threading.Timer(
        config.start_timeout,
        watch.end,
        [
            f"waited {config.start_timeout:g} s for all {cluster.processes} processes to come together at "
            f"{cluster.coordinator}, but not all did. Were they all started, and can they reach that address?"
        ],
    )
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            cluster.coordinator,
            cluster.processes,
            cluster.rank,
            local_device_ids=cluster.local_devices,
            cluster_detection_method="deactivate",
            initialization_timeout=int(config.start_timeout + 60),
            heartbeat_timeout_seconds=int(2 * config.lost_after + 60),
            shutdown_timeout_seconds=60,
        )
    finally:
        late.cancel()
    from jax._src.distributed import global_state  # JAX has no public name for it; Orbax uses this one too

    return global_state.client


def _differences(facts: list[dict[str, Any]]) -> str:
    """Differences by fact, as text; empty if there are none."""
    lines = []
    for name in dict.fromkeys(key for fact in facts for key in fact):
        holders: dict[str, list[int]] = {}
        for rank, fact in enumerate(facts):
            holders.setdefault(json.dumps(fact.get(name), sort_keys=True), []).append(rank)
        if len(holders) > 1:
            told = "; ".join(f"{value} in {_processes(ranks)}" for value, ranks in holders.items())
            lines.append(f"\n  {name}: {told}")
    return "".join(lines)


def _processes(ranks: list[int]) -> str:
    """``process 3``, ``processes 0-2, 5``."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    listed = ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
    return ("process " if len(ranks) == 1 else "processes ") + listed


class SynchronizedStop:
    """Synchronised stop: ends a loop at the same step in every process, whichever of them got a signal.

    The call of each step enqueues an all-reduce over all devices and reads the result of the step before, so the host
    never waits and all processes read the same value at the same step. (The preemption service of ``jax.distributed``
    agrees on a step too, but on SIGTERM alone, with a handler of its own, and asks process 0 at each step.)

    Args:
        mesh: devices of all processes.
    """

    def __init__(self, mesh: Any):
        self._alone = group().size == 1
        self._pending: Any = None
        if self._alone:
            return
        import jax
        import numpy as np
        from jax.sharding import NamedSharding, PartitionSpec

        each = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._put = lambda number: jax.make_array_from_callback(
            (mesh.size,), each, lambda index: np.full(mesh.size, number, np.int32)[index]
        )
        self._quiet = self._put(0)
        self._largest = jax.jit(lambda numbers: numbers.max(), out_shardings=NamedSharding(mesh, PartitionSpec()))

    def __call__(self, seen: list[int]) -> int:
        """Signal number to stop for after this step; 0 for none.

        Args:
            seen: signal numbers that this process got; that of another process is appended.
        """
        number = seen[0] if seen else 0  # read once: a signal may arrive at any moment
        if self._alone:
            return number
        before, self._pending = self._pending, self._largest(self._put(number) if number else self._quiet)
        agreed = 0 if before is None else int(before)
        if agreed and not seen:
            seen.append(agreed)
        return agreed
