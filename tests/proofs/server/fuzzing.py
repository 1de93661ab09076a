"""Fuzzed bodies over all routes: none makes the server fail."""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import json
import random
import tempfile
from typing import Any

import httpx

from jaxllm.serve import ServeConfig
from tests import environment
from tests.proofs.harness import proof
from tests.serve import servers

BODIES = 100
"""Bodies of a trial; 100 trials are 10,000."""
_OPEN = contextlib.ExitStack()
atexit.register(_OPEN.close)

HI: dict[str, Any] = {"role": "user", "content": "hi"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL: dict[str, Any] = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED: dict[str, Any] = {"role": "assistant", "tool_calls": [CALL]}
LEGAL: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": [HI], "max_tokens": 3},
        {"messages": [HI], "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}},
        {"messages": [HI, CALLED, {"role": "tool", "tool_call_id": "a", "content": ""}], "tools": [TOOL],
         "tool_choice": "auto", "max_tokens": 3},
        {"messages": [HI], "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}},
         "max_tokens": 3, "logprobs": True, "top_logprobs": 2},
        {"messages": [HI], "continue_final_message": True, "chat_template_kwargs": {"a": [1]}, "max_tokens": 3},
    ],
    "/v1/completions": [
        {"prompt": "a<|eos|>", "max_tokens": 3, "logprobs": 2, "echo": True},
        {"prompt": [[1, 2], [3]], "max_tokens": 3, "stream": True, "n": 2},
        {"prompt": "a", "max_tokens": 3, "structured_outputs": {"regex": "a+"}, "logit_bias": {"5": 1}},
        {"prompt": "a", "max_tokens": 3, "prompt_logprobs": 1, "truncate_prompt_tokens": 2, "best_of": 2},
    ],
    "/v1/embeddings": [{"input": ["a", "b"], "encoding_format": "base64"}],
    "/tokenize": [{"prompt": "a"}, {"messages": [HI], "tools": [TOOL]}],
    "/detokenize": [{"tokens": [1, 2, 300]}],
    "/v1/responses": [
        {"input": "a", "max_output_tokens": 3, "stream": True, "include": ["message.output_text.logprobs"]},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                   {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
                   {"type": "function_call", "call_id": "call_a", "name": "f", "arguments": "{}"},
                   {"type": "function_call_output", "call_id": "call_a", "output": "a"}],
         "max_output_tokens": 3, "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
         "truncation": "auto", "instructions": "a", "metadata": {"a": "a"}},
        {"input": "a", "max_output_tokens": 3, "text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}},
    ],
    "/v1/responses/input_tokens": [{"input": "a", "reasoning": {"effort": "none"}}],
    "/v1/messages": [
        {"messages": [HI], "max_tokens": 3, "stream": True, "system": [{"type": "text", "text": "a"}]},
        {"messages": [HI, {"role": "assistant", "content": [
            {"type": "text", "text": "a"}, {"type": "thinking", "thinking": "a", "signature": ""},
            {"type": "tool_use", "id": "toolu_a", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_a", "content": "a"}]}],
         "max_tokens": 3, "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"}},
        {"messages": [HI, {"role": "assistant", "content": "a"}], "max_tokens": 3, "stop_sequences": ["a"]},
    ],
    "/v1/messages/count_tokens": [{"messages": [HI], "tools": [{"name": "f", "input_schema": {"type": "object"}}]}],
    "/v1/batches": [{"input_file_id": "file-" + "0" * 24, "endpoint": "/v1/completions", "completion_window": "24h"}],
    "/score": [{"text_1": "a", "text_2": ["a", "b"]}],
    "/rerank": [{"query": "a", "documents": ["a", {"text": "b"}], "top_n": 1}],
    "/pooling": [{"input": ["a", "b"]}],
    "/classify": [{"input": "a"}],
}  # fmt: skip
"""Legal bodies to begin with; other routes begin with what the others have."""
WORDS = sorted({name for bodies in LEGAL.values() for body in bodies for name in body})
JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e308, "", " ", "a", "\x00", "\ud800",
    "\ufdd0", "<|eos|>", "<|bos|>" * 9, "{{ 7 * 7 }}", "%s%n", "../../etc/passwd", "a" * 3000, "auto", "required",
    "\U0001f469\u200d\U0001f4bb", [], {}, [[]], [{}], [None], [1, "a"], {"": ""}, {"type": "object"}, [0] * 600,
    {"type": "function"}, {"$ref": "#"}, {"role": "user", "content": "a"}, {"a": {"b": {"c": []}}},
]  # fmt: skip


@functools.cache
def _served() -> tuple[str, list[tuple[str, str]]]:
    """(a server's address, (method, path) of its routes); it lives as long as the process."""
    folder = _OPEN.enter_context(tempfile.TemporaryDirectory())
    config = ServeConfig(port=0, name="tiny", queue=12, tool_parser="hermes", batch_dir=folder)
    _, url = _OPEN.enter_context(servers.running(servers.tiny_backend, config))
    paths = httpx.get(f"{url}/openapi.json").json()["paths"]
    return url, [(method.upper(), path) for path, operations in paths.items() for method in operations]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of all values inside."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in ((value, key), *_places(value[key]))]


def _copy(value: Any) -> Any:
    return copy.deepcopy(value)


def _body(rng: random.Random, path: str) -> Any:
    """A legal body in which a few values are replaced, dropped or added."""
    known = LEGAL.get(path) or rng.choice(list(LEGAL.values()))
    body = _copy({"model": "tiny", **rng.choice(known)})
    for _ in range(rng.randrange(4)):
        places = _places(body)
        if not places:
            return body
        container, key = rng.choice(places)
        how = rng.choice(["junk", "junk", "drop", "add", "nest", "double", "swap"])
        if how == "junk":
            container[key] = _copy(rng.choice(JUNK))
        elif how == "drop" and isinstance(container, dict):
            del container[key]
        elif how == "add":
            body[rng.choice(WORDS)] = _copy(rng.choice(JUNK))
        elif how == "nest":
            for _ in range(rng.randrange(1, 200)):
                container[key] = [container[key]]
        elif how == "double" and isinstance(container, list):
            container += _copy(container)
        elif how == "swap":
            container[key] = _copy(rng.choice(places)[0])
    return body


def _sent(rng: random.Random, path: str) -> tuple[bytes, str]:
    """(bytes of a body, its media type), the bytes at times broken."""
    raw = bytearray(json.dumps(_body(rng, path)).encode())
    if rng.random() < 0.15:
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(raw))
            raw[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
    media = (
        "application/json"
        if rng.random() < 0.95
        else rng.choice(["text/plain", "multipart/form-data; boundary=x", "x"])
    )
    return bytes(raw), media


@proof("server", count=100, sample=1, bound={"5xx": 0, "not JSON": 0})
def fuzzed_bodies(seed: int) -> dict[str, float]:
    """100 bodies over all routes in turn: no answer is a server's failure, and every refusal is an error in JSON."""
    url, routes = _served()
    rng = random.Random(environment.derive(seed, "fuzzed bodies"))
    failed = shapeless = 0
    with httpx.Client(base_url=url, timeout=120) as client:
        for number in range(BODIES):
            method, path = routes[(seed * BODIES + number) % len(routes)]
            content, media = _sent(rng, path)
            filled = path
            while "{" in filled:
                begin, end = filled.index("{"), filled.index("}")
                filled = filled[:begin] + rng.choice(["tiny", "a", "%2e%2e", "%00", "x" * 300]) + filled[end + 1 :]
            answer = client.request(method, filled, content=content, headers={"content-type": media})
            failed += answer.status_code >= 500 and answer.status_code != 503
            if answer.status_code >= 400 and not _has_error(answer):
                shapeless += 1
        assert client.get("/health").status_code == 200
    return {"5xx": failed, "not JSON": shapeless}


def _has_error(answer: httpx.Response) -> bool:
    try:
        return isinstance(answer.json().get("error"), dict)
    except (ValueError, AttributeError):
        return False
