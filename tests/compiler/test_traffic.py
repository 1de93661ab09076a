"""HBM traffic by the program's text: whole operands, slices, updates in place, loops, a core's own memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxllm.compiler import hbm_traffic
from tests import environment

PROGRAM = """HloModule made_up, num_partitions=1

%fused (p0: f32[10,100], p1: s32[], p2: f32[100]) -> f32[100] {
  %p0 = f32[10,100]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = f32[100]{0} parameter(2)
  %zero = s32[] constant(0)
  %row = f32[1,100]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,100}
  %flat = f32[100]{0} bitcast(%row)
  ROOT %sum = f32[100]{0} add(%flat, %p2)
}

%update (q0: f32[10,100], q1: s32[], q2: f32[1,100]) -> f32[10,100] {
  %q0 = f32[10,100]{1,0} parameter(0)
  %q1 = s32[] parameter(1)
  %q2 = f32[1,100]{1,0} parameter(2)
  %none = s32[] constant(0)
  ROOT %put = f32[10,100]{1,0} dynamic-update-slice(%q0, %q2, %q1, %none)
}

%body (s: (s32[], f32[10,100], f32[100])) -> (s32[], f32[10,100], f32[100]) {
  %s = (s32[], f32[10,100]{1,0}, f32[100]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %table = f32[10,100]{1,0} get-tuple-element(%s), index=1
  %x = f32[100]{0} get-tuple-element(%s), index=2
  %y = f32[100]{0} fusion(%table, %i, %x), kind=kLoop, calls=%fused
  ROOT %out = (s32[], f32[10,100]{1,0}, f32[100]{0}) tuple(%i, %table, %y)
}

%condition (c: (s32[], f32[10,100], f32[100])) -> pred[] {
  %c = (s32[], f32[10,100]{1,0}, f32[100]{0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (a: f32[10,100], b: f32[1,100], k: s32[]) -> f32[10,100] {
  %a = f32[10,100]{1,0} parameter(0)
  %b = f32[1,100]{1,0} parameter(1)
  %k = s32[] parameter(2)
  %near = f32[1,100]{1,0:T(8,128)S(1)} add(%b, %b)
  %written = f32[10,100]{1,0} fusion(%a, %k, %near), kind=kLoop, calls=%update
  %vector = f32[100]{0} bitcast(%b)
  %start = (s32[], f32[10,100]{1,0}, f32[100]{0}) tuple(%k, %written, %vector)
  %loop = (s32[], f32[10,100]{1,0}, f32[100]{0}) while(%start), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"7"}}
  ROOT %last = f32[10,100]{1,0} get-tuple-element(%loop), index=1
}
"""

NESTED = """HloModule made_up, num_partitions=1

%relaid (q: f32[10,100]) -> f32[10,100] {
  %q = f32[10,100]{1,0:T(8,128)} parameter(0)
  ROOT %as_it_is = f32[10,100]{1,0} copy(%q)
}

%fused (p0: f32[10,100], p1: s32[]) -> f32[100] {
  %p0 = f32[10,100]{1,0:T(8,128)} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %whole = f32[10,100]{1,0} fusion(%p0), kind=kLoop, calls=%relaid
  %row = f32[1,100]{1,0} dynamic-slice(%whole, %p1, %zero), dynamic_slice_sizes={1,100}
  ROOT %flat = f32[100]{0} bitcast(%row)
}

ENTRY %main (a: f32[10,100], k: s32[]) -> f32[100] {
  %a = f32[10,100]{1,0:T(8,128)} parameter(0)
  %k = s32[] parameter(1)
  ROOT %row = f32[100]{0} fusion(%a, %k), kind=kLoop, calls=%fused
}
"""
"""A table that a fusion within a fusion lays out anew; of the result one row is used."""

BODY = PROGRAM[PROGRAM.index("%body") : PROGRAM.index("%condition")]


def test_a_made_up_program():
    """800 of b twice; the update 400 and its index; seven turns of a row, an index, a vector read and one written."""
    found = hbm_traffic.read(PROGRAM)
    assert found.bytes == 800 + (400 + 4) + 7 * (400 + 4 + 400 + 400)
    assert (found.data_loops, found.kernels) == (0, 0)


def test_loops_that_depend_on_data_are_counted_by_number():
    unknown = PROGRAM.replace(', backend_config={"known_trip_count":{"n":"7"}}', "")
    assert unknown != PROGRAM
    assert hbm_traffic.read(unknown).bytes == 800 + 404 + 1204, "one turn of the outermost"
    assert hbm_traffic.read(unknown, turns=5).bytes == 800 + 404 + 5 * 1204


def test_a_loop_in_such_a_loop_is_left_out():
    unknown = PROGRAM.replace(', backend_config={"known_trip_count":{"n":"7"}}', "")
    nested = unknown.replace(
        "  %y = f32[100]{0} fusion(%table, %i, %x), kind=kLoop, calls=%fused\n",
        "  %inner = (s32[], f32[10,100]{1,0}, f32[100]{0}) while(%s), condition=%condition, body=%deep\n"
        "  %y = f32[100]{0} get-tuple-element(%inner), index=2\n",
    ).replace("%condition (c:", BODY.replace("%body", "%deep") + "\n%condition (c:")
    found = hbm_traffic.read(nested, turns=3)
    assert (found.bytes, found.data_loops) == (800 + 404, 3)


def test_a_piece_fetched_ahead_is_read_once():
    fetched = PROGRAM.replace(
        "  %written =",
        "  %ahead = ((f32[10,100]{1,0}), f32[3,100]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%a), slice={[0:3], [0:100]}\n"
        "  %there = f32[3,100]{1,0:S(1)} slice-done(%ahead)\n  %written =",
    )
    assert hbm_traffic.read(fetched).bytes - hbm_traffic.read(PROGRAM).bytes == 3 * 400


def test_a_slice_of_what_a_fusion_hands_on_is_a_slice():
    """A row is read and written, and the index; a use of the whole result reads the whole table."""
    assert hbm_traffic.read(NESTED).bytes == 2 * 400 + 4
    used = NESTED.replace("dynamic-slice(%whole, %p1, %zero), dynamic_slice_sizes={1,100}", "custom-call(%whole)")
    assert hbm_traffic.read(used).bytes == 4000 + 400


def test_a_compiled_product_reads_its_matrix_once():
    shapes = jax.ShapeDtypeStruct((1, 512), jnp.float32), jax.ShapeDtypeStruct((512, 256), jnp.float32)
    text = jax.jit(lambda x, w: x @ w).lower(*shapes).compile(environment.AS_EVER).as_text()
    assert 1 <= hbm_traffic.read(text).bytes / (4 * (512 + 512 * 256 + 256)) < 1.05
