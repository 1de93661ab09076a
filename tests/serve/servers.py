"""Servers for tests: in a thread, over a tiny random model or a stub engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.infer import AsyncEngine, Engine, EngineConfig, Request, SamplingParams
from jaxllm.infer.adapter_catalogue import AdapterRevision
from jaxllm.infer.embedder import Embedder
from jaxllm.infer.engine.stream_output import OutputDelta
from jaxllm.infer.scheduling.policies import Service
from jaxllm.infer.scheduling.sequence import Finish
from jaxllm.infer.scheduling.sequence import Sequence as Continuation
from jaxllm.serve import Backend, EngineBackend, EngineLoad, ServeConfig, Server
from jaxllm.serve.scoring.text_scorer import RewardScorer, TextScorer
from jaxllm.serve.server import BackendFactory
from jaxllm.text import ChatTemplate
from jaxllm.text.byte_tokenizer import ByteTokenizer
from tests import quick, tiny

TEMPLATE = ChatTemplate(
    "{% if tools %}<tools>{% for t in tools %}{{ t.function.name }} {% endfor %}\n{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIZES = EngineConfig(
    max_sequences=4,
    max_batched_tokens=32,
    max_len=384,
    page_size=8,
    buckets=(32,),
    decode_steps=2,
    samplers=("full",),
    top_logprobs=20,
    chunk_cache=True,
)


@functools.cache
def tiny_engine() -> Engine:
    """A random model of bytes."""
    import jax
    import jax.numpy as jnp
    import pytest

    from jaxllm.models import functional

    tokenizer = ByteTokenizer()
    config = tiny.decoder(vocab_size=tokenizer.vocab_size, dtype="float32")
    params = jax.tree.map(jnp.asarray, quick.params(config, seed=7, scale=0.5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", quick.jit)
        return Engine.of(functional(config), params, SIZES, tokenizer=tokenizer, strict=True)


@contextlib.asynccontextmanager
async def tiny_backend() -> AsyncIterator[Backend]:
    """The tiny engine, running."""
    made = tiny_engine()
    async with AsyncEngine(made) as engine:
        embedder = Embedder(made.runner.model, made.runner.params, made.max_len)
        reward = functools.partial(embedder.reward, token=7)
        scorer = RewardScorer(ByteTokenizer(), TEMPLATE, reward, made.max_len)
        yield EngineBackend(engine, TEMPLATE, embedder, scorer=scorer)


class FixedRate:
    """Stub engine that makes a token of every completion at a fixed interval, without a model.

    Args:
        seconds: between two tokens.
        sequences: worked on at a time; others wait.
        says: a letter a token, and then it ends; None: letters of the alphabet until it is told to end.
        template: of its chats.
    """

    def __init__(
        self,
        seconds: float = 0.01,
        sequences: int = 256,
        max_len: int = 4096,
        *,
        says: str | None = None,
        template: ChatTemplate = TEMPLATE,
    ):
        self.tokenizer, self.template, self.says = ByteTokenizer(), template, says
        self.max_len, self.max_sequences, self.seconds = max_len, sequences, seconds
        self.supports_priority, self.embedding_dim, self.services = True, 8, list[Service | None]()
        self.adapter_host = None
        self.sampling: Mapping[str, float] = {}
        self.scorer: TextScorer | None = None
        self.begun = self.closed = self.held = 0
        self._places: asyncio.Semaphore | None = None

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Accepts everything."""

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        salt: str = "",
        service: Service | None = None,
        adapter: str | AdapterRevision | None = None,
    ) -> AsyncGenerator[OutputDelta, None]:
        """Streams letters."""
        self._places = self._places or asyncio.Semaphore(self.max_sequences)
        self.begun += 1
        self.services.append(service)
        request = Request(self.begun, list(prompt), params, salt.encode(), 0, frozenset())
        request.sequences = [Continuation(request, n, n, list(prompt)) for n in range(params.n)]
        echo = self.tokenizer.prompt_text(list(prompt)) if params.echo else ""
        try:
            async with self._places:
                self.held += 1
                try:
                    loop = asyncio.get_running_loop()
                    due = loop.time()
                    if params.max_tokens == 0:
                        yield OutputDelta(request, 0, (), echo, finish="length")
                    for made in range(1, min(params.max_tokens, len(self.says or " " * params.max_tokens)) + 1):
                        due += self.seconds
                        await asyncio.sleep(due - loop.time())
                        for number in range(params.n):
                            letter = chr(97 + made % 26) if self.says is None else self.says[made - 1]
                            yield OutputDelta(
                                request,
                                number,
                                (ord(letter) % 256,),
                                (echo if made == 1 else "") + letter,
                                finish=self._finish(made, params),
                            )
                finally:
                    self.held -= 1
        finally:
            self.closed += 1

    def _finish(self, made: int, params: SamplingParams) -> Finish | None:
        if made == len(self.says or ""):
            return "stop"
        return "length" if made == params.max_tokens else None

    def embed(self, ids: Sequence[int], pooling: str) -> np.ndarray:
        """Frequency of each digit, normalised to length 1."""
        vector = np.bincount(np.asarray(ids) % 8, minlength=8).astype(np.float32)
        return vector / np.linalg.norm(vector)

    def load(self) -> EngineLoad:
        """Page usage: one page per completion."""
        return EngineLoad(self.held, self.begun - self.closed - self.held, self.held, self.max_sequences, {})

    def describe(self) -> dict[str, Any]:
        """Describes nothing."""
        return {}


def opener(backend: Backend) -> BackendFactory:
    """Gives a backend that is there already."""

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[Backend]:
        yield backend

    return opened


@contextlib.contextmanager
def running(open_: BackendFactory, config: ServeConfig | None = None) -> Iterator[tuple[Server, str]]:
    """(a server in a thread, its URL)."""
    server = Server(config or ServeConfig(port=0, name="tiny"), open_)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while thread.is_alive() and not (server.started and server.service.dispatcher is not None):
            thread.join(0.01)
        assert server.started, "the server has not begun"
        yield server, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
