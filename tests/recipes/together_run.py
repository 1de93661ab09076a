"""Run of a second for several processes: it divides over eight devices in every way.

TOGETHER='{"rank": 2, "step": 6, "signal": "SIGKILL"}'    process 2 sends itself a signal when it has seen step 6
TOGETHER='{..., "once": "FILE"}'                          only if FILE is not there; makes it
TOGETHER='{"rank": 2, "peak": 0.02}'                      process 2 has another learning rate
TOGETHER='{"rank": 2, "jax": "0.1"}'                      process 2 has another version of jax
TOGETHER='{"memory": true}'                               snapshots in memory at every step; disk at the end
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from jaxllm.checkpoint import CheckpointConfig, MemoryConfig
from jaxllm.data import DataConfig
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.parallel.distributed import DistributedConfig
from jaxllm.train import RunConfig, run_processes
from jaxllm.train.records.live_view import LiveView


def together_run() -> RunConfig:
    """Twelve steps in float64, saving every four."""
    special = json.loads(os.environ.get("TOGETHER", "{}"))
    mine = special if str(special.get("rank")) == os.environ.get("JAXLLM_PROCESS_ID") else {}
    if "step" in mine:
        signal_at(mine["step"], signal.Signals[mine["signal"]], mine.get("once"))
    if "jax" in mine:
        versions = run_processes.versions
        run_processes.versions = lambda: {**versions(), "jax": mine["jax"]}
    block = BlockConfig(AttentionConfig(heads=8, kv_heads=8, head_dim=4), MlpConfig(hidden=32))
    return RunConfig(
        name="together",
        model=DecoderConfig(
            vocab_size=272, embed_dim=16, layers=1, pattern=(block,), dtype="float64", param_dtype="float64"
        ),
        data=DataConfig(tokenizer="byte", seq_len=16, batch_size=8, heldout_fraction=0.1),
        optim=OptimConfig(schedule=ScheduleConfig(peak=mine.get("peak", 1e-2))),
        steps=12,
        checkpoint=(
            CheckpointConfig(every=100, memory=MemoryConfig(every=1, linger=300))
            if special.get("memory")
            else CheckpointConfig(every=4)
        ),
        distributed=DistributedConfig(start_timeout=200, lost_after=30),
        log_every=1,
    )


def signal_at(step: int, number: signal.Signals, once: str | None = None) -> None:
    """This process gets a signal when it has seen the metrics of ``step``; if ``once``, no process after it does."""
    show, last = LiveView.step, step

    def shown(self: LiveView, step: int, metrics: dict[str, float]) -> None:
        show(self, step, metrics)
        if step == last and (once is None or not Path(once).exists()):
            if once is not None:
                Path(once).touch()
            os.kill(os.getpid(), number)

    LiveView.step = shown
