"""Program walker against counts by hand, and on unrolled programs against XLA's own count."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.compiler import hbm_traffic, program_walker
from jaxllm.compiler.hlo import HloError
from jaxllm.compiler.program_walker import Done, Exchange, KernelCost, KernelOp, Loop, Program, Start
from jaxllm.compiler.replica_groups import Placement, groups
from jaxllm.compiler.timeline import Rates, ring_seconds, timeline
from tests import environment


def compiled(function, *shapes, dtype=jnp.float32):
    return (
        jax.jit(function).lower(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)).compile(environment.AS_EVER)
    )


def flops(function, *shapes) -> int:
    return program_walker.read(compiled(function, *shapes).as_text() or "").flops


def analysis(program) -> dict[str, float]:
    found = program.cost_analysis()
    assert found is not None
    return found


def turns(times, body):
    return lambda x, w: jax.lax.scan(lambda c, _: (body(c, w), None), x, None, length=times)[0]


def conv(x, k, **options):
    return jax.lax.conv_general_dilated(x, k, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


def remat(x, w):
    layer = jax.checkpoint(lambda c, w: jnp.tanh(c @ w))
    return jax.grad(lambda x: jnp.sum(turns(6, layer)(x, w)))(x)


MATMUL = 2 * 8 * 24 * 24
SQUARE = ((8, 24), (24, 24))

BY_HAND = {
    "a product": (lambda x, w: x @ w, ((8, 16), (16, 24)), 2 * 8 * 16 * 24),
    "batched": (lambda x, y: jnp.einsum("bsnh,btnh->bnst", x, y), ((2, 6, 3, 8), (2, 5, 3, 8)), 2 * 2 * 3 * 6 * 5 * 8),
    "a scan": (turns(7, lambda c, w: jnp.tanh(c @ w)), SQUARE, 7 * MATMUL),
    "a scan in a scan": (turns(5, turns(3, lambda c, w: jnp.tanh(c @ w))), SQUARE, 15 * MATMUL),
    "rematerialised": (remat, SQUARE, 6 * 3 * MATMUL),  # forward, again, and backward
    "a convolution": (
        lambda x, k: conv(x, k, window_strides=(1, 1), padding="VALID"),
        ((2, 9, 9, 4), (3, 3, 4, 8)),
        2 * (2 * 7 * 7 * 8) * (3 * 3 * 4),
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_flops_are_those_by_hand(name):
    function, shapes, count = BY_HAND[name]
    assert flops(function, *shapes) == count


def drawn_products(rng):
    """A function of two arrays that only multiplies, and their shapes."""
    b, m, n, k = (int(size) for size in rng.integers(2, 9, 4))  # a size of one is no product
    spec, *shapes = [
        ("bmk,bkn->bmn", (b, m, k), (b, k, n)),
        ("mk,kn->mn", (m, k), (k, n)),
        ("bkm,nkb->bnm", (b, k, m), (n, k, b)),
        ("mbk,mk->mb", (m, b, k), (m, k)),
    ][rng.integers(4)]
    return lambda x, y: jnp.einsum(spec, x, y), shapes


def drawn_convolution(rng):
    """The same of one that strides, pads, dilates and has groups of features."""
    options = {
        "window_strides": rng.integers(1, 4, 2).tolist(),
        "padding": rng.integers(0, 3, (2, 2)).tolist(),
        "lhs_dilation": rng.integers(1, 4, 2).tolist(),
        "rhs_dilation": rng.integers(1, 3, 2).tolist(),
        "feature_group_count": int(rng.integers(1, 3)),
    }
    places, kernel = rng.integers(6, 10, 2), rng.integers(1, 4, 2)
    inputs = 4 // options["feature_group_count"]
    return lambda x, k: conv(x, k, **options), [(2, *places.tolist(), 4), (*kernel.tolist(), inputs, 6)]


@pytest.mark.parametrize("draw", [drawn_products, drawn_convolution])
def test_flops_are_those_of_xla(draw, rng):
    """XLA's own count of the same text, which adds one for each element of an elementwise operation."""
    for _ in range(4):
        function, shapes = draw(rng)
        program = (
            jax.jit(function)
            .lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
            .compile(environment.AS_EVER)
        )
        found = program_walker.read(program.as_text() or "").flops
        assert found == analysis(program).get("flops", 0), shapes


def test_unrolled_equals_scanned():
    """XLA counts a loop's body once: unrolled, its count is the walker's of the loop."""

    def unrolled(x, w):
        for _ in range(7):
            x = jnp.tanh(x @ w)
        return x

    program = compiled(unrolled, *SQUARE)
    elementwise = 7 * 8 * 24  # tanh, which XLA counts apart, as transcendentals
    assert analysis(program)["flops"] in (7 * MATMUL, 7 * MATMUL + elementwise)
    assert program_walker.read(program.as_text() or "").flops == 7 * MATMUL == flops(*BY_HAND["a scan"][:1], *SQUARE)


