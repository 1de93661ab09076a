"""OuterConfig: how replicas that train by themselves are brought together every H steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxllm.train.outer.compression import CompressedMean, parse_compression


@dataclass(frozen=True)
class OuterConfig:
    """Outer step of replicas, over the mesh axis ``replica``.

    Attributes:
        kind: "none". "diloco": Nesterov momentum on the mean of the replicas' pseudo-gradients (arXiv:2311.08105).
            "sparseloco": no momentum, but sparse messages with error feedback that takes its place (arXiv:2508.15706).
            "co2": the mean of one round is sent in pieces beside the steps of the next, and applied after them
            (``jaxllm.train.outer.co2``: arXiv:2401.16265).
        every: H, steps of a round, between two outer steps.
        rate: outer learning rate; None: 0.7 for "diloco", 1 for the others.
        momentum: outer momentum; None: 0.9 for "diloco", 0.5 for "co2"; "sparseloco" has none.
        compress: what is sent of a pseudo-gradient (``jaxllm.train.outer.compression``): "int8", "int2", "topk:SHARE",
            "topk:SHARE,int8"; empty: all of it. "sparseloco" sends "topk:0.02,int2" by default.
        feedback: error feedback: share of what a replica has not sent that it adds to its next pseudo-gradient; 0:
            none; None: 0.95 for "sparseloco", 1 for others with top-k, else 0.
        slow: numbers of the replicas whose messages between pipeline stages are projected
            (``jaxllm.parallel.pipeline.stage_messages``); others send them whole.
        stage_rank: numbers that a slow replica sends for each token, of the model's width.
        clip: "co2" alone: the outer momentum is scaled down to this global norm; 0: no clipping.
    """

    kind: Literal["none", "diloco", "sparseloco", "co2"] = "none"
    every: int = 50
    rate: float | None = None
    momentum: float | None = None
    compress: str = ""
    feedback: float | None = None
    clip: float = 0.0
    slow: tuple[int, ...] = ()
    stage_rank: int = 0

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"outer: every = {self.every}; give 1 or more inner steps.")
        if self.kind == "none":
            given = [
                name
                for name in ("rate", "momentum", "compress", "feedback", "clip", "slow", "stage_rank")
                if getattr(self, name)
            ]
            if given:
                raise ValueError(f'outer: {given[0]} is of an outer step; give outer.kind too, such as "diloco".')
        if self.rate is not None and not self.rate > 0:
            raise ValueError(f"outer: rate = {self.rate}; give a positive number.")
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ValueError(f"outer: momentum = {self.momentum}; give 0 (none) or a number below 1.")
        if self.feedback is not None and not 0 <= self.feedback <= 1:
            raise ValueError(f"outer: feedback = {self.feedback}; give a number from 0 (none) to 1.")
        if self.clip < 0 or (self.clip and self.kind != "co2"):
            raise ValueError(f'outer: clip = {self.clip}; give 0, or a positive norm with outer.kind = "co2".')
        if self.stage_rank < 0 or bool(self.slow) != bool(self.stage_rank):
            raise ValueError(
                f"outer: slow = {self.slow} and stage_rank = {self.stage_rank}; give the slow replicas and a positive "
                "rank of their messages, or neither."
            )
        if len(set(self.slow)) < len(self.slow) or min(self.slow, default=0) < 0:
            raise ValueError(f"outer: slow = {self.slow}; give numbers of replicas from 0 on, each once.")
        if self.kind == "sparseloco" and self.momentum:
            raise ValueError(
                f'outer: momentum = {self.momentum}, but error feedback takes its place in "sparseloco"; leave it out, '
                'or give outer.kind = "diloco".'
            )
        if self.kind == "co2" and (self.compress or self.feedback):
            raise ValueError(
                'outer: "co2" sends whole values beside the steps, so compress and feedback have no effect; leave them '
                'out, or give outer.kind = "diloco".'
            )
        if self.error_feedback and self.exchange.is_exact:
            raise ValueError(
                f"outer: feedback = {self.feedback}, but all values are sent; give outer.compress too, or feedback = 0."
            )

    @property
    def exchange(self) -> CompressedMean:
        """Compressed mean of the pseudo-gradients."""
        default = "topk:0.02,int2" if self.kind == "sparseloco" else ""
        return parse_compression(self.compress or default, "outer.compress")

    @property
    def outer_rate(self) -> float:
        """Outer learning rate, or its default."""
        return (0.7 if self.kind == "diloco" else 1.0) if self.rate is None else self.rate

    @property
    def outer_momentum(self) -> float:
        """Outer momentum, or its default."""
        return {"diloco": 0.9, "co2": 0.5}.get(self.kind, 0.0) if self.momentum is None else self.momentum

    @property
    def error_feedback(self) -> float:
        """Error feedback, or its default."""
        if self.feedback is not None:
            return self.feedback
        return 0.95 if self.kind == "sparseloco" else 1.0 if self.exchange.loses else 0.0
