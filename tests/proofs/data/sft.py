"""The real SmolLM2 fine-tuned on real conversations by the recipe, exported, and opened by transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import from_dict
from jaxllm.convert.convert import convert
from jaxllm.data import load_dataset
from jaxllm.infer import load_model
from jaxllm.models import Segments, functional
from jaxllm.train import Evaluator, RunConfig
from jaxllm.train.init_from import open_initial_model
from sharding import MeshSpec
from tests import environment
from tests.proofs.harness import proof

STEPS = 24
FEWER = 6
"""Steps of the sample in `make test`."""


SETTINGS = {
    "data.seq-len": "128",
    "data.batch-size": "4",
    "data.heldout-fraction": "0.008",
    "accumulate": "1",
    "optim.schedule.kind": "constant",
    "checkpoint.every": "1000",
}
"""The recipe in rows of 128 tokens, four a step."""


def run_recipe(folder: Path, steps: int, *more: str) -> Path:
    """``jaxllm train`` in a process of its own, which has one device; the run's directory."""
    words = [word for name, value in SETTINGS.items() for word in (f"--{name}", value)]
    recipe = environment.ROOT / "recipes" / "sft.py"
    command = [sys.executable, "-m", "jaxllm.cli", "train", f"{recipe}:sft_smollm2", "--steps", str(steps)]
    done = subprocess.run(
        [*command, "--out", str(folder), *words, *more], cwd=environment.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "sft_smollm2"


@proof("data", count=1, sample=1, bound={"nll_kept": 0.95, "logits": 1e-5}, parallel=False)
def sft_smollm2_on_chats(seed: int) -> dict[str, float]:
    """Held-out assistant NLL falls; nll_kept: after over before. The exported model has transformers' logits:
    max |ours - theirs| / max |theirs|, of the run's own checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM

    steps = FEWER if "PYTEST_CURRENT_TEST" in os.environ else STEPS
    with tempfile.TemporaryDirectory() as name:
        finished = run_recipe(Path(name), steps)
        config = from_dict(RunConfig, json.loads((finished / "config.json").read_text()))
        begin = open_initial_model(config.init_from, config.model)
        mesh = MeshSpec.parse("dp").build(jax.devices()[:1])
        run = load_dataset(config.data, begin.tokenizer, begin.template)
        assert run.heldout is not None
        evaluate = Evaluator(functional(config.model), mesh, run.heldout)
        before = evaluate(begin.load(mesh, config.model.param_dtype))
        result = json.loads((finished / "receipt.json").read_text())["result"]
        after = result["heldout_nll"]
        assert before.tokens == run.heldout.target_tokens
        print(f"{steps} steps: held-out assistant NLL {before.nll:.4f} -> {after:.4f}, {before.tokens} tokens")

        loaded = load_model(finished)
        convert(str(finished), Path(name) / "hf", "hf")
        theirs = AutoModelForCausalLM.from_pretrained(Path(name) / "hf", dtype=torch.float32).eval()
        batch = run.heldout.batch_at(0)
        tokens = batch.tokens[:2, : int(batch.segment_ids[:2].sum(1).min())]
        tokens = tokens[:, : min(48, tokens.shape[1])]
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        with jax.set_mesh(loaded.mesh):
            hidden, _ = loaded.model.forward(loaded.params, jnp.asarray(tokens), positions, Segments())
            ours = np.asarray(loaded.model.head(loaded.params, hidden))
        with torch.no_grad():
            expected = theirs(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
        logits = float(np.abs(ours - expected).max() / np.abs(expected).max())
        assert theirs.generation_config.eos_token_id is not None
        return {"nll_kept": after / before.nll, "logits": logits}
