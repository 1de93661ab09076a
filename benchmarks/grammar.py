"""Grammar cost: compiling a grammar, host time per token, and decode throughput with and without it.

python -m benchmarks.grammar [--model smollm2] [--batches 1,16] [--tokens 64] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "ä"]}},
        "friends": {"type": "array", "items": {"$ref": "#"}},
    },
    "required": ["name", "age", "friends"],
    "additionalProperties": False,
}


def host(grammars: Any, form: Any, tokens: int, seed: int = 0) -> dict[str, float]:
    """Milliseconds: until a grammar is ready, and for each token of random texts in it (mean, 99th percentile)."""
    rng = np.random.default_rng(seed)
    clock = time.perf_counter()
    guide = grammars.guide(form)
    ready, spent = time.perf_counter() - clock, []
    while len(spent) < tokens:
        if guide.mask is None:
            guide = grammars.guide(form)
            continue
        legal = np.flatnonzero(np.unpackbits(guide.mask.view(np.uint8), bitorder="little"))
        token = int(rng.choice(legal))
        clock = time.perf_counter()
        guide.advance(token)
        spent.append(time.perf_counter() - clock)
    return {
        "ready_ms": 1e3 * ready,
        "token_ms": 1e3 * float(np.mean(spent)),
        "token_ms_99": 1e3 * float(np.quantile(spent, 0.99)),
    }


def speed(llm: Any, form: Any, batch: int, tokens: int) -> float:
    """Tokens a second of so many texts, once all have begun; ``form`` None: no grammar, but the same sampler."""
    from jaxllm.infer import SamplingParams

    params = SamplingParams(max_tokens=tokens, seed=1, grammar=form, top_p=0.95, ignore_eos=form is None)
    prompt, engine = llm.ids("A list of people and their friends, in JSON:\n"), llm.engine
    reading, clock, made = {engine.submit(prompt, params).id for _ in range(batch)}, 0.0, 0
    while engine.busy:
        for piece in engine.step():
            reading -= {piece.request.id} if piece.tokens else set()
            made += len(piece.tokens) if clock else 0
        clock = clock or (0.0 if reading else time.perf_counter())
    return made / (time.perf_counter() - clock)


def main() -> int:
    """Measures and prints."""
    from jaxllm.infer import LLM, EngineConfig, Grammar

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    batches = [int(n) for n in options.batches.split(",")]
    config = EngineConfig(
        max_sequences=max(batches), max_batched_tokens=128, max_len=512, samplers=("full",), buckets=(128,)
    )
    llm = LLM(options.model, config)
    forms = {
        "person": Grammar.json_schema(PERSON),
        "any JSON": Grammar.json_schema("{}"),
        "regex": Grammar.regex("([A-Z][a-z]+ ){2,9}[0-9]{4}"),
    }
    figures: dict[str, Any] = {name: host(llm.engine.grammars, form, 400) for name, form in forms.items()}
    for name, found in figures.items():
        print(f"{name}: " + ", ".join(f"{key} {value:.3f}" for key, value in found.items()))
    for batch in batches:
        pairs = [
            [speed(llm, form, batch, options.tokens) for form in (None, forms["person"])] for _ in range(options.rounds)
        ]
        free, formed = np.median(pairs, axis=0)
        ratios = [free / formed for free, formed in pairs]
        step, least, most = float(np.median(ratios)), min(ratios), max(ratios)
        figures[f"batch {batch}"] = {"free": free, "formed": formed, "step_ratio": step, "step_ratios": ratios}
        print(
            f"batch {batch}: {free:.1f} tokens/s free, {formed:.1f} with a schema: a step takes {step:.3f} times as "
            f"long ({least:.3f} to {most:.3f})"
        )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
