"""Walkers of a program's text on programs written by hand: branches, copies to the host, loops of unknown length."""

from __future__ import annotations

import pytest

from jaxllm.compiler import collectives, hbm_traffic, host_transfers, program_walker
from jaxllm.compiler.program_walker import Fetch

SMALL = """%small (a: (f32[8,128], f32[128,128])) -> f32[8,128] {
  %sa = (f32[8,128]{1,0}, f32[128,128]{1,0}) parameter(0)
  %sx = f32[8,128]{1,0} get-tuple-element(%sa), index=0
  ROOT %sz = f32[8,128]{1,0} negate(%sx)
}
"""
LARGE = """%large (b: (f32[8,128], f32[128,128])) -> f32[8,128] {
  %la = (f32[8,128]{1,0}, f32[128,128]{1,0}) parameter(0)
  %lx = f32[8,128]{1,0} get-tuple-element(%la), index=0
  %lw = f32[128,128]{1,0} get-tuple-element(%la), index=1
  %kernel = f32[8,128]{1,0} custom-call(%lx), custom_call_target="k", output_to_operand_aliasing={{}: (0, {})}
  ROOT %lz = f32[8,128]{1,0} dot(%kernel, %lw), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
SUMMED = """%summed (c: (f32[8,128], f32[128,128])) -> f32[8,128] {
  %ca = (f32[8,128]{1,0}, f32[128,128]{1,0}) parameter(0)
  %cx = f32[8,128]{1,0} get-tuple-element(%ca), index=0
  ROOT %cz = f32[8,128]{1,0} all-reduce(%cx), replica_groups=[1,4]<=[4], to_apply=%add
}
"""
LINE, MATRIX = 8 * 128 * 4, 128 * 128 * 4


def with_branches(*branches: str) -> str:
    names = ", ".join(branch.split(" ")[0] for branch in branches)
    given = ", ".join(["%both"] * len(branches))
    return f"""HloModule made_up, is_scheduled=true, num_partitions=4

{"".join(branches)}
ENTRY %main (which: s32[], x: f32[8,128], w: f32[128,128]) -> f32[8,128] {{
  %which = s32[] parameter(0)
  %x = f32[8,128]{{1,0}} parameter(1)
  %w = f32[128,128]{{1,0}} parameter(2)
  %both = (f32[8,128]{{1,0}}, f32[128,128]{{1,0}}) tuple(%x, %w)
  ROOT %out = f32[8,128]{{1,0}} conditional(%which, {given}), branch_computations={{{names}}}
}}
"""


@pytest.mark.parametrize("branches", [(SMALL, LARGE), (LARGE, SMALL), (SMALL, LARGE, SMALL.replace("small", "other"))])
def test_the_dearest_branch_counts(branches):
    """Of a negation and a product, the product, wherever it is; and once."""
    program = program_walker.read(with_branches(*branches))
    assert program.flops == 2 * 8 * 128 * 128
    assert program.bytes == LINE + MATRIX + LINE
    assert program.unknown == {"kernel": 1}
    traffic = hbm_traffic.read(with_branches(*branches))
    assert (traffic.bytes, traffic.kernels) == (LINE + MATRIX + LINE, 1)


@pytest.mark.parametrize("branches", [(SUMMED, LARGE), (LARGE, SUMMED)])
def test_a_branch_that_communicates_is_the_dearest(branches):
    program = program_walker.read(with_branches(*branches))
    assert [(one.kind, one.group_size, one.bytes, count) for one, count in program.exchanges] == [
        ("all-reduce", 4, LINE, 1)
    ]
    assert program.flops == 0
    assert collectives.read(with_branches(*branches)).collectives == program.collectives


def copies(known: str) -> str:
    """A loop that copies an array to the host, one of twice its size back, and the first to a core's own memory."""
    return f"""HloModule made_up, is_scheduled=true, num_partitions=1

%body (s: (f32[8,128], f32[8,128])) -> (f32[8,128], f32[8,128]) {{
  %s = (f32[8,128]{{1,0}}, f32[8,128]{{1,0:S(5)}}) parameter(0)
  %x = f32[8,128]{{1,0}} get-tuple-element(%s), index=0
  %h = f32[16,128]{{1,0:S(5)}} get-tuple-element(%s), index=1
  %away = (f32[8,128]{{1,0:S(5)}}, f32[8,128]{{1,0}}, u32[]) copy-start(%x)
  %back = (f32[16,128]{{1,0}}, f32[16,128]{{1,0:S(5)}}, u32[]) copy-start(%h)
  %near = (f32[8,128]{{1,0:S(1)}}, f32[8,128]{{1,0}}, u32[]) copy-start(%x)
  %gone = f32[8,128]{{1,0:S(5)}} copy-done(%away)
  %come = f32[16,128]{{1,0}} copy-done(%back)
  %held = f32[8,128]{{1,0:S(1)}} copy-done(%near)
  ROOT %next = (f32[8,128]{{1,0}}, f32[8,128]{{1,0:S(5)}}) tuple(%come, %gone)
}}

%condition (c: (f32[8,128], f32[8,128])) -> pred[] {{
  %c = (f32[8,128]{{1,0}}, f32[8,128]{{1,0:S(5)}}) parameter(0)
  ROOT %true = pred[] constant(true)
}}

ENTRY %main (a: f32[8,128], b: f32[8,128]) -> f32[8,128] {{
  %a = f32[8,128]{{1,0}} parameter(0)
  %b = f32[8,128]{{1,0:S(5)}} parameter(1)
  %begin = (f32[8,128]{{1,0}}, f32[8,128]{{1,0:S(5)}}) tuple(%a, %b)
  %loop = (f32[8,128]{{1,0}}, f32[8,128]{{1,0:S(5)}}) while(%begin), condition=%condition, body=%body{known}
  ROOT %last = f32[8,128]{{1,0}} get-tuple-element(%loop), index=0
}}
"""


