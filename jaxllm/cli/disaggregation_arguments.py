"""Options of pools in several processes: ``--disaggregation-mode`` and what belongs to it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxllm.cli.errors import UsageError

if TYPE_CHECKING:
    from jaxllm.infer import EngineConfig, LoadedModel
    from jaxllm.infer.pools.decode_listener import DecodeListener
    from jaxllm.infer.pools.decode_process import DecodeProcess
    from jaxllm.infer.start_progress import Listener

Disaggregation = Literal["none", "prefill", "decode"]


def check_disaggregation(mode: Disaggregation, bootstrap: str, secret: Path | None, pools: str | None) -> None:
    """Checks the options before a model is loaded.

    Raises:
        UsageError: one is missing, or is given without the others.
        ConfigError: ``bootstrap`` is no address.
    """
    from jaxllm.infer.pools.pool_link import parse_address

    if mode == "none":
        if secret is not None:
            raise UsageError("--disaggregation-secret is for pools in several processes; give --disaggregation-mode.")
        return
    if pools is None:
        raise UsageError(f"--disaggregation-mode {mode} is for pools in several processes; say which with --pools.")
    if secret is None:
        raise UsageError(
            f"--disaggregation-mode {mode}: give --disaggregation-secret FILE, the same in all processes; the prefill "
            "process writes one if there is none."
        )
    parse_address(bootstrap)


def read_secret(file: Path, *, create: bool) -> bytes:
    """Secret in a file; with ``create`` one is written, which only this user can read, if there is no file.

    Raises:
        UsageError: it cannot be read or written, or is empty.
    """
    try:
        if create and not file.exists():
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w") as out:
                out.write(secrets.token_hex(32) + "\n")
        found = file.read_bytes().strip()
    except OSError as error:
        advice = "" if create else "; the prefill process writes it when it starts: start that first, or copy its file"
        raise UsageError(f"--disaggregation-secret {file}: {error.strerror or error}{advice}.") from None
    if not found:
        raise UsageError(f"--disaggregation-secret {file} is empty; delete it, and the prefill process writes one.")
    return found


def listen_for_decode(mode: Disaggregation, bootstrap: str, secret: Path | None) -> DecodeListener | None:
    """Listener of a prefill process; None in another.

    Raises:
        UsageError: see ``read_secret``.
        ConfigError: nothing can listen there.
    """
    from jaxllm.infer.pools.decode_listener import DecodeListener

    if mode != "prefill":
        return None
    assert secret is not None
    listener = DecodeListener(bootstrap, read_secret(secret, create=True))
    print("decode processes connect to {}:{}".format(*listener.address), file=sys.stderr, flush=True)
    return listener


def run_decode_process(
    load: Callable[[], LoadedModel],
    config: EngineConfig,
    bootstrap: str,
    secret: Path,
    *,
    programs: Path | None = None,
    trust_programs: bool = False,
    progress: Listener | None = None,
    grace_seconds: float,
) -> None:
    """Runs a decode process until it is told to end by SIGTERM or SIGINT, and its completions have ended.

    Args:
        load: loads the model.
        config: as the prefill process has it.
        bootstrap: where the prefill process listens.
        secret: file of the secret.
        programs, trust_programs: see ``LLM``.
        progress: see ``LLM``.
        grace_seconds: see ``leaves_on_signals``.

    Raises:
        UsageError: see ``read_secret``.
        ConfigError: see ``DecodeProcess.serve``.
    """
    from jaxllm.files import cache_root
    from jaxllm.infer.pools.decode_process import DecodeProcess

    known, loaded = read_secret(secret, create=False), load()
    process = DecodeProcess.of(
        loaded.model, loaded.params, config, tokenizer=loaded.tokenizer, longest=loaded.longest,
        manifest=cache_root("") / "engine", shipped=programs, trusted=trust_programs, progress=progress,
    )  # fmt: skip
    del loaded
    print(f"ready: a decode engine, for the prefill process at {bootstrap}", file=sys.stderr, flush=True)
    with leaves_on_signals(process, grace_seconds):
        process.serve(bootstrap, known, lambda line: print(line, file=sys.stderr, flush=True))


@contextlib.contextmanager
def leaves_on_signals(process: DecodeProcess, grace_seconds: float) -> Iterator[None]:
    """SIGTERM and SIGINT let a decode process leave; the second one ends it as it would have without this.

    Args:
        process: takes no more sequences after the first signal.
        grace_seconds: time that its completions have to end then.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def leave() -> None:
        process.leave()
        ended.wait(grace_seconds)
        process.stop()

    def told(number: int, frame: Any) -> None:
        for one, handler in before.items():
            signal.signal(one, handler)
        # Not here: this thread may be sending a message just now, and a second one would wait for it for ever.
        threading.Thread(target=leave, name="jaxllm-decode-leaving", daemon=True).start()

    ended = threading.Event()
    for number in before:
        signal.signal(number, told)
    try:
        yield
    finally:
        ended.set()
        for number, handler in before.items():
            signal.signal(number, handler)
