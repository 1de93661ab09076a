"""Collectives of compiled programs against counts by hand, on every compiler."""

from __future__ import annotations

import pytest

from jaxllm.compiler import collectives
from jaxllm.compiler.aot import CompileReport
from jaxllm.compiler.collectives import Collective
from jaxllm.compiler.hlo import HloError
from jaxllm.compiler.replica_groups import group_size
from sharding.isolate import run_isolated
from tests.compiler.programs import COLUMNS, ROWS

# Bytes of the array on one device: split over data=2, or over data=2 and tensor=4.
HALF, EIGHTH, WHOLE = ROWS * COLUMNS * 4 // 2, ROWS * COLUMNS * 4 // 8, ROWS * COLUMNS * 4
EXPECTED = {
    "nothing": [],
    "psum": [Collective("all-reduce", 4, HALF, 1)],
    "psum of all": [Collective("all-reduce", 8, WHOLE, 1)],
    "all_gather": [Collective("all-gather", 4, HALF, 1)],
    "psum_scatter": [Collective("reduce-scatter", 4, HALF, 1)],
    "all_to_all": [Collective("all-to-all", 4, EIGHTH, 1)],
    "ppermute": [Collective("collective-permute", 4, EIGHTH, 1)],
    "scan": [Collective("all-reduce", 4, HALF, 7)],
    "scan of two": [Collective("all-gather", 4, HALF, 6), Collective("reduce-scatter", 4, HALF, 6)],
    "ring in a scan": [Collective("collective-permute", 4, EIGHTH, 5)],
    "scan in a scan": [Collective("all-reduce", 4, HALF, 15)],
    "kernel in a scan": [Collective("all-reduce", 4, HALF, 7)],
    "countdown": [Collective("all-reduce", 4, HALF, 5)],
    "until small": [Collective("all-reduce", 4, HALF, 1)],
    "branches": [Collective("all-reduce", 4, HALF, 2)],
}


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("topology", ["v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1", "h100:1x8", "cpu:8"])
def test_counts_and_bytes_are_those_of_the_program(topology):
    reports = run_isolated("tests.compiler.programs:report_all", topology)
    found = {name: CompileReport.from_json(report) for name, report in reports.items()}
    assert {name: list(report.collectives) for name, report in found.items()} == EXPECTED
    assert {name: report.unknown_loops for name, report in found.items() if report.unknown_loops} == {"until small": 1}
    if topology[0] in "vt":
        assert found["scan in a scan"].cycles > found["scan"].cycles > found["nothing"].cycles > 0  # 15, 7 and 1 sines
    else:
        assert {report.cycles for report in found.values()} == {None}


@pytest.mark.drawn(0.3)
def test_gradients_of_split_weights_are_gathered_twice_and_scattered_once():
    """ZeRO-3 with full rematerialisation; the TPU's fused all-reduce-scatter counts as reduce-scatter."""
    layers, width = 6, 1024
    report = CompileReport.from_json(
        run_isolated("tests.compiler.programs:fsdp_step", "v6e:2x4", {"layers": layers, "width": width})
    )
    found = {row.kind: row for row in report.collectives}
    assert set(found) == {"all-gather", "reduce-scatter"}
    assert (found["all-gather"].group_size, found["all-gather"].count) == (8, 2 * layers)
    # TPU products take bfloat16: the compiler converts before it gathers.
    assert found["all-gather"].bytes == width * width * 2
    assert found["reduce-scatter"] == Collective("reduce-scatter", 8, width * width * 4, layers)
    # Weights and activations; the new weights lie where the old ones did.
    weights = layers * width * width * 4 // 8
    assert report.argument_bytes == weights + 64 * width * 4
    assert report.alias_bytes == report.output_bytes == weights


@pytest.mark.drawn(0.3)
def test_an_asynchronous_all_gather_counts_once():
    found = run_isolated("tests.compiler.programs:asynchronous", "v5e:4x4")
    assert found["starts"] > 0, "the compiler did not split any collective: this test tests nothing"
    gathers = [row for row in CompileReport.from_json(found["report"]).collectives if row.kind == "all-gather"]
    weights = 2048 * 8192 // 4 * 2  # gathered over data: each device holds its quarter of the columns
    assert gathers == [Collective("all-gather", 4, weights, 12)]


