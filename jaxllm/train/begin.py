"""Beginning a run from a model that exists instead of from random parameters."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.config import ConfigError, differences
from jaxllm.hub import Source, find_model, open_source
from jaxllm.models import DecoderConfig

OURS = ("param_dtype", "dtype", "remat", "unroll")
"""Fields of the architecture that a run chooses; the others are the model's."""


def source_of(init_from: str, model: DecoderConfig) -> Source:
    """The model to begin from.

    Raises:
        HubError: there is no such model, or it is not understood.
        ConfigError: ``model`` is another architecture; lists the differences.
    """
    source = open_source(find_model(init_from))
    theirs = replace(source.config, **{name: getattr(model, name) for name in OURS})
    if changed := differences(theirs, model):
        listed = "\n  ".join(f"model.{d}" for d in changed)
        raise ConfigError(
            f"init_from = {init_from!r} has another architecture than the run's model:\n  {listed}\n"
            "(the model's own -> the run's). Take it as it is: model=open_source(find_model(init_from)).config."
        )
    return source
