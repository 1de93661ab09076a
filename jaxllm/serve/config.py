"""Server configuration: address, API keys, limits and timeouts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxllm.effort.effort_policy import EffortPolicy
from jaxllm.serve.tools.tool_formats import TOOL_CALL_FORMATS


@dataclass(frozen=True)
class ServeConfig:
    """Settings of the HTTP server.

    Attributes:
        host: address to listen on; the default is reachable from this computer only.
        port: port to listen on; 0 for any free one.
        name: model name in requests; None: "model".
        api_keys: legal API keys (``Authorization: Bearer KEY``); empty: no key is required.
        origins: origins whose web pages may call the server (CORS); ("*",) for all.
        tool_parser: tool-call format, a name of ``TOOL_CALL_FORMATS``; None: detected from the chat template.
        queue: sequences that may wait beside those that run; further requests are refused with 429.
        max_body: maximum size of a request body in bytes.
        max_prompts: maximum number of prompts in one request.
        body_seconds: time in which a request body must arrive.
        request_seconds: maximum duration of a request; None: unlimited.
        write_seconds: time that a client may leave a chunk of its stream unread before it is disconnected.
        grace_seconds: time that running requests have to end after SIGTERM.
        log_prompts: write prompts to the log too.
        adapter_dirs: directories that ``/v1/load_lora_adapter`` may read adapters from; empty: none.
        admin_keys: API keys that may load and unload adapters; empty: nobody may.
        efforts: effort policies, as (model name in requests, policy).
        stored_responses: responses that ``previous_response_id`` can name; the least recently used are dropped.
        stored_bytes: maximum bytes of all of them.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    api_keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    tool_parser: str | None = None
    queue: int = 256
    max_body: int = 4 * 2**20
    max_prompts: int = 64
    body_seconds: float = 30.0
    request_seconds: float | None = None
    write_seconds: float = 60.0
    grace_seconds: float = 30.0
    log_prompts: bool = False
    adapter_dirs: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    efforts: tuple[tuple[str, EffortPolicy], ...] = ()
    stored_responses: int = 1000
    stored_bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ValueError(f"serve: port = {self.port}; give 0 (any free one) to 65535.")
        for name, least in (
            ("queue", 0),
            ("max_body", 1),
            ("max_prompts", 1),
            ("grace_seconds", 0),
            ("stored_responses", 0),
            ("stored_bytes", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"serve: {name} = {getattr(self, name)}; give {least} or more.")
        for name in ("body_seconds", "request_seconds", "write_seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"serve: {name} = {value}; give seconds above 0.")
        if self.tool_parser is not None and self.tool_parser not in TOOL_CALL_FORMATS:
            raise ValueError(
                f"serve: tool_parser = {self.tool_parser!r}; give one of {', '.join(TOOL_CALL_FORMATS)}, or None."
            )
        names = [self.name, *(name for name, _ in self.efforts)]
        if len(set(names)) < len(names) or not all(name for name, _ in self.efforts):
            raise ValueError(f"serve: the model names {names} are not unique, or one is empty; give each its own.")
        keys = (*self.api_keys, *self.admin_keys)
        if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in keys):
            raise ValueError("serve: an API key is empty or has characters that are illegal in a header; give ASCII.")
