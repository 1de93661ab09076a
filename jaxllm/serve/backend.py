"""Backend protocol: the interface between the HTTP server and an inference engine, and its implementation."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxllm.infer.adapter_catalogue import AdapterRevision
from jaxllm.infer.async_engine import AsyncEngine
from jaxllm.infer.attention_pool.offloaded_runner import OffloadedRunner
from jaxllm.infer.embedder import Embedder, Pooling
from jaxllm.infer.engine.engine import Engine
from jaxllm.infer.engine.stream_output import OutputDelta
from jaxllm.infer.pools.pooled_runner import PooledRunner
from jaxllm.infer.runner.serving_mesh import spans_processes
from jaxllm.infer.sampling_params import SamplingParams
from jaxllm.infer.scheduling.policies import FirstCome, Priority, Service
from jaxllm.infer.streaming.blocks.block_runner import BlockRunner
from jaxllm.infer.streaming.streamed_runner import StreamedRunner
from jaxllm.serve.api.errors import ApiError
from jaxllm.serve.scoring.text_scorer import TextScorer
from jaxllm.serve.utilisation import ProgramUtilisation, program_utilisation
from jaxllm.text import ChatTemplate, Tokenizer
from pallas_kernels.paged_attention.pages import HOST_MEMORY


@dataclass(frozen=True)
class EngineLoad:
    """Load of an engine: its queue and KV cache now, and its counters since the start.

    Attributes:
        running, waiting: number of running and of queued sequences.
        pages_held, pages: pages of the KV cache in use, and in total.
        counters: cumulative counters by name.
        programs: FLOPs, bytes and utilisation by the name of the compiled program.
        gauges: further values of now, by name; those of adapters.
        accepted_by_position: draft tokens that were accepted, by position in the draft; None without speculation.
    """

    running: int = 0
    waiting: int = 0
    pages_held: int = 0
    pages: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    programs: dict[str, ProgramUtilisation] = field(default_factory=dict)
    gauges: dict[str, int] = field(default_factory=dict)
    accepted_by_position: list[int] | None = None


@runtime_checkable
class Backend(Protocol):
    """Inference engine as the server sees it. ``EngineBackend`` wraps ``Engine``; tests bring stubs."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    max_len: int
    """Maximum length of a sequence in tokens, prompt included."""
    max_sequences: int
    """Maximum number of sequences that run at the same time."""
    supports_priority: bool
    """Whether the scheduling policy honours priorities."""
    embedding_dim: int
    """Elements of an embedding."""
    adapter_host: Engine | None
    """Engine that adapters are loaded into; None: it serves none."""
    sampling: Mapping[str, float]
    """Sampling parameters of requests that give none, by field of ``SamplingParams``."""
    scorer: TextScorer | None
    """Scores texts; None: the model only generates."""

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Checks a request without submitting it.

        Raises:
            ValueError: ``stream`` would refuse it.
        """
        ...

    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        salt: str = "",
        service: Service | None = None,
        adapter: str | AdapterRevision | None = None,
    ) -> AsyncGenerator[OutputDelta, None]:
        """Output of a request as it is generated; closing the generator cancels the request."""
        ...

    def embed(self, ids: Sequence[int], pooling: Pooling) -> np.ndarray:
        """Embedding of a text, float32 [D] of norm 1; blocks until it is computed."""
        ...

    def load(self) -> EngineLoad:
        """Current load and cumulative counters."""
        ...

    def describe(self) -> dict[str, Any]:
        """Effective configuration as JSON values, for ``/config``."""
        ...


class EngineBackend:
    """Backend over ``AsyncEngine``.

    Args:
        engine: engine that runs in its own thread.
        template: chat template of the model; None if it has none.
        embedder: computes embeddings.
        sampling: sampling parameters of requests that give none.
        scorer: scores texts; None: the model only generates.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        template: ChatTemplate | None,
        embedder: Embedder,
        sampling: Mapping[str, float] | None = None,
        scorer: TextScorer | None = None,
    ):
        assert engine.engine.tokenizer is not None
        self._async, self._engine, self._embedder = engine, engine.engine, embedder
        self.tokenizer, self.template = engine.engine.tokenizer, template
        self.max_len = self._engine.max_len
        self.max_sequences = self._engine.config.max_sequences * self._engine.runner.spec.replicas
        self.supports_priority = isinstance(self._engine.scheduler.policy_state.policy, Priority)
        self.embedding_dim = embedder.dim
        self.sampling: Mapping[str, float] = dict(sampling or {})
        self.scorer: TextScorer | None = scorer
        self.adapter_host = self._engine if self._engine.adapter_slots is not None else None

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Checks a request, see ``Engine.check``."""
        self._engine.check(list(prompt), params)

    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        salt: str = "",
        service: Service | None = None,
        adapter: str | AdapterRevision | None = None,
    ) -> AsyncGenerator[OutputDelta, None]:
        """Streams a request's output, see ``AsyncEngine.stream``."""
        return self._async.stream(prompt, params, salt=salt, service=service, adapter=adapter)

    def embed(self, ids: Sequence[int], pooling: Pooling) -> np.ndarray:
        """Embedding of a text, see ``Embedder``.

        Raises:
            ApiError: the engine spans several processes, which follow its steps and nothing else.
        """
        if spans_processes(self._engine.runner.mesh):
            raise ApiError(400, "this server runs over several processes, which serve completions and no embeddings.")
        if isinstance(self._engine.runner, StreamedRunner):
            raise ApiError(400, "this server streams its weights (--offload), for completions and not for embeddings.")
        if self._engine.config.stages > 1:
            raise ApiError(400, "this server has pipeline stages (--mesh stage=N), for completions and no embeddings.")
        return self._embedder(ids, pooling)

    def load(self) -> EngineLoad:
        """Load, read while the engine's thread runs: every value is exact, but they may be of different steps."""
        scheduler, metrics = self._engine.scheduler, self._engine.metrics
        held = sum(pages.count - pages.available for pages in scheduler.pages)
        slots = self._engine.adapter_slots
        counters, gauges = dict[str, int](), dict[str, int]()
        if slots is not None:
            counters = {
                "adapter_reads": slots.reads,
                "adapter_loads": slots.loads,
                "adapter_evictions": slots.evictions,
            }
            gauges = {
                "adapters_catalogued": len(self._engine.adapters),
                "adapters_on_host": slots.on_host,
                "adapters_on_device": slots.resident,
            }
        if isinstance(self._engine.runner, StreamedRunner):
            counters |= self._engine.runner.counters()
        if self._engine.pools is not None:
            counters |= {
                "kv_pages_moved": metrics.moved_pages,
                "kv_bytes_moved": metrics.moved_bytes,
                "kv_pages_shared": self._engine.pools.shared_pages,
            }
            gauges["decode_engines_connected"] = self._engine.pools.connected
        if isinstance(self._engine.runner, OffloadedRunner):
            found = self._engine.runner.transfers
            counters |= {
                "attention_bytes_sent": found.sent_bytes,
                "attention_bytes_returned": found.returned_bytes,
            }
        if (beside := self._engine.side_work) is not None:
            counters |= beside.counters()
        if speculates := self._engine.config.verify_tokens > 0:
            counters |= {
                "spec_decode_num_drafts": metrics.drafts,
                "spec_decode_num_draft_tokens": metrics.proposed_tokens,
                "spec_decode_num_accepted_tokens": metrics.accepted_tokens,
            }
        return EngineLoad(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(scheduler.forks),
            pages_held=held,
            pages=sum(pages.count for pages in scheduler.pages),
            counters={
                "steps": metrics.steps,
                "prompt_tokens": metrics.prompt_tokens,
                "generation_tokens": metrics.generated_tokens,
                "padding_tokens": metrics.padding_tokens,
                "prefix_cache_hit_tokens": scheduler.hit_tokens,
                "preemptions": scheduler.preemptions,
            }
            | counters,
            programs=program_utilisation(self._engine),
            gauges=gauges,
            accepted_by_position=list(metrics.accepted_by_position) if speculates else None,
        )

    def describe(self) -> dict[str, Any]:
        """Effective sizes, dtypes, bytes and devices of the engine."""
        return describe(self._engine)


