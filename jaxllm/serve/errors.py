"""Every refusal in the shape that OpenAI's clients read: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """A request is not answered.

    Args:
        status: of HTTP.
        message: what is wrong, what is legal, what to do.
        param: the field it is about.
        code: for programs.
        headers: of the response.
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
        """What the client reads."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def dumps(value: Any) -> str:
    """JSON in ASCII: a client's text may hold half a surrogate pair, which UTF-8 cannot."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))


def of_validation(problems: list[Mapping[str, Any]]) -> ApiError:
    """What pydantic found wrong with a body: the first problem's field and words."""
    if not problems:
        return ApiError(400, "the request's body cannot be read.")
    first = problems[0]
    where = [part for part in first.get("loc", ()) if part != "body"]
    param = _path(where) or None
    kind, message = str(first.get("type", "")), str(first.get("msg", "not legal"))
    if kind == "extra_forbidden":
        return ApiError(400, f"there is no field {param!r}.", param=param, code="unknown_parameter")
    if kind == "missing":
        return ApiError(
            400, f"the field {param or 'body'!r} is missing.", param=param, code="missing_required_parameter"
        )
    if kind == "json_invalid":
        return ApiError(400, f"the body is not JSON: {message}.", code="invalid_json")
    return ApiError(400, f"{param or 'the body'}: {message}.", param=param, code=kind or None)


def _path(parts: list[Any]) -> str:
    """messages, 0, content -> messages[0].content."""
    out = ""
    for part in parts:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else str(part)
    return out[:200]
