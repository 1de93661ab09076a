"""``jaxllm compile --serve``: compiles the programs of a server ahead, into a directory to ship beside a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxllm.cli.command_parser import parse_command
from jaxllm.cli.model_loading import load_with_progress
from jaxllm.infer.kv_cache_options import KvFormat, with_kv_cache


def compile_serving(argv: list[str]) -> int:
    """Compile a server's programs ahead of time: `jaxllm compile MODEL --serve DIR`."""

    def run(
        model: Annotated[str, tyro.conf.Positional],
        /,
        serve: Path,
        max_sequences: int = 16,
        max_len: int | None = None,
        max_batched_tokens: int = 256,
        dtype: Literal["float32", "bfloat16"] | None = None,
        weights: str = "auto",
        kv_format: KvFormat = "auto",
        kv_keep: str = "all",
        layers: Literal["stacked", "apart"] = "stacked",
        mesh: str | None = None,
    ) -> int:
        """Compiles all programs of `jaxllm serve MODEL` for this computer's devices, and writes them to a directory.

        The directory may be copied: `jaxllm serve` finds it as the directory programs beside the model's files, or by
        --programs. Programs are for these versions of jaxllm and jax and for this kind of device; where they do not
        fit, the server compiles its own. They are native code, so a server runs those of others only with
        --trust-programs (docs/decisions/0006-engine.md). The options are those of `jaxllm serve` that programs depend
        on; give the same.

        Args:
            model: model, as for `jaxllm generate`.
            serve: directory to write to; programs of other options may be there.
            max_sequences: maximum number of sequences that run at the same time.
            max_len: maximum sequence length in tokens, prompt included; by default the model's context length.
            max_batched_tokens: token budget of a step.
            dtype: compute dtype of a model from another library, float32 by default.
            weights: auto, plain, packed, or a format that matrices are rounded to, as for `jaxllm serve`.
            kv_format: format of the KV cache: auto (the compute dtype), bf16, or 8, 4 or 2 bits with scales: int8, fp8,
                int4, bfp4, kivi4, kivi2; or shadowkv[:RANK[,TOKENS[,OUTLIERS]]], low-rank keys on the device, values on
                the host (what each costs: docs/serve/kv_cache.md).
            kv_keep: tokens that stay in the KV cache: all; window+sinks[:RECENT[,SINKS]], the most recent ones and
                the first few, by default 1024 and 4; corm[:THRESHOLD], those with that multiple of the even share of
                recent attention; pyramid[:SHARE], so many of all by recent attention, fewer in deeper layers;
                locret:HEADS.safetensors[,BUDGET], so many by trained heads; or chai[:SIZE], all, with one key for every
                SIZE kv heads that attend alike, 2 by default (docs/serve/kv_cache.md).
            layers: stacked, or apart: decodes faster on CPUs and GPUs, and `jaxllm serve` takes it by itself where
                these programs are there.
            mesh: device mesh, such as data=2,tensor=4; one device by default.
        """
        from jaxllm.infer import LLM
        from jaxllm.infer.engine_config import serving_config

        sizes = serving_config(
            max_sequences=max_sequences, max_batched_tokens=max_batched_tokens, max_len=max_len, kv_dtype="auto"
        )
        sizes = with_kv_cache(sizes, kv_format, kv_keep)
        llm = LLM(load_with_progress(model, dtype, layers, mesh, weights), sizes, manifest=serve, background=False)
        cache = llm.engine.runner.program_cache
        assert cache is not None
        counts, device = cache.counts, cache.devices[0]
        size = sum(file.stat().st_size for file in cache.folder.iterdir()) if cache.folder is not None else 0
        print(
            f"{serve}: {counts.compiled} programs compiled, {counts.loaded} were there, for {len(cache.devices)} x "
            f"{device.device_kind}; {size / 2**20:.1f} MiB. Serve with them: jaxllm serve {model} --programs {serve}"
        )
        return 0

    return parse_command(run, argv, "jaxllm compile --serve")
