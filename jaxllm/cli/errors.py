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
        no_device = _no_device(error)
        if os.environ.get("JAXLLM_TRACEBACK") or not (no_device or is_user_error(error)):
            raise
        print(f"error: {no_device or error}", file=sys.stderr)
        return 2


def is_user_error(error: Exception) -> bool:
    """Whether an error's message is meant for the user: the errors that this project raises on purpose."""
    if isinstance(error, UsageError):  # known without the imports below, which take seconds
        return True
    from jaxllm.checkpoint import CheckpointError
    from jaxllm.config import ConfigError
    from jaxllm.data import CursorMismatch, DataError
    from jaxllm.hub import HubError
    from jaxllm.infer import ModelNotFoundError
    from jaxllm.infer.streaming.weight_file import TierUnavailableError
    from jaxllm.observe.metric_sinks import SinkError
    from jaxllm.parallel.cluster_environment import ClusterError
    from jaxllm.parallel.distributed import DistributedError
    from jaxllm.parallel.pipeline.schedule import ScheduleError
    from jaxllm.plan.hardware import HardwareError
    from jaxllm.plan.scaling_laws import ScalingError
    from jaxllm.train import NonFiniteLossError, ResumeError
    from jaxllm.train.disk.state_file import DiskTierError
    from jaxllm.train.records.receipt import ReceiptError
    from sharding import ShardingError
    from sharding.topology import CompilerMissing

    kinds = (
        CheckpointError,
        ClusterError,
        CompilerMissing,
        ConfigError,
        CursorMismatch,
        DataError,
        DiskTierError,
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
        TierUnavailableError,
        UsageError,
    )
    # Configurations raise plain ValueErrors in their __post_init__; a ValueError of another library is a bug.
    return isinstance(error, kinds) or (type(error) is ValueError and _raised_by_us(error))


def _raised_by_us(error: Exception) -> bool:
    return _raised_in(error).split(".")[0] in ("jaxllm", "sharding", "recipes")


def _raised_in(error: Exception) -> str:
    """Name of the module that raised an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""


def _no_device(error: Exception) -> str:
    """Message about JAX's failure to find a device of ``$JAX_PLATFORMS``, for which it has errors of several types."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if not platforms or _raised_in(error) != "jax._src.xla_bridge":
        return ""
    detail = f" ({str(error).splitlines()[0]})" if str(error) else ""
    return (
        f"JAX_PLATFORMS={platforms}, and this computer has no such device that JAX can use{detail}. Unset "
        "JAX_PLATFORMS, or set it to cpu; a GPU needs its driver and pip install 'jaxllm[cuda]'."
    )
