"""Scorer: log-likelihoods of continuations and of texts, and generated answers, over one engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.infer import LLM, SamplingParams

DEFAULT_MAX_TOKENS = 256
"""Maximum number of generated tokens if a task has no setting."""
SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "seed")


class Scorer:
    """Scorer for the three kinds of requests that lm-eval has, over one engine.

    Args:
        llm: LLM whose engine has the full sampler.
    """

    def __init__(self, llm: LLM):
        self.llm = llm

    def continuations(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation after its context, and whether greedy decoding generates it.

        Spaces at the end of a context are moved to the continuation. Its tokens are those of the whole text after the
        context's. A text that is too long is truncated from the left.

        Raises:
            ValueError: an empty continuation, or one that does not fit with a context.
        """
        texts = []
        for context, continuation in pairs:
            own = len(context.rstrip())
            context, continuation = context[:own], context[own:] + continuation
            if not continuation:
                raise ValueError(f"the continuation of {context[-40:]!r} is empty; there is nothing to score.")
            before = self._ids(context)
            whole = self._ids(context + continuation)
            texts.append((whole, len(whole) - min(len(before), len(whole) - 1)))
        return self._score(texts)

    def texts(self, texts: Sequence[str]) -> list[float]:
        """Log-likelihood of each text, its first token included; long ones in windows of the engine's length."""
        most = self.llm.engine.max_len - 1
        windows, owners = [], []
        for owner, text in enumerate(texts):
            whole = self._ids(text)
            begin = self._start()
            whole = whole if whole[: len(begin)] == begin else begin + whole
            scored = 1
            while scored < len(whole):
                end = min(len(whole), max(scored + 1, scored + most - 1))
                windows.append((whole[max(0, end - most) : end], end - scored))
                owners.append(owner)
                scored = end
        sums = [0.0] * len(texts)
        for owner, (value, _) in zip(owners, self._score(windows), strict=True):
            sums[owner] += value
        return sums

    def write(self, prompts: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Generates a completion per prompt, by lm-eval's settings: ``until``, ``max_gen_toks``, ``do_sample``, ...

        Raises:
            ValueError: a setting that is not supported.
        """
        params, ids = [], []
        for prompt, settings in prompts:
            params.append(sampling_params(settings))
            room = self.llm.engine.max_len - params[-1].max_tokens
            if room < 1:
                raise ValueError(
                    f"max_gen_toks = {params[-1].max_tokens} leaves {room} tokens for prompts; give a smaller number."
                )
            ids.append(self._ids(prompt)[-room:])
        return [one.outputs[0].text for one in self.llm.generate(ids, params)]

    def _score(self, texts: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """Log-likelihood of the last tokens of each text, and whether each of them is the most likely."""
        most = self.llm.engine.max_len - 1
        for _, scored in texts:
            if scored >= most:
                raise ValueError(
                    f"a continuation of {scored} tokens does not fit the engine's {most + 1} with a context."
                )
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
        completions = self.llm.generate([ids[-most:] for ids, _ in texts], params)
        found = [one.prompt_scores[-scored:] for one, (_, scored) in zip(completions, texts, strict=True)]
        return [(sum(value for value, _ in scores), all(rank == 0 for _, rank in scores)) for scores in found]

    def _start(self) -> list[int]:
        start = self.llm.tokenizer.start_id
        return [] if start is None else [start]

    def _ids(self, text: str) -> list[int]:
        return self.llm.ids(text) if text else self._start()


def sampling_params(settings: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters from lm-eval's generation settings.

    Raises:
        ValueError: a setting that is not supported.
    """
    known = {"until", "max_gen_toks", *SAMPLING}
    if unknown := set(settings) - known:
        raise ValueError(f"generation settings {sorted(unknown)} are not supported; there are {sorted(known)}.")
    until = settings.get("until") or ()
    until = (until,) if isinstance(until, str) else tuple(until)
    drawn = settings.get("do_sample", settings.get("temperature", 0.0) > 0)
    filters = {name: settings[name] for name in ("top_k", "top_p", "min_p", "seed") if name in settings}
    temperature = float(settings.get("temperature", 1.0)) if drawn else 0.0
    return SamplingParams(
        max_tokens=int(settings.get("max_gen_toks", DEFAULT_MAX_TOKENS)), temperature=temperature, stop=until, **filters
    )
