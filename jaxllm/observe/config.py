"""What of a run is looked at, beyond its log of metrics."""

from __future__ import annotations

import re
from dataclasses import dataclass

SINKS = ("tensorboard", "wandb", "trackio")


@dataclass(frozen=True)
class ObserveConfig:
    """Looking at a run.

    Attributes:
        sinks: where metrics go beside metrics.jsonl: tensorboard, wandb, trackio.
        layers_every: steps between two rows of norms by layer (gradient, parameters, update) in layers.jsonl; 0 for
            none. They are sums that the step makes anyway, kept apart.
        profile: steps whose profile is taken, "10:13" for 10, 11 and 12; empty for none. SIGUSR2 takes one of the next
            three at any time.
    """

    sinks: tuple[str, ...] = ()
    layers_every: int = 0
    profile: str = ""

    def __post_init__(self) -> None:
        for name in self.sinks:
            if name not in SINKS:
                raise ValueError(
                    f"observe.sinks: {name!r} is none of {', '.join(SINKS)}; metrics.jsonl is always there."
                )
        if self.layers_every < 0:
            raise ValueError(f"observe.layers_every = {self.layers_every}; give 0 (none) or a number of steps.")
        self.profiled_steps()

    def profiled_steps(self) -> range:
        """The steps whose profile is taken.

        Raises:
            ValueError: ``profile`` is no range of steps.
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
