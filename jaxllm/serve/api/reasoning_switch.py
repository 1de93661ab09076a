"""Reasoning switch: chat-template variables that turn a model's reasoning on or off, for APIs with a field for it."""

from __future__ import annotations

from typing import Any

from jaxllm.serve.api.errors import ApiError
from jaxllm.serve.tools.tool_choice import ChatFormat


def template_reads(chat_format: ChatFormat, variable: str) -> bool:
    """Whether the model's chat template reads a variable."""
    template = chat_format.backend.template
    return template is not None and any(variable in text for text in template.sources.values())


def reasoning_off(chat_format: ChatFormat, param: str) -> dict[str, Any]:
    """Template variables that turn reasoning off; none are needed for a model that marks no reasoning.

    Raises:
        ApiError: the template cannot turn it off; ``param`` is the request field that asks for it.
    """
    if not chat_format.has_reasoning:
        return {}
    if not template_reads(chat_format, "enable_thinking"):
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


def reasoning_effort(chat_format: ChatFormat, effort: str, param: str) -> dict[str, Any]:
    """Template variables for a reasoning effort: ``none`` turns it off, others need a template that reads them.

    Raises:
        ApiError: the template knows no such thing; ``param`` is the request field.
    """
    if effort == "none":
        return reasoning_off(chat_format, param)
    if not template_reads(chat_format, "reasoning_effort"):
        raise ApiError(
            400, 'this model\'s chat template does not read reasoning_effort; give "none" or null.', param=param
        )
    return {"reasoning_effort": effort}
