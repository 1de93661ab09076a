"""Each assertion passes, or differs by design in a sentence."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.serve import servers
from tests.serve.public_assertions import llama_cpp, sglang, vllm
from tests.serve.public_assertions.assertions import ASSERTIONS, Asker, Assertion

MODULES = {"vllm": vllm, "sglang": sglang, "llama.cpp": llama_cpp}


@pytest.fixture(scope="module")
def ask() -> Iterator[Asker]:
    with servers.running(servers.tiny_backend) as (_, url), httpx.Client(base_url=url, timeout=120) as client:
        yield Asker(client)


def test_there_are_eighty():
    assert len(ASSERTIONS) >= 80
    assert {one.server for one in ASSERTIONS} == set(MODULES)
    assert len({(one.server, one.name) for one in ASSERTIONS}) == len(ASSERTIONS)
    assert all(not one.by_design or one.by_design.endswith(".") for one in ASSERTIONS)


@pytest.mark.parametrize("one", ASSERTIONS, ids=lambda one: f"{one.server}-{one.name}")
def test_assertion(ask: Asker, one: Assertion):
    one.check(ask)
