"""Layout search: its layouts are legal, fit, and are the best of those tried; the command prints them."""

from __future__ import annotations

import dataclasses
import json

import pytest

from jaxllm import cli
from jaxllm.compiler.aot import CompileReport
from jaxllm.models import functional
from jaxllm.plan import layout_search
from jaxllm.plan.compiled_layout import CompiledLayout
from jaxllm.plan.formulas import memory_estimate
from jaxllm.plan.formulas.calibration import DEFAULT
from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.plan.hardware import TABLE, Cluster
from jaxllm.plan.plan_export import write_recipe
from jaxllm.train.run import fitting_mesh
from recipes.llama3 import llama3_8b
from recipes.mixtral import mixtral_8x22b
from recipes.quickstart import quickstart
from sharding import MeshSpec
from sharding.isolate import OutOfDeviceMemory

SMALL = ("--model.layers", "2", "--data.seq-len", "32", "--data.batch-size", "8")


def cut(run, layers: int, rows: int):
    """The run with fewer layers and rows."""
    model = dataclasses.replace(run.model, layers=layers)
    return dataclasses.replace(run, model=model, data=dataclasses.replace(run.data, batch_size=rows))


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize(
    ("run", "on"),
    [
        (quickstart(), "v6e:2x2"),
        (cut(llama3_8b(), 4, 8), "h100:1x4"),
        (cut(mixtral_8x22b(), 2, 8), "h200:1x8"),
    ],
)
def test_what_is_found_is_legal_fits_and_is_in_order(run, on):
    cluster = Cluster.parse(on)
    found = layout_search.search(run, cluster)
    assert found.layouts
    if cluster.devices == 4 and run.name == "quickstart":  # once is enough to see that it is a function
        assert found.layouts == layout_search.search(run, cluster).layouts
    seconds = [layout.time.seconds for layout in found.layouts]
    assert seconds == sorted(seconds)
    for layout in found.layouts:
        assert layout.fits
        model = functional(layout.run.model, layout.run.parallel.rules())
        assert str(fitting_mesh(layout.run, model, cluster.devices)) == layout.run.mesh


@pytest.mark.drawn(0.3)
def test_its_first_is_no_slower_than_any_plan_that_fits():
    cluster, run = Cluster.parse("v6e:2x2"), cut(llama3_8b(), 2, 8)
    best = layout_search.search(run, cluster).layouts[0]
    for mesh in layout_search.meshes(run, cluster):
        for remat in layout_search.REMATS:
            model = dataclasses.replace(run.model, remat=remat)
            laid = dataclasses.replace(run, model=model, mesh=str(mesh))
            try:
                fitting_mesh(laid, functional(laid.model, laid.parallel.rules()), cluster.devices)
            except ValueError:
                continue
            if dict(mesh.axes).get("stage", 1) > 1:
                continue
            other = layout_search.predict_layout(laid, mesh, cluster)
            assert not other.fits or best.time.seconds <= other.time.seconds * (1 + 1e-9)


def test_offloading_is_tried_where_a_pipeline_can():
    cluster, run = Cluster.parse("h100:1x4"), cut(llama3_8b(), 8, 16)
    shares = {}
    for mesh in layout_search.meshes(run, cluster):
        for family in layout_search._families(run, mesh):
            shares.setdefault("stage" in dict(mesh.axes), set()).update(laid.parallel.offload for laid in family)
    assert shares == {True: set(layout_search.OFFLOADS), False: {0.0}}


def test_offloading_frees_the_device_and_waits_for_a_slow_host():
    run = dataclasses.replace(cut(llama3_8b(), 8, 16), accumulate=8, mesh="stage=4")
    mesh = MeshSpec.parse(run.mesh)
    away = dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, offload=1.0))
    plain, fast = (layout_search.predict_layout(laid, mesh, Cluster.parse("h100:1x4")) for laid in (run, away))
    table = {"h100": dataclasses.replace(TABLE["h100"], host=1e9)}
    slow = layout_search.predict_layout(away, mesh, Cluster.parse("h100:1x4", table))
    assert plain.memory.host == 0 < fast.memory.host
    assert fast.memory.total < plain.memory.total
    kept = memory_estimate.kept_bytes(DeviceWork.of(away, mesh))
    assert kept == 4 * 8192 * 4096 * 2, "the inputs of a stage's two layers, for two rows"
    hidden = DEFAULT.weight_overlap * slow.time.compute / 3
    assert slow.time.host == pytest.approx(2 * (8 * kept / 1e9 - hidden))
    assert slow.time.seconds > fast.time.seconds + slow.time.host - fast.time.host


