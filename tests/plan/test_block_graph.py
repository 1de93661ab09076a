"""Graphs of traced programs: a block's recomputation by policy and at least; estimated bytes of small programs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxllm import cli
from jaxllm.data import DataConfig
from jaxllm.models.remat import moved_values, save_policy, saved_values
from jaxllm.plan.graphs.block_graph import BlockGraph, block_graphs, value_bytes
from jaxllm.plan.graphs.block_placement import place_block, placed_policies
from jaxllm.plan.graphs.jaxpr_graph import graph_of
from jaxllm.plan.graphs.peak_estimate import estimate
from jaxllm.plan.graphs.remat_report import compare_remat, remat_table
from jaxllm.plan.graphs.value_graph import GraphError
from jaxllm.train import RunConfig
from jaxllm.train.model_flops import recomputed_flops
from sharding import MeshSpec
from tests import tiny

ROWS, LENGTH, LAYERS = 4, 16, 3
WIDTHS = {"qkv": 3 * 16, "attention": 16 + 2, "residual": 16, "inner": 2 * 24}


def run() -> RunConfig:
    model = tiny.decoder(
        dtype="float32", heads=2, kv_heads=2, head_dim=8, embed_dim=16, mlp=24, vocab_size=32, layers=LAYERS
    )
    return RunConfig(model=model, data=DataConfig(batch_size=ROWS, seq_len=LENGTH), mesh="fsdp=2", steps=2)


@functools.cache
def block() -> BlockGraph:
    (found,) = block_graphs(run(), MeshSpec.parse("fsdp=2"))
    return found


@pytest.mark.parametrize(
    "values", [("attention",), ("qkv", "attention"), ("attention", "inner"), ("attention", "residual", "inner")]
)
def test_a_policy_in_the_graph_is_that_of_the_formulas(values: tuple[str, ...]):
    """Bytes and FLOPs of one device of two; attention is kept, of which the trace computes masked pairs as well."""
    policy, tokens = "save:" + "+".join(values), ROWS * LENGTH // 2
    own = block().kept_by(policy)
    assert own is not None
    assert own.bytes == 4 * tokens * sum(map(WIDTHS.__getitem__, values))
    model = run().model
    assert own.time == pytest.approx(tokens * recomputed_flops(policy, model, model.pattern, LENGTH), rel=1e-12)
    best, least = block().kept_by(block().best(own.bytes)), block().best_of_any(own.bytes)
    assert best is not None
    assert max(best.bytes, least.bytes) <= own.bytes
    assert least.time <= best.time <= own.time
    assert block().repeats == LAYERS


@pytest.mark.parametrize("room", [0, 500, 1700, 2100, 4000, 8000, 20000])
def test_the_best_values_of_the_graph_are_those_of_the_formulas(room: int):
    """Of all sets of named values, by widths and by counted matmuls; rows whose attention has no masked pairs."""
    numbers = {"q": 16, "k": 16, "v": 16, "attention": 18, "residual": 16, "gate": 24, "up": 24}
    tokens, model = ROWS * LENGTH // 2, run().model
    sets = [kept for n in range(8) for kept in itertools.combinations(numbers, n)]
    assert block().values().keys() == numbers.keys()
    assert value_bytes([block()]) == {name: 4 * tokens * n * LAYERS for name, n in (*numbers.items(), ("input", 16))}

    def again(policy: str) -> float:
        """FLOPs, attention's with masked pairs."""
        flops = recomputed_flops(policy, model, model.pattern, LENGTH)
        masked = 0.0 if "attention" in (saved_values(policy) or ()) else 4 * 16 * (LENGTH - (LENGTH + 1) / 2)
        return tokens * (flops + masked)

    least = min(again(save_policy(kept)) for kept in sets if 4 * tokens * sum(map(numbers.__getitem__, kept)) <= room)
    own = block().kept_by(block().best(room))
    assert own is not None
    assert own.bytes <= room
    assert own.time == pytest.approx(least, rel=1e-12)
    assert again(block().best(room)) == pytest.approx(least, rel=1e-12)


@pytest.mark.parametrize("room", [0, 3000, 6144, 11000, 18688])
def test_a_placement_of_a_block_moves_the_least(room: int):
    """Of all choices of what stays on the device, and no more than a greedy one; as many bytes in the traced step."""
    policy = "save:k+attention+residual+inner"
    sizes = {"input": 2048} | {name: block().bytes_of(name) for name in saved_values(policy) or ()}
    found = place_block(block(), policy, room, seconds=None)
    moved = moved_values(found.policy)
    assert {*moved, *(saved_values(found.policy) or ()), "input"} == sizes.keys()
    here = [sum(map(sizes.__getitem__, some)) for n in range(7) for some in itertools.combinations(sizes, n)]
    best = max(size for size in here if size <= room)
    assert found.optimal
    assert (found.device, found.moved) == (best, sum(sizes.values()) - best)
    assert found.moved == sum(map(sizes.__getitem__, moved))
    left = room
    for size in sizes.values():  # the first that fit stay
        left -= size * (size <= left)
    assert found.device >= room - left


def test_placements_are_offered_where_values_may_move():
    found = placed_policies([block()])
    assert len(found) == 3
    assert all(moved_values(policy) and len(saved_values(policy) or ()) == 7 for policy in found)
    with pytest.raises(GraphError, match="give full or save:VALUES"):
        place_block(block(), "elementwise", 10)