@pytest.mark.parametrize(
    ("attributes", "size"),
    [
        ("channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}", 4),
        ("replica_groups={{0,1,2},{3}}", 3),
        ("channel_id=1, replica_groups={}, to_apply=%add", 16),
        ("replica_groups=[2,8]<=[16], dimensions={1}", 8),
        ("replica_groups=[8,2]<=[2,8]T(1,0), use_global_device_ids=true", 2),
        ("replica_groups=mesh['a'=2,'b'=8] {'b'}, dimensions={0}", 8),
        ("replica_groups=mesh['a'=2,'b'=8] {'a','b'}, dimensions={0}", 16),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=4], device_ids=([4,4]T(1,0)) {'axis_0'}, d={0}", 4),
        ("replica_groups=mesh['a'=16] {'a':(2)4}, dimensions={0}", 4),
        ("source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,4}}", 4),
        ("source_target_pairs={{0,1},{2,3}}, metadata={}", 2),
    ],
)
def test_group_sizes_in_every_notation(attributes, size):
    assert group_size(attributes, num_devices=16) == size


def test_unknown_notation_of_groups_is_an_error():
    with pytest.raises(HloError, match="cannot read the groups"):
        group_size("replica_groups=<new in 2027>", 8)


def program(body: str, *others: str) -> str:
    """Text of a program for 8 devices."""
    return "\n".join(
        [
            "HloModule m, is_scheduled=true, num_partitions=8",
            "",
            *others,
            "ENTRY %main (p: f32[8,128]) -> f32[8,128] {",
            "  %p = f32[8,128]{1,0} parameter(0)",
            *(f"  {line}" for line in body.strip().splitlines()),
            "}",
        ]
    )


SCATTER = """%all-reduce-scatter (input: f32[8,128]) -> f32[1,128] {
  %input = f32[8,128]{1,0:T(8,128)S(1)} parameter(0)
  %all-reduce.1 = f32[8,128]{1,0} all-reduce(%input), replica_groups=[1,8]<=[8], to_apply=%add
  %id = u32[] partition-id()
  ROOT %slice = f32[1,128]{1,0} dynamic-slice(%all-reduce.1, %id, %id), dynamic_slice_sizes={1,128}
}
"""
STEP = """%step (a: f32[1,128]) -> f32[8,128] {
  %a = f32[1,128]{1,0} parameter(0)
  ROOT %all-gather.1 = f32[8,128]{1,0} all-gather(%a), channel_id=3, replica_groups=[1,8]<=[8], dimensions={0}, \
frontend_attributes={chain_id="4"}
}
"""


def test_a_fused_all_reduce_and_slice_is_a_reduce_scatter():
    text = program("ROOT %f = f32[1,128]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter", SCATTER)
    assert collectives.read(text).collectives == (Collective("reduce-scatter", 8, 8 * 128 * 4, 1),)


def test_an_all_reduce_that_is_also_used_whole_stays_one():
    kept = (
        SCATTER.replace("ROOT %slice", "%slice").removesuffix("}\n")
        + "  ROOT %n = f32[8,128] negate(%all-reduce.1)\n}\n"
    )
    text = program("ROOT %f = f32[8,128]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter", kept)
    assert collectives.read(text).collectives == (Collective("all-reduce", 8, 8 * 128 * 4, 1),)


def test_the_parts_of_a_split_collective_are_one():
    body = """%s = f32[1,128]{1,0} slice(%p), slice={[0:1], [0:128]}
%start = f32[8,128] fusion(%s), kind=kCustom, calls=%first
%middle = f32[8,128] fusion(%s), kind=kOutput, calls=%step
ROOT %done = f32[8,128] fusion(%s), kind=kCustom, calls=%step"""
    first = STEP.replace("%step", "%first").replace(
        "\n}", '\n  %begun = f32[8,128] custom-call(%s), custom_call_target="AsyncCollectiveStart"\n}'
    )
    assert collectives.read(program(body, first + STEP)).collectives == (Collective("all-gather", 8, 8 * 128 * 4, 1),)


def test_gpu_starts_count_and_dones_do_not():
    body = """%s = (f32[8,128]{1,0}, bf16[8,128]{1,0}) copy-start(%p)
%b = bf16[8,128]{1,0} convert(%p)
%start = ((f32[8,128]{1,0}, bf16[8,128]{1,0}), (f32[1,128]{1,0}, bf16[1,128]{1,0})) reduce-scatter-start(%p, %b), \
replica_groups=[2,4]<=[8]
ROOT %done = (f32[1,128]{1,0}, bf16[1,128]{1,0}) reduce-scatter-done(%start)"""
    assert collectives.read(program(body)).collectives == (Collective("reduce-scatter", 4, 8 * 128 * (4 + 2), 1),)


def test_a_collective_of_one_device_moves_nothing():
    body = "ROOT %r = f32[8,128]{1,0} all-reduce(%p), replica_groups=[8,1]<=[8], to_apply=%add"
    assert collectives.read(program(body)).collectives == ()


def test_an_estimate_that_says_no_idea_is_left_out():
    body = """%a = f32[8,128] negate(%p), backend_config={"estimated_cycles":"70"}
ROOT %b = f32[8,128] negate(%a), backend_config={"estimated_cycles":"9223372036854775807"}"""
    assert collectives.read(program(body)).cycles == 70


