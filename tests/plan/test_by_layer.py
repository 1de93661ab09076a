"""Layouts and recomputation by layer: their prediction, the search for them, and the command."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random

import pytest

from jaxllm import cli
from jaxllm.config import ConfigError
from jaxllm.models import MoeConfig, functional
from jaxllm.plan import layout_search
from jaxllm.plan.automatic_layout import automatic_layout
from jaxllm.plan.by_layer import layer_search
from jaxllm.plan.by_layer.layer_costs import ChoiceCost, LayerChoice, LayerCosts, seconds_of
from jaxllm.plan.by_layer.layer_program import LayerProblem, fastest_plan
from jaxllm.plan.formulas.calibration import DEFAULT
from jaxllm.plan.hardware import TABLE, Cluster
from jaxllm.plan.plan_export import write_recipe
from jaxllm.train.run import fitting_mesh
from recipes.llama3 import llama3_8b
from sharding import MeshSpec
from tests.proofs.plan import by_layer as proofs

MESHES = ("tensor=8", "fsdp=2,tensor=4", "data=2,expert=2,tensor=2")
CHOICES = tuple(itertools.starmap(LayerChoice, itertools.product(("tensor", "fsdp"), ("none", "elementwise", "full"))))


def run_on(mesh: str, *, mixtures: bool = False, layers: int = 8, rows: int = 16, layouts: str = "tensor"):
    """A small Llama, half of its layers mixtures where asked for."""
    run = llama3_8b()
    block = dataclasses.replace(run.model.pattern[0], mlp=dataclasses.replace(run.model.pattern[0].mlp, hidden=2048))
    pattern = (dataclasses.replace(block, mlp=MoeConfig(8, 2, 512)),) if mixtures else (block,)
    model = dataclasses.replace(
        run.model,
        embed_dim=1024,
        layers=layers,
        prefix=(block,) * (layers // 2) * mixtures,
        pattern=pattern,
        remat="full",
        vocab_size=4096,
    )
    data = dataclasses.replace(run.data, seq_len=1024, batch_size=rows)
    plan = dataclasses.replace(run.parallel, sequence="tensor" in mesh, layers=layouts)
    return dataclasses.replace(run, model=model, data=data, mesh=mesh, parallel=plan)


def predict(run, on: str = "v6e:2x4"):
    """Prediction of a run as it is."""
    return layout_search.predict_layout(run, MeshSpec.parse(run.mesh), Cluster.parse(on))


def remat(run, policy: str):
    """The run with a remat policy."""
    return dataclasses.replace(run, model=dataclasses.replace(run.model, remat=policy))


@pytest.mark.parametrize("mixtures", [False, True])
@pytest.mark.parametrize("policy", ["none", "elementwise", "full"])
@pytest.mark.parametrize("mesh", MESHES)
def test_parts_that_are_alike_are_the_whole(mesh, policy, mixtures):
    if "expert" in mesh and not mixtures:
        return
    run = run_on(mesh, mixtures=mixtures)
    whole, parts = predict(remat(run, policy)), predict(remat(run, f"{policy}=4,{policy}=4"))
    assert parts.time.seconds == pytest.approx(whole.time.seconds, rel=1e-12)
    assert parts.time.near == pytest.approx(whole.time.near, rel=1e-9)
    assert parts.memory.parts() == pytest.approx(whole.memory.parts(), abs=2)


@pytest.mark.parametrize("policy", ["none=4,full=4", "full=4,none=4", "elementwise=4,full=4"])
def test_recomputation_of_half_of_the_layers_is_half_way(policy):
    run = run_on("fsdp=2,tensor=4")
    first, second = (predict(remat(run, part.split("=")[0])) for part in policy.split(","))
    half = predict(remat(run, policy))
    assert half.memory.activations == pytest.approx(
        (first.memory.activations + second.memory.activations) / 2, rel=0.02
    )
    assert half.time.compute == pytest.approx((first.time.compute + second.time.compute) / 2, rel=0.02)
    assert half.memory.working == first.memory.working


def test_layers_of_fsdp_gather_weights_and_send_no_activations():
    layouts = ("tensor", "fsdp", "tensor=4,fsdp")
    tensor, fsdp, mixed = (predict(run_on("tensor=8", layouts=layouts)) for layouts in layouts)
    assert tensor.memory.arguments == fsdp.memory.arguments == mixed.memory.arguments
    assert tensor.memory.gradients == fsdp.memory.gradients
    assert sum(fsdp.time.near.values()) < sum(mixed.time.near.values()) < sum(tensor.time.near.values())
    assert mixed.memory.working == max(tensor.memory.working, fsdp.memory.working)


@pytest.mark.parametrize("mesh", MESHES)
def test_working_memory_is_that_of_the_kind_of_layers_that_needs_most(mesh):
    both, dense = run_on(mesh, mixtures=True), run_on(mesh)
    mixtures = dataclasses.replace(both, model=dataclasses.replace(both.model, prefix=()))
    dense = dataclasses.replace(both, model=dataclasses.replace(both.model, prefix=(), pattern=dense.model.pattern))
    for on in ("v6e:2x4", "h100:1x8"):
        found = [predict(run, on).memory.working for run in (both, dense, mixtures)]
        assert found[0] == max(found[1:])
        assert found[1] != found[2]


@pytest.mark.parametrize("on", ["v6e:2x4", "h100:1x8"])
@pytest.mark.parametrize("mesh", MESHES)
def test_costs_of_layers_add_up_to_the_step(mesh, on):
    draw = random.Random(mesh)
    cluster = Cluster.parse(on)
    for accumulate in (1, 2):
        run = dataclasses.replace(run_on(mesh, mixtures=True), accumulate=accumulate)
        costs = LayerCosts(run, MeshSpec.parse(mesh), cluster, DEFAULT)
        seconds, taken = costs.shared
        for _ in range(4):
            plan = [draw.choice(CHOICES) for _ in range(8)]
            parts = [costs.ends(plan[0].layout)]
            parts += [costs.group(number // 4, choice) for number, choice in enumerate(plan)]
            layouts = ["", *(choice.layout for choice in plan), ""]
            parts += [costs.change(a, b) for a, b in itertools.pairwise(layouts)]
            used = [frozenset(choice.layout for choice in own) for own in (plan[:4], plan[4:])]
            found = predict(layer_search.with_choices(run, plan), on)
            assert seconds + seconds_of(parts) == pytest.approx(found.time.seconds, rel=1e-9)
            kept = sum(cost.kept for cost in parts) * costs.turns
            assert taken + kept + costs.working(used) == pytest.approx(found.memory.total, abs=4)


def drawn_problem(seed: int) -> LayerProblem:
    """A problem of two runs of equal layers with costs that are not those of any model."""
    draw = random.Random(seed)

    def cost(scale: float) -> ChoiceCost:
        return ChoiceCost(
            draw.random() * scale, draw.uniform(-1, 1) * scale, draw.uniform(-1, 0.6) * scale, draw.random()
        )

    choices = draw.sample(CHOICES, draw.choice((2, 3, 4)))
    layouts = sorted({choice.layout for choice in choices})
    costs = tuple({choice: cost(1.0) for choice in choices} for _ in range(2))
    changes = {}
    for a, b in itertools.product(("", *layouts), repeat=2):
        same = (a or "tensor") == (b or "tensor")
        changes[a, b] = ChoiceCost(0.0, 0.0, 0.0, 0.0) if same else ChoiceCost(draw.random() * 0.3, 0.0, 0.0, 0.0)
    moved = draw.random() * 0.3
    changes = {pair: ChoiceCost(moved if any(one) else 0.0, 0.0, 0.0, 0.0) for pair, one in changes.items()}
    ends = {layout: cost(0.2)._replace(kept=0.0) for layout in layouts}
    return LayerProblem(costs, (draw.choice((1, 2, 3)), 2), ends, changes, draw.uniform(0.5, 4.0))


def test_the_program_is_brute_force_on_drawn_costs():
    fits = 0
    for seed in range(150):
        problem = drawn_problem(seed)
        choices = list(problem.costs[0])
        plans = itertools.product(choices, repeat=sum(problem.repeats))
        fastest = min(problem.seconds(plan) for plan in plans)
        plan = fastest_plan(problem)
        assert (plan is None) == math.isinf(fastest)
        if plan is not None:
            fits += 1
            assert problem.seconds(plan) == pytest.approx(fastest, rel=1e-12)
            assert fastest_plan(problem, fastest) is None, "nothing is faster than the fastest"
    assert fits > 100


@pytest.mark.parametrize("seed", [5, 13])
@pytest.mark.drawn(0.3)
def test_the_search_is_brute_force_on_a_drawn_run(seed):
    assert proofs.layers_are_brute_force(seed) <= 1e-9


def limited(found, share: float) -> Cluster:
    """A cluster whose memory is part of the way from what a run with full remat needs to what one without needs."""
    none, full = (predict(remat(found, policy)).memory.total for policy in ("none", "full"))
    size = round(full + share * (none - full))
    return Cluster.parse("v6e:2x4", {"v6e": dataclasses.replace(TABLE["v6e"], hbm_bytes=size)})


@pytest.mark.drawn(0.5)
def test_memory_that_is_left_is_filled_by_layer(tmp_path, capsys, monkeypatch):
    run = run_on("fsdp=2,tensor=4", layers=6)
    cluster = limited(run, 0.6)
    plain, found = (search(run, cluster).layouts for search in (layout_search.search, layer_search.search_by_layer))
    slower = {layout.mesh: layout.time.seconds for layout in plain}
    assert {layout.mesh for layout in found} >= set(slower)
    assert all(layout.time.seconds <= slower.get(layout.mesh, math.inf) * (1 + 1e-12) for layout in found)
    mixed = [one for one in found if "=" in one.run.model.remat]
    assert mixed, [one.run.model.remat for one in found]
    for layout in found:
        assert layout.fits
        model = functional(layout.run.model, layout.run.parallel.rules())
        assert str(fitting_mesh(layout.run, model, 8)) == layout.run.mesh
        again = layout_search.predict_layout(layout.run, layout.mesh, cluster)
        assert (again.time.seconds, again.memory) == (layout.time.seconds, layout.memory)
    monkeypatch.setattr("jaxllm.plan.automatic_layout.Cluster.parse", lambda *_: cluster)
    assert automatic_layout(run, "v6e:2x4").time.seconds == found[0].time.seconds
    file = tmp_path / "mixed.py"
    name = write_recipe(file, mixed[0], cluster)
    capsys.readouterr()
    assert cli.main(["plan", name, "--on", "v6e:2x4", "--as-is", "--no-compile"]) == 0
    said = capsys.readouterr().out
    assert mixed[0].run.model.remat in said


def test_the_command_predicts_a_run_with_layouts_by_layer(tmp_path, capsys):
    file = tmp_path / "said.json"
    argv = ["plan", "llama3_8b", "--on", "v6e:2x4", "--as-is", "--no-compile", "--mesh", "fsdp=2,tensor=4"]
    argv += ["--parallel.sequence", "--data.batch-size", "16", "--json", str(file)]
    assert cli.main([*argv, "--parallel.layers", "tensor=8,fsdp", "--model.remat", "none=2,full=30"]) == 0
    assert "layers tensor=8,fsdp" in capsys.readouterr().out
    (said,) = json.loads(file.read_text())
    assert (said["remat"], said["parallel"]["layers"]) == ("none=2,full=30", "tensor=8,fsdp")


@pytest.mark.drawn(0.5)
def test_the_command_searches_by_layer(capsys):
    argv = ["plan", "quickstart", "--on", "v6e:2x2", "--by-layer", "--no-compile", "--data.batch-size", "8"]
    assert cli.main(argv) == 0
    assert "predicted, the first 3 of" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [["--as-is"], ["--host", "1GiB"], ["--disk", "files:1GiB"], ["--documents", "lengths.txt"], ["--on", "x.toml"]],
)
def test_what_the_search_by_layer_does_not_cover_is_named(words, capsys):
    argv = ["plan", "quickstart", "--on", "v6e:2x2", "--by-layer", "--no-compile", *words]
    assert cli.main(argv) == 2
    assert "--by-layer searches plans of equal devices" in capsys.readouterr().err


def test_runs_that_it_does_not_cover_are_named():
    run = run_on("fsdp=2,tensor=4", layers=8)
    narrow = dataclasses.replace(run.model.pattern[0], mlp=dataclasses.replace(run.model.pattern[0].mlp, hidden=512))
    prefix = (run.model.pattern[0], narrow) * 2
    many = dataclasses.replace(run, model=dataclasses.replace(run.model, prefix=prefix))
    away = dataclasses.replace(run, host=dataclasses.replace(run.host, optimizer=True))
    for one, says in ((many, "more than 4 stacks"), (away, "host.optimizer")):
        with pytest.raises(ConfigError, match=says):
            layer_search.search_by_layer(one, Cluster.parse("v6e:2x4"))
