"""What the fields of requests have in common: strict types, and fields that are refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import PydanticCustomError, core_schema


class RequestModel(BaseModel):
    """A part of a request: no field is converted, none is unknown, no number is nan."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


@dataclass(frozen=True)
class UnsupportedField:
    """A published field that is not honoured here: ``name: Annotated[Any, UnsupportedField("why", neutral, ...)] = None``.

    Null and the neutral values, which ask for nothing, are taken; all else is refused.
    """

    why: str
    neutral: tuple[Any, ...] = ()

    def __init__(self, why: str, *neutral: Any):
        object.__setattr__(self, "why", why)
        object.__setattr__(self, "neutral", neutral)

    def check(self, value: Any) -> Any:
        """The value, if it asks for nothing."""
        if value is None or any(_same(value, one) for one in self.neutral):
            return value
        legal = " or ".join(json.dumps(one) for one in (None, *self.neutral))
        raise PydanticCustomError("unsupported_parameter", "{why}; give {legal}", {"why": self.why, "legal": legal})

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self.neutral], "description": f"Not served: {self.why}."}


def _same(value: Any, other: Any) -> bool:
    """As JSON has it: 0 is 0.0 and not false."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def unsupported_fields(model: type[BaseModel]) -> set[str]:
    """Fields of a model that are refused by name."""
    return {name for name, f in model.model_fields.items() if any(isinstance(m, UnsupportedField) for m in f.metadata)}


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 2.0 is as whole as 2."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE_NUMBER = BeforeValidator(_whole)
"""Comes after an integer's bounds, which the published schema would lose otherwise."""
Count = Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE_NUMBER]
Fraction = Annotated[float, Field(gt=0, le=1)]
Temperature = Annotated[float, Field(ge=0, le=2)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE_NUMBER]
Token = Annotated[int, Field(ge=0, lt=2**31, json_schema_extra={"format": "token"}), WHOLE_NUMBER]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Name = Annotated[str, Field(max_length=512)]
