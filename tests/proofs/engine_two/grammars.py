"""Guided decoding by JSON schemas: finished completions are valid JSON, whatever the model."""

from __future__ import annotations

import json

import jsonschema
import numpy as np

from jaxllm.infer import Engine, Grammar, SamplingParams
from tests.infer import engines, schemas
from tests.infer.writers import writer
from tests.proofs.engine.real import smollm2
from tests.proofs.harness import proof


def _cut(engine: Engine, seed: int, many: int, tokens: int, prompt: list[int]) -> dict[str, float]:
    """Share of completions that max_tokens truncated (`error`), and the number of the others, which are all valid."""
    rng = np.random.default_rng(seed)
    wanted = [schemas.schema(rng) for _ in range(many)]
    asked = [
        {
            "prompt": prompt,
            "at": int(rng.integers(5)),
            "params": SamplingParams(
                max_tokens=tokens,
                seed=seed,
                temperature=float(rng.choice([0.7, 1.0])),
                grammar=Grammar.json_schema(one),
            ),
        }
        for one in wanted
    ]
    cut = 0
    for one, request in zip(wanted, engines.serve(engine, asked, check=False), strict=True):
        (sequence,) = request.sequences
        if sequence.finish == "length":
            cut += 1
            continue
        assert sequence.finish == "stop"
        jsonschema.Draft202012Validator.check_schema(one)
        jsonschema.Draft202012Validator(one).validate(json.loads(sequence.text))
    return {"error": cut / many, "validated": many - cut}


@proof("engine_two", count=50, sample=1, bound=0.3, counts=("validated",))
def json_schemas_random_model(seed: int) -> dict[str, float]:
    """Ten schemas per trial, nested, recursive, with enums and Unicode text: a random model."""
    return _cut(writer(), seed, 10, 400, list(b"Fill in: "))


@proof("engine_two", count=20, sample=1, bound=0.4, counts=("validated",), parallel=False)
def json_schemas_smollm2(seed: int) -> dict[str, float]:
    """The same with the real SmolLM2, 25 schemas a trial.

    The bound is on the share of one trial. max_tokens truncates a tenth of these completions, so among five a
    trial three or more are cut once in a hundred trials by chance alone; among 25, more than ten hardly ever.
    """
    llm = smollm2()
    return _cut(llm.engine, seed, 25, 300, llm.ids("Fill in this form with what comes to your mind. Answer in JSON:\n"))