@pytest.mark.drawn(0.3)
def test_what_does_not_fit_says_what_would(capsys):
    asked = ["--no-compile", "--model.layers", "12", "--data.batch-size", "4"]
    assert cli.main(["plan", "llama3_8b", "--on", "v5e:2x2", *asked]) == 1
    said = capsys.readouterr().out
    assert "too much" in said
    assert "On v5e:2x4 it fits" in said


@pytest.mark.drawn(0.3)
def test_a_batch_that_nothing_divides_says_what_fits(capsys):
    asked = ["--no-compile", "--model.layers", "12", "--data.batch-size", "101"]
    assert cli.main(["plan", "llama3_8b", "--on", "v5e:4x4", *asked]) == 1
    said = capsys.readouterr().out
    assert "no layout" in said
    assert "--data.batch-size 50" in said or "On v5e" in said


@pytest.mark.drawn(0.3)
def test_the_command_ranks_explains_prices_and_saves(tmp_path, capsys):
    recipe, data = tmp_path / "planned.py", tmp_path / "planned.json"
    options = ["--no-compile", "--explain", "1", "--tokens", "1e9", "--save", str(recipe), "--json", str(data)]
    assert cli.main(["plan", "quickstart", "--on", "v6e:2x2", *options, *SMALL]) == 0
    said = capsys.readouterr().out
    assert "predicted" in said
    assert "1,000,000,000 tokens" in said
    planned = cli.find_recipe(f"{recipe}:quickstart_v6e_2x2")()
    first = json.loads(data.read_text())[0]
    assert (planned.mesh, planned.accumulate) == (first["mesh"], first["accumulate"])
    assert planned.model.layers == 2


