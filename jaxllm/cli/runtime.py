"""Runtime setup of commands: the process group of a distributed run, and the compilation cache."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxllm.cli.errors import is_user_error

if TYPE_CHECKING:
    from jaxllm.parallel.distributed import DistributedConfig, ProcessGroup


@contextlib.contextmanager
def processes(config: DistributedConfig | None = None) -> Iterator[ProcessGroup]:
    """Joins the process group of a distributed job while the context is open; detects the cluster by environment."""
    from jaxllm.parallel.cluster_environment import detect, tpu_metadata
    from jaxllm.parallel.distributed import running

    cluster = detect(os.environ, tpu_metadata)
    if cluster.processes > 1:
        print(f"joining as {cluster}", file=sys.stderr)
    with running(cluster, config, plain=lambda error: isinstance(error, Exception) and is_user_error(error)) as group:
        yield group


def use_compilation_cache() -> None:
    """Enables JAX's persistent compilation cache, unless the user has configured its directory."""
    import jax

    from jaxllm.files import cache_root

    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_compilation_cache_dir", str(cache_root("") / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
