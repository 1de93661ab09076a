"""What a memory limit costs, and live bytes by tier over a step with files: by hand, and held to the capacity table."""

from __future__ import annotations

import dataclasses

import pytest

from jaxllm import cli
from jaxllm.models.remat import RematError, offloaded_share
from jaxllm.plan.capacity_table import PLACEMENTS, disk_seconds, file_traffic, run_kinds
from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.plan.formulas.memory_estimate import predict as predict_memory
from jaxllm.plan.formulas.offload_time import offloaded_bytes
from jaxllm.plan.formulas.step_time import predict_work
from jaxllm.plan.formulas.update_timeline import play
from jaxllm.plan.hardware import Cluster
from jaxllm.plan.layout_search import predict_layout
from jaxllm.plan.tiers.limited_step import LimitedStep, MovedBytes, limited_step
from jaxllm.plan.tiers.streamed_moments import step_moments, step_tasks, streamed_sizes
from jaxllm.plan.tiers.token_share import token_share
from jaxllm.train import RunConfig
from recipes.llama3 import llama3_8b, llama3_8b_1m_node
from sharding import MeshSpec

ON, MESH = Cluster.parse("h100:1x8"), MeshSpec.parse("fsdp=8")


def run_with(remat: str = "full", accumulate: int = 1, clip: bool = True, **disk) -> RunConfig:
    """Llama 8B on eight devices, with files where ``disk`` says so."""
    run = llama3_8b()
    return dataclasses.replace(
        run,
        mesh="fsdp=8",
        accumulate=accumulate,
        model=dataclasses.replace(run.model, remat=remat),
        optim=run.optim if clip else dataclasses.replace(run.optim, clip_norm=None),
        disk=dataclasses.replace(run.disk, **disk),
    )


def test_a_step_that_keeps_everything_costs_nothing():
    step = limited_step(run_with("none"), MovedBytes(), MESH, ON)
    assert step.seconds == step.unlimited == predict_work(DeviceWork.of(run_with("none"), MESH), ON).seconds
    assert step.ratio == 1
    assert str(step).endswith("nothing is recomputed or moved")


def test_recomputation_is_the_planners_where_it_has_a_formula_and_linear_between():
    none, full = (predict_work(DeviceWork.of(run_with(one), MESH), ON).seconds for one in ("none", "full"))
    assert limited_step(run_with("full"), MovedBytes(), MESH, ON).seconds == pytest.approx(full)
    half = limited_step(run_with("none=16,full=16"), MovedBytes(), MESH, ON)
    assert half.recomputed == pytest.approx((full - none) / 2)
    assert half.ratio == pytest.approx((none + full) / 2 / none)


