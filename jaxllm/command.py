"""What every command shares: mistakes as messages, the processes of a run, the cache of compiled programs."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxllm.parallel.distributed import DistributedConfig, Group


class UsageError(Exception):
    """The command line asks for something that is not there; the message says what is."""


def guarded(run: Callable[[], int]) -> int:
    """Runs ``run``; a mistake of the user's becomes one message, not a stack trace."""
    try:
        return run()
    except BrokenPipeError:  # the reader of a stream has gone: `jaxllm generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        if os.environ.get("JAXLLM_TRACEBACK") or not is_user_error(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2


def is_user_error(error: Exception) -> bool:
    """Errors whose message is meant for the user: those this project raises on purpose."""
    from jaxllm.checkpoint import CheckpointError
    from jaxllm.config import ConfigError
    from jaxllm.data import CursorMismatch, DataError
    from jaxllm.hub import HubError
    from jaxllm.infer import ModelNotFoundError
    from jaxllm.observe.sinks import SinkError
    from jaxllm.parallel.cluster import ClusterError
    from jaxllm.parallel.distributed import DistributedError
    from jaxllm.parallel.pipeline.schedule import ScheduleError
    from jaxllm.plan.hardware import HardwareError
    from jaxllm.plan.scaling import ScalingError
    from jaxllm.train import NonFiniteLossError, ResumeError
    from jaxllm.train.receipt import ReceiptError
    from sharding import ShardingError

    kinds = (
        CheckpointError,
        ClusterError,
        ConfigError,
        CursorMismatch,
        DataError,
        DistributedError,
        HardwareError,
        HubError,
        ModelNotFoundError,
        NonFiniteLossError,
        ReceiptError,
        ResumeError,
        ScalingError,
        ScheduleError,
        ShardingError,
        SinkError,
        UsageError,
    )
    # Configurations check themselves with plain ValueErrors; those come from our packages' own __post_init__.
    return isinstance(error, kinds) or (type(error) is ValueError and _raised_by_us(error))


def _raised_by_us(error: Exception) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
    return module.split(".")[0] in ("jaxllm", "sharding", "recipes")


@contextlib.contextmanager
def processes(config: DistributedConfig | None = None) -> Iterator[Group]:
    """Joins the processes that the scheduler has started with this one, for the time of the block."""
    from jaxllm.parallel.cluster import detect, tpu_metadata
    from jaxllm.parallel.distributed import running

    cluster = detect(os.environ, tpu_metadata)
    if cluster.processes > 1:
        print(f"joining as {cluster}", file=sys.stderr)
    with running(cluster, config, plain=lambda error: isinstance(error, Exception) and is_user_error(error)) as group:
        yield group


def use_compilation_cache() -> None:
    """Keeps compiled programs between runs, where the user has not chosen a place for them."""
    import jax

    from jaxllm.files import cache_root

    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_compilation_cache_dir", str(cache_root("") / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
