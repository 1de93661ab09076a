"""What the black-box tests of vLLM, SGLang and llama.cpp's server assert, stated anew for this server.

Each row names the server and its test file. A row passes as there, or says in a sentence why this server answers
otherwise by design: then the request is refused by name, or its answer differs in the way that the row checks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

HI: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BASE: dict[str, Any] = {"model": "tiny", "max_tokens": 5, "temperature": 0, "ignore_eos": True}


class Asker:
    """Requests to one server."""

    def __init__(self, client: httpx.Client):
        self.client = client

    def send(self, path: str, **body: Any) -> httpx.Response:
        given = {"prompt": "Hello, my name is"} if path == TEXT else {"messages": HI} if path == CHAT else {}
        merged = {**(BASE if path in (TEXT, CHAT) else {}), **given, **body}
        return self.client.post(path, json={name: value for name, value in merged.items() if value is not ...})

    def get(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.send(path, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def text(self, **body: Any) -> dict[str, Any]:
        return self.get(TEXT, **body)

    def chat(self, **body: Any) -> dict[str, Any]:
        return self.get(CHAT, **body)

    def said(self, **body: Any) -> str:
        return self.chat(**body)["choices"][0]["message"]["content"]

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        answer = self.send(path, stream=True, **body)
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.text.split("\n\n") if line]
        assert lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def refused(self, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
        answer = self.send(path, **body)
        assert answer.status_code == status, answer.text
        return answer.json()["error"]


@dataclass(frozen=True)
class Assertion:
    """One assertion: the server and file that have it, what it says, and why it differs here, if it does."""

    server: str
    file: str
    name: str
    check: Callable[[Asker], Any]
    by_design: str = ""


ASSERTIONS: list[Assertion] = []


def asserts(server: str, file: str, by_design: str = "") -> Callable[[Callable[[Asker], Any]], Callable[[Asker], Any]]:
    """Adds a check to the table; its name says what it asserts."""

    def add(check: Callable[[Asker], Any]) -> Callable[[Asker], Any]:
        ASSERTIONS.append(Assertion(server, file, check.__name__, check, by_design))
        return check

    return add


def refuses(server: str, file: str, name: str, why: str, path: str, param: str | None, **body: Any) -> None:
    """Adds a request that the other server takes and this one refuses by name."""

    def check(ask: Asker) -> None:
        error = ask.refused(path, **body)
        assert error["param"] == param
        assert error["message"]

    ASSERTIONS.append(Assertion(server, file, name, check, why))