def test_copies_and_files_are_added():
    link = ON.hardware.host
    step = limited_step(run_with("none"), MovedBytes(activations=1e15, host=64e9), MESH, ON)
    flops = predict_work(DeviceWork.of(run_with("none"), MESH), ON).compute
    assert step.activations == pytest.approx(2e15 / link - flops)
    assert step.state == pytest.approx(64e9 / link)
    alone = limited_step(run_with("none", directory="/nvme"), MovedBytes(files=6e9), MESH, ON)
    assert alone.files == pytest.approx(6e9 / 3e9)
    slow = dataclasses.replace(ON, hardware=dataclasses.replace(ON.hardware, disk=1e9, disk_write=3e9))
    assert limited_step(run_with("none", directory="/nvme"), MovedBytes(files=6e9), MESH, slow).files == 6, "reads"
    run = run_with(directory="/nvme", parameters=True)
    streamed = limited_step(run, MovedBytes(files=60e9), MESH, ON)
    full = predict_work(DeviceWork.of(run_with("full"), MESH), ON).seconds
    traffic = file_traffic(run, MESH, ON)._replace(backward=60e9, written=60e9)
    assert streamed.files == pytest.approx(disk_seconds(traffic, ON.hardware, full / 4, 3 * full / 4))
    assert streamed.seconds == pytest.approx(full + streamed.files)
    assert "recomputation" in str(streamed)
    assert "files" in str(streamed)
    assert str(LimitedStep(2.0, 1.0, 0.0, 0.5)) == (
        "predicted: 3500.0 ms a step, 1.75 times as long as without a limit (2000.0 ms)\n"
        "  recomputation 1000.0, optimizer state from and to the host 500.0"
    )


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize(
    ("place", "layers", "remat"),
    [
        *((place, layers, "full") for place, layers in [(3, 0), (4, 0), (5, 0), (5, 5), (5, 32)]),
        (4, 0, "elementwise"),
        (5, 5, "save:attention+qkv=8,full"),
        (5, 0, "full=30,attention"),
    ],
)
def test_the_most_of_each_tier_is_that_of_the_capacity_table(place, layers, accumulate, clip, remat):
    run = PLACEMENTS[place].of(run_with(accumulate=accumulate, clip=clip))
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, remat=remat))
    run = dataclasses.replace(run, disk=dataclasses.replace(run.disk, activation_layers=layers))
    moments, table = step_moments(run, MESH, ON), run_kinds(run, MESH, ON)
    for tier in ("device", "host", "disk"):
        most = max(sum(moment.tier(tier).values()) for moment in moments)
        limit = sum(getattr(size, tier) for size in table.values())
        if tier == "host" and run.disk.parameters:
            # The table counts all inputs beside the state of the ends, which is read when some inputs are used up.
            ends = streamed_sizes(run, MESH, ON).ends.state
            assert limit - ends <= most * (1 + 1e-6)
            assert most <= limit * (1 + 1e-6)
        else:
            assert most == pytest.approx(limit, rel=1e-6), tier
    names = [moment.name for moment in moments]
    assert len(set(names)) == len(names)
    assert sum("forward" in name for name in names) == run.model.layers
    assert any("norm" in name for name in names) == (clip and run.disk.parameters)
    inputs = [moment.kinds["activations"].host + moment.kinds["activations"].disk for moment in moments]
    turn = names.index("output head and loss") if run.disk.parameters else 0
    assert inputs[: turn + 1] == sorted(inputs[: turn + 1])
    assert inputs[-1] == 0


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize(("activations", "remat"), [(True, "full"), (False, "full"), (True, "elementwise")])
def test_the_timeline_moves_the_bytes_of_the_step(activations, remat, clip):
    """Reads and writes of the played step, times their rates, are those of the traffic's formula."""
    disk = {"directory": "/nvme", "parameters": True, "activations": activations}
    run = run_with(clip=clip, **disk)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, remat=remat))
    tasks, traffic = step_tasks(run, MESH, ON), file_traffic(run, MESH, ON)
    found = {way: sum(task.seconds for task in tasks if task.resource == f"disk {way}") for way in ("read", "write")}
    read = traffic.forward + traffic.backward + traffic.again + traffic.saved * (2 if clip else 1)
    window = traffic.saved * run.disk.window / run.model.layers * (2 if clip else 1)  # forwarded at the turn
    read -= window + (traffic.saved if clip else 0)
    assert found["write"] * 3e9 == pytest.approx(traffic.written + traffic.saved, rel=0.01)
    assert found["read"] * 3e9 == pytest.approx(read, rel=0.02)
    spans = play(tasks)
    for task in tasks:
        if task.name.startswith("forward") and f"read layer {task.name[8:]}" in spans:
            assert spans[f"read layer {task.name[8:]}"][1] <= spans[task.name][0]


def with_share(run: RunConfig, share: float) -> RunConfig:
    """The run with token-wise offload of a share of the tokens."""
    return dataclasses.replace(run, model=dataclasses.replace(run.model, remat=f"offload:{share:g}"))


