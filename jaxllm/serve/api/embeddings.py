"""Embeddings, `POST /v1/embeddings`: pooled hidden states of texts."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np

from jaxllm.serve.api.errors import ApiError
from jaxllm.serve.api.prompt_encoding import remaining_tokens
from jaxllm.serve.api.request_schemas import EmbeddingRequest
from jaxllm.serve.generation import RequestDispatcher


async def embed(
    dispatcher: RequestDispatcher, body: EmbeddingRequest, prompts: list[list[int]], record: dict[str, Any]
) -> dict[str, Any]:
    """Response body of an embedding request.

    Raises:
        ApiError: too many or too long inputs, ``dimensions`` other than the model's, or a full queue.
    """
    dispatcher.check_prompt_count(prompts, "input")
    for ids in prompts:
        remaining_tokens(dispatcher.backend, ids, "input")
    release = dispatcher.admit(1)
    try:
        data = []
        for index, ids in enumerate(prompts):
            vector = await asyncio.to_thread(dispatcher.backend.embed, ids, body.pooling or "mean")
            if body.dimensions not in (None, len(vector)):
                message = f"this model's embeddings have {len(vector)} dimensions; give that or leave the field out."
                raise ApiError(400, message, param="dimensions")
            data.append({"object": "embedding", "index": index, "embedding": _encoded(vector, body.encoding_format)})
    finally:
        release()
    count = record["prompt_tokens"] = sum(map(len, prompts))
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": body.model, "usage": usage}


def _encoded(vector: np.ndarray, form: str | None) -> Any:
    """Embedding as a list of floats, or as base64 of little-endian float32, which OpenAI's client requests."""
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
