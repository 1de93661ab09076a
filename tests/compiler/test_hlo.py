"""HLO parser: sizes, structure, loops."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.compiler import collectives, hlo
from tests import environment

DTYPES = {"f32": 4, "bf16": 2, "f16": 2, "f64": 8, "s32": 4, "u8": 1, "pred": 1, "f8e4m3fn": 1, "c64": 8, "s4": 1}


@given(st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 40), max_size=4)), max_size=4))
def test_bytes_of_a_shape_are_those_of_its_elements(arrays):
    layouts = ["", "{1,0:T(8,128)(2,1)S(1)}", "{0}"]
    texts = [
        f"{dtype}[{','.join(map(str, dims))}]{layouts[i % 3] if dims else ''}" for i, (dtype, dims) in enumerate(arrays)
    ]
    expected = sum(DTYPES[dtype] * int(np.prod(dims, dtype=np.int64)) for dtype, dims in arrays)
    assert hlo.shape_bytes("(" + ", ".join(texts) + ")") == expected


@pytest.mark.parametrize(
    ("shape", "size"),
    [("f32[]", 4), ("token[]", 0), ("s4[8,128]{1,0:T(8,128)E(4)}", 512), ("u2[5]{0:E(2)}", 2), ("s32[<=16]", 64)],
)
def test_bytes_of_odd_shapes(shape, size):
    assert hlo.shape_bytes(shape) == size


LOOP = """HloModule m, is_scheduled=true, num_partitions=2

