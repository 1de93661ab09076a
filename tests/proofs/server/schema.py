"""Requests drawn from the published schema, valid and invalid: every response is a published one."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import tempfile
from collections import Counter
from typing import Any

import hypothesis
import jsonschema
import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from jaxllm.serve import ServeConfig
from tests import environment
from tests.proofs.harness import proof
from tests.serve import servers

_OPEN = contextlib.ExitStack()
atexit.register(_OPEN.close)
LEGAL, BROKEN = 12, 5
"""Legal and broken requests that a trial draws for each route; one without a body or a parameter has one request."""
schemathesis.openapi.format("json", st.dictionaries(st.text(max_size=9), st.integers(), max_size=3).map(json.dumps))


@functools.cache
def _served() -> tuple[str, Any]:
    """(a server's address, its schema); it lives as long as the process."""
    folder = _OPEN.enter_context(tempfile.TemporaryDirectory())
    config = ServeConfig(port=0, name="tiny", queue=12, tool_parser="hermes", batch_dir=folder)
    _, url = _OPEN.enter_context(servers.running(servers.tiny_backend, config))
    return url, schemathesis.openapi.from_url(f"{url}/openapi.json")


@proof("server", count=110, sample=1, bound={"refused": 0.5, "too few": 0})
def schemathesis_cases(seed: int) -> dict[str, float]:
    """Status, type, headers and body of every answer are as published; broken requests are refused; never a 5xx.

    Of all answers at least half are 2xx, though a quarter of the requests are broken. That legal requests are accepted
    is not asked of each: prompts must fit a context, and some fields need each other, which the schema does not say.
    """
    url, schema = _served()
    counts: Counter[int] = Counter()

    def send(case: Any) -> None:
        answer = case.call(base_url=url, timeout=120)
        counts[answer.status_code] += 1
        lenient = [positive_data_acceptance, *([negative_data_rejection] if _legal_after_all(schema, case) else [])]
        case.validate_response(answer, excluded_checks=lenient)

    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) == 32
    for operation in operations:
        draw(operation.as_strategy(generation_mode=GenerationMode.POSITIVE), send, LEGAL, seed, operation.label)
        if operation.method == "post" or len(operation.path_parameters):
            draw(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE), send, BROKEN, seed, operation.label)
    total = sum(counts.values())
    good = sum(many for status, many in counts.items() if status < 300)
    return {"refused": 1 - good / total, "too few": max(0, 10_000 / 110 - total)}


def _legal_after_all(schema: Any, case: Any) -> bool:
    """Whether nothing but the body is broken, and that is legal: it breaks one branch of a choice and is another.

    Of a message, say, whose role is made another role.
    """
    broken = [place for place, part in case.meta.components.items() if part.mode is GenerationMode.NEGATIVE]
    if [place.name for place in broken] != ["BODY"] or case.media_type != "application/json":
        return False
    content = schema.raw_schema["paths"][case.operation.path]["post"]["requestBody"]["content"]
    whole = {**content["application/json"]["schema"], "components": schema.raw_schema["components"]}
    return jsonschema.Draft202012Validator(whole).is_valid(case.body)


def draw(strategy: Any, send: Any, many: int, seed: int, label: str) -> None:
    """Sends so many requests."""

    @hypothesis.seed(environment.derive(seed, label))
    @hypothesis.settings(
        max_examples=many,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(strategy)
    def run(case: Any) -> None:
        send(case)

    run()
