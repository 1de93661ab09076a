"""Official clients on the real SmolLM2: Anthropic's on messages, OpenAI's on responses and batches."""

from __future__ import annotations

import tempfile

import anthropic
import openai

from jaxllm.serve import ServeConfig
from tests.proofs.harness import proof
from tests.proofs.server.clients import smollm2_backend
from tests.serve import servers
from tests.serve.anthropic_features import MESSAGE_FEATURES
from tests.serve.batch_features import BATCH_FEATURES
from tests.serve.response_features import RESPONSE_FEATURES

CONFIG = ServeConfig(port=0, name="tiny", tool_parser="hermes")


@proof("apis", cases=sorted(MESSAGE_FEATURES), sample=1)
def anthropic_client_on_smollm2(feature: str) -> None:
    """Each feature of ``/v1/messages`` by the official client, streamed and whole."""
    with (
        servers.running(smollm2_backend, CONFIG) as (_, url),
        anthropic.Anthropic(base_url=url, api_key="-", max_retries=0, timeout=600) as client,
    ):
        MESSAGE_FEATURES[feature](client)


@proof("apis", cases=sorted(RESPONSE_FEATURES), sample=1)
def responses_on_smollm2(feature: str) -> None:
    """Each feature of ``/v1/responses`` by the official client, streamed and whole."""
    with (
        servers.running(smollm2_backend, CONFIG) as (_, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=600) as client,
    ):
        RESPONSE_FEATURES[feature](client)


@proof("apis", cases=sorted(BATCH_FEATURES), sample=1)
def batches_on_smollm2(feature: str) -> None:
    """Each feature of ``/v1/files`` and ``/v1/batches`` by the official client."""
    with (
        tempfile.TemporaryDirectory() as folder,
        servers.running(smollm2_backend, ServeConfig(port=0, name="tiny", batch_dir=folder)) as (_, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=600) as client,
    ):
        BATCH_FEATURES[feature](client)
