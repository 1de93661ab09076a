"""Rotary position embedding fields of a ``config.json``: ``rope_parameters`` (transformers 5) or the older fields."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.hub.errors import HubError
from jaxllm.hub.families.field_reader import FieldReader
from jaxllm.models import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)


def rope_config(fields: FieldReader, *, theta: float = 10000.0, partial: bool = False) -> RopeConfig:
    """Rotary embedding of a model that has one for all layers.

    Args:
        theta: the family's base if the config states none.
        partial: whether the family can rotate a fraction of each head.
    """
    base = fields.get("rope_theta", float, theta)
    fraction = fields.get("partial_rotary_factor", float, 1.0)
    # Where both are there, transformers takes the older.
    newer, older = fields.get("rope_parameters", Mapping, None), fields.get("rope_scaling", Mapping, None)
    given = older or newer or {}
    return read_rope(given, fields, base, fraction, partial=partial)


def read_rope(
    given: Mapping[str, Any], fields: FieldReader, theta: float, fraction: float = 1.0, *, partial: bool = False
) -> RopeConfig:
    """Parameters of one rotary embedding; ``theta`` and ``fraction`` are the defaults.

    Raises:
        HubError: an unknown kind, or a parameter that is missing or illegal.
    """
    inner = FieldReader(given, f"{fields.where}: the rotary embedding")
    kind = inner.get("rope_type", str, inner.get("type", str, "default"))
    inner.skip("type")
    theta = inner.get("rope_theta", float, theta)
    fraction = inner.get("partial_rotary_factor", float, fraction)
    if kind == "default":
        scaling = None
    elif kind in SCALINGS:
        scaling = SCALINGS[kind](inner, fields)
    else:
        raise HubError(f"{inner.where} has rope_type {kind!r}; known: default, {', '.join(sorted(SCALINGS))}.")
    inner.finish()
    if fraction != 1 and not partial:  # with some scalings transformers would rotate a part, with others all of it
        raise HubError(f"{inner.where} has partial_rotary_factor = {fraction}; legal in this family: 1.")
    return RopeConfig(theta, scaling, fraction)


def _original_length(inner: FieldReader, fields: FieldReader) -> int:
    """Original training length: among the parameters, beside them (Phi-3), or the longest sequence."""
    beside = fields.get("original_max_position_embeddings", int, None)
    inside = inner.get("original_max_position_embeddings", int, None)
    return beside or inside or fields.need("max_position_embeddings", int)


def _linear(inner: FieldReader, _: FieldReader) -> RopeScaling:
    return LinearScaling(inner.need("factor", float))


def _dynamic(inner: FieldReader, fields: FieldReader) -> RopeScaling:
    # transformers measures growth from max_position_embeddings, whatever the parameters name.
    inner.skip("original_max_position_embeddings")
    return DynamicScaling(inner.need("factor", float), fields.need("max_position_embeddings", int))


def _llama3(inner: FieldReader, fields: FieldReader) -> RopeScaling:
    return Llama3Scaling(
        factor=inner.need("factor", float),
        low_freq_factor=inner.need("low_freq_factor", float),
        high_freq_factor=inner.need("high_freq_factor", float),
        original_length=_original_length(inner, fields),
    )


def _yarn(inner: FieldReader, fields: FieldReader) -> RopeScaling:
    length = _original_length(inner, fields)
    factor = inner.get("factor", float, None) or fields.need("max_position_embeddings", int) / length
    attention = inner.get("attention_factor", float, None)
    above, below = inner.get("mscale", float, None), inner.get("mscale_all_dim", float, None)
    if attention is None and above and below:
        grown = [0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0 for m in (above, below)]
        attention = grown[0] / grown[1]
    return YarnScaling(
        factor,
        length,
        beta_fast=inner.get("beta_fast", float, 32.0),
        beta_slow=inner.get("beta_slow", float, 1.0),
        magnitude=attention,
        truncate=inner.get("truncate", bool, True),
    )


def _longrope(inner: FieldReader, fields: FieldReader) -> RopeScaling:
    length = _original_length(inner, fields)
    factor = inner.get("factor", float, None) or fields.need("max_position_embeddings", int) / length
    attention = inner.get("attention_factor", float, None)
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    return LongRopeScaling(_factors(inner, "short_factor"), _factors(inner, "long_factor"), length, attention)


def _factors(inner: FieldReader, name: str) -> tuple[float, ...]:
    """A list of positive numbers."""
    given = inner.need(name, list)
    if not all(type(f) in (int, float) and 0 < f < math.inf for f in given):
        raise HubError(f"{inner.where}: {name} = {given!r}; legal: positive numbers.")
    return tuple(map(float, given))


SCALINGS: dict[str, Callable[[FieldReader, FieldReader], RopeScaling]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
