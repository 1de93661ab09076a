"""Prompt tuning: learned embeddings before the text (arXiv:2104.08691).

They start as the embeddings of tokens that are drawn from the vocabulary (section 3.2 of the paper).

Legend: P virtual tokens, V vocab, D embed.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxllm.models import DecoderConfig
from jaxllm.models.functional import Params
from jaxllm.peft.adapter_method import AdapterConfig, AdapterMethod
from jaxllm.peft.virtual_tokens import VirtualTokens

SEED = 0
"""Seed that draws the tokens whose embeddings a prompt starts from."""


def _architecture(config: AdapterConfig, base: DecoderConfig) -> DecoderConfig:
    return replace(base, prompt_tokens=config.tokens)


def _start_rest(config: AdapterConfig, params: Params) -> Params:
    """Parameters whose prompt has the embeddings of drawn tokens."""
    embedding = params["embedding"]
    table, prompt = embedding["table"], embedding["prompt"]
    chosen = np.random.default_rng(SEED).choice(table.shape[0], config.tokens, replace=False)

    def rows(table: Float[Array, "V D"]) -> Float[Array, "P D"]:
        return table[chosen]

    start = jax.jit(jax.sharding.auto_axes(rows, out_sharding=prompt.sharding.spec))(table)
    return params | {"embedding": embedding | {"prompt": start}}


PROMPT = AdapterMethod(
    architecture=_architecture,
    trained=("prompt",),
    text_context=lambda config: functools.partial(VirtualTokens, tokens=config.tokens),
    start_rest=_start_rest,
    fields=("tokens",),
)
