"""Decode benchmark: throughput of an engine, and its share of the roofline (reading weights and KV cache)."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.compiler.device_peaks import peak_of
from jaxllm.convert.load import LoadedModel
from jaxllm.infer.engine.engine import Engine
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.kv_cache_options import KEEP_ALL, with_kv_cache
from jaxllm.infer.runner.paged_cache import layer_groups
from jaxllm.infer.sampling_params import SamplingParams
from jaxllm.infer.speculate.proposer_table import with_speculation
from jaxllm.infer.streaming.streamed_weights import StreamedWeights
from jaxllm.models import DecoderConfig
from pallas_kernels.paged_attention.retention import by_scores


@dataclass(frozen=True)
class DecodeMeasurement:
    """Measured decode throughput.

    Attributes:
        batch, prompt, tokens: batch size, prompt length, and generated tokens per sequence.
        seconds: time from the last first token to the last token.
        prompt_seconds: time from the start to the last first token.
        step_bytes: bytes that a step reads: the weights, and the KV cache halfway through; None: of a mixture these
            depend on the routing, and streamed weights have no roofline of one memory.
        bandwidth: memory bandwidth in bytes per second.
        ready: seconds until the engine was ready.
    """

    batch: int
    prompt: int
    tokens: int
    seconds: float
    prompt_seconds: float
    step_bytes: int | None
    bandwidth: float
    ready: float

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens per second of all sequences together."""
        return self.batch * (self.tokens - 1) / self.seconds

    @property
    def roofline(self) -> float | None:
        """Fraction of the speed at which a step takes as long as reading its bytes once; None: it has no roofline."""
        if self.step_bytes is None:
            return None
        return self.step_bytes / self.bandwidth * (self.tokens - 1) / self.seconds

    def __str__(self) -> str:
        part = "" if self.roofline is None else f", {self.roofline:4.0%} of the memory's roofline"
        return (
            f"batch {self.batch:3}: {self.tokens_per_second:8.1f} tokens/s decoding, "
            f"{1e3 * self.seconds / (self.tokens - 1):7.2f} ms a step{part}; "
            f"prompts {self.batch * self.prompt / self.prompt_seconds:8.1f} tokens/s; ready in {self.ready:.1f} s"
        )


class DecodeBenchmark:
    """Decode benchmark: an engine for a batch size and length, to be measured any number of times.

    Args:
        loaded: model.
        batch, prompt, tokens: see ``DecodeMeasurement``.
        bandwidth: memory bandwidth in bytes per second, see ``memory_bandwidth``.
        manifest: see ``Engine.of``.
        speculate, speculate_tokens: speculative decoding, see ``LLM``.
        kv_format, kv_keep: KV cache, see ``with_kv_cache``.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        batch: int,
        prompt: int,
        tokens: int,
        bandwidth: float,
        manifest: Any = None,
        *,
        speculate: str | None = None,
        speculate_tokens: int | None = None,
        kv_format: str = "auto",
        kv_keep: str = KEEP_ALL,
    ):
        self.batch, self.prompt, self.tokens, self.bandwidth = batch, prompt, tokens, bandwidth
        self.config = loaded.model.config
        streamed = isinstance(loaded.params, StreamedWeights)
        self.weights = None if streamed or self.config.mixtures else _weights_read(loaded)
        budget = max(batch, 256)
        sizes = EngineConfig(
            max_sequences=batch, max_batched_tokens=budget, max_len=prompt + tokens, buckets=(budget,),
            samplers=("plain",), prefix_cache=False, decode_steps=16,
            layer_window=loaded.params.placement.window if streamed else 0,
        )  # fmt: skip
        sizes = with_speculation(with_kv_cache(sizes, kv_format, kv_keep), speculate, speculate_tokens)
        sizes = replace(sizes, buckets=tuple(sorted({budget, *sizes.verify_buckets})))
        start = time.perf_counter()
        self.engine = Engine.of(
            loaded.model,
            loaded.params,
            sizes,
            tokenizer=loaded.tokenizer if speculate else None,
            mesh=loaded.mesh,
            manifest=manifest,
            strict=True,
            path=loaded.path,
        )
        self.ready = time.perf_counter() - start

    @property
    def _tokens_read(self) -> int:
        """Tokens of the KV cache that a sequence reads halfway through: those that a retention rule keeps, or all."""
        half = self.prompt + self.tokens // 2
        rules = [group.rule for group in self.engine.runner.spec.groups if group.rule is not None]
        if rules and by_scores(rules[0]) is not None:
            return round(half * self.engine.metrics.kept_share)
        return rules[0].capacity(half) if rules else half

    def show_retention(self) -> str:
        """Line about the retention rule: entries that have stayed and left, and pages that came back."""
        found = self.engine.retention_report()
        return (
            f"{found['rule']}: {found['kept_entries']:,} entries kept and {found['dropped_entries']:,} dropped "
            f"({self.engine.metrics.kept_share:.0%} kept), {found['returned_pages']:,} pages returned"
        )

    def run(self) -> DecodeMeasurement:
        """Measures greedy decoding of random prompts."""
        rng = np.random.default_rng(0)
        params = SamplingParams(max_tokens=self.tokens, temperature=0.0, ignore_eos=True)
        start = time.perf_counter()
        for _ in range(self.batch):
            self.engine.submit(rng.integers(0, self.engine.vocab_size, self.prompt), params)
        waiting, first = self.batch, start
        seen: set[int] = set()
        while self.engine.busy:
            for delta in self.engine.step():
                if delta.tokens and delta.request.id not in seen:
                    seen.add(delta.request.id)
                    waiting -= 1
                    first = time.perf_counter()
        end = time.perf_counter()
        read = None
        if self.weights is not None:
            read = self.weights + self.batch * self._tokens_read * self.engine.runner.token_bytes
        return DecodeMeasurement(
            self.batch, self.prompt, self.tokens, end - first, first - start, read, self.bandwidth, self.ready
        )


def _weights_read(loaded: LoadedModel) -> int:
    """Bytes of weights that a step of a dense model reads: of a table of its own for the tokens only their rows."""
    table = 0 if loaded.model.config.tied else loaded.params["embedding"]["table"].nbytes
    return sum(x.nbytes for x in jax.tree.leaves(loaded.params)) - table


def kv_bytes_per_token(config: DecoderConfig, kv_dtype: str = "auto") -> int:
    """Bytes of KV cache per token in all layers, scales included; ``kv_dtype`` as in ``EngineConfig``."""
    return sum(group.token_bytes() for group in layer_groups(config, kv_dtype))


def memory_bandwidth() -> float:
    """Memory bandwidth of the first device in bytes/s, from its data sheet or measured by a matmul of 256 MB."""
    if (peak := peak_of(jax.devices()[0].device_kind)) is not None:
        return peak.bandwidth
    matrix, vector = jnp.ones((8192, 8192), jnp.float32), jnp.ones((1, 8192), jnp.float32)
    run = jax.jit(lambda v, m: jnp.einsum("bd,vd->bv", v, m))
    run(vector, matrix).block_until_ready()
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        run(vector, matrix).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return matrix.nbytes / best