@pytest.mark.drawn(0.3)
def test_top_layouts_are_compiled(capsys, monkeypatch):
    asked = []

    def compile_layout(layout, cluster, progress, calibration, html):
        assert html is None
        asked.append((str(layout.mesh), cluster.name))
        if len(asked) == 2:
            raise OutOfDeviceMemory(cluster.name, 40 * 2**30, 31 * 2**30)
        sizes = dict.fromkeys(("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "code_bytes"), 2**30)
        names = {field.name: 0 for field in dataclasses.fields(CompileReport)}
        fixed = {"name": "x", "topology": cluster.name, "jax": "", "compiler": "", "collectives": (), "transfers": ()}
        return CompiledLayout(CompileReport(**{**names, **sizes, **fixed, "cycles": None, "hbm_bytes": None}), 0.125)

    monkeypatch.setattr("jaxllm.plan.compiled_layout.compile_layout", compile_layout)
    assert cli.main(["plan", "quickstart", "--on", "v6e:2x2", "--top", "2", *SMALL]) == 0
    said = capsys.readouterr().out
    assert len({mesh for mesh, _ in asked}) == 2
    assert "0.125" in said
    assert "9.00 GiB too much" in said


@pytest.mark.parametrize(
    ("setting", "mesh", "says"),
    [
        (["--parallel.layers", "tensor=1,fsdp", "--parallel.zero", "2"], "fsdp=2,tensor=2", "supports 3"),
        (["--model.remat", "sqrt=16,full"], "fsdp=4", "by layer, the cost model supports none, elementwise, full"),
        (["--accumulate", "2", "--parallel.micro-batches", "3", "1"], "data=2,fsdp=2", "there is no formula yet"),
    ],
)
def test_a_run_without_a_formula_is_named(setting, mesh, says, capsys):
    argv = ["llama3_8b", "--on", "v6e:2x2", "--as-is", "--no-compile", "--mesh", mesh, "--data.batch-size", "16"]
    assert cli.main(["plan", *argv, *setting]) == 2
    said = capsys.readouterr().err
    assert "--as-is: the planner has no formula for this run" in said
    assert says in said


def test_a_search_chooses_rows_and_layouts_of_layers_anew():
    parallel = dataclasses.replace(quickstart().parallel, layers="tensor=1,fsdp", micro_batches=(3, 1))
    run = dataclasses.replace(quickstart(), parallel=parallel, accumulate=2)
    cluster = Cluster.parse("v6e:2x2")
    found, want = (layout_search.search(one, cluster).layouts for one in (run, quickstart()))
    assert [one.run for one in found] == [one.run for one in want]


@pytest.mark.parametrize("finished", [True, False])
def test_a_layout_that_does_not_fit_is_drawn_where_the_compiler_finishes_it(finished, tmp_path, capsys, monkeypatch):
    def compile_layout(layout, cluster, progress, calibration, html, anyway=False):
        if not (anyway and finished):
            raise OutOfDeviceMemory(cluster.name, 40 * 2**30, 31 * 2**30)
        html.write_text("drawn")

    monkeypatch.setattr("jaxllm.plan.compiled_layout.compile_layout", compile_layout)
    page = tmp_path / "page.html"
    argv = ["quickstart", "--on", "v6e:2x2", "--top", "1", "--explain", "1", "--html", str(page), *SMALL]
    assert cli.main(["plan", *argv]) == 0
    said = capsys.readouterr().out
    assert page.exists() == finished
    assert (f"written: {page}, of the program that does not fit" in said) == finished
    assert ("does not finish" in said) != finished


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["quickstart", "--on", "v9:2x2"], "unknown topology"),
        (["quickstar", "--on", "v6e:2x2"], "Did you mean 'quickstart'?"),
        (["quickstart", "--on", "v6e:2x2", "--top", "0"], "give --top of 1 or more"),
        (["quickstart", "--on", "cpu:4"], "has no hardware entry to plan for"),
        (["quickstart", "--on", "v6e:2x2,h100:1x4", "--save", "x.py"], "needs a single topology"),
    ],
)
def test_mistakes_say_what_is_legal(argv, says, capsys):
    assert cli.main(["plan", *argv]) == 2
    assert says in capsys.readouterr().err


def test_a_saved_recipe_is_the_layouts_run(tmp_path):
    cluster = Cluster.parse("h100:1x4")
    layout = layout_search.search(quickstart(), cluster).layouts[0]
    name = write_recipe(tmp_path / "mine.py", layout, cluster)
    assert cli.find_recipe(name)() == layout.run


def test_foldings_of_experts_are_those_that_lay_them_out_in_another_way():
    mesh, mixture = MeshSpec.parse("fsdp=2,expert=2,tensor=2"), cut(mixtral_8x22b(), 2, 8)
    found = {
        text: list(layout_search.foldings(mixture, MeshSpec.parse(text))) for text in ("fsdp=8", "fsdp=4,expert=2")
    }
    assert list(layout_search.foldings(mixture, mesh)) == ["", "expert=4", "expert=1,tensor=4", "expert=2,tensor=4"]
    assert found["fsdp=8"] == ["", "expert=8", "expert=1,tensor=8"]
    # Where both axes are folded alike, fsdp=4,expert=2 is fsdp=8.
    assert found["fsdp=4,expert=2"] == ["", "expert=1,tensor=2", "expert=4,tensor=2"]
    assert list(layout_search.foldings(cut(llama3_8b(), 2, 8), mesh)) == [""]


@pytest.mark.drawn(3)
def test_a_folding_is_shown_and_saved(tmp_path, capsys):
    recipe = tmp_path / "planned.py"
    asked = ["--on", "h100:1x8", "--no-compile", "--top", "40", "--save", str(recipe)]
    asked += ["--model.layers", "2", "--data.batch-size", "8", "--data.seq-len", "512"]
    assert cli.main(["plan", "mixtral_8x22b", *asked]) == 0
    said = capsys.readouterr().out
    assert "experts expert=" in said
