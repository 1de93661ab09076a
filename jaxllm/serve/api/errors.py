"""API errors in OpenAI's shape, {"error": {"message", "type", "param", "code"}}, and in Anthropic's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
ANTHROPIC_PATH = "/v1/messages"
"""Path of Anthropic's API; errors of it and of the paths below it have Anthropic's shape."""


class ApiError(Exception):
    """Error response to a request.

    Args:
        status: HTTP status.
        message: what is wrong, what is legal, what to do.
        param: path of the request field at fault.
        code: machine-readable error code.
        headers: headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """JSON body of the response."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def body_for(self, path: str) -> dict[str, Any]:
        """JSON body of the response to a request of a path: Anthropic's shape below ``/v1/messages``, else OpenAI's."""
        if path != ANTHROPIC_PATH and not path.startswith(ANTHROPIC_PATH + "/"):
            return self.body()
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        named = self.param is None or self.param in self.message
        message = self.message if named else f"{self.param}: {self.message}"
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}


def dumps(value: Any) -> str:
    """JSON in ASCII, because a client's text may contain a lone surrogate, which UTF-8 cannot encode."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))


def validation_error(problems: Sequence[Mapping[str, Any]], body: Any = None) -> ApiError:
    """API error for pydantic's validation errors: field and message of the first of them."""
    if not problems:
        return ApiError(400, "the request's body cannot be read.")
    first = problems[0]
    where = [part for part in first.get("loc", ()) if part != "body"]
    kind, message = str(first.get("type", "")), str(first.get("msg", "not legal"))
    param = _path(where, body) or None
    if kind == "extra_forbidden":
        return ApiError(400, f"there is no field {param!r}.", param=param, code="unknown_parameter")
    if kind == "missing":
        return ApiError(400, f"{param or 'the body'} is missing.", param=param, code="missing_required_parameter")
    if kind == "json_invalid":
        return ApiError(400, f"the body is not JSON: {message}.", code="invalid_json")
    return ApiError(400, f"{param or 'the body'}: {message}.", param=param, code=kind or None)


def _path(parts: Sequence[Any], body: Any) -> str:
    """Field path: (messages, 0, user, content) -> messages[0].content, without pydantic's names of union members."""
    out = ""
    for number, part in enumerate(parts):
        inside = (isinstance(body, dict) and part in body) or (
            isinstance(body, list) and isinstance(part, int) and part < len(body)
        )
        if inside:
            body = body[part]
        elif number < len(parts) - 1 or isinstance(part, int) or not isinstance(body, dict):
            continue
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else str(part)
    return out[:200]
