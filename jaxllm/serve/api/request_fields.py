"""Request fields: strict base model, common field types, and published fields that are refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
)
from pydantic_core import PydanticCustomError, core_schema


class RequestModel(BaseModel):
    """Base of all request schemas: types are strict, unknown fields and NaN are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


@dataclass(frozen=True)
class UnsupportedField:
    """Marker of a published field that is not supported: ``Annotated[Any, UnsupportedField("why", neutral, ...)]``.

    Null and the neutral values, which request nothing, are accepted; every other value is refused.
    """

    why: str
    neutral: tuple[Any, ...] = ()

    def __init__(self, why: str, *neutral: Any):
        object.__setattr__(self, "why", why)
        object.__setattr__(self, "neutral", neutral)

    def check(self, value: Any) -> Any:
        """Returns the value if it is null or neutral.

        Raises:
            PydanticCustomError: it is not.
        """
        if value is None or any(_same(value, one) for one in self.neutral):
            return value
        legal = " or ".join(json.dumps(one) for one in (None, *self.neutral))
        raise PydanticCustomError("unsupported_parameter", "{why}; give {legal}", {"why": self.why, "legal": legal})

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self.neutral], "description": f"Not supported: {self.why}."}


def _same(value: Any, other: Any) -> bool:
    """Equality of JSON values: 0 equals 0.0 but not false."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def unsupported_fields(model: type[BaseModel]) -> set[str]:
    """Names of a schema's fields that are marked ``UnsupportedField``."""
    return {name for name, f in model.model_fields.items() if any(isinstance(m, UnsupportedField) for m in f.metadata)}


def _as_integer(value: Any) -> Any:
    """JSON has one kind of number, so 2.0 is the integer 2."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _not_zero(value: int) -> int:
    if value == 0:
        raise PydanticCustomError("zero", "give 1 or more, or -1 for as many as fit")
    return value


WHOLE_NUMBER = BeforeValidator(_as_integer)
"""Validator that accepts 2.0 as an integer. It follows the bounds, which the published schema would lose otherwise."""
Count = Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE_NUMBER]
Fraction = Annotated[float, Field(gt=0, le=1)]
Temperature = Annotated[float, Field(ge=0, le=2)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE_NUMBER]
Token = Annotated[int, Field(ge=0, lt=2**31, json_schema_extra={"format": "token"}), WHOLE_NUMBER]
Truncation = Annotated[int, Field(ge=-1, le=2**31 - 1), WHOLE_NUMBER, AfterValidator(_not_zero)]
"""Number of tokens to keep, or -1."""
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Name = Annotated[str, Field(max_length=512)]
