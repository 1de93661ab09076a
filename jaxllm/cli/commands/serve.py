"""``jaxllm serve``: serves a model over HTTP with an OpenAI-compatible API."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from jaxllm.cli.command_parser import parse_command
from jaxllm.cli.deprecated_options import with_current_options
from jaxllm.cli.disaggregation_arguments import (
    Disaggregation,
    check_disaggregation,
    listen_for_decode,
    run_decode_process,
)
from jaxllm.cli.errors import UsageError
from jaxllm.cli.model_loading import (
    check_mla,
    check_offload,
    check_overlap,
    check_pools,
    check_span,
    check_speculation,
    check_star_bytes,
    load_with_progress,
)
from jaxllm.cli.runtime import ends_at_interrupt, is_first_process, processes, use_compilation_cache
from jaxllm.infer.kv_cache_options import KvFormat, with_kv_cache
from jaxllm.infer.scheduling.policies import PolicyName
from jaxllm.infer.start_progress import StartProgress, terminal_line
from jaxllm.serve.listening import ListenError, listen

if TYPE_CHECKING:
    from jaxllm.effort import EffortPolicy
    from jaxllm.infer import LoadedModel

DEPRECATED_OPTIONS = {
    "--sequences": "--max-sequences", "--budget": "--max-batched-tokens", "--kv-dtype": "--kv-format",
}  # fmt: skip
"""Deprecated options of ``jaxllm serve`` and the options that replace them."""


def serve(argv: list[str]) -> int:
    """Serve a model to OpenAI clients: `jaxllm serve MODEL --port 8000`."""

    def run(
        model: Annotated[str, tyro.conf.Positional],
        /,
        host: str = "127.0.0.1",
        port: int = 8000,
        name: str | None = None,
        api_key_file: Path | None = None,
        origins: tuple[str, ...] = (),
        max_sequences: int = 16,
        max_len: int | None = None,
        max_batched_tokens: int = 256,
        policy: PolicyName = "first-come",
        phase_split: str = "whole",
        tool_parser: str | None = None,
        queue: int = 256,
        max_body: int = 4 * 2**20,
        max_connections: int = 512,
        header_seconds: float = 10.0,
        request_seconds: float | None = None,
        grace_seconds: float = 30.0,
        log_prompts: bool = False,
        metrics_names: Literal["jaxllm", "vllm"] = "jaxllm",
        otlp_traces_endpoint: str | None = None,
        dtype: Literal["float32", "bfloat16"] | None = None,
        weights: str = "auto",
        kv_format: KvFormat = "auto",
        kv_keep: str = "all",
        kv_host: float = 0.0,
        kv_disk: Path | None = None,
        chunk_cache: bool = False,
        two_phase: bool = False,
        layers: Literal["auto", "stacked", "apart"] = "auto",
        mesh: str | None = None,
        star_bytes: int = 0,
        overlap: Literal["none", "iso", "nano"] = "none",
        mla: str = "exact",
        kv_span: bool = False,
        pools: str | None = None,
        disaggregation_mode: Disaggregation = "none",
        disaggregation_bootstrap: str = "127.0.0.1:8998",
        disaggregation_secret: Path | None = None,
        adapters: Path | None = None,
        adapter_slots: int = 32,
        adapter_rank: int = 64,
        admin_key_file: Path | None = None,
        generation_config: str = "auto",
        speculate: str | None = None,
        speculate_tokens: int | None = None,
        speculate_runs: int = 1,
        effort: tuple[str, ...] = (),
        batch_dir: Path | None = None,
        max_file: int = 100 * 2**20,
        stored_responses: int = 1000,
        stored_bytes: int = 64 * 2**20,
        pooling: Literal["mean", "last"] | None = None,
        programs: Path | None = None,
        trust_programs: bool = False,
        offload: str | None = None,
        finetune: str | None = None,
        finetune_set: tuple[str, ...] = (),
        finetune_tokens: int = 64,
        finetune_target: float = 0.1,
    ) -> int:
        """Serves a model with OpenAI's API until SIGTERM or Ctrl-C; running requests may end then.

        Args:
            model: model, as for `jaxllm generate`.
            host: address to listen on; by default reachable from this computer only.
            port: port to listen on; 0 for any free one.
            name: model name in requests; the last part of MODEL by default.
            api_key_file: file of API keys, one per line; requests must carry one. $JAXLLM_API_KEY is a key too.
            origins: origins whose web pages may call the server (CORS); none by default.
            max_sequences: maximum number of sequences that run at the same time; more are queued.
            max_len: maximum sequence length in tokens, prompt included; by default the model's context length.
            max_batched_tokens: token budget of a step: one per decoding sequence, the rest for chunked prefill.
            policy: scheduling policy: arrival order, highest `priority`, the API key with the least service so far, the
                shortest expected remaining work, grouped by common prefixes, or predicted: in arrival order, admitted
                by the KV cache that they are predicted to need, from means by prompt length; learned: the same, from
                the tokens of prompts; packed: the same, the largest first, and smaller ones pass those that do not fit;
                grouped-predicted: grouped, and admitted by predictions.
            phase_split: tokens of prompts in a step while sequences decode: whole, all that --max-batched-tokens
                leaves; half, as many as double the time of decoding; tpot:SECONDS, as many as keep a step to that time;
                nexus or nexus:WEIGHT, as many as make prompts and output tokens wait least together, a second to the
                first token worth WEIGHT (10) of output tokens.
            tool_parser: tool-call format: hermes, llama3_json, pythonic, llama4_pythonic, mistral, mistral_args,
                mistral_call_id, deepseek_v3, deepseek_v31, qwen3_coder, glm45, gemma3, harmony or json; by default
                detected from the chat template.
            queue: maximum number of queued sequences; further requests are refused with status 429.
            max_body: maximum size of a request body in bytes.
            max_connections: maximum number of open connections; clients that have not sent a whole request are
                disconnected first to make room.
            header_seconds: time in which the headers of a request must arrive.
            request_seconds: maximum duration of a request; unlimited by default.
            grace_seconds: time that running requests have to end after SIGTERM; of a decode process too.
            log_prompts: write prompts to the log too.
            metrics_names: vllm: /metrics also has vLLM's names, for dashboards and gateways that read those.
            otlp_traces_endpoint: URL that OpenTelemetry traces are sent to (OTLP over HTTP), such as
                http://127.0.0.1:4318/v1/traces; needs jaxllm[otel].
            dtype: compute dtype of a model from another library, float32 by default.
            weights: plain: quantised models are dequantised; packed: they stay as their files have them; auto: packed
                for a GGUF on one CPU that has a kernel for it, else plain; int8, int4, mxfp4: matrices are rounded to
                that format after loading; experts_int2: those of experts alone (docs/serve/quantise.md).
            kv_format: format of the KV cache: auto (the compute dtype), bf16, or 8, 4 or 2 bits with scales: int8, fp8,
                int4, bfp4, kivi4, kivi2; or shadowkv[:RANK[,TOKENS[,OUTLIERS]]], low-rank keys on the device, values on
                the host (what each costs: docs/serve/kv_cache.md).
            kv_keep: tokens that stay in the KV cache: all; window+sinks[:RECENT[,SINKS]], the most recent ones and
                the first few, by default 1024 and 4; corm[:THRESHOLD], those with that multiple of the even share of
                recent attention; pyramid[:SHARE], so many of all by recent attention, fewer in deeper layers;
                locret:HEADS.safetensors[,BUDGET], so many by trained heads; or chai[:SIZE], all, with one key for every
                SIZE kv heads that attend alike, 2 by default (docs/serve/kv_cache.md).
            kv_host: GiB of host memory for pages of the prefix cache that the device has no room for, those of
                preempted sequences too.
            kv_disk: directory for pages that leave host memory; they are found again after a restart
                (docs/serve/kv_cache.md).
            chunk_cache: requests may name parts of their prompts, in cache_chunks, whose keys and values are reused at
                any position (docs/serve/kv_cache.md).
            two_phase: decode steps read the pages that sequences have in common, such as a system prompt's, once for
                all of them (docs/serve/kv_cache.md).
            layers: stacked: parameters of alike layers in one array; apart: one array per layer, which decodes faster
                on CPUs and GPUs and compiles ten times as long; auto: apart where the programs for that are there, by
                `jaxllm compile --serve DIR --layers apart` or an earlier start, and stacked otherwise.
            mesh: device mesh, such as data=2,tensor=4 (docs/serve/serving.md); one device by default. Each replica has
                --max-sequences and --max-batched-tokens of its own.
            star_bytes: with --mesh tensor=N, sums of no more bytes go through one device, where the latency of links
                rules; `jaxllm bench --links` says how many (docs/serve/serving.md).
            overlap: with --mesh tensor=N, steps go through each layer in two halves, so that the matmuls of one do not
                wait for the all-reduces of the other: iso: steps with prompts; nano: decode steps of several sequences
                too (docs/serve/serving.md). With an attention pool in --pools: nano.
            mla: with --mesh tensor=N and a model with multi-head latent attention: tpla: each device has a slice of the
                latents, and generated tokens attend to the slices one by one, which is an approximation (tpla:pca,
                tpla:hadamard, tpla:none: the rotation before slicing); exact: latents are repeated on the devices
                (docs/serve/serving.md).
            kv_span: with --mesh context=N: the KV cache pages of a request are spread over the N devices, so that a
                context may be longer than one device has memory for (docs/serve/serving.md).
            pools: prefill and decode on engines of their own, each with a copy of the weights, such as
                "prefill=tensor:2 x1, decode=tensor:4 x1": devices of an engine, and engines of a pool; or weights on
                some devices, and the KV cache with the attention over it on others, such as
                "model=tensor:2, attention=tensor:4" (docs/serve/pools.md); instead of --mesh.
            disaggregation_mode: with --pools: prefill: this process has the prefill pool and answers requests; decode:
                it is one engine of the decode pool, for that process, and answers none, so that options of requests do
                not matter to it; none: both pools are in this process (docs/serve/pools.md).
            disaggregation_bootstrap: address HOST:PORT that the prefill process listens on for decode processes.
            disaggregation_secret: file of the secret that all processes of the pools must know; the prefill process
                writes one if there is none.
            adapters: directory of LoRA adapters in PEFT's format, each in a directory whose name is its model name; or
                one adapter (docs/serve/adapters.md).
            adapter_slots: with --adapters: adapters that can be on the device, and so in one step, at a time.
            adapter_rank: with --adapters: largest rank of an adapter.
            admin_key_file: with --adapters: file of API keys, one per line, that may load adapters of that directory
                and unload them while the server runs.
            generation_config: auto: requests that give no temperature, top_p, top_k, ... get those of the model's
                generation_config.json; none: OpenAI's defaults; or a directory with another generation_config.json.
            speculate: speculative decoding: ngram[:N] proposes what followed the last N tokens before, draft:MODEL what
                a smaller model samples, tree:MODEL,BUDGET a tree of its likeliest continuations, head:DIR what a
                trained layer over the model's features drafts, mtp what the model's own module for multi-token
                prediction drafts, self:LAYERS what the model samples with so many of its layers; the completion stays
                the same (docs/serve/speculation.md).
            speculate_tokens: with --speculate: number of tokens that are proposed and verified in one step; by default
                up to 4, as many as pay.
            speculate_runs: with --speculate and --mesh stage=N: runs of draft tokens that may be in flight through the
                pipeline stages, such as N + 1 (docs/serve/speculation.md).
            effort: effort policies as NAME=FILE: requests to the model NAME spend tokens by the policy of FILE
                (docs/serve/effort.md).
            batch_dir: directory of files and batches (docs/serve/batches.md); without it /v1/files and /v1/batches
                refuse.
            max_file: with --batch-dir: maximum size of an uploaded file in bytes.
            stored_responses: responses that previous_response_id can name; the least recently used are dropped.
            stored_bytes: maximum bytes of all of them.
            pooling: the model is an embedding model, with this pooling of hidden states: /score, /rerank and /pooling
                use it (docs/serve/apis.md).
            programs: directory of compiled programs, of `jaxllm compile --serve`; by default the directory programs
                beside the model's files, if there is one.
            trust_programs: run programs of that directory that somebody else has compiled. They are native code, which
                can do anything; files that others than you can change are not taken in any case.
            offload: serve a model that the device has no room for: layers come to it while they compute, from the host
                or from files, such as window=2,device=4GiB,host=8GiB,disk=DIR: layers on the device at a time, bytes of
                layers that stay there, bytes of those that stay in host memory (by default all others), and a directory
                for files of the rest; or fit,device=20GiB,...: a placement is solved (docs/serve/offload.md).
            finetune: recipe of `jaxllm train`, or a run's directory, with an adapter of MODEL: it is trained in what
                decoding and prefill leave of each step (docs/serve/finetune.md).
            finetune_set: with --finetune: settings of the run as NAME=VALUE, such as adapter.kind=lora.
            finetune_tokens: with --finetune: tokens of a piece of its work, which runs between two steps.
            finetune_target: with --finetune: seconds per output token that a step may take with it; it waits where a
                step has no room.
        """
        # Before anything is imported or loaded, which takes seconds.
        try:
            sockets = listen(host, port) if is_first_process() and disaggregation_mode != "decode" else []
            for one in sockets:
                closed.callback(one.close)
        except ListenError as error:
            raise UsageError(str(error)) from None
        try:
            from jaxllm.serve import ServeConfig
            from jaxllm.serve.multihost_server import facts_of, serve_group
        except ModuleNotFoundError as error:
            raise UsageError(f"serving needs {error.name}: pip install 'jaxllm[serve]'.") from None
        use_compilation_cache()
        from jaxllm.infer import LLM
        from jaxllm.infer.engine_config import serving_config
        from jaxllm.infer.scheduling.policies import POLICIES
        from jaxllm.infer.speculate.proposer_table import with_speculation

        check_offload(offload, mesh, adapters is not None)
        check_disaggregation(disaggregation_mode, disaggregation_bootstrap, disaggregation_secret, pools)
        check_pools(pools, mesh, offload, None if disaggregation_mode == "none" else disaggregation_mode)
        check_overlap(overlap, mesh, pools)
        check_star_bytes(star_bytes, mesh)
        check_mla(mla, mesh)
        check_span(kv_span, mesh)
        if speculate_runs != 1:
            check_speculation(speculate, speculate_tokens, speculate_runs, mesh)
        config = ServeConfig(
            host=host, port=port, name=name or Path(model).name, api_keys=read_keys(api_key_file), origins=origins,
            queue=queue, max_body=max_body, max_connections=max_connections, header_seconds=header_seconds,
            request_seconds=request_seconds, grace_seconds=grace_seconds,
            log_prompts=log_prompts, metrics_names=metrics_names, otlp_traces_endpoint=otlp_traces_endpoint,
            tool_parser=tool_parser,
            adapter_dirs=() if adapters is None else (str(adapters.resolve()),),
            admin_keys=() if admin_key_file is None else keys_of(admin_key_file),
            efforts=read_policies(effort),
            batch_dir=None if batch_dir is None else str(batch_dir), max_file=max_file,
            stored_responses=stored_responses, stored_bytes=stored_bytes,
        )  # fmt: skip
        found = None if adapters is None else find_adapters(adapters)
        if found is None and admin_key_file is not None:
            raise UsageError("--admin-key-file is for adapters; give --adapters DIR too.")
        plain = serving_config(
            max_sequences=max_sequences, max_batched_tokens=max_batched_tokens, max_len=max_len, kv_dtype="auto",
            adapter_slots=0 if found is None else adapter_slots, adapter_rank=adapter_rank, chunk_cache=chunk_cache,
            two_phase=two_phase, phase_split=phase_split,
        )  # fmt: skip
        sizes = with_speculation(
            with_kv_cache(plain, kv_format, kv_keep, kv_host, kv_disk), speculate, speculate_tokens, speculate_runs
        )
        sizes = dataclasses.replace(
            sizes, pools=pools, star_bytes=star_bytes, overlap=overlap, mla=mla, kv_span=kv_span
        )
        tuned = None
        if finetune is not None:
            from jaxllm.cli.finetune_arguments import finetune_config

            if layers == "apart":
                raise UsageError("--finetune trains beside stacked layers; leave --layers apart out.")
            if offload is not None:
                raise UsageError(
                    "--finetune trains beside weights on the device, which --offload streams; leave one out."
                )
            if pools is not None:
                raise UsageError(
                    "--finetune trains beside an engine on one device, and --pools has several; leave one out."
                )
            if finetune_target <= 0 or finetune_tokens < 1:
                raise UsageError("--finetune-target and --finetune-tokens: give positive numbers.")
            tuned = finetune_config(finetune, finetune_set, model)
        elif finetune_set:
            raise UsageError("--finetune-set is for a run; give --finetune RECIPE too.")
        log_to_terminal()
        order = POLICIES[policy]

        start = StartProgress(*([terminal_line(str(config.name))] if sys.stderr.isatty() else []))

        def load_weights() -> LoadedModel:
            form = "stacked" if layers == "auto" else layers
            return load_with_progress(
                model,
                dtype,
                form,
                mesh,
                "plain" if weights == "auto" and tuned is not None else weights,
                generation_config,
                offload=offload,
                pools=pools,
                sequences=max_sequences,
                step_tokens=max_batched_tokens,
                max_len=max_len,
                kv_format=kv_format,
                adapter_ranks=sizes.pages_of_adapters * sizes.adapter_page_ranks,
                progress=start,
            )

        def programs_there() -> Path | None:
            from jaxllm.infer.llm import shipped_programs

            return shipped_programs(model) if programs is None else programs

        if disaggregation_mode == "decode":
            assert disaggregation_secret is not None
            run_decode_process(
                load_weights, sizes, disaggregation_bootstrap, disaggregation_secret,
                programs=programs_there(), trust_programs=trust_programs, progress=start, grace_seconds=grace_seconds,
            )  # fmt: skip
            return 0
        decode_listener = listen_for_decode(disaggregation_mode, disaggregation_bootstrap, disaggregation_secret)

        def load() -> LLM:
            loaded = load_weights()
            beside, reserved = None, 0
            if tuned is not None:
                from jaxllm.posttrain.coserve.finetune_run import CoServedRun

                beside = CoServedRun(tuned, loaded, finetune_tokens)
                reserved = beside.device_bytes
            llm = LLM(
                loaded, sizes, policy=order, adapters=found, progress=start, plain_first=False,
                programs=programs_there(), trust_programs=trust_programs,
                layers="auto" if layers == "auto" and beside is None else "given", reserved_bytes=reserved,
                decode_listener=decode_listener,
            )  # fmt: skip
            if beside is not None:
                beside.attach(llm.engine, finetune_target)
            return llm

        def announce(url: str) -> None:
            done, total = start.programs
            rest = "" if done == total else f"; {total - done} more are compiled meanwhile"
            print(f"ready: {url} serves {config.name} ({done} of {total} programs{rest})", file=sys.stderr, flush=True)

        facts = facts_of(model, mesh, sizes, dtype=dtype, weights=weights, layers=layers)
        with processes(advice="Start all processes of the server again with the same command.") as group:
            if group.size > 1 and tuned is not None:
                raise UsageError(f"--finetune trains on one device, and {group.size} processes serve; leave it out.")
            if group.size > 1 and mesh is None:
                raise UsageError(
                    f"{group.size} processes serve one model together: give --mesh over all their devices, such as "
                    "data=2,tensor=4 (docs/serve/serving.md). To serve from this process alone, set JAXLLM_PROCESSES=1."
                )
            serve_group(config, load, group, facts, pooling=pooling, sockets=sockets, start=start, on_ready=announce)
        return 0

    with ends_at_interrupt(), contextlib.ExitStack() as closed:
        return parse_command(run, with_current_options(argv, DEPRECATED_OPTIONS), "jaxllm serve")


def log_to_terminal() -> None:
    """Writes the server's log to the standard error, a JSON object a line; of libraries only their warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    logging.getLogger().addHandler(handler)
    logging.getLogger("jaxllm").setLevel(logging.INFO)
    logging.captureWarnings(True)


