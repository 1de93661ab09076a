"""Compiled programs: state bytes fall as 1/N under fsdp, and an 8B step compiles for pods."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st

from jaxllm.models import functional, param_count
from jaxllm.train import RunConfig
from jaxllm.train.compile_step import compile_for
from recipes.llama3 import llama3_8b
from tests import tiny
from tests.proofs.harness import proof

EIGHT = {"cpu": "cpu:8", "tpu": "v6e:2x4"}
STATE_BYTES = 4 * 3  # float32 parameter and two moments


def small_run(mesh: str) -> RunConfig:
    """A run whose parameters outweigh its batch, every dimension whole tiles of a TPU (8 x 128) also when split."""
    model = tiny.decoder(
        dtype="float32", embed_dim=256, heads=8, kv_heads=8, head_dim=128, mlp=512, vocab_size=2048, layers=4
    )
    run = RunConfig(model=model, mesh=mesh)
    return dataclasses.replace(run, data=dataclasses.replace(run.data, batch_size=8, seq_len=128))


@proof(
    "first_run",
    count=6,
    sample=1,
    chunk=6,
    strategy=st.tuples(st.sampled_from(["cpu", "tpu"]), st.sampled_from([2, 4, 8])),
    bound=0.01,
)
def fsdp_state_bytes(example: tuple[str, int]) -> float:
    """Compiled bytes of parameters and optimizer per device are the whole divided by fsdp = N, within 1%.

    What is not divided: the step counters and the random key (a few bytes), and the device's own layout padding.
    """
    platform, n = example
    run = small_run(f"data={8 // n},fsdp={n}")
    report = compile_for(run, EIGHT[platform])
    batch = 4 * 4 * run.data.batch_size * run.data.seq_len // 8  # four int32 arrays, over all eight
    whole = STATE_BYTES * param_count(functional(run.model).abstract())
    return abs((report.argument_bytes - batch) / (whole / n) - 1)


@proof("first_run", count=2, sample=1, chunk=2, strategy=st.sampled_from(["v6e:8x8", "h100:8x8"]))
def llama3_8b_compiles(on: str) -> None:
    """The 8B recipe's step, rows of 8,192 tokens, compiles for 64 chips and fits them."""
    report = compile_for(llama3_8b(), on)
    print(report)
    assert report.num_devices == 64
    assert report.fits, f"over by {report.over_bytes} bytes"
    # Parameters and moments in float32, divided over all devices; the batch is small beside them.
    assert abs(report.argument_bytes / (8.03e9 * STATE_BYTES / 64) - 1) < 0.01
    kinds = {row.kind for row in report.collectives}
    assert "all-gather" in kinds, kinds
