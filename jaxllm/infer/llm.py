"""A model that answers: texts or token ids in, texts out.

llm = LLM("smollm2")
for completion in llm.generate(["Once upon a time", "The sea"], SamplingParams(max_tokens=40)):
    print(completion.outputs[0].text)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jaxllm.convert.load import LoadedModel, load_model
from jaxllm.files import DataError, cache_root
from jaxllm.infer.engine.engine import Engine
from jaxllm.infer.engine.policies import Policy
from jaxllm.infer.engine.sequence import Request
from jaxllm.infer.engine.stream_output import Piece
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.length_limits import hard_limit
from jaxllm.infer.runner.model_runner import Device
from jaxllm.infer.runner.serving_mesh import mesh_of
from jaxllm.infer.sampling_params import SamplingParams

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Output:
    """One continuation.

    Attributes:
        text: of the tokens, without a stop text unless it was to be included, after the prompt's if that was.
        tokens: made, the one that ended it included.
        finish: "stop", "length", "cancelled" or "error"; see ``Piece``.
        logprobs: of the tokens, where asked for.
        top: the likeliest tokens at each place and their log-probabilities, where asked for.
    """

    text: str
    tokens: tuple[int, ...]
    finish: str
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True)
class Completion:
    """What became of one prompt.

    Attributes:
        prompt: its token ids.
        outputs: ``n`` continuations.
        prompt_scores: of each token of the prompt but the first, where asked for: its log-probability, and how many
            tokens are likelier.
        prompt_top: the likeliest tokens there, where asked for.
    """

    prompt: tuple[int, ...]
    outputs: tuple[Output, ...]
    prompt_scores: tuple[tuple[float, int], ...] = ()
    prompt_top: tuple[tuple[tuple[int, float], ...], ...] = ()


class LLM:
    """A model with an engine.

    Args:
        model: what ``load_model`` takes, or what it gave.
        config: the engine's sizes.
        dtype: see ``load_model``.
        mesh: to serve on, such as ``"data=2,tensor=4"``, over all devices; None: where ``model`` lives, or one device.
        manifest: folder to keep compiled programs in; None: nowhere. By default the cache folder's.
        strict, policy: see ``Engine``.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel,
        config: EngineConfig | None = None,
        *,
        dtype: str | None = None,
        mesh: str | None = None,
        manifest: Path | str | None = "",
        strict: bool = False,
        policy: Policy | None = None,
    ):
        over = None if mesh is None else mesh_of(mesh)
        self.loaded = model if isinstance(model, LoadedModel) else load_model(model, dtype=dtype, mesh=over)
        self.tokenizer = self.loaded.tokenizer
        folder = cache_root("") / "engine" if manifest == "" else manifest
        self.engine = Engine.of(
            self.loaded.model,
            self.loaded.params,
            config,
            tokenizer=self.tokenizer,
            longest=self.loaded.longest,
            mesh=over or self.loaded.mesh,
            manifest=None if folder is None else Path(folder),
            strict=strict,
            policy=policy,
        )
        if isinstance(self.engine.device, Device) and self.engine.device.mesh is not None:
            # Those that the engine has placed, not these and others beside them.
            self.loaded = replace(self.loaded, params=self.engine.device.params, mesh=self.engine.device.mesh)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        salt: str = "",
    ) -> list[Completion]:
        """Continues prompts, as many at a time as the engine takes; the completions are in their order.

        Args:
            prompts: a text, token ids, or several of them.
            params: for all prompts, or one for each.
            salt: see ``Engine.submit``.

        Raises:
            ValueError: see ``Engine.submit``; nothing is begun then.
        """
        many: list[Any] = [prompts] if _is_one(prompts) else list(prompts)
        each = [params] * len(many) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(many):
            raise ValueError(
                f"{len(each)} params are given for {len(many)} prompts; give one for all, or one for each."
            )
        requests: list[Request] = []
        try:
            for prompt, one in zip(many, each, strict=True):
                requests.append(self.engine.submit(self.ids(prompt), one, salt=salt))
            while any(s.finish is None for r in requests for s in r.sequences):
                self.engine.step()
        except BaseException:
            for request in requests:
                self.engine.cancel(request)
            raise
        return [completion(request) for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, salt: str = "") -> Iterator[Piece]:
        """Continues one prompt, piece by piece; a stream that is closed is cancelled."""
        request = self.engine.submit(self.ids(prompt), params, salt=salt)
        return self._stream(request)

    def _stream(self, request: Request) -> Iterator[Piece]:
        left = request.params.n
        try:
            while left:
                for piece in self.engine.step():
                    if piece.request is request:
                        left -= piece.finish is not None
                        yield piece
        finally:
            self.engine.cancel(request)

    def ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; a text begins as the model's documents do.

        Raises:
            DataError: an empty text, and a tokenizer that has no token to begin one with.
        """
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        ids = [int(i) for i in self.tokenizer.encode(prompt, bos=self.tokenizer.adds_bos)]
        if not ids and self.tokenizer.start_id is not None:
            ids = [self.tokenizer.start_id]
        if not ids:
            raise DataError("the prompt is empty, and this tokenizer has no token to begin a document with.")
        return ids


def for_one(loaded: LoadedModel, tokens: int) -> EngineConfig:
    """An engine's sizes for one reader: few programs, room for sequences of this many tokens and for some more.

    Room grows by powers of two, so that programs are found again for the next text. On a CPU, 64 tokens at a time read
    a long prompt nearly as fast as 256 do, short ones faster, and are one program to wait for.
    """
    room = 512
    while room < tokens:
        room *= 2
    most, _ = hard_limit(loaded.model.config)
    room = room if most is None else min(room, most)
    buckets = (64,) if jax.default_backend() == "cpu" else (64, 512)
    return EngineConfig(sequences=1, budget=buckets[-1], max_len=room, buckets=buckets, samplers=("plain",))


def completion(request: Request) -> Completion:
    """What became of a request, all of whose continuations have ended."""
    outputs = []
    for s in request.outputs:
        assert s.finish is not None
        made = tuple(s.tokens[len(request.prompt) :])
        wanted = request.params.logprobs is not None
        logprobs, top = (tuple(s.logprobs), tuple(map(tuple, s.top))) if wanted else ((), ())
        outputs.append(Output(s.text, made, s.finish, logprobs, top))
    return Completion(tuple(request.prompt), tuple(outputs), tuple(request.prompt_scores), tuple(request.prompt_top))


def _is_one(prompts: Any) -> bool:
    """Whether this is a text or token ids, and not several of them."""
    return isinstance(prompts, str) or (len(prompts) > 0 and hasattr(prompts[0], "__index__"))
