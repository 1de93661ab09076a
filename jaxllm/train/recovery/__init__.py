"""Recovery of a run: saving, resuming, and rolling back after a loss spike."""

from typing import TYPE_CHECKING

from jaxllm.lazy import lazy_exports

if TYPE_CHECKING:
    from jaxllm.train.recovery.rollback import NonFiniteLossError, SpikesError

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "jaxllm.train.recovery.rollback": (
            "NonFiniteLossError",
            "SpikesError",
        )
    },
)

__all__ = ["NonFiniteLossError", "SpikesError"]
