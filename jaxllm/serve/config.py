"""How a server is run: where it listens, whom it lets in, and what it takes on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxllm.serve.tools.tool_formats import TOOL_CALL_FORMATS


@dataclass(frozen=True)
class ServeConfig:
    """Settings of a server.

    Attributes:
        host: address to listen on; the default is reached from this computer only.
        port: 0 for any free one.
        name: of the model, as clients ask for it; None: the last part of what it was loaded from.
        api_keys: requests must carry one of them (``Authorization: Bearer KEY``); none: nobody is asked.
        origins: web pages of these origins may call the server (CORS); ("*",) for all.
        tool_parser: how the model writes calls of functions, a name of ``TOOL_CALL_FORMATS``; None: as its template says.
        queue: continuations that may wait beside those the engine works on; more are refused with 429.
        max_body: bytes of a request at most.
        max_prompts: prompts of one request at most.
        body_seconds: in which a request must have arrived.
        request_seconds: that a request may take; None: as long as it needs.
        write_seconds: that a reader may leave a piece of its stream unread.
        grace_seconds: that requests have to end after SIGTERM.
        log_prompts: texts of requests and answers are logged too.
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

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ValueError(f"serve: port = {self.port}; give 0 (any free one) to 65535.")
        for name, least in (("queue", 0), ("max_body", 1), ("max_prompts", 1), ("grace_seconds", 0)):
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
        if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in self.api_keys):
            raise ValueError("serve: an API key is empty or has characters that no header can carry; give ASCII text.")
