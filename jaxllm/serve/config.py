"""Server configuration: address, API keys, limits and timeouts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from jaxllm.effort.effort_policy import EffortPolicy
from jaxllm.serve.tools.tool_formats import TOOL_CALL_FORMATS
from jaxllm.serve.tracing import check_tracing

MetricsNames = Literal["jaxllm", "vllm"]
"""Names that metrics are exported under: this server's alone, or vLLM's beside them."""


@dataclass(frozen=True)
class ServeConfig:
    """Settings of the HTTP server.

    Attributes:
        host: address to listen on; the default is reachable from this computer only.
        port: port to listen on; 0 for any free one.
        name: model name in requests; None: "model".
        api_keys: legal API keys (``Authorization: Bearer KEY`` or ``x-api-key: KEY``); empty: no key is required.
        origins: origins whose web pages may call the server (CORS); ("*",) for all.
        tool_parser: tool-call format, a name of ``TOOL_CALL_FORMATS``; None: detected from the chat template.
        queue: sequences that may wait beside those that run; further requests are refused with 429.
        max_body: maximum size of a request body in bytes.
        max_prompts: maximum number of prompts in one request.
        max_connections: maximum number of open connections; a further one closes the longest of those that have not
            sent a whole request, or is refused with 503.
        header_seconds: time in which the headers of a request must arrive, after which its connection is closed.
        body_seconds: time in which a request body must arrive.
        request_seconds: maximum duration of a request; None: unlimited.
        write_seconds: time that a client may leave a chunk of its stream unread before it is disconnected.
        grace_seconds: time that running requests have to end after SIGTERM.
        log_prompts: write prompts to the log too.
        metrics_names: names of the metrics: "jaxllm", or "vllm" for those of vLLM beside them.
        otlp_traces_endpoint: URL that OpenTelemetry traces are sent to, such as http://host:4318/v1/traces; None: none.
        adapter_dirs: directories that ``/v1/load_lora_adapter`` may read adapters from; empty: none.
        admin_keys: API keys that may load and unload adapters; empty: nobody may.
        efforts: effort policies, as (model name in requests, policy).
        batch_dir: directory of files and batches; None: there are none.
        max_file: maximum size of an uploaded file in bytes.
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
    max_connections: int = 512
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    request_seconds: float | None = None
    write_seconds: float = 60.0
    grace_seconds: float = 30.0
    log_prompts: bool = False
    metrics_names: MetricsNames = "jaxllm"
    otlp_traces_endpoint: str | None = None
    adapter_dirs: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    efforts: tuple[tuple[str, EffortPolicy], ...] = ()
    batch_dir: str | None = None
    max_file: int = 100 * 2**20
    stored_responses: int = 1000
    stored_bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ValueError(f"serve: port = {self.port}; give 0 (any free one) to 65535.")
        least_of = {"queue": 0, "max_body": 1, "max_prompts": 1, "grace_seconds": 0, "max_connections": 1}
        least_of |= {"stored_responses": 0, "stored_bytes": 0, "max_file": 1}
        for name, least in least_of.items():
            if getattr(self, name) < least:
                raise ValueError(f"serve: {name} = {getattr(self, name)}; give {least} or more.")
        for name in ("header_seconds", "body_seconds", "request_seconds", "write_seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"serve: {name} = {value}; give seconds above 0.")
        if self.tool_parser is not None and self.tool_parser not in TOOL_CALL_FORMATS:
            raise ValueError(
                f"serve: tool_parser = {self.tool_parser!r}; give one of {', '.join(TOOL_CALL_FORMATS)}, or None."
            )
        if self.metrics_names not in get_args(MetricsNames):
            raise ValueError(
                f"serve: metrics_names = {self.metrics_names!r}; give {' or '.join(get_args(MetricsNames))}."
            )
        if self.otlp_traces_endpoint is not None:
            if not self.otlp_traces_endpoint.startswith(("http://", "https://")):
                raise ValueError(
                    f"serve: otlp_traces_endpoint = {self.otlp_traces_endpoint!r}; give a URL, such as "
                    "http://host:4318/v1/traces."
                )
            check_tracing()
        names = [self.name, *(name for name, _ in self.efforts)]
        if len(set(names)) < len(names) or not all(name for name, _ in self.efforts):
            raise ValueError(f"serve: the model names {names} are not unique, or one is empty; give each its own.")
        keys = (*self.api_keys, *self.admin_keys)
        if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in keys):
            raise ValueError("serve: an API key is empty or has characters that are illegal in a header; give ASCII.")
