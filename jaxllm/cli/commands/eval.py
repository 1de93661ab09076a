"""``jaxllm eval``: bits per byte on held-out text, accuracy on held-out pairs, scores on tasks, or what was lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from jaxllm.cli.command_parser import parse_command
from jaxllm.cli.errors import UsageError
from jaxllm.cli.model_loading import check_kv_cache, check_offload, load_with_progress, progress_bar
from jaxllm.cli.runtime import processes, use_compilation_cache
from jaxllm.infer.kv_cache_options import KvFormat, with_kv_cache
from jaxllm.infer.scheduling.policies import POLICIES, BatchPolicyName

if TYPE_CHECKING:
    from jaxllm.parallel.distributed import ProcessGroup

TEXT_ROWS, TEXT_TOKENS = 8, 512
"""Rows of text, and tokens of a row, that a model is compared with its original on by default."""


def evaluate(argv: list[str]) -> int:
    """Evaluate a model: bits per byte on its held-out text, or tasks: `jaxllm eval MODEL`."""

    def run(
        model: Annotated[str, tyro.conf.Positional],
        /,
        step: int | None = None,
        tasks: str = "",
        limit: int | None = None,
        max_len: int = 2048,
        dtype: Literal["float32", "bfloat16"] | None = None,
        weights: str = "plain",
        original: str | None = None,
        text: tuple[Path, ...] = (),
        needle: bool = False,
        kv_format: KvFormat = "auto",
        kv_keep: str = "all",
        policy: BatchPolicyName = "first-come",
        offload: str | None = None,
    ) -> int:
        """Measures bits per byte on the held-out split of the run's data (lower is better), scores on --tasks, or what
        a model lost of its --original.

        Bits per byte are compared with those of a byte bigram model; the exit status is 1 if the model is not better.
        A run with a preference objective is evaluated on its held-out pairs: loss, accuracy, margin of the rewards.

        Args:
            model: a run's directory; with --tasks, any model as for `jaxllm generate`.
            step: step of the checkpoint; the newest by default.
            tasks: comma-separated: .jsonl files (docs/serve/serving.md), names of lm-eval tasks, or YAML files of
                lm-eval tasks.
            limit: number of first rows of each task to use, all by default; of text with --original, 8 by default.
            max_len: maximum length of a row in tokens; longer rows are truncated from the left.
            dtype: with --tasks, --original or --needle, compute dtype of a model from another library, by default
                float32.
            weights: with --tasks or --original, as for `jaxllm generate`: packed, or a format to round to.
            original: compare with this model, which MODEL was made of: negative log-likelihood of both, the
                Kullback-Leibler divergence of MODEL's distribution, and how often both have the same likeliest token;
                with --tasks, scores of both.
            text: with --original: text files to compare on; held-out Shakespeare by default.
            needle: measure the KV cache instead: negative log-likelihood of held-out Shakespeare, recall of pass keys
                hidden in it, and bytes, beside those of the full cache.
            kv_format: with --needle or --tasks: format of the KV cache: auto (the compute dtype), bf16, int8, fp8,
                int4, bfp4, kivi4, kivi2 or shadowkv[:RANK[,TOKENS[,OUTLIERS]]] (docs/serve/kv_cache.md).
            kv_keep: with --needle or --tasks: tokens that stay in the KV cache: all, window+sinks[:RECENT[,SINKS]],
                corm[:THRESHOLD], pyramid[:SHARE], locret:HEADS.safetensors[,BUDGET] or chai[:SIZE]
                (docs/serve/kv_cache.md).
            policy: with --tasks: order of the prompts, as for `jaxllm generate --batch`, such as grouped, with which
                the examples that generation tasks begin with are computed once.
            offload: with --tasks: a model that the device has no room for, as for `jaxllm generate`
                (docs/serve/offload.md).
        """
        check_kv_cache(kv_format, kv_keep)
        use_compilation_cache()
        if policy != "first-come" and (not tasks or original is not None):
            raise UsageError("--policy is for --tasks.")
        if offload is not None and (not tasks or original is not None):
            raise UsageError("--offload is for --tasks.")
        check_offload(offload, None)
        if needle:
            if tasks or step is not None or limit is not None or weights != "plain" or original or text:
                raise UsageError("--needle goes with --max-len, --dtype, --kv-format and --kv-keep only.")
            return compare_caches(model, max_len, dtype, kv_format, kv_keep)
        if text and (original is None or tasks):
            raise UsageError("--text is what a model is compared on with its --original, in place of --tasks.")
        if missing := [str(file) for file in text if not file.is_file()]:
            raise UsageError(f"--text: there is no file {missing[0]}.")
        if original is not None:
            if step is not None or (kv_format, kv_keep) != ("auto", "all"):
                raise UsageError(
                    "--original goes with --text, --tasks, --limit, --max-len, --dtype and --weights only."
                )
            names = [name for name in tasks.split(",") if name]
            return compare_with_original(model, original, text, names, limit, max_len, dtype, weights)
        if not tasks and (kv_format, kv_keep) != ("auto", "all"):
            raise UsageError("--kv-format and --kv-keep are for --needle and --tasks.")
        if tasks:
            if step is not None:
                raise UsageError("--step is for a run's held-out text; --tasks use the newest checkpoint.")
            names = [name for name in tasks.split(",") if name]
            return run_tasks(model, names, limit, max_len, dtype, weights, kv_format, kv_keep, policy, offload)
        if limit is not None or dtype is not None or weights != "plain":
            raise UsageError("--limit, --dtype and --weights are for --tasks and --original.")
        with processes() as group:
            return measure(group, Path(model), step)

    def measure(group: ProcessGroup, model: Path, step: int | None) -> int:
        from rich.console import Console
        from rich.progress import track

        from jaxllm.config import from_dict
        from jaxllm.data import bigram_baseline_of, load_dataset
        from jaxllm.infer import load_model
        from jaxllm.train import Evaluator, RunConfig
        from jaxllm.train.evaluate import evaluate_loaded, evaluates_objective
        from sharding import MeshSpec

        # Several processes share the data; a single process uses its first device.
        loaded = load_model(model, step=step, mesh=MeshSpec.parse("dp").build() if group.size > 1 else None)
        if "data" not in loaded.meta.get("config", {}):
            raise UsageError(f"{model} was not trained with jaxllm, so it has no held-out text; give --tasks.")
        if "algorithm" in loaded.meta["config"]:
            raise UsageError(f"{model} was trained by rewards and has no held-out text; give --tasks.")
        config = from_dict(RunConfig, loaded.meta["config"], "the checkpoint's config")
        dataset = load_dataset(config.data, loaded.tokenizer, loaded.template)
        if dataset.heldout is None:
            raise UsageError(f"{model} was trained without held-out text; train with --data.heldout-fraction above 0.")
        if evaluates_objective(config):
            found = evaluate_loaded(config, loaded.model, loaded.params, loaded.mesh, dataset.heldout)
            if group.is_leader:
                print(f"{model}, step {loaded.step}: {config.objective.name} on held-out data of {config.data.content}")
                for name, value in found.metrics.items():
                    print(f"  {name:16} {value:.4f}")
            return 0
        result = Evaluator(loaded.model, loaded.mesh, dataset.heldout)(
            loaded.params,
            lambda batches: track(
                batches, "evaluating", transient=True, console=None if group.is_leader else Console(quiet=True)
            ),
        )
        baseline = bigram_baseline_of(dataset)
        better = result.bits_per_byte < baseline.bits_per_byte
        if not group.is_leader:
            return 0 if better else 1
        print(f"{model}, step {loaded.step}: {result.tokens:,} held-out tokens, {dataset.heldout.target_bytes:,} bytes")
        print(f"  model        {result.bits_per_byte:.4f} bits per byte ({result.nll:.4f} nats per token)")
        print(f"  byte bigram  {baseline.bits_per_byte:.4f} bits per byte")
        if not better:
            print("The model does not beat the byte bigram: train it for longer.")
            return 1
        return 0

    return parse_command(run, argv, "jaxllm eval")


def compare_with_original(
    model: str,
    original: str,
    text: Sequence[Path],
    tasks: list[str],
    limit: int | None,
    max_len: int,
    dtype: Literal["float32", "bfloat16"] | None,
    weights: str,
) -> int:
    """Prints what a model lost of the one that it was made of: on text, or on tasks."""
    import numpy as np

    from jaxllm.data import corpus
    from jaxllm.evals.model_comparison import compare_models

    if tasks:
        for name, kept in ((original, "plain"), (model, weights)):
            print(f"{name}:", flush=True)
            if status := run_tasks(name, tasks, limit, max_len, dtype, kept):
                return status
        return 0
    before = load_with_progress(original, dtype)
    after = load_with_progress(model, dtype, weights=weights)
    files = list(text) or [corpus.path("heldout")]
    ids = [int(token) for file in files for token in before.tokenizer.encode(file.read_text("utf-8"))]
    length = min(max_len, TEXT_TOKENS)
    if len(ids) < length:
        raise UsageError(f"--text has {len(ids)} tokens, and a row has {length}: give more, or a smaller --max-len.")
    count = min(limit or TEXT_ROWS, len(ids) // length)
    rows = np.asarray(ids[: count * length], np.int32).reshape(count, length)
    with progress_bar("comparing", model) as progress:
        found = compare_models(before, after, rows, lambda done: progress("rows", done, len(rows)))
    print(
        f"{model} beside {original}: {found.tokens:,} tokens of {', '.join(map(str, text)) or 'held-out Shakespeare'}"
    )
    print(f"  NLL        {found.original_nll:.4f} -> {found.nll:.4f} nats ({found.nll / found.original_nll - 1:+.2%})")
    print(f"  KL         {found.kl:.4f} nats from the original's distribution")
    print(f"  agreement  {found.agreement:.1%} of the likeliest tokens")
    return 0


def compare_caches(
    model: str, max_len: int, dtype: Literal["float32", "bfloat16"] | None, kv_format: str, kv_keep: str
) -> int:
    """Prints the quality and the bytes of a KV cache beside those of the full one."""
    from jaxllm.evals.cache_quality import MOST_TOKENS, cache_quality

    loaded = load_with_progress(model, dtype)
    length = min(max_len, MOST_TOKENS)
    print(f"{model}, {length} tokens: NLL of held-out Shakespeare, recall of pass keys, KV cache of a sequence")
    rows = [("auto", "all"), *([] if (kv_format, kv_keep) == ("auto", "all") else [(kv_format, kv_keep)])]
    full = None
    for form, keep in rows:
        found = cache_quality(loaded, length, form, keep)
        full = full or found
        name = form if keep == "all" else f"{form} {keep}"
        print(
            f"  {name:28} NLL {found.nll:.4f} ({found.nll / full.nll - 1:+.2%})  recall {found.recall:4.0%}  "
            f"{found.sequence_bytes:,} bytes ({found.sequence_bytes / full.sequence_bytes:.3f} of full)",
            flush=True,
        )
    return 0


def run_tasks(
    model: str,
    tasks: list[str],
    limit: int | None,
    max_len: int,
    dtype: Literal["float32", "bfloat16"] | None,
    weights: str = "plain",
    kv_format: str = "auto",
    kv_keep: str = "all",
    policy: BatchPolicyName = "first-come",
    offload: str | None = None,
) -> int:
    """Runs tasks and prints their scores: .jsonl files one after the other, then all lm-eval tasks together."""
    from jaxllm.evals import Scorer, run_lm_eval, run_task
    from jaxllm.infer import LLM, EngineConfig
    from jaxllm.infer.length_limits import hard_limit

    files = [Path(name) for name in tasks if name.endswith(".jsonl")]
    others = [name for name in tasks if not name.endswith(".jsonl")]
    for path in files:
        if not path.is_file():
            raise UsageError(f"there is no file {path}.")
    loaded = load_with_progress(
        model, dtype, weights=weights, offload=offload, sequences=EngineConfig.max_sequences, max_len=max_len,
        kv_format=kv_format,
    )  # fmt: skip
    most, _ = hard_limit(loaded.model.config)
    sizes = EngineConfig(max_len=max_len if most is None else min(max_len, most), samplers=("full",), buckets=(256,))
    sizes = with_kv_cache(sizes, kv_format, kv_keep)
    scorer = Scorer(LLM(loaded, sizes, policy=POLICIES[policy]))
    for path in files:
        print(run_task(scorer, path, limit))
    if others:
        for name, metrics in run_lm_eval(scorer, others, limit).items():
            shown = ", ".join(f"{metric} {value:.4f}" for metric, value in metrics.items() if isinstance(value, float))
            print(f"{name}: {shown}")
    return 0
