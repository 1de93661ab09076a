"""Saved activations of each remat policy, read from the traced program: dots, residuals, gathered weights."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sharding
from jaxllm.models import functional, remat
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.train import value_and_grad
from tests import tiny
from tests.models.jaxprs import equations

LAYERS = 3
# No two dimensions that a weight and an activation could share: rows and positions are 2 and 5.
CONFIG = tiny.decoder(
    dtype="float32", heads=2, kv_heads=1, head_dim=8, embed_dim=16, mlp=24, vocab_size=10, layers=LAYERS
)


def traced_of(config: Any) -> Any:
    """The program of loss and gradients of a model."""
    batch = jax.tree.map(jnp.asarray, tiny.batch(0, 2, 5, config.vocab_size, packed=False))
    model = functional(config)
    return jax.jit(value_and_grad(model)).trace(model.abstract(), batch).jaxpr


@functools.cache
def traced(remat: str, on: str = "") -> Any:
    """The program of loss and gradients."""
    model = functional(dataclasses.replace(CONFIG, remat=remat))
    batch = jax.tree.map(jnp.asarray, tiny.batch(0, 2, 5, CONFIG.vocab_size, packed=False))
    run = jax.jit(value_and_grad(model))
    if not on:
        return run.trace(model.abstract(), batch).jaxpr
    mesh = sharding.MeshSpec.parse(on).build(jax.devices()[:2])
    abstract = sharding.abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
    with jax.set_mesh(mesh):
        batch = jax.device_put(batch, jax.NamedSharding(mesh, model.rules.spec(("batch", "seq"), mesh)))
        return run.trace(abstract, batch).jaxpr


def dots(jaxpr: Any) -> int:
    return sum(e.primitive.name == "dot_general" for e in equations(jaxpr))


def kept(jaxpr: Any) -> list[Any]:
    """Residuals that the forward loop over layers passes to the backward one, a slice per layer."""
    loops = [e for e in equations(jaxpr) if e.primitive.name == "scan" and e.params["length"] == LAYERS]
    assert len(loops) == 2, "one forward, one backward"
    forward = loops[0]
    body = forward.params["jaxpr"].out_avals
    # A carry comes out as the body makes it, what is kept comes out stacked.
    return [v.aval for v, one in zip(forward.outvars, body, strict=True) if v.aval.shape == (LAYERS, *one.shape)]


def size(jaxpr: Any) -> int:
    return sum(math.prod(aval.shape) for aval in kept(jaxpr))


def test_full_keeps_the_input_of_each_block_alone():
    shapes = sorted(aval.shape for aval in kept(traced("full")) if jnp.issubdtype(aval.dtype, jnp.floating))
    assert shapes == [(LAYERS, 2, 5, 16)]


def test_elementwise_keeps_less_and_recomputes_no_matrix_product():
    assert dots(traced("elementwise")) == dots(traced("none")) < dots(traced("full"))
    assert size(traced("full")) < size(traced("elementwise")) < 0.6 * size(traced("none"))


def test_attention_keeps_what_goes_into_it_and_not_what_comes_out():
    """Selective recomputation: saves less by attention's output and its softmax sums, 2 heads of 8 and of 1."""
    assert size(traced("elementwise")) - size(traced("attention")) == LAYERS * 2 * 5 * 2 * (8 + 1)
    more = dots(traced("attention")) - dots(traced("elementwise"))
    assert more == 2, "scores and values, and no product with a weight"


@pytest.mark.parametrize(
    ("values", "numbers"),
    [
        ("attention", 2 * (8 + 1)),
        ("qkv", (2 + 2) * 8),
        ("residual", 16),
        ("inner", 2 * 24),
        ("inner+attention", 66),
        ("k+up", 8 + 24),
    ],
)
def test_save_keeps_the_values_that_it_names(values, numbers):
    """Per token of 2 x 5, besides the block's input; attention's sums of a softmax are one per head."""
    assert size(traced(f"save:{values}")) - size(traced("full")) == LAYERS * 2 * 5 * numbers


