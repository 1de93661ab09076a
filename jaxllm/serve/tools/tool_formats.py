"""Tool-call formats of model families, and which of them a chat template writes.

Every format also reads calls that are written as plain JSON objects, see ``json_calls``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.serve.tools.call_format import ToolCallFormat, to_json
from jaxllm.serve.tools.gemma_calls import GemmaCallFormat
from jaxllm.serve.tools.harmony import HarmonyFormat
from jaxllm.serve.tools.json_calls import JsonCallFormat
from jaxllm.serve.tools.python_calls import PythonCallFormat
from jaxllm.serve.tools.xml_calls import XmlCallFormat
from jaxllm.text import ChatTemplate


def _deepseek(words: str) -> str:
    """A special token of DeepSeek's vocabulary, with its full-width bars and lower-block spaces."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_CALLS = _deepseek("tool calls begin"), _deepseek("tool calls end")
_CALL = _deepseek("tool call begin"), _deepseek("tool call end")
_SEP = _deepseek("tool sep")

TOOL_CALL_FORMATS = {
    "hermes": JsonCallFormat(
        open="<tool_call>\n", close="\n</tool_call>", between="\n",
        template_markers=("<tool_call>",), template_exclusions=("<function=",),
    ),
    "llama3_json": JsonCallFormat(
        between="; ", arguments_key="parameters", exclusive=True,
        template_markers=("<|start_header_id|>", '"parameters": ', "tools"),
    ),
    "mistral": JsonCallFormat(
        begin="[TOOL_CALLS] [", between=", ", end="]",
        template_markers=("[TOOL_CALLS]",), template_exclusions=("[ARGS]", "[CALL_ID]"),
    ),
    "mistral_call_id": JsonCallFormat(
        open="[TOOL_CALLS]", id_separator="[CALL_ID]", name_separator="[ARGS]",
        template_markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    ),
    "mistral_args": JsonCallFormat(
        open="[TOOL_CALLS]", name_separator="[ARGS]",
        template_markers=("[TOOL_CALLS]", "[ARGS]"), template_exclusions=("[CALL_ID]",),
    ),
    "deepseek_v3": JsonCallFormat(
        begin=_CALLS[0], open=f"{_CALL[0]}function{_SEP}", name_separator="\n```json\n", close=f"\n```{_CALL[1]}",
        between="\n", end=_CALLS[1], template_markers=(_CALLS[0], "```json"),
    ),
    "deepseek_v31": JsonCallFormat(
        begin=_CALLS[0], open=_CALL[0], name_separator=_SEP, close=_CALL[1], end=_CALLS[1],
        template_markers=(_CALLS[0],), template_exclusions=("```json",),
    ),
    "qwen3_coder": XmlCallFormat(
        open="<tool_call>\n<function=", name_end=">\n", key_open="<parameter=", key_close=">\n",
        value_close="\n</parameter>\n", close="</function>\n</tool_call>", between="\n", bare_open="<function=",
        template_markers=("<function=", "<parameter="),
    ),
    "glm45": XmlCallFormat(
        open="<tool_call>", name_end="\n", key_open="<arg_key>", key_close="</arg_key>\n<arg_value>",
        value_close="</arg_value>\n", close="</tool_call>", between="\n",
        template_markers=("<arg_key>", "<arg_value>"),
    ),
    "pythonic": PythonCallFormat(
        begin="[", between=", ", end="]", exclusive=True,
        template_markers=("<|start_header_id|>", "func_name1(params_name1=params_value1"),
    ),
    "llama4_pythonic": PythonCallFormat(
        begin="<|python_start|>[", between=", ", end="]<|python_end|>", template_markers=("<|python_start|>",),
    ),
    "gemma3": PythonCallFormat(
        begin="```tool_code\n", between="\n", end="\n```", template_markers=("<start_of_turn>", "tool_code"),
    ),
    "functiongemma": GemmaCallFormat(
        open="<start_function_call>call:", close="<end_function_call>", quote="<escape>",
        template_markers=("<start_function_call>", "<escape>"),
    ),
    "gemma4": GemmaCallFormat(
        open="<|tool_call>call:", close="<tool_call|>", quote='<|"|>', template_markers=("<|tool_call>", '<|"|>'),
    ),
    "harmony": HarmonyFormat(
        open="<|channel|>commentary to=functions.", name_separator=" <|constrain|>json<|message|>", close="<|call|>",
        template_markers=("<|channel|>", "<|message|>", "functions"),
    ),
    "json": JsonCallFormat(between="\n", exclusive=True),
}  # fmt: skip
"""Formats by the names of vLLM's tool parsers, where it has one, which covers several of Mistral's formats.

Markers of ``hermes`` are in templates of other formats too; those come first where one is detected.
"""
_MOST_SPECIFIC = (
    "harmony", "qwen3_coder", "glm45", "llama4_pythonic", "pythonic", "functiongemma", "gemma4", "gemma3",
)  # fmt: skip


def detect_format(template: ChatTemplate) -> ToolCallFormat | None:
    """Tool-call format that a chat template writes; None where it writes no calls or uses an unknown format."""
    text = "\n".join(template.sources.values())
    names = (*_MOST_SPECIFIC, *(name for name in TOOL_CALL_FORMATS if name not in (*_MOST_SPECIFIC, "json")))
    for one in map(TOOL_CALL_FORMATS.__getitem__, names):
        present = all(marker in text for marker in one.template_markers)
        if supports_tools(template) and present and not any(marker in text for marker in one.template_exclusions):
            return one
    return None


def supports_tools(template: ChatTemplate) -> bool:
    """Whether a chat template renders the ``tools`` variable."""
    return any(re.search(r"\btools\b", text) for text in template.sources.values())


def tools_prompt(tools: Sequence[Mapping[str, Any]], call_format: ToolCallFormat) -> str:
    """System-message text that describes the functions, for a chat template that does not render ``tools``."""
    lines = [to_json(tool["function"]) for tool in tools]
    example = call_format.render([("NAME", {"PARAMETER": "VALUE"})])
    return "\n".join(["You may call these functions:", *lines, "To call one, write:", example])