%body (s: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {{
  %s = (s32[], f32[8], s32[]) parameter(0)
  %one = s32[] constant({step})
  %i = s32[] get-tuple-element(%s), index=0
  %next = s32[] {update}
  %x = f32[8] get-tuple-element(%s), index=1
  %sum = f32[8] all-reduce(%x), replica_groups={{{{0,1}}}}, to_apply=%add
  %n = s32[] get-tuple-element(%s), index=2
  ROOT %out = (s32[], f32[8], s32[]) tuple(%next, %sum, {passed})
}}

%condition (s: (s32[], f32[8], s32[])) -> pred[] {{
  %s.1 = (s32[], f32[8], s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %n.1 = s32[] get-tuple-element(%s.1), index=2
  ROOT %more = pred[] compare({order}), direction={direction}
}}

ENTRY %main (x: f32[8]) -> f32[8] {{
  %x.1 = f32[8] parameter(0)
  %start = s32[] constant({start})
  %copied = s32[] copy(%start)
  %end = s32[] constant({end})
  %state = (s32[], f32[8], s32[]) tuple(%copied, %x.1, %end)
  %loop = (s32[], f32[8], s32[]) while(%state), condition=%condition, body=%body{note}
  ROOT %result = f32[8] get-tuple-element(%loop), index=1
}}
"""


def loop(**changes: object) -> str:
    settings = {
        "start": 0,
        "end": 5,
        "step": 1,
        "update": "add(%i, %one)",
        "passed": "%n",
        "order": "%i.1, %n.1",
        "direction": "LT",
        "note": "",
    }
    return LOOP.format(**{**settings, **changes})


def turns(text: str) -> int | None:
    module = hlo.parse(text)
    return hlo.trip_count(module, module.entry.instructions["loop"], hlo.Frame(module.entry))


def run(start: int, end: int, step: int, direction: str) -> int | None:
    """Turns of the loop, by running it."""
    more = {"LT": int.__lt__, "LE": int.__le__, "GT": int.__gt__, "GE": int.__ge__, "NE": int.__ne__}[direction]
    count = 0
    while more(start, end):
        start, count = start + step, count + 1
        if count > 1000:
            return None
    return count


@given(
    start=st.integers(-20, 20),
    end=st.integers(-20, 20),
    step=st.integers(-4, 4).filter(bool),
    direction=st.sampled_from(["LT", "LE", "GT", "GE", "NE"]),
    swapped=st.booleans(),
    subtract=st.booleans(),
    first=st.booleans(),
)
def test_turns_of_a_loop_are_those_of_running_it(start, end, step, direction, swapped, subtract, first):
    flipped = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}
    order = {"order": "%n.1, %i.1", "direction": flipped[direction]} if swapped else {"direction": direction}
    update = "add(%one, %i)" if first else "add(%i, %one)"
    change = {"step": -step, "update": "subtract(%i, %one)"} if subtract else {"step": step, "update": update}
    assert turns(loop(start=start, end=end, **order, **change)) == run(start, end, step, direction)


FUSED = """%fused_more (i.2: s32[]) -> pred[] {
  %i.2 = s32[] parameter(0)
  %end.2 = s32[] constant(3)
  ROOT %more.2 = pred[] compare(%i.2, %end.2), direction=LT
}

%fused_next (i.3: s32[]) -> s32[] {
  %i.3 = s32[] parameter(0)
  %one.3 = s32[] constant(STEP)
  ROOT %next.3 = s32[] add(%i.3, %one.3)
}

"""


@pytest.mark.parametrize(("step", "count"), [(1, 3), (2, 2)])
def test_a_loop_whose_counter_is_in_fusions_is_read(step, count):
    """GPU compilers leave such a loop where they have peeled an iteration off, without their note."""
    text = loop(update="fusion(%i), kind=kLoop, calls=%fused_next")
    text = text.replace("compare(%i.1, %n.1), direction=LT", "fusion(%i.1), kind=kLoop, calls=%fused_more")
    assert turns(text.replace("%body (s", FUSED.replace("STEP", str(step)) + "%body (s", 1)) == count


def test_a_loop_multiplies_all_that_is_in_it():
    estimate = ', backend_config={{"window_config":{{"estimated_cycles":"{}"}}}}'
    text = loop(end=12).replace("to_apply=%add", "to_apply=%add" + estimate.format(100))
    text = text.replace("%x.1, %end)", "%x.1, %end)" + estimate.format(7))
    work = collectives.read(text)
    assert work.cycles == 12 * 100 + 7
    assert work.collectives == (collectives.Collective("all-reduce", 2, 32, 12),)


@pytest.mark.parametrize(
    "changes",
    [
        {"passed": "%next"},  # the bound changes
        {"update": "multiply(%i, %one)"},
        {"update": "add(%n, %one)"},
        {"direction": "EQ"},
    ],
)
def test_a_loop_that_cannot_be_read_counts_as_one_turn_and_says_so(changes):
    assert turns(loop(**changes)) is None
    work = collectives.read(loop(**changes))
    assert (work.unknown_loops, work.collectives[0].count) == (1, 1)


def test_the_compilers_own_note_comes_first():
    note = ', backend_config={"known_trip_count":{"n":"9"}}'
    assert turns(loop(note=note)) == 9
    assert collectives.read(loop(note=note)).collectives[0].count == 9


def test_an_instruction_over_several_lines_is_read_whole():
    """As the TPU compiler prints the metadata of a kernel that names axes of a mesh."""
    metadata = 'frontend_attributes={kernel_metadata={\n"mesh_axes":"[\\"context\\"]"\n}}, metadata={op_name="step"}'
    text = loop(update=f"add(%i, %one), {metadata}")
    assert turns(text) == 5
    assert collectives.read(text).collectives[0].count == 5
    body = hlo.parse(text).computations["body"]
    assert body.root.name == "out"
    assert list(body.instructions) == ["s", "one", "i", "next", "x", "sum", "n", "out"]
    assert body.instructions["next"].attributes == ", " + metadata.replace("\n", "")


def test_a_program_is_read_whole():
    compiled = jax.jit(lambda x: jax.lax.fori_loop(0, 6, lambda i, c: jnp.tanh(c @ c), x)).lower(jnp.ones((8, 8)))
    text = compiled.compile(environment.AS_EVER).as_text()
    module = hlo.parse(text)
    lines = [line for line in text.splitlines() if " = " in line and line.startswith("  ")]
    assert sum(len(computation.instructions) for computation in module.computations.values()) == len(lines)
    assert module.entry.name in text.split("ENTRY")[1].split("(")[0]
    loops = [i for i in module.entry.instructions.values() if i.opcode == "while"]
    assert [hlo.trip_count(module, one, hlo.Frame(module.entry)) for one in loops] == [6]


@pytest.mark.parametrize("text", ["", "HloModule m\n", "ENTRY %main () -> f32[] {\n  %a = f32[] oops\n}\n"])
def test_broken_text_is_refused(text):
    with pytest.raises(hlo.HloError):
        hlo.parse(text)


@pytest.mark.parametrize("direction", ["LT", "LE", "GT", "GE", "NE"])
def test_trips_in_every_direction(direction):
    """All of some starts, ends and steps, beside running the loop; None where it does not end."""
    for start, end, step in itertools.product((-3, 0, 4), (-3, 0, 4, 5), (-2, -1, 1, 3)):
        assert hlo._trips(start, end, step, direction) == run(start, end, step, direction), (start, end, step)