def test_save_of_all_values_is_elementwise():
    assert size(traced("save:qkv+attention+residual+inner")) == size(traced("elementwise"))
    assert size(traced("save:qkv+residual+inner")) == size(traced("attention"))


def test_save_moves_values_to_the_host():
    """Per token: attention's results and the block's input on the host, keys on the device."""
    program = traced("save:k+attention@host+input@host")
    away = [aval for aval in kept(program) if "host" in str(aval.memory_space).lower()]
    assert sum(math.prod(aval.shape) for aval in away) == LAYERS * 2 * 5 * (2 * 8 + 2 + 16)
    assert size(program) - size(traced("full")) == LAYERS * 2 * 5 * (2 * 8 + 2 + 8)
    assert dots(program) == dots(traced("save:k+attention"))


@pytest.mark.parametrize(
    ("kind", "value", "numbers"),
    [
        ({"qk_norm": "head"}, "q_proj", 16),
        ({"norms": "post"}, "o_proj", 16),
        ({"norms": "sandwich"}, "down", 16),
        ({"latent": 6}, "kv_latent", 6 + 8),
        ({"latent": 6}, "kv_up", 2 * (8 + 8)),
    ],
)
def test_save_keeps_values_that_some_blocks_have(kind, value, numbers):
    """Per token of 2 x 5; other blocks refuse them by name."""
    model = tiny.decoder(
        dtype="float32", heads=2, kv_heads=1, head_dim=8, embed_dim=16, mlp=24, vocab_size=10, layers=LAYERS,
        remat=f"save:{value}", **kind,
    )  # fmt: skip
    full = size(traced_of(dataclasses.replace(model, remat="full")))
    assert size(traced_of(model)) - full == LAYERS * 2 * 5 * numbers
    with pytest.raises(remat.RematError, match=f"no block has {value!r}; of this model: q, k, v, attention, residual"):
        dataclasses.replace(CONFIG, remat=f"save:{value}")


def test_policies_of_values_are_written_shortly():
    assert remat.save_policy(["k", "v", "q", "attention"]) == "save:qkv+attention"
    assert remat.save_policy(["up"], ["gate", "input"]) == "save:up+gate@host+input@host"
    assert remat.save_policy([], []) == "full"
    assert remat.saved_values("save:qkv+attention@host") == ("q", "k", "v", "attention")
    assert remat.moved_values("save:up+inner@host+input@host") == ("gate", "up", "input")


def test_square_root_keeps_the_inputs_of_runs():
    """Four layers: the inputs of two groups, and two within the current group; nested loops, twice."""
    config = dataclasses.replace(CONFIG, layers=4, remat="sqrt")
    batch = jax.tree.map(jnp.asarray, tiny.batch(0, 2, 5, CONFIG.vocab_size, packed=False))
    model = functional(config)
    loops = [
        e
        for e in equations(jax.jit(value_and_grad(model)).trace(model.abstract(), batch).jaxpr)
        if e.primitive.name == "scan" and e.params["length"] == 2
    ]
    streams = [
        v.aval.shape
        for e in loops
        for v in e.outvars
        if v.aval.shape[-3:] == (2, 5, 16) and jnp.issubdtype(v.aval.dtype, jnp.floating)
    ]
    assert sorted(s for s in streams if len(s) == 4) == [(2, 2, 5, 16)] * 2
    assert not any(len(s) > 4 for s in streams)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_offload_sends_a_share_of_the_tokens_to_the_host(share):
    """Input, attention's output and sums, residual stream before the MLP of all tokens; matmul outputs of some.

    The others' products are done again: queries, keys, values, gate, up and what attention's output is projected to.
    """
    program = traced(f"offload:{share}")
    away = [aval for aval in kept(program) if "host" in str(aval.memory_space).lower()]
    embed, heads, kv_heads, mlp = 16, 2 * 8, 1 * 8, 24
    of_all, of_some = 2 * embed + heads + 2, heads + 2 * kv_heads + 2 * mlp
    assert sum(math.prod(aval.shape) for aval in away) == LAYERS * 2 * (5 * of_all + round(5 * share) * of_some)
    here = [aval for aval in kept(program) if aval not in away and jnp.issubdtype(aval.dtype, jnp.floating)]
    assert not any(math.prod(aval.shape) >= LAYERS * 2 * 5 * 8 for aval in here)


