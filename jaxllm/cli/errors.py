"""Error handling of commands: user errors are printed as one message instead of a traceback."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable


class UsageError(Exception):
    """The command line is invalid; the message names what is legal."""


def guarded(run: Callable[[], int]) -> int:
    """Runs ``run`` and returns its exit status; a user error is printed as one message, with status 2.

    With ``$JAXLLM_TRACEBACK`` set, user errors are raised too.
    """
    try:
        return run()
    except BrokenPipeError:  # the reader of the pipe has exited: `jaxllm generate ... | head`
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
    """Whether an error's message is meant for the user: the errors that this project raises on purpose."""
    from jaxllm.checkpoint import CheckpointError
    from jaxllm.config import ConfigError
    from jaxllm.data import CursorMismatch, DataError
    from jaxllm.hub import HubError
    from jaxllm.infer import ModelNotFoundError
    from jaxllm.observe.metric_sinks import SinkError
    from jaxllm.parallel.cluster_environment import ClusterError
    from jaxllm.parallel.distributed import DistributedError
    from jaxllm.parallel.pipeline.schedule import ScheduleError
    from jaxllm.plan.hardware import HardwareError
    from jaxllm.plan.scaling_laws import ScalingError
    from jaxllm.train import NonFiniteLossError, ResumeError
    from jaxllm.train.records.receipt import ReceiptError
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
    # Configurations raise plain ValueErrors in their __post_init__; a ValueError of another library is a bug.
    return isinstance(error, kinds) or (type(error) is ValueError and _raised_by_us(error))


def _raised_by_us(error: Exception) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
    return module.split(".")[0] in ("jaxllm", "sharding", "recipes")