def test_the_least_of_a_block_is_listed_beside_its_policies():
    config = run()
    policies = "attention=1,offload=1,elementwise=1"
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, remat=policies))
    compared = compare_remat(config, [block()])
    assert [(one.policy, one.layers) for one in compared] == [("attention", 1), ("elementwise", 1)]
    assert compared[1].own.time == compared[1].best.time == 0
    assert compared[0].own.time > compared[0].best.time > 0, "results of attention are cheaper to keep than its inputs"
    assert "attention" in (saved_values(compared[0].instead) or ())
    assert compared[1].instead == "elementwise"
    assert compared[0].instead in remat_table(compared)
    assert block_graphs(config, MeshSpec.parse("stage=2")) == []
    assert compare_remat(config, []) == []
    assert remat_table([]) == ""


def test_a_graph_has_calls_inlined_and_names_on_values():
    def inner(x):
        return checkpoint_name(jnp.sin(x), "sine").reshape(-1)

    found = graph_of(jax.make_jaxpr(lambda x, w: jax.jit(inner)(x @ w).sum())(jnp.ones((3, 4)), jnp.ones((4, 5))))
    assert found.primitives == ("", "", "dot_general", "sin", "reduce_sum")
    assert [one.bytes for one in found.graph.operations] == [48, 80, 60, 60, 4]
    assert [one.time for one in found.graph.operations] == [0, 0, 2 * 3 * 4 * 5, 0, 0]
    assert found.names[3] == {"sine"}
    assert (found.results, found.arguments) == ((4,), 2)


def test_estimates_of_small_programs():
    x = jnp.ones((16, 16))  # 1,024 bytes
    two = estimate(jax.make_jaxpr(lambda x: (x @ x) @ x)(x))
    assert (two.arguments, two.temporaries, two.live, two.total) == (1024, 2048, 2048, 3072)
    assert estimate(jax.make_jaxpr(lambda x: (x @ x) @ x)(x), [True]).temporaries == 1024  # the result is in x's memory
    fused = jax.make_jaxpr(lambda x: jnp.sum(jnp.sin(x) * 2 + x))(x)
    assert estimate(fused).temporaries == 4
    over = jax.make_jaxpr(lambda x: jnp.tanh(x @ x) @ x)(x)
    assert estimate(over).temporaries == 2048, "tanh writes over its operand"
    loop = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, w: ((c @ w) @ w, c @ w), x, jnp.ones((8, 16, 16))))(x)
    # The matrices and the stacked results, the carry; in the body a slice, one matmul's operand and its result.
    assert estimate(loop).temporaries == 2 * 8192 + 1024 + 3 * 1024


def test_a_loop_reads_what_its_body_reads():
    def loop(carry, xs):
        x, unread, stacked = carry
        return (x @ xs, unread, stacked), (stacked, x)

    x = jnp.ones((16, 16))  # 1,024 bytes
    traced = jax.make_jaxpr(lambda *carry: jax.lax.scan(loop, carry, jnp.ones((8, 16, 16))))(x, x, x)
    found = graph_of(traced)
    (run,) = (i for i, one in enumerate(found.primitives) if one == "scan")
    moved, unread, stacked, copies, inputs = found.results
    assert (unread, stacked) == (1, 2), "what the body returns as it is"
    assert set(found.graph.operations[run].inputs) & {0, 1, 2} == {0}
    assert found.graph.operations[copies].inputs == (run, 2)
    assert found.graph.operations[inputs].inputs == (run,)
    assert found.carried == {moved: 0}
    # The matrices and two stacks, of one if nothing reads the other; the carry; in the body a slice and the product.
    assert estimate(traced).temporaries == 3 * 8192 + 1024 + 2 * 1024
    fewer = jax.make_jaxpr(lambda *carry: jax.lax.scan(loop, carry, jnp.ones((8, 16, 16)))[1][1])(x, x, x)
    assert estimate(fewer).temporaries == 2 * 8192 + 1024 + 2 * 1024


def test_carries_are_in_one_place():
    def write(stack, n):
        return jax.lax.dynamic_update_index_in_dim(stack, jnp.float32(n), n, 0), None

    def twice(n):
        stack = jnp.zeros(1024) + n
        for _ in range(2):
            stack, _ = jax.lax.scan(write, stack, jnp.arange(8))
        return stack

    assert 4096 <= estimate(jax.make_jaxpr(twice)(1.0)).temporaries < 1.1 * 4096
    kept = jax.make_jaxpr(lambda n: (twice(n), jax.lax.scan(write, jnp.zeros(1024) + n, jnp.arange(8))[0]))(1.0)
    assert 2 * 4096 <= estimate(kept).temporaries < 2.1 * 4096


def test_what_a_body_only_returns_is_read():
    """A slice or a constant that is the next carry, and an initial value that the body reads besides."""

    def bytes_of(loop: Any) -> int:
        return estimate(jax.make_jaxpr(lambda n: loop(jnp.ones(1024) * n))(1.0)).temporaries

    stack = jnp.zeros((8, 1))
    assert bytes_of(lambda k: jax.lax.scan(lambda c, s: (s, c), k, stack + k)[0]) >= 9 * 4096
    assert bytes_of(lambda k: jax.lax.scan(lambda c, _: (jnp.sin(c) * k, None), k, length=4)) >= 2 * 4096
    kept = bytes_of(lambda k: jax.lax.scan(lambda c, _: (jnp.sin(c), c), k, length=4))
    assert 5 * 4096 <= kept < 5.1 * 4096, "the stack, and one carry"


def test_compile_estimates_without_compiling(capsys, monkeypatch):
    monkeypatch.setattr("jaxllm.train.compile_step.compile_for", None)
    small = ["--model.layers", "2", "--model.embed-dim", "32", "--data.seq-len", "32"]
    argv = ["compile", "quickstart", "--on", "v5e:2x2", "--estimate", *small]
    assert cli.main(argv) == 0
    assert "estimated without a compiler" in capsys.readouterr().out
    assert cli.main([*argv, "--within", "3"]) == 2
    assert "--estimate compiles nothing" in capsys.readouterr().err