def test_other_text_is_refused():
    with pytest.raises(HloError, match="not the text of a compiled program"):
        collectives.read("module @jit_f { func.func public @main() }")


DISGUISED = """HloModule m, num_partitions=4

%cut (p0: f32[8,16], p1: s32[]) -> f32[2,16] {
  %p0 = f32[8,16]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %own = f32[2,16]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={2,16}
}

%double (p2: f32[8,16]) -> f32[8,16] {
  %p2 = f32[8,16]{1,0} parameter(0)
  ROOT %twice = f32[8,16]{1,0} add(%p2, %p2)
}

ENTRY %main (x: f32[8,16], part: f32[2,16], at: s32[]) -> (f32[2,16], f32[8,16], f32[8,16]) {
  %x = f32[8,16]{1,0} parameter(0)
  %part = f32[2,16]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %nothing = f32[] constant(0)
  %zeros = f32[8,16]{1,0} broadcast(%nothing), dimensions={}
  %padded = f32[8,16]{1,0} dynamic-update-slice(%zeros, %part, %at, %at)
  %sum = f32[8,16]{1,0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add
  %moved = f32[8,16]{1,0} copy(%sum)
  %slice = f32[2,16]{1,0} fusion(%moved, %at), kind=kLoop, calls=%cut
  %gathered = f32[8,16]{1,0} all-reduce(%padded), replica_groups={{0,1,2,3}}, to_apply=%add
  %both = f32[8,16]{1,0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add
  %some = f32[2,16]{1,0} fusion(%both, %at), kind=kLoop, calls=%cut
  %all = f32[8,16]{1,0} fusion(%both), kind=kLoop, calls=%double
  ROOT %out = (f32[2,16]{1,0}, f32[8,16]{1,0}, f32[8,16]{1,0}) tuple(%slice, %gathered, %all)
}
"""


def test_all_reduces_that_stand_for_something_else():
    """One is only sliced, one sums slices in zeros; one is sliced and used whole too, so it is what it says."""
    size = 8 * 16 * 4
    assert set(collectives.read(DISGUISED).collectives) == {
        Collective("reduce-scatter", 4, size, 1, summed=True),
        Collective("all-gather", 4, size, 1, summed=True),
        Collective("all-reduce", 4, size, 1),
    }


CALLED = """HloModule jit_step, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%pad (around: bf16[64,8], part: bf16[8,8], at: s32[]) -> bf16[64,8] {
  %around = bf16[64,8]{1,0} parameter(0)
  %part = bf16[8,8]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %nought = s32[] constant(0)
  ROOT %padded = bf16[64,8]{1,0} dynamic-update-slice(%around, %part, %at, %nought)
}

%called (given: bf16[64,8]) -> bf16[64,8] {
  %given = bf16[64,8]{1,0} parameter(0)
  ROOT %reduced = bf16[64,8]{1,0} all-reduce(%given), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
}

ENTRY %main (part: bf16[8,8], whole: bf16[64,8], at: s32[]) -> BODY
"""


@pytest.mark.parametrize(
    ("given", "used", "kind", "summed"),
    [
        ("%zeros", "bf16[64,8] negate(%done)", "all-gather", True),
        ("%whole", "bf16[64,8] negate(%done)", "all-reduce", False),
        ("%whole", "bf16[8,8] dynamic-slice(%done, %at, %nought), dynamic_slice_sizes={8,8}", "reduce-scatter", True),
    ],
)
def test_what_the_sparse_core_is_called_for(given, used, kind, summed):
    """TPU7x: the all-reduce is a computation of its own; what it is given and what is used of it say what it is."""
    lines = [
        "bf16[8,8] {",
        "  %part = bf16[8,8]{1,0} parameter(0)",
        "  %whole = bf16[64,8]{1,0} parameter(1)",
        "  %at = s32[] parameter(2)",
        "  %nought = s32[] constant(0)",
        "  %value = bf16[] constant(0)",
        "  %zeros = bf16[64,8]{1,0} broadcast(%value), dimensions={}",
        f"  %full = bf16[64,8]{{1,0}} fusion({given}, %part, %at), kind=kLoop, calls=%pad",
        "  %token = token[] after-all()",
        "  %start = ((bf16[64,8], token[]), bf16[64,8]) call-start(%full, %token), to_apply=%called",
        "  %done = bf16[64,8]{1,0} call-done(%start)",
        f"  ROOT %used = {used}",
        "}",
    ]
    work = collectives.read(CALLED.replace("BODY\n", "\n".join(lines) + "\n"))
    assert work.collectives == (Collective(kind, 8, 64 * 8 * 2, 1, summed),)
