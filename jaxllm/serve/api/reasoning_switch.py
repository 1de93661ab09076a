"""Reasoning switch: chat-template variables that turn a model's reasoning on or off, for APIs with a field for it."""

from __future__ import annotations

from typing import Any

from jaxllm.serve.api.errors import ApiError
from jaxllm.serve.tools.tool_choice import ChatFormat


def reasoning_off(chat_format: ChatFormat, param: str) -> dict[str, Any]:
    """Template variables that turn reasoning off; none are needed for a model that marks no reasoning.

    Raises:
        ApiError: the template cannot turn it off; ``param`` is the request field that asks for it.
    """
    if not chat_format.has_reasoning:
        return {}
    if not chat_format.template_reads("enable_thinking"):
        message = "this model always reasons: its chat template does not read enable_thinking; leave the field out."
        raise ApiError(400, message, param=param)
    return {"enable_thinking": False}


def require_reasoning(chat_format: ChatFormat, param: str) -> None:
    """Checks that a model marks its reasoning.

    Raises:
        ApiError: it does not; ``param`` is the request field that asks for reasoning.
    """
    if not chat_format.has_reasoning:
        raise ApiError(400, "this model's chat template marks no reasoning; leave the field out.", param=param)