def test_the_recipe_of_a_million_tokens_has_the_computed_share():
    """The most sixteenths that 256 GiB of the host hold, by the planner's bytes; the forward pass hides all of them."""
    run, on = llama3_8b_1m_node(), Cluster.parse("h200:1x8")
    mesh, limit = MeshSpec.parse(run.mesh), 256 * 2**30
    assert run.data.seq_len == 2**20
    share = offloaded_share(run.model.remat)
    assert share is not None
    held = [sixteenths / 16 for sixteenths in range(17)
            if predict_memory(with_share(run, sixteenths / 16), mesh, on.topology).host <= limit]  # fmt: skip
    assert share == max(held) == 9 / 16
    found = token_share(run, mesh, on, limit)
    assert found.remat == run.model.remat
    assert found.hidden == 1
    assert "the host holds 59%; 249.5 GiB of the host" in str(found)
    assert token_share(run, mesh, on, limit / 2).share == 1 / 16
    with pytest.raises(RematError, match=r"moves 96.5 GiB for all tokens, and the host has 96.0 GiB"):
        token_share(run, mesh, on, 96 * 2**30)
    predicted = predict_layout(run, mesh, on)
    assert predicted.fits
    full = predict_layout(dataclasses.replace(run, model=dataclasses.replace(run.model, remat="full")), mesh, on)
    assert predicted.time.seconds < 0.8 * full.time.seconds


def test_the_share_is_what_a_forward_pass_hides():
    """Llama 8B with rows of 8,192 tokens: a third of the arithmetic of a layer, times the link, holds the copies."""
    run = with_share(run_with(), 1.0)
    found = token_share(run, MESH, ON, 2**40)
    forward = predict_work(DeviceWork.of(run_with("none"), MESH), ON).compute / 3
    assert found.held == 1
    assert found.mandatory + found.hidden * found.optional == pytest.approx(forward * ON.hardware.host)
    assert 0 < found.share < found.hidden < 1
    sent, _ = offloaded_bytes(DeviceWork.of(with_share(run, found.share), MESH))
    assert sent == pytest.approx(found.mandatory + found.share * found.optional)
    assert (
        sent
        <= forward * ON.hardware.host
        < offloaded_bytes(DeviceWork.of(with_share(run, found.share + 1 / 16), MESH))[0]
    )
    slow = dataclasses.replace(ON, hardware=dataclasses.replace(ON.hardware, host=1e9))
    assert token_share(run, MESH, slow, 2**40).share == 0


def test_the_plan_prints_the_computed_share(capsys):
    words = ["llama3_8b_1m", "--on", "h200:1x8", "--as-is", "--no-compile", "--mesh", "context=8"]
    assert cli.main(["plan", *words, "--model.remat", "offload", "--host", "256GiB"]) == 0
    said = capsys.readouterr().out
    assert "model.remat offload:0.5625: the forward pass hides copies of 100% of the tokens, the host holds 59%" in said
    assert cli.main(["plan", *words, "--host", "256GiB"]) == 2
    assert "computes the share of --model.remat offload" in capsys.readouterr().err


def test_a_page_has_a_lane_for_the_disk(tmp_path, capsys):
    page = tmp_path / "page.html"
    words = ["llama3_70b", "--on", "rtx4090:1x8", "--host", "128GiB", "--disk", f"{tmp_path}:1TiB", "--mesh", "fsdp"]
    assert cli.main(["plan", *words, "--top", "1", "--explain", "1", "--html", str(page)]) == 0
    said = capsys.readouterr().out
    assert f"written: {page}" in said
    text = page.read_text()
    for word in ("<h2>Device</h2>", "<h2>Host</h2>", "<h2>Disk</h2>", "files read", "files written", "layer 0"):
        assert word in text


def test_a_page_that_cannot_be_written_is_refused(tmp_path, capsys):
    page = tmp_path / "page.html"
    words = ["plan", "quickstart", "--on", "rtx4090:1x1", "--top", "1", "--explain", "1", "--html", str(page)]
    assert cli.main(words) == 2
    assert "of the compiled program of layout 1, which needs a compiler for rtx4090" in capsys.readouterr().err
    assert not page.exists()
