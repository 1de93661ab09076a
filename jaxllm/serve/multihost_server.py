"""Multi-host server: process 0 of a group answers HTTP, the others run its device programs and end with it.

    with running(detect(os.environ)) as group:
        serve_group(config, load, group)    # in every process; ``load`` makes an engine over all devices

A group of one process is an ordinary server. In a larger one every process loads its shards of the weights and compiles
the same programs; ``jaxllm.infer.runner.multihost`` says how the others follow.
"""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from jaxllm.infer.embedder import Pooling
from jaxllm.infer.llm import LLM
from jaxllm.infer.runner.serving_mesh import spans_processes
from jaxllm.parallel.distributed import DistributedError, ProcessGroup, StoppedError
from jaxllm.serve.config import ServeConfig
from jaxllm.serve.server import backend_factory, serve

T = TypeVar("T")
LOADING = "while it loaded the model"
WAITING = "while it waited for the other processes"


def serve_group(
    config: ServeConfig,
    load: Callable[[], LLM],
    group: ProcessGroup,
    facts: Mapping[str, Any] | None = None,
    *,
    pooling: Pooling | None = None,
    **others: Any,
) -> None:
    """Serves a model from all processes of a group, until process 0 gets a signal.

    Args:
        config: settings of the server, of which only those of process 0 count.
        load: makes the engine, on a mesh of the devices of all processes.
        group: this process's group.
        facts: JSON values that must agree in all processes, such as the model's name.
        pooling: see ``backend_factory``.
        others: arguments of ``serve``: sockets, start and on_ready, of process 0.

    Raises:
        DistributedError: the facts disagree, or the mesh has not the devices of all processes.
        StoppedError: a signal came before the processes had met, or before the model was loaded: no other process may
            wait for this one.
        Exception: the one that kept the model from being loaded.
    """
    if group.size == 1:
        serve(config, backend_factory(load, pooling), **others)
        return
    # A launcher signals all processes: process 0 drains, its server having a handler of its own, and the others end
    # when it has ended. Uvicorn raises the signal again after it has handled it. Until these handlers are there, JAX's
    # own one of SIGTERM, which it has for training, lets a process go on.
    signals = _Signals()
    signals.wait_for(lambda: group.agree("the server", dict(facts or {}), 300.0), WAITING)
    made: list[LLM] = []

    def load_over_all() -> LLM:
        llm = load()
        if not spans_processes(llm.engine.runner.mesh):
            raise DistributedError(
                f"{group.size} processes were started, and the mesh has devices of one: give --mesh with all devices, "
                "such as data=2,tensor=4. To run this process alone, set JAXLLM_PROCESSES=1."
            )
        made.append(llm)
        return llm

    if not group.is_leader:
        signals.wait_for(load_over_all, LOADING).engine.follow()
        return
    serve(config, backend_factory(load_over_all, pooling), **others)
    if not made:
        raise StoppedError(LOADING, signals.last)
    made[0].engine.close()


def facts_of(model: str, mesh: str | None, sizes: Any, **others: Any) -> dict[str, Any]:
    """Facts of a server that all its processes must agree on.

    Args:
        model: name of the model.
        mesh: its mesh.
        sizes: ``EngineConfig``.
        others: further JSON values by name.
    """
    return {"model": model, "mesh": mesh, **dataclasses.asdict(sizes), **others}


class _Signals:
    """SIGINT and SIGTERM of a process of the group, which are remembered and otherwise left to process 0."""

    def __init__(self) -> None:
        self.last = signal.SIGTERM
        self._came = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._remember)

    def wait_for(self, work: Callable[[], T], doing: str) -> T:
        """Result of ``work``, from a thread of its own: a signal ends the wait in the middle of a compilation.

        Raises:
            StoppedError: a signal came first; its message says what the process was ``doing``.
            Exception: what ``work`` raises.
        """
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=run, name="jaxllm-start", daemon=True).start()
        while not done.done():
            if self._came.wait(0.1):
                raise StoppedError(doing, self.last)
        return done.result()

    def _remember(self, number: int, frame: object) -> None:
        self.last = signal.Signals(number)
        self._came.set()