def test_layers_can_have_policies_of_their_own():
    segments = ((("a",), 2), (("b", "c"), 3))
    assert remat.policies_by_segment("full", segments) == [[("full", 2)], [("full", 3)]]
    assert remat.policies_by_segment("none=4,full", segments) == [[("none", 2)], [("none", 1), ("full", 2)]]
    assert remat.policies_by_layer("none=1,attention=3,full=4", segments) == ["none", *["attention"] * 3, *["full"] * 4]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("some", "give one of none, elementwise, attention, full, sqrt, offload"),
        ("offload:2", "with the share of tokens"),
        ("full:0.5", "with the share of tokens"),
        ("save", "save with different values of qkv, inner, q, k, v, attention, residual, gate, up, q_proj"),
        ("save:gates", "save with different values of"),
        ("save:qkv+qkv", "save with different values of"),
        ("save:qkv+k@host", "save with different values of"),
        ("save:input", '"input@host" the input'),
        ("full=0,none", "give one of"),
        ("full,none=2", "only the last value may omit"),
        ("full=4", "covers 4 layers, but the model has 8"),
        ("full=9", "covers 9 layers, but the model has 8"),
        ("full=8,none", "covers 8 layers, but the model has 8"),
        ("none=3,full", "splits a group of 2 layers"),
        ("sqrt", "divides layers into equal runs of several"),
    ],
)
def test_what_does_not_fit_is_refused(text, said):
    with pytest.raises(ValueError, match=said):
        remat.policies_by_segment(text, ((("a",), 2), (("b", "c"), 3)))


@pytest.mark.parametrize("remat", ["none", "elementwise", "attention", "full", "save:attention"])
def test_gathered_weights_are_gathered_again(remat):
    """ZeRO-3: if gathered weights were saved between the passes, every device would hold the whole model."""
    for aval in kept(traced(remat, "fsdp=2")):
        split = any("fsdp" in str(part) for part in aval.sharding.spec)
        gain = math.prod(aval.shape) == LAYERS * CONFIG.embed_dim
        assert split or gain, f"{aval.str_short()} is whole on every device"
    assert dots(traced(remat, "fsdp=2")) == dots(traced(remat))


@pytest.mark.parametrize("norms", ["post", "sandwich"])
def test_a_norm_of_a_scattered_sum_keeps_the_sum_and_not_the_summands(norms):
    """All-gathers are repeated in the backward pass, reductions are not: a loop cannot carry partial sums."""
    mesh = sharding.MeshSpec.parse("fsdp=2,tensor=2").build(jax.devices()[:4])
    (block,) = CONFIG.pattern
    attention = dataclasses.replace(block.attention, kv_heads=2)
    pattern = (dataclasses.replace(block, attention=attention, norms=norms),)
    config = dataclasses.replace(CONFIG, remat="none", pattern=pattern)
    model = functional(config, ParallelConfig(sequence=True).rules())
    abstract = sharding.abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
    batch = jax.tree.map(jnp.asarray, tiny.batch(0, 2, 6, CONFIG.vocab_size, packed=False))
    with jax.set_mesh(mesh):
        batch = jax.device_put(batch, jax.NamedSharding(mesh, model.rules.spec(("batch", "seq"), mesh)))
        program = jax.jit(value_and_grad(model)).trace(abstract, batch)
        assert not any(aval.sharding.spec.unreduced for aval in kept(program.jaxpr))
        program.lower()
