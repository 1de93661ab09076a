"""LLM: a model with an engine; completes prompts given as text or token ids.

llm = LLM("smollm2")
for completion in llm.generate(["Once upon a time", "The sea"], SamplingParams(max_tokens=40)):
    print(completion.outputs[0].text)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax

import sharding
from jaxllm.convert.load import LoadedModel, load_model
from jaxllm.files import DataError, cache_root
from jaxllm.hub import find_model
from jaxllm.infer.adapter_catalogue import AdapterCatalogue, Source
from jaxllm.infer.engine.engine import Engine
from jaxllm.infer.engine.stream_output import OutputDelta
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.kv_cache_options import KEEP_ALL, with_kv_cache
from jaxllm.infer.length_limits import hard_limit
from jaxllm.infer.pools.decode_listener import DecodeListener
from jaxllm.infer.runner.serving_mesh import loading_mesh, mesh_of, stages_of
from jaxllm.infer.sampling_params import SamplingParams
from jaxllm.infer.scheduling.policies import Policy
from jaxllm.infer.scheduling.sequence import Request
from jaxllm.infer.speculate.proposer_table import with_speculation
from jaxllm.infer.start_progress import Listener, shown_progress
from jaxllm.infer.streaming.streamed_weights import StreamedWeights
from jaxllm.models import has_unstacked_layers
from jaxllm.models.packed_weight import has_packed
from jaxllm.peft import Adapter, AdapterError, read_peft
from jaxllm.peft.base_hash import base_hash
from jaxllm.text import Tokenizer

DEFAULT_ADAPTER_SLOTS = 32
"""Adapters on the device at a time where adapters are given and the number of slots is not."""
Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Output:
    """One completion of a prompt.

    Attributes:
        text: generated text, without the stop string unless it is to be included, after the prompt's if that is
            echoed.
        tokens: generated tokens, the stop token included.
        finish: "stop", "length", "cancelled" or "error"; see ``OutputDelta``.
        logprobs: log-probabilities of the tokens, if requested.
        top: top tokens at each position and their log-probabilities, if requested.
    """

    text: str
    tokens: tuple[int, ...]
    finish: str
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True)
class Completion:
    """Result of one prompt: its completions.

    Attributes:
        prompt: token ids.
        outputs: ``n`` completions.
        prompt_scores: for each prompt token but the first, if requested: its log-probability, and the number of tokens
            that are more likely.
        prompt_top: top tokens at these positions, if requested.
    """

    prompt: tuple[int, ...]
    outputs: tuple[Output, ...]
    prompt_scores: tuple[tuple[float, int], ...] = ()
    prompt_top: tuple[tuple[tuple[int, float], ...], ...] = ()


class LLM:
    """LLM: a model with an engine that generates text.

    Args:
        model: name or path that ``load_model`` takes, or a loaded model.
        config: sizes of the engine.
        dtype: see ``load_model``.
        mesh: mesh over all devices to serve on, such as ``"data=2,tensor=4"``; None: the mesh of ``model``, or one
            device.
        manifest: folder that compiled programs are kept in; None: nowhere. By default in the cache folder.
        strict, policy: see ``Engine``.
        speculate: proposer of speculative decoding, such as "ngram", see ``EngineConfig``; None: the configuration's.
        speculate_tokens: number of draft tokens of a sequence in a step, fixed; None: as the configuration says, which
            is adaptive by default.
        adapters: LoRA adapters by the names that requests may give: directories in PEFT's format, read when they are
            needed, or adapters in memory. ``engine.load_adapter`` adds others.
        background: generate as soon as the first programs are compiled, and compile the others meanwhile, see
            ``Engine.of``; ``engine.wait_for_programs`` waits for all.
        plain_first: see ``Engine.of``; false for a server, whose first request may need any sampler.
        programs: folder of compiled programs that came with the model (`jaxllm compile --serve`); None: the folder
            ``programs`` in the model's directory, if there is one.
        trust_programs: run programs of that folder that somebody else has compiled: native code, which can do anything.
            Only files that nobody but you can change are taken.
        layers: "given": parameters as the model has them, which ``engine.swap`` takes too; "auto": one array per layer
            where the programs for that are compiled already, see ``ModelRunner``; the model's stacks are freed then.
        progress: called with "loading", "compiling" or "ready", how much of it is done, and of how much, see
            ``StartProgress``; None: a start of more than two seconds shows a line on the terminal.
        reserved_bytes: device memory that the KV cache leaves to work beside the engine.
        decode_listener: see ``Engine.of``.
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
        adapters: Mapping[str, Source] | None = None,
        speculate: str | None = None,
        speculate_tokens: int | None = None,
        background: bool = True,
        plain_first: bool = True,
        programs: Path | str | None = None,
        trust_programs: bool = False,
        layers: Literal["given", "auto"] = "given",
        progress: Listener | None = None,
        reserved_bytes: int = 0,
        decode_listener: DecodeListener | None = None,
    ):
        # Checked before the model is loaded.
        sizes = with_speculation(config or EngineConfig(), speculate, speculate_tokens)
        over = None if mesh is None else mesh_of(mesh)
        folder = cache_root("") / "engine" if manifest == "" else manifest
        shipped = shipped_programs(model) if programs is None and isinstance(model, str | Path) else programs
        name = "the model" if isinstance(model, LoadedModel) else str(model)
        with shown_progress(name, progress) as tell:
            if not isinstance(model, LoadedModel):
                model = load_model(
                    model,
                    dtype=dtype,
                    mesh=loading_mesh(over, pooled=sizes.offloads_attention),
                    progress=lambda _, done, total: tell("loading", done, total),
                )
            self.loaded, self.tokenizer = model, model.tokenizer
            if isinstance(model.params, StreamedWeights):
                sizes, layers = replace(sizes, layer_window=model.params.placement.window), "given"
            if adapters and not sizes.adapter_slots:
                sizes = replace(sizes, adapter_slots=min(len(adapters), DEFAULT_ADAPTER_SLOTS))
            own = _hash_of(self.loaded) if sizes.adapter_slots else ""
            catalogue = AdapterCatalogue(functools.partial(read_adapter, self.loaded, base_hash=own))
            for name, source in (adapters or {}).items():
                catalogue.add(name, source)
            self.engine = Engine.of(
                self.loaded.model,
                self.loaded.params,
                sizes,
                tokenizer=self.tokenizer,
                longest=self.loaded.longest,
                mesh=over or (self.loaded.mesh if sizes.pools is None else None),
                manifest=None if folder is None else Path(folder),
                strict=strict,
                policy=policy,
                adapters=catalogue,
                background=background,
                plain_first=plain_first,
                shipped=None if shipped is None else Path(shipped),
                trusted=trust_programs,
                layers=layers,
                progress=tell,
                reserved_bytes=reserved_bytes,
                path=self.loaded.path,
                decode_listener=decode_listener,
            )
        held, over = self.engine.runner.params, self.engine.runner.mesh
        several = self.engine.config.stages > 1 or self.engine.config.pools is not None
        if over is None and self.engine.config.pools is not None:  # not the device that they were loaded on
            over = sharding.MeshSpec.parse("dp").build(list(jax.tree.leaves(held)[0].devices()))
        if over is not None or several or (layers == "auto" and has_unstacked_layers(held)):
            # Keep only the engine's copy of the weights.
            self.loaded = replace(self.loaded, params=held, mesh=over or self.loaded.mesh)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        salt: str = "",
        adapter: str | Sequence[str | None] | None = None,
        add_special_tokens: bool = True,
        parse_special: bool = True,
    ) -> list[Completion]:
        """Generates completions of prompts, batched by the engine; results are in the order of the prompts.

        Args:
            prompts: text, token ids, or a list of either.
            params: sampling parameters for all prompts, or one for each.
            salt: see ``Engine.submit``.
            adapter: name of the adapter for all prompts, or one for each; None: the base.
            add_special_tokens, parse_special: see ``ids``.

        Raises:
            ValueError: see ``Engine.submit``; no prompt is started then.
        """
        many: list[Any] = [prompts] if _is_one(prompts) else list(prompts)
        each = [params] * len(many) if params is None or isinstance(params, SamplingParams) else list(params)
        names = [adapter] * len(many) if adapter is None or isinstance(adapter, str) else list(adapter)
        for what, given in (("params", each), ("adapters", names)):
            if len(given) != len(many):
                raise ValueError(
                    f"{len(given)} {what} are given for {len(many)} prompts; give one for all, or one for each."
                )
        requests: list[Request] = []
        try:
            for prompt, one, name in zip(many, each, names, strict=True):
                ids = self.ids(prompt, add_special_tokens=add_special_tokens, parse_special=parse_special)
                requests.append(self.engine.submit(ids, one, salt=salt, adapter=name))
            while any(s.finish is None for r in requests for s in r.sequences):
                self.engine.step()
        except BaseException:
            for request in requests:
                self.engine.cancel(request)
            raise
        if failed := next((request.failure for request in requests if request.failure is not None), None):
            raise failed
        return [completion(request) for request in requests]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        salt: str = "",
        adapter: str | None = None,
        add_special_tokens: bool = True,
        parse_special: bool = True,
    ) -> Iterator[OutputDelta]:
        """Streams the completions of one prompt, see ``generate``; closing the stream cancels the request."""
        ids = self.ids(prompt, add_special_tokens=add_special_tokens, parse_special=parse_special)
        request = self.engine.submit(ids, params, salt=salt, adapter=adapter)
        return self._stream(request)

    def _stream(self, request: Request) -> Iterator[OutputDelta]:
        left = request.params.n
        try:
            while left:
                for delta in self.engine.step():
                    if delta.request is request:
                        left -= delta.finish is not None
                        yield delta
        finally:
            self.engine.cancel(request)

    def ids(self, prompt: Prompt, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a prompt; token ids stay as they are.

        Args:
            prompt: text or token ids.
            add_special_tokens: the text begins as the model's documents do, with a begin-of-text token where they do.
            parse_special: names of special tokens in the text, such as those of a fill-in-the-middle prompt, are those
                tokens, as in transformers; otherwise they are text.

        Raises:
            DataError: an empty text, and a tokenizer that has no token to begin one with.
        """
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        ids = encode_prompt(self.tokenizer, prompt, add_special_tokens=add_special_tokens, parse_special=parse_special)
        if not ids:
            raise DataError("the prompt is empty, and this tokenizer has no token to begin a document with.")
        return ids


def shipped_programs(model: str | Path) -> Path | None:
    """Folder of compiled programs in a model's directory; None: there is none."""
    folder = find_model(model) / "programs"
    return folder if folder.is_dir() else None


def encode_prompt(
    tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
) -> list[int]:
    """Token ids of a prompt's text, see ``LLM.ids``; [] for an empty one without a token to begin it.

    Raises:
        DataError: the vocabulary cannot spell the text.
    """
    begin = add_special_tokens and tokenizer.adds_bos
    ids = [int(i) for i in tokenizer.encode(text, bos=begin, specials=parse_special)]
    if not ids and add_special_tokens and tokenizer.start_id is not None:
        ids = [tokenizer.start_id]
    return ids


def read_adapter(loaded: LoadedModel, folder: Path, *, base_hash: str = "") -> Adapter:
    """Adapter of a loaded model in a directory of PEFT's format.

    Args:
        base_hash: hash of the model's parameters, which an adapter that was trained here must name; "": not compared.

    Raises:
        AdapterError: it is not an adapter of this model; or the model is of no family that PEFT's files are known for.
    """
    if loaded.source is None:
        raise AdapterError(f"{folder}: this model is of no family of Hugging Face, whose names PEFT's files have.")
    try:
        return read_peft(folder, loaded.model, loaded.source, base_hash=base_hash)
    except AdapterError:
        raise
    except ValueError as error:  # layers in slices, which published names do not know
        raise AdapterError(f"{folder}: no adapter of this model as it is served: {error}") from error


def _hash_of(loaded: LoadedModel) -> str:
    """Hash of a model's parameters; "" where they are in another form than training has them in."""
    if isinstance(loaded.params, StreamedWeights):
        return ""
    leaves = jax.tree.leaves(loaded.params)
    whole = all(isinstance(leaf.sharding, jax.NamedSharding) for leaf in leaves)
    return (
        ""
        if has_unstacked_layers(loaded.params) or not whole or has_packed(loaded.params)
        else base_hash(loaded.params)
    )


def single_user_buckets() -> tuple[int, ...]:
    """Sizes of steps for one user, in tokens.

    On a CPU, prefill chunks of 64 tokens are nearly as fast as chunks of 256 for long prompts, faster for short ones,
    and need only one program, and with speculation, see ``LLM``, a second one for verification.
    """
    return (64,) if jax.default_backend() == "cpu" else (64, 512)


def single_user_length(tokens: int) -> int:
    """Tokens of a sequence that an engine for one user has room for, where so many are needed."""
    return max(512, 1 << (tokens - 1).bit_length())


def single_user_config(
    loaded: LoadedModel,
    tokens: int,
    speculate: str | None = None,
    speculate_tokens: int | None = None,
    full: bool = False,
    kv_format: str = "auto",
    kv_keep: str = KEEP_ALL,
    speculate_runs: int = 1,
) -> EngineConfig:
    """Engine configuration for one user: few programs, and room for sequences of this many tokens.

    ``full``: with the full sampler, for parameters that need it; else the plain one. ``kv_format``, ``kv_keep``: see
    ``with_kv_cache``.

    The length is a power of two, so that compiled programs are found again for the next prompt.
    """
    room = single_user_length(tokens)
    most, _ = hard_limit(loaded.model.config)
    room = room if most is None else min(room, most)
    buckets = single_user_buckets()
    config = EngineConfig(
        max_sequences=1,
        max_batched_tokens=buckets[-1],
        max_len=room,
        buckets=buckets,
        samplers=("full" if full else "plain",),
    )
    config = with_speculation(with_kv_cache(config, kv_format, kv_keep), speculate, speculate_tokens, speculate_runs)
    decode = {1} if stages_of(loaded.mesh) > 1 else set()  # pipeline stages have no decode programs
    return replace(config, buckets=tuple(sorted({*buckets, *config.verify_buckets, *decode})))


def completion(request: Request) -> Completion:
    """Result of a request, all of whose completions have ended."""
    outputs = []
    for s in request.outputs:
        assert s.finish is not None
        tokens = tuple(s.completion)
        wanted = request.params.logprobs is not None
        logprobs, top = (tuple(s.logprobs), tuple(map(tuple, s.top))) if wanted else ((), ())
        outputs.append(Output(s.text, tokens, s.finish, logprobs, top))
    return Completion(tuple(request.text), tuple(outputs), tuple(request.text_scores), tuple(request.text_top))


def _is_one(prompts: Any) -> bool:
    """Whether ``prompts`` is one prompt, a text or token ids, and not a list of prompts."""
    return isinstance(prompts, str) or (len(prompts) > 0 and hasattr(prompts[0], "__index__"))
