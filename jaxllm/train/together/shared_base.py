"""Shared base: the frozen base of runs that are trained together, which is read and held once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh

from jaxllm.models.param_subset import select
from jaxllm.train.config import RunConfig
from jaxllm.train.frozen_base import trained_only
from jaxllm.train.init_from import InitialModel, open_initial_model
from jaxllm.train.recovery.resume import ResumeError, start_state
from jaxllm.train.recovery.saving import Saver
from jaxllm.train.run import Run
from jaxllm.train.run_model import saved_params
from jaxllm.train.step.train_state import TrainState


class LoadedOnce:
    """Initial model whose parameters are read once while several runs start from them.

    Attributes:
        model: the initial model.
    """

    def __init__(self, config: RunConfig):
        opened = open_initial_model(config.init_from, config.model)
        self._load, self._params = opened.load, None
        self.model: InitialModel = replace(opened, load=self._loaded)

    def _loaded(self, mesh: Mesh, dtype: str) -> Any:
        if self._params is None:
            self._params = self._load(mesh, dtype)
        return self._params

    def release(self) -> None:
        """Forgets the parameters, which methods such as qlora hold in another form; the next start reads them again."""
        self._params = None


def start_together(
    runs: Sequence[Run], savers: Sequence[Saver], initial: LoadedOnce
) -> tuple[Any, tuple[TrainState, ...], int]:
    """The base that runs share, their states without it, and the steps that they have done.

    Runs resume from the newest step that all of them have a checkpoint of. Later checkpoints of a run, which a start
    that was killed between two saves leaves behind, are set aside.

    Raises:
        ResumeError: as for a run alone; or some runs have checkpoints and others have none, or none of a common step.
    """
    steps = [set(saver.disk.steps()) for saver in savers]
    if any(steps):
        common = set.intersection(*steps)
        if not common:
            listed = "; ".join(
                f"{run.config.name}: {sorted(own) or 'none'}" for run, own in zip(runs, steps, strict=True)
            )
            raise ResumeError(
                f"runs that are trained together resume from one step, but there is none of which all have a "
                f"checkpoint ({listed}). Train those that are behind by themselves, or start all under another name."
            )
        for saver in savers:
            saver.set_aside_after(max(common))
    base, states, firsts = None, [], []
    mask = saved_params(runs[0].config, runs[0].model)
    for run, saver in zip(runs, savers, strict=True):
        state, first = start_state(run, saver)
        if base is None:
            base = select(jax.tree.map(lambda own: not own, mask), state.params)
        states.append(trained_only(run.base, state))
        firsts.append(first)
    initial.release()
    if len(set(firsts)) > 1:
        names = ", ".join(f"{run.config.name} {first}" for run, first in zip(runs, firsts, strict=True))
        raise ResumeError(
            f"a checkpoint is damaged, and the older ones are of different steps ({names}). Delete the checkpoints of "
            "the other runs after the earliest of these steps, and start again."
        )
    return base, tuple(states), firsts[0]
