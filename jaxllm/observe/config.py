"""ObserveConfig: trackers, norms by layer, profiles and the step watchdog, in addition to metrics.jsonl."""

from __future__ import annotations

import re
from dataclasses import dataclass

SINKS = ("tensorboard", "wandb", "trackio")


@dataclass(frozen=True)
class ObserveConfig:
    """Observability settings of a run.

    Attributes:
        sinks: trackers that metrics go to in addition to metrics.jsonl: tensorboard, wandb, trackio.
        layers_every: steps between two rows of norms by layer (gradient, parameters, update) in layers.jsonl; 0: none.
            They are partial results of norms that the step computes anyway.
        profile: steps to profile, "10:13" for steps 10, 11 and 12; empty: none. The signal SIGUSR2 profiles the next
            three steps at any time.
        stalled_after: seconds after which a step that does not come back is named on stderr
            (``jaxllm.train.recovery.step_watchdog``); 0: never.
    """

    sinks: tuple[str, ...] = ()
    layers_every: int = 0
    profile: str = ""
    stalled_after: float = 600.0

    def __post_init__(self) -> None:
        for name in self.sinks:
            if name not in SINKS:
                raise ValueError(
                    f"observe.sinks: {name!r} is none of {', '.join(SINKS)}; metrics.jsonl is always there."
                )
        if self.layers_every < 0:
            raise ValueError(f"observe.layers_every = {self.layers_every}; give 0 (none) or a number of steps.")
        if not self.stalled_after >= 0:
            raise ValueError(f"observe.stalled_after = {self.stalled_after}; give 0 (never) or a number of seconds.")
        self.profiled_steps()

    def profiled_steps(self) -> range:
        """Steps to profile.

        Raises:
            ValueError: ``profile`` is not a range of steps.
        """
        if not self.profile:
            return range(0)
        found = re.fullmatch(r"(\d+):(\d+)", self.profile)
        if not found or not 0 < int(found[1]) < int(found[2]):
            raise ValueError(
                f"observe.profile = {self.profile!r}; write FIRST:END, such as 10:13 for the steps 10, 11 and 12; the "
                "first step of a run is 1."
            )
        return range(int(found[1]), int(found[2]))
