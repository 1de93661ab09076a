"""Multi-host server: process 0 of a group answers HTTP, the others run its device programs and end with it.

    with running(detect(os.environ)) as group:
        serve_group(config, load, group)    # in every process; ``load`` makes an engine over all devices

A group of one process is an ordinary server. In a larger one every process loads its shards of the weights and compiles
the same programs; ``jaxllm.infer.runner.multihost`` says how the others follow.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.infer.embedder import Pooling
from jaxllm.infer.llm import LLM
from jaxllm.infer.runner.serving_mesh import spans_processes
from jaxllm.parallel.distributed import DistributedError, ProcessGroup
from jaxllm.serve.config import ServeConfig
from jaxllm.serve.server import backend_factory, serve


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
        DistributedError: the facts disagree, the mesh has not the devices of all processes, or process 0 was stopped
            before the model was loaded, in which case no other process may wait for it.
        Exception: the one that kept the model from being loaded.
    """
    if group.size == 1:
        serve(config, backend_factory(load, pooling), **others)
        return
    group.agree("the server", dict(facts or {}), 300.0)
    for number in (signal.SIGINT, signal.SIGTERM):
        # A launcher signals all processes: process 0 drains, its server having a handler of its own, and the others end
        # when it has ended. Uvicorn raises the signal again after it has handled it.
        signal.signal(number, _ignored)
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
        load_over_all().engine.follow()
        return
    serve(config, backend_factory(load_over_all, pooling), **others)
    if not made:
        raise DistributedError("process 0 was stopped before it had loaded the model.")
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


def _ignored(number: int, frame: object) -> None:
    """Handler of a signal that another process acts upon."""