@pytest.mark.parametrize("name", ["a product", "a scan", "a scan in a scan", "rematerialised"])
def test_bytes_are_those_of_the_traffic(name):
    function, shapes, _ = BY_HAND[name]
    text = compiled(function, *shapes).as_text() or ""
    assert program_walker.read(text).bytes == hbm_traffic.read(text).bytes > 0


HEAD = """HloModule made_up, is_scheduled=true, num_partitions=8

%body (s: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %s = (s32[], f32[8,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8,128]{1,0} get-tuple-element(%s), index=1
  %start = (f32[8,128]{1,0}, f32[64,128]{1,0}) all-gather-start(%x), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  %y = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %z = f32[8,128]{1,0} custom-call(%y), custom_call_target="tpu_custom_call"ESTIMATE
  %whole = f32[64,128]{1,0} all-gather-done(%start)
  %sum = f32[8,128]{1,0} all-reduce(%z), replica_groups=[4,2]<=[8], to_apply=%add
  ROOT %out = (s32[], f32[8,128]{1,0}) tuple(%i, %sum)
}

%condition (c: (s32[], f32[8,128])) -> pred[] {
  %c = (s32[], f32[8,128]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (a: f32[8,128], k: s32[]) -> f32[8,128] {
  %a = f32[8,128]{1,0} parameter(0)
  %k = s32[] parameter(1)
  %begin = (s32[], f32[8,128]{1,0}) tuple(%k, %a)
  %loop = (s32[], f32[8,128]{1,0}) while(%begin), condition=%condition, body=%body, KNOWN
  ROOT %last = f32[8,128]{1,0} get-tuple-element(%loop), index=1
}
"""
KNOWN = 'backend_config={"known_trip_count":{"n":"5"}}'
SAID = ', backend_config={"custom_call_config":{"cost_estimate":{"flops":70,"transcendentals":0,"bytes_accessed":90}}}'
TRITON = r""", backend_config={ir = "{}\0A", serialized_metadata = """
TRITON += r""""{\22flops\22: \2270\22, \22bytes_accessed\22: \2290\22}"}"""
PLACES = Placement((("data", 4), ("tensor", 2)), (0, 0, 0, 0, 1, 1, 1, 1))


def made_up(estimate: str = "", known: str = KNOWN) -> str:
    return HEAD.replace("ESTIMATE", estimate).replace("KNOWN", known)


def test_a_kernel_that_says_nothing_is_listed_by_name():
    program = program_walker.read(made_up())
    assert program.unknown == {"z": 5}
    assert program.flops == 5 * 2 * 8 * 8 * 128


@pytest.mark.parametrize("estimate", [SAID, TRITON])
def test_a_kernel_is_counted_as_it_says_or_as_it_is_told(estimate):
    said, told = program_walker.read(made_up(estimate)), program_walker.read(made_up(), costs={"z": KernelCost(70, 90)})
    assert said.unknown == told.unknown == {}
    assert said.flops == told.flops == 5 * (2 * 8 * 8 * 128 + 70)
    assert said.bytes == told.bytes == 5 * ((2 * 8 * 128 + 64) * 4 + 90)


def test_loops_of_unknown_length_are_counted_and_can_be_told():
    program = program_walker.read(made_up(SAID, "a=b"), turns=3)
    assert (program.unknown_loops, program.flops) == (1, 3 * (2 * 8 * 8 * 128 + 70))


def test_collectives_have_their_axes_and_their_overlap():
    program = program_walker.read(made_up(SAID), PLACES)
    (gather, turns), (reduce, _) = program.exchanges
    assert turns == 5
    assert (gather.kind, gather.axes, gather.islands, gather.asynchronous) == (
        "all-gather",
        ("data", "tensor"),
        2,
        True,
    )
    assert (reduce.kind, reduce.axes, reduce.islands, reduce.asynchronous) == ("all-reduce", ("tensor",), 1, False)
    assert (gather.where, reduce.where) == ("data+tensor+network", "tensor")
    (loop,) = program.steps
    assert isinstance(loop, Loop)
    kinds = [type(step).__name__ for step in loop.steps]
    assert kinds == ["Start", "KernelOp", "KernelOp", "Done", "Start", "Done"]