class _JsonLines(logging.Formatter):
    """Formats a record as a line of JSON; the server's own records are JSON already."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.name == "jaxllm.serve" and not record.exc_info:
            return text
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return json.dumps({"level": record.levelname.lower(), "logger": record.name, "message": text})


def read_keys(file: Path | None) -> tuple[str, ...]:
    """API keys of a file and of ``$JAXLLM_API_KEY``.

    Raises:
        UsageError: the file cannot be read, or has no key.
    """
    own = (os.environ["JAXLLM_API_KEY"],) if os.environ.get("JAXLLM_API_KEY") else ()
    return own if file is None else (*own, *keys_of(file))


def read_policies(named: tuple[str, ...]) -> tuple[tuple[str, EffortPolicy], ...]:
    """Effort policies of ``--effort NAME=FILE``.

    Raises:
        UsageError: it has no "=", or the file is not a policy.
    """
    from jaxllm.config import ConfigError
    from jaxllm.effort import load_policy

    out = []
    for one in named:
        name, found, file = one.partition("=")
        if not found:
            raise UsageError(f"--effort {one}: give NAME=FILE, the model name of requests and a policy file.")
        try:
            out.append((name, load_policy(file)))
        except ConfigError as error:
            raise UsageError(f"--effort {one}: {error}") from None
    return tuple(out)


def keys_of(file: Path) -> tuple[str, ...]:
    """API keys of a file.

    Raises:
        UsageError: the file cannot be read, or has no key.
    """
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from None
    found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not found:
        raise UsageError(f"{file} has no API key; write one per line.")
    return tuple(found)


def find_adapters(folder: Path) -> dict[str, Path]:
    """Adapters in a directory by name: each directory in it that has an ``adapter_config.json``, or itself.

    Raises:
        UsageError: there is no such directory.
    """
    if not folder.is_dir():
        raise UsageError(f"--adapters: there is no directory {folder}.")
    if (folder / "adapter_config.json").exists():
        return {folder.resolve().name: folder}
    return {one.name: one for one in sorted(folder.iterdir()) if (one / "adapter_config.json").exists()}
