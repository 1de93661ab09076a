"""Weight swaps during decode."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests import quick
from tests.infer import engines
from tests.proofs.engine.programs import Compilations
from tests.proofs.harness import proof

WAYS = ("tight, recompute", "roomy", "tight, swap", "contiguous")


@functools.cache
def weights(seed: int) -> Any:
    return jax.tree.map(jnp.asarray, quick.params(engines.model_of("llama", "float64"), seed=seed, scale=0.5))


def logprobs(params: Any, tokens: list[int]) -> np.ndarray:
    """Float[S V] by the training forward."""
    padded = np.zeros((1, engines.LONGEST), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(engines._forward("llama", "float64")(params, jnp.asarray(padded)))


@functools.cache
def counter() -> Compilations:
    return Compilations()


@proof("engine_two", count=40, sample=1, bound=1e-10, float64=True)
def weights_change_under_load(seed: int) -> float:
    """Log-probabilities of every token by the weights that made it, less those served; nothing is compiled."""
    rng = np.random.default_rng(seed)
    engine = engines.engine(WAYS[seed % len(WAYS)], "llama", "float64")
    sets = [weights(int(n)) for n in rng.choice(8, 3, replace=False)]
    heard = counter()
    with heard:
        engine.swap(sets[0])
        first, requests, step = engine.version, [], 0
        for asked in engines.traffic(rng, engine.config, 12):
            params = dataclasses.replace(asked["params"], logprobs=0, prompt_logprobs=None)
            requests.append(engine.submit(asked["prompt"], params, salt=asked["salt"]))
        when = sorted(rng.choice(np.arange(2, 30), 2, replace=False).tolist())
        while engine.busy or step <= when[-1]:
            if step in when:
                engine.swap(sets[1 + when.index(step)])
            if engine.busy:
                engine.step()
            engines.check_books(engine)
            step += 1
    assert heard.names == []
    assert engine.runner.program_cache.counts.late == 0  # type: ignore[attr-defined]
    worst = 0.0
    for request in requests:
        begin = len(request.prompt)
        for s in request.sequences:
            assert len(s.versions) == len(s.logprobs) == len(s.tokens) - begin
            for version in set(s.versions):
                want = logprobs(sets[version - first], s.tokens)
                gaps = [
                    abs(want[begin + i - 1, s.tokens[begin + i]] - s.logprobs[i])
                    for i, made_by in enumerate(s.versions)
                    if made_by == version
                ]
                worst = max(worst, *gaps)
    engine.swap(engines.params_of("llama", "float64"))  # as other proofs expect it
    return worst
