"""Output items of a response while they are generated: message deltas become items and the events that tell of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from jaxllm.serve.responses.response_translation import CALL_PREFIX, new_id
from jaxllm.serve.tools.output_parser import Delta

ResponseEvent = dict[str, Any]


class OutputItems:
    """Output items of one response.

    Attributes:
        items: items so far; the last one is open until ``end``.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []

    def add(self, delta: Delta, logprobs: Sequence[Any] = ()) -> list[ResponseEvent]:
        """Events of a message delta; ``logprobs`` are those of the tokens of its text."""
        out: list[ResponseEvent] = []
        if thought := delta.get("reasoning_content"):
            out += self._begin("reasoning", {"summary": [], "content": []}, {"type": "reasoning_text", "text": ""})
            self.items[-1]["content"][0]["text"] += thought
            out.append(self._in_part({"type": "response.reasoning_text.delta", "delta": thought}))
        if text := delta.get("content"):
            out += self.begin_message()
            part = self.items[-1]["content"][0]
            part["text"] += text
            part["logprobs"] += logprobs
            event = {"type": "response.output_text.delta", "delta": text, "logprobs": list(logprobs)}
            out.append(self._in_part(event))
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                fields = {"call_id": CALL_PREFIX + call["id"], "name": function["name"], "arguments": ""}
                out += self._begin("function_call", fields, None, anew=True)
            if function["arguments"]:
                self.items[-1]["arguments"] += function["arguments"]
                event = {"type": "response.function_call_arguments.delta", "delta": function["arguments"]}
                out.append(self._in_item(event))
        return out

    def begin_message(self) -> list[ResponseEvent]:
        """Events that begin a message, unless one is open."""
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return self._begin("message", {"role": "assistant", "content": []}, part)

    def end(self, status: str) -> list[ResponseEvent]:
        """Events that end the open item, with its status; none where no item is open."""
        if not self.items or self.items[-1]["status"] != "in_progress":
            return []
        item = self.items[-1]
        item["status"] = status
        out: list[ResponseEvent] = []
        if item["type"] == "function_call":
            event = {"type": "response.function_call_arguments.done", "arguments": item["arguments"]}
            out.append(self._in_item({**event, "name": item["name"]}))
        else:
            part = item["content"][0]
            if item["type"] == "message":
                event = {"type": "response.output_text.done", "text": part["text"], "logprobs": part["logprobs"]}
            else:
                event = {"type": "response.reasoning_text.done", "text": part["text"]}
            out += [self._in_part(event), self._in_part({"type": "response.content_part.done", "part": part})]
        return [*out, self._of_item("response.output_item.done")]

    def _begin(
        self, kind: str, fields: dict[str, Any], part: dict[str, Any] | None, anew: bool = False
    ) -> list[ResponseEvent]:
        """Ends the open item and begins one of a type, unless it is open and need not be anew."""
        if self.items and self.items[-1]["type"] == kind and not anew:
            return []
        out = self.end("completed")
        self.items.append({"id": new_id(kind), "type": kind, "status": "in_progress", **fields})
        out.append(self._of_item("response.output_item.added"))
        if part is not None:
            self.items[-1]["content"].append(part)
            out.append(self._in_part({"type": "response.content_part.added", "part": {**part}}))
        return out

    def _of_item(self, kind: str) -> ResponseEvent:
        item = copy.deepcopy(self.items[-1])  # it changes before the event is written
        return {"type": kind, "output_index": len(self.items) - 1, "item": item}

    def _in_item(self, event: ResponseEvent) -> ResponseEvent:
        return {**event, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _in_part(self, event: ResponseEvent) -> ResponseEvent:
        return {**self._in_item(event), "content_index": 0}
