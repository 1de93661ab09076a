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


MAX_PROBLEMS = 8
"""Problems of a request that one error names."""
_WORDS = {
    "string_type": "a string", "int_type": "an integer", "int_from_float": "an integer", "float_type": "a number",
    "bool_type": "true or false", "list_type": "a list", "dict_type": "an object", "model_type": "an object",
    "model_attributes_type": "an object",
}  # fmt: skip


def validation_error(problems: Sequence[Mapping[str, Any]], body: Any = None) -> ApiError:
    """API error for pydantic's validation errors: it names every field at fault, and ``param`` is the first."""
    if not problems:
        return ApiError(400, "the request's body cannot be read.")
    if problems[0].get("type") == "json_invalid":
        return ApiError(400, f"the body is not JSON: {problems[0].get('msg', '')}.", code="invalid_json")
    found = _by_field(problems, body)
    unknown = [path for path, errors in found.items() if errors[0].get("type") == "extra_forbidden"]
    parts = [] if not unknown else [_unknown(unknown)]
    parts += [_sentence(path, errors, body) for path, errors in found.items() if path not in unknown]
    more = f"; and {len(parts) - MAX_PROBLEMS} more" if len(parts) > MAX_PROBLEMS else ""
    param = unknown[0] if unknown else next(iter(found))
    kind = str(found[param][0].get("type", ""))
    code = {"extra_forbidden": "unknown_parameter", "missing": "missing_required_parameter"}.get(kind, kind or None)
    return ApiError(400, "; ".join(parts[:MAX_PROBLEMS]) + more + ".", param=param or None, code=code)


def _by_field(problems: Sequence[Mapping[str, Any]], body: Any) -> dict[str, list[Mapping[str, Any]]]:
    """Errors by field path; those of all alternatives of a union are at the path of the union."""
    alternatives: dict[str, set[Any]] = {}
    for problem in problems:
        for path, label in _alternatives(problem, body):
            alternatives.setdefault(path, set()).add(label)
    found: dict[str, list[Mapping[str, Any]]] = {}
    for problem in problems:
        unions = [path for path, _ in _alternatives(problem, body) if len(alternatives[path]) > 1]
        found.setdefault(unions[0] if unions else _field(problem, body), []).append(problem)
    return found


def _field(problem: Mapping[str, Any], body: Any) -> str:
    return _path(_where(problem), body, absent=problem.get("type") == "missing")


def _where(problem: Mapping[str, Any]) -> list[Any]:
    return [part for part in problem.get("loc", ()) if part != "body"]


def _alternatives(problem: Mapping[str, Any], body: Any) -> list[tuple[str, Any]]:
    """(path of a union, name of one of its alternatives) for each that an error's location goes through."""
    out, path = [], _where(problem)
    for number, part in enumerate(path[:-1] if problem.get("type") == "missing" else path):
        before, after = _path(path[:number], body), _path(path[: number + 1], body)
        if before == after and number:
            out.append((before, part))
    return out


def _unknown(paths: Sequence[str]) -> str:
    *first, last = [repr(path) for path in paths[:MAX_PROBLEMS]]
    return f"there are no fields {', '.join(first)} and {last}" if first else f"there is no field {last}"


def _sentence(path: str, errors: Sequence[Mapping[str, Any]], body: Any) -> str:
    """Sentence about a field: the fault, and the legal values."""
    name = path or "the body"
    words = list(dict.fromkeys(_word(one, path, body) for one in errors))
    if len(words) > 1:
        return f"{name} is none of these: {'; '.join(words)}"
    if errors[0].get("type") == "missing":
        return f"{name} is missing"
    if (kind := errors[0].get("type")) in _WORDS:
        return f"{name} must be {_WORDS[kind]}"
    if kind == "union_tag_invalid":
        about = errors[0].get("ctx", {})
        field = str(about.get("discriminator", "")).strip("'")
        return f"{name}.{field} must be one of {about.get('expected_tags')}"
    return f"{name}{_requirement(errors[0])}"


def _word(problem: Mapping[str, Any], union: str, body: Any) -> str:
    """Requirement of one alternative of a union, in words."""
    kind, path = str(problem.get("type", "")), _field(problem, body)
    expected = (problem.get("ctx") or {}).get("expected", "")
    word = f"one of {expected}" if kind == "literal_error" else _WORDS.get(kind, "")
    if path == union:
        return word or str(problem.get("msg", ""))
    kind_of = "a list" if path.removeprefix(union).startswith("[") else "an object"
    if kind in ("missing", "extra_forbidden"):
        return f"{kind_of} {'with' if kind == 'missing' else 'without'} {path}"
    return f"{kind_of} in which {path}{f' is {word}' if word else _requirement(problem)}"


def _requirement(problem: Mapping[str, Any]) -> str:
    """Pydantic's message, to follow the name of a field."""
    message = str(problem.get("msg", "not legal"))
    begin = "Input should "
    return f" must {message.removeprefix(begin)}" if message.startswith(begin) else f": {message}"


def _path(parts: Sequence[Any], body: Any, *, absent: bool = False) -> str:
    """Field path: (messages, 0, user, content) -> messages[0].content, without pydantic's names of union members.

    With ``absent`` the last part is a field that the body lacks.
    """
    out = ""
    for number, part in enumerate(parts):
        inside = (isinstance(body, dict) and part in body) or (
            isinstance(body, list) and isinstance(part, int) and part < len(body)
        )
        if inside:
            body = body[part]
        elif not (absent and number == len(parts) - 1):
            continue
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else str(part)
    return out[:200]
