"""OpenAI's own client drives the server over a tiny random model; over SmolLM2 in `make proof server`."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.serve import servers
from tests.serve.driving import FEATURES


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        servers.running(servers.tiny_backend) as (_, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as made,
    ):
        yield made


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("feature", FEATURES)
def test_feature(client, feature):
    FEATURES[feature](client)
