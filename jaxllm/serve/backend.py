"""What the server needs of an engine, and how ours gives it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxllm.infer.async_engine import AsyncEngine
from jaxllm.infer.engine.engine import Engine
from jaxllm.infer.engine.policies import FirstCome, Priority, Service
from jaxllm.infer.engine.stream_output import Piece
from jaxllm.infer.sampling_params import SamplingParams
from jaxllm.serve.embedder import Embedder, Pooling
from jaxllm.serve.utilisation import ProgramUtilisation, program_utilisation
from jaxllm.text import ChatTemplate, Tokenizer


@dataclass(frozen=True)
class EngineLoad:
    """What an engine is busy with, and what it has done since it began.

    Attributes:
        running, waiting: continuations.
        pages_held, pages: of keys and values.
        counters: by name; they only rise.
        programs: of programs, by name.
    """

    running: int = 0
    waiting: int = 0
    pages_held: int = 0
    pages: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    programs: dict[str, ProgramUtilisation] = field(default_factory=dict)


@runtime_checkable
class Backend(Protocol):
    """An engine as the server sees it. ``EngineBackend`` is ours; tests bring others."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    max_len: int
    """Tokens of a sequence at most."""
    sequences: int
    """Continuations it works on at a time."""
    supports_priority: bool
    """Whether some requests may go before others."""

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raises ValueError for what ``stream`` would refuse."""
        ...

    def stream(
        self, prompt: Sequence[int], params: SamplingParams, *, salt: str = "", service: Service | None = None
    ) -> AsyncGenerator[Piece, None]:
        """Pieces as they come; closing it ends the request."""
        ...

    def embed(self, ids: Sequence[int], pooling: Pooling) -> np.ndarray:
        """Float32[D] of length 1; may take its time."""
        ...

    def load(self) -> EngineLoad:
        """How busy it is."""
        ...

    def describe(self) -> dict[str, Any]:
        """What it is built for, and on what: for people to read."""
        ...


class EngineBackend:
    """Our engine behind the server.

    Args:
        engine: running in its thread.
        template: of its model.
        embedder: gives vectors.
    """

    def __init__(self, engine: AsyncEngine, template: ChatTemplate | None, embedder: Embedder):
        assert engine.engine.tokenizer is not None
        self._async, self._engine, self._embedder = engine, engine.engine, embedder
        self.tokenizer, self.template = engine.engine.tokenizer, template
        self.max_len, self.sequences = self._engine.max_len, self._engine.config.sequences
        self.supports_priority = isinstance(self._engine.scheduler.ranking.policy, Priority)

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """See ``Engine.check``."""
        self._engine.check(list(prompt), params)

    def stream(
        self, prompt: Sequence[int], params: SamplingParams, *, salt: str = "", service: Service | None = None
    ) -> AsyncGenerator[Piece, None]:
        """See ``AsyncEngine.stream``."""
        return self._async.stream(prompt, params, salt=salt, service=service)

    def embed(self, ids: Sequence[int], pooling: Pooling) -> np.ndarray:
        """See ``Embedder``."""
        return self._embedder(ids, pooling)

    def load(self) -> EngineLoad:
        """Read while the engine's thread works: each number is right, they may be of different steps."""
        scheduler, metrics = self._engine.scheduler, self._engine.metrics
        held = sum(pages.count - pages.available for pages in scheduler.pages)
        return EngineLoad(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(scheduler.forks),
            pages_held=held,
            pages=sum(pages.count for pages in scheduler.pages),
            counters={
                "steps": metrics.steps,
                "prompt_tokens": metrics.prompt_tokens,
                "generation_tokens": metrics.made_tokens,
                "padding_tokens": metrics.padding_tokens,
                "prefix_cache_hit_tokens": scheduler.hit_tokens,
                "preemptions": scheduler.preemptions,
            },
            programs=program_utilisation(self._engine),
        )

    def describe(self) -> dict[str, Any]:
        """Sizes as they were settled, types, bytes and devices."""
        return describe(self._engine)


def describe(engine: Engine) -> dict[str, Any]:
    """What an engine is, as JSON."""
    import dataclasses

    import jax

    spec, device = engine.device.spec, engine.device
    out: dict[str, Any] = {
        "engine": dataclasses.asdict(engine.config),
        "policy": type(engine.scheduler.ranking.policy or FirstCome()).__name__,
        "max_len": spec.max_len,
        "page_size": spec.page_size,
        "pages": list(spec.pages),
        "vocab_size": engine.vocab_size,
        "stop_ids": [] if engine.tokenizer is None else list(engine.tokenizer.stop_ids),
        "jax": jax.__version__,
    }
    params, pools = getattr(device, "params", None), getattr(device, "pools", None)
    leaves, held = jax.tree.leaves(params), jax.tree.leaves(pools)
    for leaf in leaves:
        kind = out.setdefault("parameters", {}).setdefault(str(leaf.dtype), {"numbers": 0, "bytes": 0})
        kind["numbers"] += leaf.size
        kind["bytes"] += leaf.nbytes
    if held:
        out["cache"] = {
            "kinds": sorted({group.dtype for group in spec.groups}),
            "dtypes": sorted({str(x.dtype) for x in held}),
            "bytes": sum(x.nbytes for x in held),
            "token_bytes": getattr(device, "token_bytes", None),
        }
    if leaves:
        devices = sorted(leaves[0].sharding.device_set, key=lambda d: d.id)
        out["devices"] = [{"id": d.id, "platform": d.platform, "kind": d.device_kind} for d in devices]
    if (manifest := getattr(device, "manifest", None)) is not None:
        out["programs"] = {"names": sorted(device.programs), **dataclasses.asdict(manifest.counts)}  # type: ignore[attr-defined]
    return out
