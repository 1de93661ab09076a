"""Named scopes: profiles and the op_name metadata of compiled programs name layers and their parts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxllm.compiler.live_ranges import phase
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MLAConfig, MlpConfig, MoeConfig, functional
from jaxllm.train import value_and_grad
from tests import environment, quick, tiny

TRANSFORM = re.compile(r"\w+\((.*)\)")


def layers(attention: AttentionConfig | MLAConfig, mlp: MlpConfig | MoeConfig, **fields: Any) -> DecoderConfig:
    return DecoderConfig(vocab_size=32, embed_dim=16, layers=2, pattern=(BlockConfig(attention, mlp),), **fields)


GQA = AttentionConfig(2, 1, 8)
CONFIGS = {
    "dense": layers(dataclasses.replace(GQA, qk_norm="head"), MlpConfig(24), tied=False),
    "int8": layers(GQA, MlpConfig(24), matmul_precision="int8"),
    "moe": layers(GQA, MoeConfig(4, 2, 16, shared=8)),
    "capacity": layers(GQA, MoeConfig(4, 2, 16, capacity=1.0)),
    "mla": layers(MLAConfig(2, 8, 8, 8, 4, 8), MlpConfig(24)),
}
PROJECTIONS = ("attention/q_proj", "attention/k_proj", "attention/v_proj", "attention/o_proj")
EXPERTS = ("moe/router", "moe/dispatch", "moe/experts/gate", "moe/experts/up", "moe/experts/down", "moe/combine")
MLP = ("mlp/gate", "mlp/up", "mlp/down")
PARTS = {
    "dense": (*PROJECTIONS, *MLP, "attention/qk_norm"),
    "int8": (*PROJECTIONS, *MLP),
    "moe": (*PROJECTIONS, *EXPERTS, "moe/shared_expert/down"),
    "capacity": (*PROJECTIONS, *EXPERTS),
    "mla": (
        "attention/q_down_proj",
        "attention/q_up_proj",
        "attention/kv_down_proj",
        "attention/kv_up_proj",
        "attention/o_proj",
        *MLP,
    ),
}
ALL = ("attention/rope", "attention/kernel", "norm")


def lowered(config: DecoderConfig, jit: Any = quick.jit) -> Any:
    """The program of loss and gradients."""
    model = functional(config)
    batch = jax.tree.map(jnp.asarray, tiny.batch(0, 2, 6, config.vocab_size, packed=True))
    return jit(value_and_grad(model)).lower(model.abstract(), batch)


@functools.cache
def op_names(kind: str) -> frozenset[str]:
    """Names of the compiled program's instructions."""
    return frozenset(re.findall(r'op_name="([^"]*)"', lowered(CONFIGS[kind]).compile().as_text()))


def plain(name: str) -> str:
    """A name without transformations: ``transpose(jvp(layers))/mlp`` is ``layers/mlp``."""
    parts = []
    for part in name.split("/"):
        while found := TRANSFORM.fullmatch(part):
            part = found[1]
        parts.append(part)
    return "/".join(parts)


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("kind", CONFIGS)
def test_parts_of_layers_are_named_in_the_forward_and_the_backward_pass(kind):
    for pass_ in ("forward", "backward"):
        names = [plain(name) for name in op_names(kind) if phase(name) == pass_]
        for part in (*ALL, *PARTS[kind]):
            assert any(f"/layers/{part}/" in name for name in names), f"{part} in the {pass_} pass"


def test_embedding_head_and_loss_are_named():
    names = {plain(name) for name in op_names("dense")}
    for part in ("embed", "head/final_norm", "loss"):
        assert any(f"/{part}/" in name for name in names), part


def test_recomputed_parts_are_named():
    """``remat`` = "elementwise" recomputes norms, rotary embeddings and activation functions."""
    names = [plain(name) for name in op_names("dense") if phase(name) == "recomputed"]
    assert any("/layers/norm/" in name for name in names)
    assert any("/layers/attention/rope/" in name for name in names)


@pytest.mark.drawn(1)
def test_matmuls_have_no_name_but_those_of_parts():
    """Every matmul of a layer is in a part, so that a profile has no anonymous ones."""
    for kind in CONFIGS:
        matmuls = [plain(name) for name in op_names(kind) if name.endswith("dot_general")]
        assert matmuls
        known = [f"/layers/{part}/" for part in (*ALL, *PARTS[kind])]
        others = ("/loss/", "/moe/shared_expert/")
        assert not [name for name in matmuls if not any(part in name for part in (*known, *others))]


def test_the_lowered_program_has_the_names_too():
    text = lowered(CONFIGS["dense"]).as_text(debug_info=True)
    for part in PARTS["dense"]:
        assert f"layers/{part}/" in text


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_scopes_change_metadata_alone(kind, monkeypatch):
    """The optimised program without its metadata is the same, character by character."""

    def program() -> str:
        jax.clear_caches()
        with environment.optimized():
            text = lowered(CONFIGS[kind], jax.jit).compile().as_text()
        text = re.sub(r"\nFileNames\n.*?\n(?=%|ENTRY)", "\n", text, flags=re.DOTALL)  # tables of source locations
        text = re.sub(r", metadata=\{[^}]*\}", "", text)
        assert "op_name" not in text
        return text

    scoped = program()
    monkeypatch.setattr(jax, "named_scope", lambda name: contextlib.nullcontext())
    assert program() == scoped
