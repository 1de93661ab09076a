"""Normalised texts of programs: independent of names and line numbers, different where a constant differs."""

from __future__ import annotations

import base64
import io
import json
import tomllib
import types

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters import mlir
from jaxlib.mlir import ir

from benchmarks import programs
from benchmarks.program_text import normal_hlo, normal_stablehlo
from tests import environment

HLO = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

FileNames
1 "/srv/one/model.py"

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%fused_computation.3 (param_0.7: f32[8], param_1: f32[]) -> f32[8] {
  %param_0.7 = f32[8]{0} parameter(0)
  %constant.2 = f32[] constant(1e-05), metadata={op_name="jit(step)/{x}/add" stack_frame_id=1}
  %broadcast.1 = f32[8]{0} broadcast(%constant.2), dimensions={}
  ROOT %add.9 = f32[8]{0} add(%param_0.7, %broadcast.1), metadata={op_name="a\\"}b" stack_frame_id=1}
}

ENTRY %main.5 (x.1: f32[8]) -> f32[8] {
  %x.1 = f32[8]{0} parameter(0), sharding={replicated}, metadata={op_name="x"}
  ROOT %f.1 = f32[8]{0} fusion(%x.1), calls=%fused_computation.3, backend_config={"n":"%x"}, control-predecessors={%x.1}
}
"""
NORMAL = """HloModule, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}
@0 (f32[8], f32[]) -> f32[8] {
  %0 = f32[8]{0} parameter(0)
  %1 = f32[] constant(1e-05)
  %2 = f32[8]{0} broadcast(%1), dimensions={}
  ROOT %3 = f32[8]{0} add(%0, %2)
}
ENTRY @1 (f32[8]) -> f32[8] {
  %0 = f32[8]{0} parameter(0), sharding={replicated}
  ROOT %1 = f32[8]{0} fusion(%0), calls=@0, backend_config={"n":"%x"}, control-predecessors={%0}
}
"""
RENAMED = {"step": "training_step", "fused_computation.3": "silu", "param_0.7": "p", "add.9": "rms.1", "x.1": "tokens",
           "/srv/one/model.py": "layers.py", "broadcast.1": "x", "main.5": "p"}  # fmt: skip


def test_names_metadata_and_tables_go():
    assert normal_hlo(HLO) == NORMAL
    renamed = HLO.replace('"n":"%x"', "NOTE")
    for old, new in RENAMED.items():
        renamed = renamed.replace(old, new)
    assert normal_hlo(renamed.replace("NOTE", '"n":"%x"')) == NORMAL


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("constant(1e-05)", "constant(1e-06)"),
        ("add(%param_0.7, %broadcast.1)", "add(%broadcast.1, %param_0.7)"),
        ("f32[8]{0} broadcast", "f32[8]{0:T(128)} broadcast"),
        ("{replicated}", "{devices=[2]<=[2]}"),
        ('"n"', '"other"'),
        ("calls=", "to_apply="),
        ("dimensions={}", "dimensions={0}"),
    ],
)
def test_everything_else_stays(old: str, new: str):
    assert normal_hlo(HLO.replace(old, new)) != NORMAL


def _lowered(eps: float, scope: str):
    @jax.jit
    def helper(x):
        with jax.named_scope(scope):
            return jnp.tanh(x) + eps

    helper.__wrapped__.__name__ = scope

    def outer(tree):
        return {scope: helper(tree) * helper(2 * tree)}

    outer.__name__ = scope
    return jax.jit(outer).lower(jnp.ones(8))


@pytest.mark.parametrize("text", [lambda x: normal_stablehlo(x.as_text()), lambda x: normal_hlo(x.compile().as_text())])
def test_a_program_of_jax(text):
    one, other, changed = _lowered(1e-5, "one"), _lowered(1e-5, "other"), _lowered(2e-5, "one")
    assert text(one) == text(other)
    assert text(one) != text(changed)


def _mosaic(name: str, value: float, file: str) -> str:
    """A call of a kernel, as it stands in a program for a TPU."""
    code = f"""module @{name} {{ func.func @{name}() -> f32 {{
      %0 = arith.constant {value} : f32 loc("{file}":3:4)
      func.return %0 : f32 }} loc("{file}":1:2) }}"""
    with mlir.make_ir_context():
        body = ir.Module.parse(code).operation
        buffer = io.BytesIO()
        body.write_bytecode(buffer)
    config = {"custom_call_config": {"body": base64.b64encode(buffer.getvalue()).decode(), "needs_layout_passes": True}}
    config_text = json.dumps(config, separators=(",", ":"))
    return HLO.replace('backend_config={"n":"%x"}', f"backend_config={config_text}")


def test_kernels_are_read():
    text = normal_hlo(_mosaic("forward", 0.5, "a.py"))
    assert text == normal_hlo(_mosaic("attend", 0.5, "b.py"))
    assert text != normal_hlo(_mosaic("forward", 0.25, "a.py"))
    assert "arith.constant 5.000000e-01" in text


def test_every_recipe_and_six_schedules_and_ten_engines():
    kinds = [name.partition("/")[0] for name in programs.programs()]
    project = tomllib.loads((environment.ROOT / "pyproject.toml").read_text())["project"]
    loops_of_their_own = {"draft_smollm2", "eagle_smollm2", "locret_smollm2", "s3d_smollm2"}
    assert set(programs.RECIPES) == set(project["entry-points"]["jaxllm.recipes"]) - loops_of_their_own
    assert kinds.count("recipe") == len(programs.RECIPES) >= 23
    assert len(programs.SCHEDULES) == 6
    assert kinds.count("engine") >= 10


def test_compare(tmp_path, capsys):
    for side, text in (("old", NORMAL), ("new", NORMAL), ("other", NORMAL.replace("1e-05", "1e-06"))):
        (tmp_path / side / "engine").mkdir(parents=True)
        (tmp_path / side / "engine/a@cpu:1.hlo.gz").write_bytes(programs.gzip.compress(text.encode()))
        record = {"name": "engine/a@cpu:1", "commit": side, "hlo": programs.digest(text), "stablehlo": side,
                  "instructions": 6, "versions": {}, **{f"{what}_bytes": 1 for what in programs.MEMORY}}  # fmt: skip
        (tmp_path / side / "engine/a@cpu:1.json").write_text(json.dumps(record))
    assert programs.compare(tmp_path / "old", tmp_path / "new", tmp_path / "record.json") == 0
    assert json.loads((tmp_path / "record.json").read_text())["programs"][0]["commits"] == ["old", "new"]
    assert programs.compare(tmp_path / "old", tmp_path / "other", None) == 1
    assert "+   %1 = f32[] constant(1e-06)" in capsys.readouterr().out
    (tmp_path / "new/engine/a@cpu:1.json").unlink()
    assert programs.compare(tmp_path / "old", tmp_path / "new", None) == 1


def test_an_engine_step_is_built_as_the_engine_builds_it():
    made = programs.engine(types.SimpleNamespace(devices=jax.devices, platform="cpu"), full=True)
    with jax.set_mesh(made.mesh):
        text = made.function.lower(*made.arguments).as_text()
    assert "stablehlo.while" in text, "several tokens are decoded in one step"
