"""Requests drawn from the published schema, valid and invalid: every response is a published one."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import tempfile
from collections import Counter
from typing import Any

import httpx
import hypothesis
import jsonschema
import schemathesis
from fastapi.routing import APIRoute
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from jaxllm.serve import ServeConfig, create_app
from tests import environment
from tests.proofs.harness import proof
from tests.serve import servers

_OPEN = contextlib.ExitStack()
atexit.register(_OPEN.close)
LEGAL, BROKEN = 5, 2
"""Legal and broken requests that a trial draws for each route; one without a body or a parameter has one request."""
schemathesis.openapi.format("json", st.dictionaries(st.text(max_size=9), st.integers(), max_size=3).map(json.dumps))


@functools.cache
def _served() -> tuple[str, Any]:
    """(a server's address, its schema); it lives as long as the process."""
    _, url = _OPEN.enter_context(servers.running(servers.tiny_backend, _config()))
    return url, schemathesis.openapi.from_url(f"{url}/openapi.json")


@functools.cache
def _config() -> ServeConfig:
    """Settings with which every route answers."""
    folder = _OPEN.enter_context(tempfile.TemporaryDirectory())
    return ServeConfig(port=0, name="tiny", queue=12, tool_parser="hermes", batch_dir=folder)


def _routes() -> set[tuple[str, str]]:
    """(method, path) of all routes of the application, as the schema spells them."""
    routes = [
        route for route in create_app(_config()).routes if isinstance(route, APIRoute) and route.include_in_schema
    ]
    return {(method.lower(), one.path.replace(":path}", "}")) for one in routes for method in one.methods}


@proof("server", count=110, sample=1, bound={"refused": 0.5, "too few": 0})
def schemathesis_cases(seed: int) -> dict[str, float]:
    """Status, type, headers and body of every answer are as published; broken requests are refused; never a 5xx.

    Of all answers at least half are 2xx, though a quarter of the requests are broken. That legal requests are accepted
    is not asked of each: prompts must fit a context, and some fields need each other, which the schema does not say.
    """
    url, schema = _served()
    counts: Counter[int] = Counter()

    known = _KnownObjects(url)

    def send(case: Any) -> None:
        known.put_into(case)
        answer = case.call(base_url=url, timeout=120)
        counts[answer.status_code] += 1
        lenient = [positive_data_acceptance, *([negative_data_rejection] if _legal_after_all(schema, case) else [])]
        case.validate_response(answer, excluded_checks=lenient)

    operations = [found.ok() for found in schema.get_all_operations()]
    assert {(found.method, found.path) for found in operations} == _routes()
    for operation in operations:
        draw(operation.as_strategy(generation_mode=GenerationMode.POSITIVE), send, LEGAL, seed, operation.label)
        if operation.method == "post" or len(operation.path_parameters):
            draw(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE), send, BROKEN, seed, operation.label)
    total = sum(counts.values())
    good = sum(many for status, many in counts.items() if status < 300)
    return {"refused": 1 - good / total, "too few": max(0, 10_000 / 110 - total)}


class _KnownObjects:
    """Responses, files and batches that exist: three of four legal requests are given one in place of the drawn id.

    Args:
        url: the server's.
    """

    def __init__(self, url: str):
        self._url, self._turn = url, 0

    def put_into(self, case: Any) -> None:
        """Replaces the id of a case, in three of four calls."""
        if any(part.mode is GenerationMode.NEGATIVE for part in case.meta.components.values()):
            return
        makers = {"response_id": self._response, "file_id": self._file, "batch_id": self._batch}
        names = [name for name in makers if name in (case.path_parameters or {})]
        creates = case.operation.label == "POST /v1/batches"
        if not names and not creates:
            return
        self._turn += 1
        if self._turn % 4 == 0:
            return
        for name in names:
            case.path_parameters[name] = makers[name]()
            for query in ("after", "stream"):
                case.query.pop(query, None)
        if creates:
            case.body["input_file_id"] = self._file()

    def _response(self) -> str:
        body = {"model": "tiny", "input": "hi", "max_output_tokens": 1}
        return httpx.post(f"{self._url}/v1/responses", json=body).raise_for_status().json()["id"]

    def _file(self) -> str:
        answer = httpx.post(f"{self._url}/v1/files", files={"file": b"{}"}, data={"purpose": "batch"})
        return answer.raise_for_status().json()["id"]

    def _batch(self) -> str:
        body = {"input_file_id": self._file(), "endpoint": "/v1/completions", "completion_window": "24h"}
        return httpx.post(f"{self._url}/v1/batches", json=body).raise_for_status().json()["id"]


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
