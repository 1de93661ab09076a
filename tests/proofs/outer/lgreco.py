"""L-GreCo: its solver is brute force, its choices send fewer bytes than one rank for all, and runs resume with them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import jax
import numpy as np

from jaxllm.train import train
from jaxllm.train.outer.adaptive_step import Layers, best_row, measured_errors
from jaxllm.train.outer.compressed_gradients import GradsConfig
from jaxllm.train.outer.config import OuterConfig
from jaxllm.train.outer.lgreco import candidates
from jaxllm.train.records.run_directory import RunDirectory
from jaxllm.train.run import build_value_and_grad
from tests import quick, tiny
from tests.proofs.harness import proof
from tests.train import runs
from tests.train.outer_runs import batch_at, float32, parts_of, run_of
from tests.train.test_lgreco import solver_error

WIDE = tiny.decoder(kv_heads=4, layers=3, embed_dim=128, mlp=256, head_dim=32)


@proof("outer", count=400, sample=20, bound=0.0)
def lgreco_solver(seed: int) -> float:
    """Bytes of the chosen ranks, less those of the best of all choices, for random errors, bytes and budgets."""
    return solver_error(seed)


@proof("outer", cases=[(seed, rank) for seed in range(5) for rank in (2, 4, 8)], sample=2, bound=0.999)
def lgreco_bytes(case: tuple[int, int]) -> float:
    """Bytes of the chosen ranks, of those of one rank for all, for gradients of a model at no greater error."""
    seed, rank = case
    run = float32(run_of("data=1", OuterConfig(), model=WIDE))
    model, _, mesh, abstract, _ = parts_of(run)
    with jax.set_mesh(mesh):
        take = quick.jit(build_value_and_grad(run, model, mesh))
        _, gradients = take(jax.device_put(quick.params(run.model, seed, 0.1)), batch_at(seed))
        errors = {name: np.asarray(one) for name, one in quick.jit(measured_errors)(gradients).items()}
    layers = Layers.of(abstract.params)
    ranks, sizes = layers.options()
    own = [row for number in range(len(layers.params)) if str(number) in errors for row in errors[str(number)]]
    places = [found.index(rank) if rank in found else len(found) - 2 for found in ranks]
    error = sum(float(row[place]) for row, place in zip(own, places, strict=True))
    row = best_row(layers, errors, (error / float(errors["energy"])) ** 0.5, [], 4)
    chosen = [found.index(one) for found, one in zip(ranks, row, strict=True)]
    assert sum(float(row[place]) for row, place in zip(own, chosen, strict=True)) <= error * (1 + 1e-5)
    sent, uniform = (sum(size[at] for size, at in zip(sizes, found, strict=True)) for found in (chosen, places))
    assert any(candidates(leaf.shape) for leaf in layers.params)
    return sent / uniform


@proof("outer", cases=[2, 5, 6], sample=1)
def lgreco_resumes(stop: int) -> None:
    """A run stopped between choices, or at one, and resumed: losses, evaluation and choices of the run in one go."""
    fields = {"mesh": "data=2,fsdp=4", "grads": GradsConfig("lgreco:0.5", every=3, programs=2)}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        whole = train(runs.run_config(folder, name="whole", **fields))
        directory = runs.stopped_at(folder, stop, name="stopped", **fields)
        again = train(runs.run_config(folder, name="stopped", **fields))
        assert runs.losses(directory) == runs.losses(whole.directory)
        assert again.evaluation == whole.evaluation
        listed = [json.loads((one.directory / "ranks.json").read_text()) for one in (whole, again)]
        assert listed[0] == listed[1]
        assert listed[0][0]["step"] == 0
        assert len({json.dumps(one["ranks"]) for one in listed[0]}) <= 2
        sent = {row["sent_bytes"] for row in RunDirectory(directory).read_metrics() if "sent_bytes" in row}
        assert sent == {one["bytes"] for one in listed[0]}