FIVE = ', backend_config={"known_trip_count":{"n":"5"}}'


def test_bytes_to_the_host_are_no_bytes_of_device_memory():
    """Each array crosses to the host once; the copy to a core's memory reads device memory once."""
    program = program_walker.read(copies(FIVE))
    assert program.fetches == [(Fetch(LINE, True), 5), (Fetch(2 * LINE, True), 5), (Fetch(LINE, False), 5)]
    assert program.bytes == 5 * LINE
    found = host_transfers.transfers(copies(FIVE))
    assert {(one.to, one.bytes, one.count, one.total_bytes) for one in found} == {
        ("host", LINE, 5, 5 * LINE),
        ("device", 2 * LINE, 5, 10 * LINE),
    }


def test_loops_of_unknown_length():
    """They count once, or as often as one says, and are listed; those within such loops too."""
    text = copies("")
    program, told = program_walker.read(text), program_walker.read(text, turns=3)
    assert (program.unknown_loops, program.bytes) == (1, LINE)
    assert (told.unknown_loops, told.bytes) == (1, 3 * LINE)
    assert {(one.to, one.count) for one in host_transfers.transfers(text)} == {("host", 1), ("device", 1)}
    known = program_walker.read(copies(FIVE), turns=3)
    assert (known.unknown_loops, known.bytes) == (0, 5 * LINE)
    # All copies are traffic of device memory here, which a copy to the host only reads.
    once, thrice = hbm_traffic.read(text), hbm_traffic.read(text, turns=3)
    assert (once.data_loops, thrice.data_loops) == (0, 0)
    assert thrice.bytes == 3 * once.bytes > 0


def test_a_loop_of_unknown_length_within_another():
    body = copies("")[copies("").index("%body") : copies("").index("%condition")]
    deep = body.replace("%body", "%deep").replace("ROOT %next", "%next")
    inner = "  %inner = (f32[8,128]{1,0}, f32[8,128]{1,0:S(5)}) while(%next), condition=%condition, body=%body"
    last = "\n  ROOT %both = (f32[8,128]{1,0}, f32[8,128]{1,0:S(5)}) tuple(%come, %gone)\n}\n\n"
    outer = deep.rstrip()[:-1] + inner + last
    text = copies("").replace("ENTRY", outer + "ENTRY").replace("body=%body\n  ROOT %last", "body=%deep\n  ROOT %last")
    told = program_walker.read(text, turns=3)
    assert (told.unknown_loops, told.bytes) == (2, 3 * LINE + 9 * LINE)
    assert {(one.to, one.count) for one in host_transfers.transfers(text)} == {("host", 2), ("device", 2)}
    traffic, once = hbm_traffic.read(text, turns=3), hbm_traffic.read(copies(""))
    assert (traffic.data_loops, traffic.bytes) == (3, 3 * once.bytes), "left out where the number is not for it"
    assert collectives.read(text).unknown_loops == 2
