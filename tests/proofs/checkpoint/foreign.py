"""Runs of other frameworks: fragments of random ranks become this package's parameters, bit for bit."""

from __future__ import annotations

import random
import tempfile
import warnings
from pathlib import Path

import numpy as np

from jaxllm.checkpoint import Checkpointer
from jaxllm.convert.convert import convert
from tests import tiny
from tests.checkpoint import foreign_runs
from tests.proofs.harness import proof


@proof("checkpoint", count=100, sample=2)
def foreign_runs_are_restored(seed: int) -> None:
    """Megatron's files of tensor ranks and stages, or torchtitan's in DCP, of random models, converted by ``convert``.

    The names, cuts and row orders of the files are written by hand; every leaf's bytes are equal.
    """
    rng = random.Random(seed)
    ranks, stages = rng.choice([1, 2, 4]), rng.choice([1, 2, 3])
    kv_heads = ranks * rng.choice([1, 2])
    megatron = rng.random() < 0.7
    config = tiny.decoder(
        heads=kv_heads * rng.choice([1, 2, 3]),
        kv_heads=kv_heads,
        head_dim=rng.choice([4, 6]),
        embed_dim=rng.choice([8, 12]),
        mlp=ranks * rng.choice([3, 5]),
        vocab_size=(vocabulary := rng.randint(20, 70)),
        layers=stages * rng.choice([1, 2]),
        dtype=rng.choice(["float32", "bfloat16"]),
        qk_norm=rng.choice(["none", "head"]) if megatron else "none",
        bias="none",
        tied=megatron and rng.random() < 0.5,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        leaves, tensors = foreign_runs.published(config, folder / "like", seed)
        if megatron:
            padded = -(-vocabulary // (8 * ranks)) * 8 * ranks
            foreign_runs.write_megatron(folder / "run", config, tensors, ranks, stages, padded, rng.random() < 0.5)
        else:
            import torch.distributed.checkpoint as dcp

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there are no other processes
                dcp.save(foreign_runs.torchtitan_state(config, tensors), checkpoint_id=folder / "run")
        convert(folder / "run", folder / "out", "jaxllm", like=folder / "like")
        with Checkpointer(folder / "out" / "checkpoints", read_only=True) as found:
            saved = found.map_leaves(None, prefix="params")
            assert saved.keys() == leaves.keys()
            for path, leaf in leaves.items():
                assert np.array(saved[path]).tobytes() == np.ascontiguousarray(leaf).tobytes(), path
                assert saved[path].dtype == leaf.dtype