def describe(engine: Engine) -> dict[str, Any]:
    """Effective configuration of an engine as JSON values."""
    import dataclasses

    import jax

    runner = engine.runner
    spec = runner.spec
    out: dict[str, Any] = {
        "engine": dataclasses.asdict(engine.config),
        "policy": type(engine.scheduler.policy_state.policy or FirstCome()).__name__,
        "max_len": spec.max_len,
        "page_size": spec.page_size,
        "pages": list(spec.pages),
        "vocab_size": engine.vocab_size,
        "stop_ids": [] if engine.tokenizer is None else list(engine.tokenizer.stop_ids),
        "jax": jax.__version__,
    }
    leaves, held = jax.tree.leaves(runner.params), jax.tree.leaves(runner.pools)
    for leaf in leaves:
        kind = out.setdefault("parameters", {}).setdefault(str(leaf.dtype), {"numbers": 0, "bytes": 0})
        kind["numbers"] += leaf.size
        kind["bytes"] += leaf.nbytes
    if held:
        out["cache"] = {
            "kinds": sorted({group.dtype for group in spec.groups}),
            "dtypes": sorted({str(x.dtype) for x in held}),
            "bytes": sum(_bytes_of(x) for x in held if x.sharding.memory_kind != HOST_MEMORY),
            "token_bytes": runner.token_bytes,
        }
        if isinstance(runner, BlockRunner):
            by_tier = runner.bytes_by_tier()
            out["cache"] |= {"bytes": by_tier["device"], "host_bytes": by_tier["host"], "disk_bytes": by_tier["disk"]}
            out["cache"]["batches"] = spec.replicas
        if engine.config.values_on_host:
            out["cache"]["host_bytes"] = sum(_bytes_of(x) for x in held if x.sharding.memory_kind == HOST_MEMORY)
    if engine.config.retention is not None:
        out.setdefault("cache", {})["retention"] = engine.retention_report()
    if engine.metrics.cut_tokens:
        cut, again = engine.metrics.cut_tokens, engine.metrics.recomputed_tokens
        returned = {"returned_pages": engine.scheduler.returned_pages}
        out.setdefault("cache", {})["subtasks"] = {"cut_tokens": cut, "recomputed_tokens": again, **returned}
    if (store := engine.page_tiers.store) is not None:
        out.setdefault("cache", {})["tiers"] = store.report()
    if leaves:
        has_pools = isinstance(runner, PooledRunner | OffloadedRunner)
        found = runner.devices if has_pools else leaves[0].sharding.device_set
        devices = sorted(found, key=lambda d: d.id)
        out["devices"] = [{"id": d.id, "platform": d.platform, "kind": d.device_kind} for d in devices]
    if runner.program_cache is not None:
        counts = dataclasses.asdict(runner.program_cache.counts)
        out["programs"] = {"names": sorted(runner.programs), **counts}
    return out


def _bytes_of(x: Any) -> int:
    """Bytes of an array, or of one of this shape."""
    return math.prod(x.shape) * x.dtype.itemsize
