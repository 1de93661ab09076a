"""Runs with an adapter: what is trained and saved, how they resume, and what is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.checkpoint import Checkpointer
from jaxllm.cli.recipe_arguments import configure
from jaxllm.config import ConfigError
from jaxllm.convert.convert import convert
from jaxllm.convert.load import load_model
from jaxllm.hub import HubError
from jaxllm.models import functional
from jaxllm.peft import AdapterConfig, AdapterError, merged_params, read_peft
from jaxllm.train import train
from jaxllm.train.run import Run, build_value_and_grad, fitting_mesh
from jaxllm.train.run_model import run_model
from tests.train import runs

ADAPTER = AdapterConfig("lora", rank=2, alpha=8.0, targets=("q,v", "mlp"))


def adapted(base: Path, **fields: Any) -> dict[str, Any]:
    return {"init_from": str(base / "runs/tiny"), "adapter": ADAPTER, "steps": 6, **fields}


@pytest.fixture(scope="module")
def trained(finished: Path) -> Path:
    """Directory of a finished run with an adapter."""
    with runs.shared_programs():
        return train(runs.run_config(finished, out=finished / "adapted", **adapted(finished))).directory


def values(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_a_checkpoint_has_the_adapter_alone(finished: Path, trained: Path) -> None:
    """No parameter of the base, and no optimizer state for one; the metadata names the base by its hash."""
    with Checkpointer(trained / "checkpoints", read_only=True) as checkpointer:
        leaves, meta = checkpointer.manifest(None).leaves, checkpointer.read_meta()
    params = {path for path in leaves if path.startswith("params/")}
    wanted = {"attention/q", "attention/v", "mlp/gate", "mlp/up", "mlp/down"}
    assert params == {f"params/segments/0/0/{one}/low_rank/{part}" for one in wanted for part in "ab"}
    assert not [path for path in leaves if "base" in path or "embedding" in path]
    assert meta["base"]["source"] == str(finished / "runs/tiny")
    assert meta["base"]["hash"].startswith("float32:")


def test_a_run_resumes_bitwise(finished: Path, trained: Path) -> None:
    """Stopped after four of six steps, and started again."""
    fields = adapted(finished, out=finished / "halted_adapter")
    with runs.shared_programs():
        runs.stopped_at(finished, 4, **fields)
        again = train(runs.run_config(finished, **fields)).directory
    assert runs.losses(again) == runs.losses(trained)
    kept = []
    for path in (again, trained):
        with Checkpointer(path / "checkpoints", read_only=True) as checkpointer:
            kept.append(checkpointer.map_leaves(prefix="params"))
    assert kept[0].keys() == kept[1].keys()
    for name, value in kept[0].items():
        assert (value == kept[1][name]).all(), name
    assert max(np.abs(value).max() for name, value in kept[0].items() if name.endswith("/b")) > 0


def test_a_gradient_of_several_batches(finished: Path) -> None:
    """LoRA-GA starts from the sum of the gradients of the run's first batches."""
    adapter = AdapterConfig("lora_ga", rank=2, targets=("q", "mlp"), gradient_batches=3)
    run = Run(runs.run_config(finished, **adapted(finished, adapter=adapter)))
    assert run.base is not None
    assert run.init_model is not None
    whole, base = run.base.without_adapter(), run.init_model.load(run.mesh, "float32")
    with jax.set_mesh(run.mesh):
        step = jax.jit(build_value_and_grad(whole, run_model(whole), run.mesh))
        alone = [values(step(base, run.put_batch(run.data.train.batch_at(number)))[1]) for number in range(3)]
    for found, *parts in zip(values(run.first_gradients(whole, base)), *alone, strict=True):
        np.testing.assert_allclose(found, sum(parts), rtol=1e-5, atol=1e-6)
        assert np.abs(found - 3 * parts[0]).max() > 1e-3
    with pytest.raises(ValueError, match=r"adapter.gradient_batches = 0; give a positive number"):
        AdapterConfig("lora_ga", gradient_batches=0)


def test_what_is_made_of_a_run(finished: Path, trained: Path, tmp_path: Path) -> None:
    """The merged model, that of the exported adapter, and the merged export have the same parameters."""
    base, merged = load_model(finished / "runs/tiny"), load_model(trained)
    made = convert(trained, tmp_path / "adapter", None)
    assert made.tensors == 10
    model = functional(base.model.config)
    with Checkpointer(trained / "checkpoints", read_only=True) as checkpointer:
        source = checkpointer.read_meta()["source"]
    assert source is None
    from jaxllm.hub.families.config_json import config_json

    source = config_json(base.model.config, None, {})
    adapter = read_peft(tmp_path / "adapter", model, source)
    assert adapter.base == str(finished / "runs/tiny")
    with jax.set_mesh(base.mesh):
        again = merged_params(model, base.params, adapter)
    for one, other in zip(values(merged.params), values(again), strict=True):
        np.testing.assert_array_equal(one, other)
    assert any((one != other).any() for one, other in zip(values(merged.params), values(base.params), strict=True))
    assert convert(trained, tmp_path / "whole", None, merge=True).tensors > 10
    for one, other in zip(values(load_model(tmp_path / "whole").params), values(merged.params), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_cannot_be_converted_is_named(finished: Path, trained: Path, tmp_path: Path) -> None:
    for source, arguments, says in (
        (trained, {"to": "hf"}, "give merge"),
        (trained, {"to": "peft", "merge": True}, "leave merge out"),
        (finished / "runs/tiny", {"to": None}, "say what to write"),
        (finished / "runs/tiny", {"to": "hf", "merge": True}, "nothing to merge"),
        (trained, {"to": "peft", "dtype": "float32"}, "leave dtype"),
    ):
        with pytest.raises(HubError, match=says):
            convert(source, tmp_path / "x", **arguments)


def test_another_base_is_refused(finished: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that an adapter starts from has been trained on meanwhile."""
    from jaxllm.convert import adapter_run

    monkeypatch.setattr(adapter_run, "base_hash", lambda params: "float32:other")
    with pytest.raises(AdapterError, match="it is another model"):
        load_model(trained)


def test_settings_are_checked(finished: Path) -> None:
    """From the command line too; what does not go together is named."""
    config = configure(lambda: runs.run_config(finished), ["--adapter", "dora", "--adapter.targets", "attention,mlp"])
    assert config.adapter == AdapterConfig("dora", targets=("attention", "mlp"))
    for fields, says in (({"rank": 0}, "adapter.rank = 0"), ({"alpha": 0.0}, "alpha"), ({"targets": ()}, "targets")):
        with pytest.raises(ValueError, match=says):
            AdapterConfig("lora", **fields)
    for fields, says in (
        ({"adapter": AdapterConfig("lora", targets=("atention",))}, "Did you mean 'attention'"),
        ({"kind": "compact"}, "updates the base too"),
        ({"trainable": ("gian",)}, "Did you mean 'gain'"),
    ):
        config = runs.run_config(finished, **adapted(finished, **fields))
        with pytest.raises(ConfigError, match=says):
            fitting_mesh(config, run_model(config), 1)
    with pytest.raises(ConfigError, match="init_from"):
        train(runs.run_config(finished, **adapted(finished, init_from="", out=finished / "none")))
