"""Runs beside serving: the same tokens, the same run, its files, its ends, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.cli.errors import UsageError
from jaxllm.cli.finetune_arguments import finetune_config
from jaxllm.config import ConfigError
from jaxllm.convert import load_model
from jaxllm.convert.run_files import open_checkpoints
from jaxllm.hub.families.config_json import config_json
from jaxllm.infer import SamplingParams
from jaxllm.infer.speculate.ngram import NgramProposer
from jaxllm.models.channel_order import ChannelOrder
from jaxllm.peft import AdapterConfig, read_peft
from jaxllm.posttrain.coserve.finetune_programs import device_bytes
from jaxllm.posttrain.coserve.finetune_run import CoServedRun, FinetuneUnits, check_engine
from jaxllm.train import train
from jaxllm.train.combinations import REFUSALS, refused
from jaxllm.train.run_features import CO_SERVED, FEATURES
from tests.posttrain.coserved import adapter_config, answers, requests, serve, served, work_of
from tests.posttrain.tiny_policy import policy_run
from tests.train.test_step import compilations

EXACT = ("loss", "grad_norm", "update_norm", "learning_rate")


def rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def beside(finished: Path) -> Path:
    """Directory of a run of three steps beside requests; the tokens are compared, and compilations counted."""
    alone = served(None, finished)
    wanted = requests(alone)
    serve(alone, wanted)
    config = adapter_config(finished, "beside")
    llm = served(config, finished)
    work = work_of(llm)
    source = work.source
    assert isinstance(source, FinetuneUnits)
    with compilations() as compiled:
        found = requests(llm)
        serve(llm, found)
        assert work.tokens["backward"] > 0, "nothing was trained beside the requests"
        while llm.engine.busy:
            llm.engine.step()
    assert not [name for name in compiled if "forward" in name or "backward" in name or "update" in name], compiled
    assert answers(found) == answers(wanted)
    programs = source.programs
    arrays = jax.tree.leaves((programs.state, programs._cache, programs._of_cache, programs._grads))
    reserved = device_bytes(source.run, programs.gradients)
    assert reserved > sum(x.nbytes for x in arrays) + programs.gradients.saved_bytes
    with pytest.raises(ValueError, match=r"call end_side_work\(\) before swap"):
        llm.engine.swap(llm.engine.runner.params)
    assert source.finished.wait(60)
    assert not source.failure
    assert source.done == 3
    llm.engine.close()
    assert llm.engine.side_work is None
    return finished / "runs/beside"


def test_a_finished_run_leaves_an_adapter(finished: Path, beside: Path) -> None:
    loaded = load_model(finished / "runs/tiny")
    adapter = read_peft(beside / "adapter", loaded.model, config_json(loaded.model.config, None, {}))
    assert adapter.rank == 2
    events = [json.loads(line)["event"] for line in (beside / "events.jsonl").read_text().splitlines()]
    assert events[0] == "started"
    assert events[-1] == "finished"
    assert "saved" in events
    with open_checkpoints(beside) as checkpointer:
        assert checkpointer.steps() == [2, 3]


@pytest.mark.drawn(1)
def test_a_stopped_run_resumes_bit_for_bit(finished: Path, beside: Path) -> None:
    """Stopped half way through its third step, without requests; then resumed beside other requests."""
    config = adapter_config(finished, "stopped")
    llm = served(config, finished)
    source: Any = work_of(llm).source
    while source.done < 2 or len(source._units) != 3:
        llm.engine.step()
    llm.engine.close()
    assert [row["step"] for row in rows(finished / "runs/stopped")] == [1, 2]
    again = served(config, finished)
    serve(again, requests(again, 3))
    source = work_of(again).source
    while again.engine.busy:
        again.engine.step()
    assert source.finished.wait(60)
    again.engine.close()
    whole, parts = rows(beside), rows(finished / "runs/stopped")
    assert [[row[name] for name in EXACT] for row in parts] == [[row[name] for name in EXACT] for row in whole]
    files = [path / "adapter" / "adapter_model.safetensors" for path in (beside, finished / "runs/stopped")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.drawn(1)
@pytest.mark.usefixtures("shared_programs")
def test_training_continues_a_run_from_beside_serving(finished: Path, beside: Path) -> None:
    """And reaches the same losses; float32 sums in another order."""
    config = adapter_config(finished, "continued")
    llm = served(config, finished)
    source: Any = work_of(llm).source
    while source.done < 2:
        llm.engine.step()
    llm.engine.close()
    assert train(config).complete
    for one, other in zip(rows(finished / "runs/continued"), rows(beside), strict=False):
        np.testing.assert_allclose(one["loss"], other["loss"], rtol=1e-5)
        np.testing.assert_allclose(one["grad_norm"], other["grad_norm"], rtol=1e-4)


@pytest.mark.drawn(3)
def test_a_run_that_diverges_stops_and_requests_go_on(finished: Path) -> None:
    config = adapter_config(finished, "diverged", steps=9, clip_norm=None)
    schedule = dataclasses.replace(config.optim.schedule, peak=1e30, warmup=0.0)
    config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, schedule=schedule))
    llm = served(config, finished)
    source: Any = work_of(llm).source
    while llm.engine.busy:
        llm.engine.step()
    assert "gradient norm" in source.failure
    serve(llm, requests(llm))
    llm.engine.close()
    assert json.loads((finished / "runs/diverged/events.jsonl").read_text().splitlines()[-1])["event"] == "failed"


@pytest.mark.drawn(1)
def test_a_finished_adapter_is_served(finished: Path) -> None:
    config = adapter_config(finished, "served", steps=1)
    llm = served(config, finished, adapter_slots=1, adapter_rank=4)
    while llm.engine.busy:
        llm.engine.step()
    source: Any = work_of(llm).source
    assert source.finished.wait(60)
    assert not source.failure
    request = llm.engine.submit([1, 2, 3], SamplingParams(max_tokens=3), adapter="served")
    serve(llm, [request])
    assert request.sequences[0].generated == 3
    llm.engine.close()


def test_rows_of_the_table_are_met(finished: Path) -> None:
    config = adapter_config(finished, "refused")
    assert not refused(config, {}, also=(CO_SERVED,))
    loaded = load_model(finished / "runs/tiny")
    cases = {
        "no adapter": {"adapter": AdapterConfig()},
        "adapter that is not LoRA": {"adapter": AdapterConfig("qlora")},
        "evaluation during the run": {"eval_every": 2},
        "blocking saves": {"saving": "blocking"},
        "pipeline": {"mesh": "stage=2"},
    }
    for feature, fields in cases.items():
        with pytest.raises(ConfigError, match=r"beside serving \(--finetune\) does not go with"):
            CoServedRun(adapter_config(finished, "refused", **fields), loaded, 6)
        sizes = {"stage": 2} if "mesh" in fields else {}
        run = adapter_config(finished, "x", **fields)
        assert feature in {row.other for row in refused(run, sizes, also=(CO_SERVED,))}
    assert {row.other for row in REFUSALS if row.one == CO_SERVED} <= set(FEATURES)


@pytest.mark.drawn(3)
def test_what_cannot_be_served_beside_is_refused(finished: Path, tmp_path: Path) -> None:
    config, loaded = adapter_config(finished, "refused"), load_model(finished / "runs/tiny")
    with pytest.raises(ConfigError, match="samples rollouts of its own"):
        CoServedRun(policy_run(tmp_path), loaded, 6)
    narrow = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="bfloat16"))
    with pytest.raises(ConfigError, match=r"model.dtype = 'bfloat16', but the model is served in float32"):
        CoServedRun(narrow, loaded, 6)
    packed = dataclasses.replace(loaded, params=load_model(finished / "runs/tiny", weights="int8").params)
    with pytest.raises(ConfigError, match="packed"):
        CoServedRun(config, packed, 6)
    apart = dataclasses.replace(loaded, params=load_model(finished / "runs/tiny", layers="apart").params)
    with pytest.raises(ConfigError, match="--layers stacked"):
        CoServedRun(config, apart, 6)
    with pytest.raises(ConfigError, match="without --offload"):
        CoServedRun(config, dataclasses.replace(loaded, params=object()), 6)
    over = jax.make_mesh((2,), ("tensor",))
    with pytest.raises(ConfigError, match="served on 2 devices"):
        CoServedRun(config, dataclasses.replace(loaded, mesh=over), 6)
    with pytest.raises(ConfigError, match="chunks of 0 tokens"):
        CoServedRun(config, loaded, 0)
    with pytest.raises(ConfigError, match="mesh = 'fsdp=2' has 2 devices"):
        CoServedRun(dataclasses.replace(config, mesh="fsdp=2"), loaded, 6)
    engine = served(None, finished).engine
    check_engine(engine, 31)
    with pytest.raises(ConfigError, match="--finetune-tokens"):
        check_engine(engine, 32)
    engine.folding = ChannelOrder(loaded.model, loaded.params)
    with pytest.raises(ConfigError, match="reorders or folds the weights"):
        check_engine(engine, 6)
    engine.folding, engine.proposer = None, NgramProposer()
    with pytest.raises(ConfigError, match="speculative decoding"):
        check_engine(engine, 6)


def test_arguments_of_the_command(finished: Path, tmp_path: Path) -> None:
    base = str(finished / "runs/tiny")
    recipe = tmp_path / "mine.py"
    recipe.write_text(
        "from pathlib import Path\nfrom tests.posttrain.coserved import adapter_config\n"
        f"def mine():\n    return adapter_config(Path({str(finished)!r}), 'mine')\n"
    )
    config = finetune_config(f"{recipe}:mine", ("steps=7", "adapter.rank=5"), base)
    assert (config.steps, config.adapter.rank, config.init_from) == (7, 5, base)
    assert finetune_config(f"{recipe}:mine", ("init_from=",), base).init_from == base
    with pytest.raises(UsageError, match="write NAME=VALUE"):
        finetune_config(f"{recipe}:mine", ("steps",), base)
    with pytest.raises(UsageError, match="no setting"):
        finetune_config(f"{recipe}:mine", ("stepz=3",), base)
    with pytest.raises(UsageError, match="serve that model"):
        finetune_config(f"{recipe}:mine", (f"init_from={tmp_path}",), base)
    with pytest.raises(UsageError, match="no recipe"):
        finetune_config("nothing", (), base)


@pytest.mark.drawn(3)
def test_a_run_directory_is_resumed_by_name(finished: Path, beside: Path) -> None:
    config = finetune_config(str(beside), (), str(finished / "runs/tiny"))
    assert (config.name, config.out) == ("beside", str(finished / "runs"))
    llm = served(config, finished)
    source: Any = work_of(llm).source
    assert source.finished.wait(60)
    assert source.done == 3
    assert not work_of(llm).has_work
    llm.engine.close()