def test_the_timeline_by_hand():
    """A gather of 10 s hides behind 4 s + 3 s of kernels, 3 s show; a sum of 2 s shows; five turns."""
    program = program_walker.read(made_up(SAID), PLACES)
    product, kernel = (op for op, _ in program.ops)

    def send(exchange):
        return {"all-gather": 10.0, "all-reduce": 2.0}[exchange.kind]

    rates = Rates(flops=product.flops / 4, bandwidth=kernel.bytes / 3, send=send)
    assert [rates.seconds(op) for op in (product, kernel)] == [max(4, product.bytes / rates.bandwidth), 3]
    rates = Rates(flops=product.flops / 4, bandwidth=1e30, send=send, launch=3.0)
    found = timeline(program, rates)
    assert found.seconds == 5 * (10 + 2)
    assert found.compute == 5 * 7
    assert found.exposed == {"data+tensor+network": 5 * 3, "tensor": 5 * 2}
    assert found.hidden == {"data+tensor+network": 5 * 7, "tensor": 0}
    assert found.by_estimate == 0


def test_a_network_sends_one_thing_at_a_time():
    """Two gathers of 4 s on one axis, one of 5 s on another, all started at once, behind 2 s of work."""

    def gather(axis: str, size: int) -> Exchange:
        return Exchange("all-gather", 2, size, False, (axis,), 1, True, "")

    started = [Start(name, (gather(axis, size),)) for name, axis, size in (("a", "x", 4), ("b", "x", 4), ("c", "y", 5))]
    work = KernelOp("work", "fusion", "", 0, 0, 2)
    program = Program((*started, work, Done("a"), Done("b"), Done("c")), 4, 0)
    found = timeline(program, Rates(1.0, 1.0, lambda exchange: exchange.bytes, clock=1.0))
    assert (found.seconds, found.compute, found.by_estimate) == (8, 2, 2)
    assert found.exposed == {"x": 6}
    assert found.hidden == {"x": 2, "y": 5}


@pytest.mark.parametrize(
    ("kind", "summed", "seconds"),
    [
        ("all-gather", False, 3 / 4),
        ("all-reduce", False, 6 / 4),
        ("all-gather", True, 6 / 4),
        ("collective-permute", False, 1),
    ],
)
def test_what_a_ring_sends(kind, summed, seconds):
    exchange = Exchange(kind, 4, 100, summed, (), 1, False, "")
    assert ring_seconds(exchange, 100.0) == seconds
    assert ring_seconds(exchange, 100.0, 1.0) > seconds


@pytest.mark.parametrize("given", [((2, 3, 4), (0, 2)), None], ids=["one mesh", "drawn"])
def test_groups_in_all_notations(given, rng):
    """A mesh and a set of its axes: listed, by iota and by mesh they are the same groups."""
    shape = rng.integers(1, 5, 3).tolist()
    chosen = np.flatnonzero(rng.integers(0, 2, 3)).tolist() or [1]
    if given is not None:
        shape, chosen = map(list, given)
    count, rest = int(np.prod(shape)), [i for i in range(3) if i not in chosen]
    order = [*rest, *chosen]
    wanted = (
        np.arange(count).reshape(shape).transpose(order).reshape(-1, int(np.prod([shape[i] for i in chosen]))).tolist()
    )
    names = "abc"
    listed = "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in wanted) + "}"
    iota = f"[{len(wanted)},{len(wanted[0])}]<=[{','.join(map(str, shape))}]T({','.join(map(str, order))})"
    sizes = ",".join(f"'{name}'={size}" for name, size in zip(names, shape, strict=True))
    mesh = f"mesh[{sizes}] {{{','.join(repr(names[i]) for i in chosen)}}}"
    turned = ",".join(f"'{names[i]}'={shape[i]}" for i in order)
    moved = f"mesh[{turned}], device_ids=([{','.join(map(str, shape))}]T({','.join(map(str, order))})) "
    moved += "{" + ",".join(repr(names[i]) for i in chosen) + "}"
    for text in (listed, iota, mesh, moved):
        assert groups(f"replica_groups={text}, d={{0}}", count) == wanted, text
    places = Placement(tuple(zip(names, shape, strict=True)), tuple(device // shape[2] for device in range(count)))
    axes, islands = places.joins(wanted)
    assert axes == tuple(names[i] for i in chosen if shape[i] > 1)
    assert islands == int(np.prod([shape[i] for i in chosen if i < 2]))


def test_a_part_of_an_axis():
    assert groups("replica_groups=mesh['a'=8] {'a':(2)2}", 8) == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_what_is_no_program():
    with pytest.raises(HloError, match="not the text"):
        program_walker.read("hello")
    product = made_up().replace("dot(%x, %x), lhs_contracting_dims={1}", "convolution(%x, %x), window={}")
    with pytest.raises(HloError, match="a convolution without dim_labels"):
        program_walker.read(product)
