"""Live ranges against the compiler's own allocation, and by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxllm.compiler import live_ranges
from tests import environment

SQUARE = (256, 256)


def turns(times, body):
    return lambda x, w: jax.lax.scan(lambda c, _: (body(c, w), None), x, None, length=times)[0]


def layer(c, w):
    return jnp.tanh(c @ w)


def mlp(a, b, c, x):
    for w in (a, b, c):
        x = layer(x, w)
    return jnp.sum(x)


def stack(body):
    return lambda w, x: jnp.sum(jax.lax.scan(lambda c, w: (body(c, w), None), x, w)[0] ** 2)


def attention(q, k, v):
    return jnp.einsum("nst,nth->nsh", jax.nn.softmax(jnp.einsum("nsh,nth->nst", q, k)), v)


PROGRAMS = {
    "a chain, which may work where its result goes": (lambda x, w: layer(layer(layer(x, w), w), w) @ w, SQUARE, SQUARE),
    "four products at once": (lambda x, w: (x @ w) + (x @ w.T) + (w @ x) + (x.T @ w), SQUARE, SQUARE),
    "a scan": (turns(7, layer), (256, 512), (512, 512)),
    "a scan in a scan": (turns(3, turns(4, layer)), (256, 512), (512, 512)),
    "gradients": (jax.grad(mlp, argnums=(0, 1, 2)), (512, 512), (512, 512), (512, 512), (1024, 512)),
    "gradients of a scan": (jax.grad(stack(layer)), (6, 256, 256), (1024, 256)),
    "rematerialised": (jax.grad(stack(jax.checkpoint(lambda c, w: layer(layer(c, w), w)))), (6, 256, 256), (1024, 256)),
    "attention": (attention, (4, 256, 64), (4, 256, 64), (4, 256, 64)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_peak_is_the_compilers(name):
    """Within 5% and a kilobyte: the compiler rounds each array up, and finds more kernels that may work in place."""
    function, *shapes = PROGRAMS[name]
    program = (
        jax.jit(function)
        .lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
        .compile(environment.AS_EVER)
    )
    memory = live_ranges.read(program.as_text() or "")
    analysis = program.memory_analysis()
    assert analysis is not None
    allocated = analysis.temp_size_in_bytes
    assert abs(memory.temp_bytes - allocated) <= 0.05 * allocated + 1024, (memory.temp_bytes, allocated)
    assert sum(memory.at_peak().values()) == memory.peak_bytes == memory.total.max()
    assert all(kind in live_ranges.KINDS for kind in memory.live)


def test_what_the_forward_pass_keeps_is_named():
    function, *shapes = PROGRAMS["gradients of a scan"]
    text = (
        jax.jit(function)
        .lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
        .compile(environment.AS_EVER)
        .as_text()
    )
    kept = live_ranges.read(text or "").at_peak()["saved for the backward pass"]
    assert kept >= 6 * 1024 * 256 * 4, "each layer's input"


BY_HAND = """HloModule made_up, is_scheduled=true, input_output_alias={ {1}: (0, {}, may-alias) }, num_partitions=1

%body (s: (f32[256], f32[1024])) -> (f32[256], f32[1024]) {
  %s = (f32[256]{0}, f32[1024]{0}) parameter(0)
  %x = f32[256]{0} get-tuple-element(%s), index=0
  %big = f32[1024]{0} get-tuple-element(%s), index=1
  %wide = f32[512]{0} concatenate(%x, %x), dimensions={0}
  %next = f32[256]{0} slice(%wide), slice={[0:256]}
  ROOT %out = (f32[256]{0}, f32[1024]{0}) tuple(%next, %big)
}

%condition (c: (f32[256], f32[1024])) -> pred[] {
  %c = (f32[256]{0}, f32[1024]{0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (a: f32[256]) -> (f32[256], f32[256]) {
  %a = f32[256]{0} parameter(0)
  %near = f32[9999]{0:S(1)} pad(%a, %a)
  %made = f32[1024]{0} concatenate(%a, %a, %a, %a), dimensions={0}
  %copied = f32[256]{0} copy(%a)
  %begin = (f32[256]{0}, f32[1024]{0}) tuple(%copied, %made)
  %loop = (f32[256]{0}, f32[1024]{0}) while(%begin), condition=%condition, body=%body
  %x.1 = f32[256]{0} get-tuple-element(%loop), index=0
  %small = f32[256]{0} reverse(%x.1), dimensions={0}
  %donated = f32[256]{0} reverse(%small), dimensions={0}
  ROOT %both = (f32[256]{0}, f32[256]{0}) tuple(%small, %donated)
}
"""


def test_by_hand():
    """At the fullest: the loop's state of 1 and 4 KiB and, inside a turn, 2 KiB; its next state is in place."""
    memory = live_ranges.read(BY_HAND)
    assert memory.peak_bytes == (1 + 4 + 2) * 1024
    assert memory.steps[memory.peak] in ("wide", "next")
    at = dict(zip(memory.steps, memory.total.tolist(), strict=True))
    assert [at[name] for name in ("near", "made", "copied", "small", "donated")] == [0, 4096, 5120, 2048, 1024]
    assert [buffer.name for buffer in memory.largest(2)] == ["made", "wide"]
    assert [(memory.steps[a], name) for a, _, name in memory.loops] == [("loop", "loop")]


def test_the_hosts_memory_is_counted_apart():
    """4 KiB of an argument there throughout; 1 KiB that is copied out and back, beside 1 KiB of the device's."""
    text = """HloModule step, is_scheduled=true

ENTRY %main (a: f32[256], there: f32[1024]) -> f32[256] {
  %a = f32[256]{0} parameter(0)
  %there = f32[1024]{0:S(5)} parameter(1)
  %made = f32[256]{0} reverse(%a)
  %out = f32[256]{0:S(5)} copy(%made)
  %other = f32[256]{0} pad(%a, %a)
  %back = f32[256]{0} copy(%out)
  ROOT %end = f32[256]{0} custom-call(%back, %other), custom_call_target="z"
}
"""
    memory = live_ranges.read(text)
    at = {kind: dict(zip(memory.steps, live.tolist(), strict=True)) for kind, live in memory.host.items()}
    assert set(at) == {"arguments", "other"}
    assert set(at["arguments"].values()) == {4096}
    assert [at["other"][name] for name in ("made", "out", "other", "back", "end")] == [0, 1024, 1024, 1024, 0]
    assert [memory.total.tolist()[memory.steps.index(name)] for name in ("out", "other", "back")] == [1024, 1024, 2048]
    assert not any(buffer.host for buffer in memory.buffers)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[8,100]{1,0:T(8,128)}", 8 * 128 * 4),
        ("bf16[3,5,200]{2,1,0:T(8,128)(2,1)}", 3 * 8 * 256 * 2),
        ("bf16[3,5,200]{1,2,0:T(8,128)(2,1)}", 3 * 200 * 128 * 2),
        ("s32[100]{0:T(128)}", 128 * 4),
        ("s32[]{:T(128)}", 128 * 4),
        ("f32[3,128]{1,0:T(1,128)}", 3 * 128 * 4),
        ("f32[3,100]{1,0}", 1200),
        ("(f32[8,100]{1,0:T(8,128)}, pred[7]{0})", 4096 + 7),
    ],
)
def test_padding(shape, size):
    assert live_ranges.padded_bytes(shape) == size
