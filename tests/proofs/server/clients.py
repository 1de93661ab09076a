"""Third-party clients over the real SmolLM2."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import openai

from jaxllm.infer import LLM, AsyncEngine, EngineConfig
from jaxllm.infer.embedder import Embedder
from jaxllm.serve import EngineBackend, ServeConfig
from tests.proofs.harness import proof
from tests.serve import servers
from tests.serve.driving import FEATURES

SIZES = EngineConfig(
    max_sequences=4, max_batched_tokens=64, max_len=768, buckets=(64,), samplers=("full",), top_logprobs=20,
    decode_steps=4,
)  # fmt: skip


@functools.cache
def smollm2() -> LLM:
    """The engine that clients share."""
    return LLM("smollm2", SIZES)


@contextlib.asynccontextmanager
async def smollm2_backend() -> Any:
    """It, running."""
    llm = smollm2()
    loaded = llm.loaded
    async with AsyncEngine(llm.engine) as engine:
        yield EngineBackend(
            engine, loaded.template, Embedder(loaded.model, loaded.params, llm.engine.max_len, loaded.mesh)
        )


@proof("server", cases=sorted(FEATURES), sample=1)
def openai_client_on_smollm2(feature: str) -> None:
    """Each feature, by the official client, streamed and whole."""
    with (
        servers.running(smollm2_backend, ServeConfig(port=0, name="tiny", tool_parser="hermes")) as (_, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=600) as client,
    ):
        FEATURES[feature](client)
