"""Decode processes of tests: as processes, and as threads of the test's own, with tiny models.

python -m tests.infer.pool_processes ADDRESS SECRET WAY MODEL POOLS KV_DTYPE
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax
import pytest

import tests.environment  # noqa: F401
from jaxllm.cli.disaggregation_arguments import leaves_on_signals
from jaxllm.infer import Engine, EngineConfig
from jaxllm.infer.pools.decode_listener import DecodeListener
from jaxllm.infer.pools.decode_process import DecodeProcess
from jaxllm.infer.pools.pool_argument import PoolSizes
from jaxllm.models import functional
from tests import environment, quick

SECRET = "of the tests"


def decoding(config: EngineConfig, model: str, **fields: Any) -> DecodeProcess:
    """A decode engine whose programs compile fast."""
    from tests.infer import engines

    params = engines.params_of(model, "float64")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", quick.jit)
        return DecodeProcess.of(functional(engines.model_of(model, "float64")), params, config, strict=True, **fields)


def prefilling(config: EngineConfig, model: str, listener: DecodeListener, **fields: Any) -> Engine:
    """An engine with its decode pool in other processes; waits for them."""
    from tests.infer import engines

    return engines.build(config, model, "float64", decode_listener=listener, **fields)


def listening(patience: float = 60.0) -> DecodeListener:
    """A listener on a free port."""
    return DecodeListener("127.0.0.1:0", SECRET.encode(), patience)


def address_of(listener: DecodeListener) -> str:
    """Its address as an option has it."""
    return "{}:{}".format(*listener.address)


@contextlib.contextmanager
def in_thread(process: DecodeProcess, listener: DecodeListener) -> Iterator[threading.Thread]:
    """Serves in a thread while the context is open."""
    process._stopped.clear()
    process._leaving.clear()
    thread = threading.Thread(target=process.serve, args=[address_of(listener), SECRET.encode()], daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        process.stop()
        thread.join(30)
        assert not thread.is_alive()


def started(listener: DecodeListener, way: str, model: str, config: EngineConfig) -> subprocess.Popen[str]:
    """A decode process of ``ENGINES[way]``, with the pools and the KV cache format of a configuration."""
    words = [address_of(listener), SECRET, way, model, config.pools or "", config.kv_dtype]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.infer.pool_processes", *words],
        env=os.environ | {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"}, cwd=environment.ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def main(address: str, secret: str, way: str, model: str, pools: str, kv_dtype: str) -> None:
    jax.config.update("jax_num_cpu_devices", PoolSizes.parse(pools).decode.tensor)
    from tests.infer import engines

    process = decoding(dataclasses.replace(engines.ENGINES[way], pools=pools, kv_dtype=kv_dtype), model)
    with leaves_on_signals(process, 60.0):
        process.serve(address, secret.encode(), lambda line: print(line, flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
