"""Facts that the processes of both pools must agree on, and where they do not."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import numpy as np

from jaxllm.files import digest
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.pools.phase_runner import PhaseRunner
from jaxllm.infer.runner.program_cache import source_digest
from jaxllm.models import Functional


def pool_facts(model: Functional, params: Any, config: EngineConfig, runner: PhaseRunner) -> dict[str, Any]:
    """Facts of a process, as JSON values by name.

    Args:
        model, params: model and weights that the engine was given.
        config: its configuration, with ``pools``.
        runner: one of its engines.
    """
    spec = runner.spec
    found: dict[str, Any] = {
        "source of jaxllm": source_digest(),
        "version of jax": jax.__version__,
        "model": digest(str(model.config)),
        "weights": weight_fingerprint(params),
        "vocabulary": runner.vocab_size,
        "page size": spec.page_size,
        "max_len": spec.max_len,
    }
    found |= {f"engine.{name}": value for name, value in dataclasses.asdict(config).items()}
    return json.loads(json.dumps(found))


def weight_fingerprint(params: Any) -> str:
    """Digest of shapes, dtypes and the first number of every weight: tells one training of a model from another.

    Reads a number of each array alone, so weights that differ only elsewhere have the same fingerprint.
    """
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        first = np.asarray(leaf.addressable_data(0)[(slice(0, 1),) * leaf.ndim])
        found.append([jax.tree_util.keystr(path), list(leaf.shape), str(leaf.dtype), first.tobytes().hex()])
    return digest(found)


def difference(prefill: dict[str, Any], decode: dict[str, Any]) -> str | None:
    """The first fact that differs, as a sentence that says what to do; None if all agree."""
    for name in prefill.keys() | decode.keys():
        one, other = prefill.get(name), decode.get(name)
        if one != other:
            return (
                f"{name} is {one} in the prefill process and {other} in the decode process: start both with the same "
                "model and the same options."
            )
    return None
