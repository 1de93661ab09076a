"""Reinforcement learning of language models: rollouts by the engine, rewards, advantages, and the policy's updates.

Besides, the training of what the engine serves a model with: retaining heads of its KV cache, drafts of
self-speculation, and draft heads.
"""

from typing import TYPE_CHECKING

from jaxllm.lazy import lazy_exports

if TYPE_CHECKING:
    from jaxllm.posttrain.algorithms import ALGORITHMS, Algorithm
    from jaxllm.posttrain.frozen.distillation import DistillationRunConfig, train_distilled
    from jaxllm.posttrain.frozen.draft_training import DraftRunConfig, train_draft
    from jaxllm.posttrain.frozen.head_training import DraftHeadRunConfig, train_head
    from jaxllm.posttrain.frozen.retention_training import HeadsRunConfig, train_heads
    from jaxllm.posttrain.policies_together import train_policies_together
    from jaxllm.posttrain.policy_config import PolicyRunConfig, RolloutConfig
    from jaxllm.posttrain.policy_training import train_policy
    from jaxllm.posttrain.rewards import REWARDS, RewardError

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "jaxllm.posttrain.algorithms": ("ALGORITHMS", "Algorithm"),
        "jaxllm.posttrain.frozen.distillation": ("DistillationRunConfig", "train_distilled"),
        "jaxllm.posttrain.frozen.draft_training": ("DraftRunConfig", "train_draft"),
        "jaxllm.posttrain.policies_together": ("train_policies_together",),
        "jaxllm.posttrain.policy_config": ("PolicyRunConfig", "RolloutConfig"),
        "jaxllm.posttrain.policy_training": ("train_policy",),
        "jaxllm.posttrain.frozen.head_training": ("DraftHeadRunConfig", "train_head"),
        "jaxllm.posttrain.frozen.retention_training": ("HeadsRunConfig", "train_heads"),
        "jaxllm.posttrain.rewards": ("REWARDS", "RewardError"),
    },
)

__all__ = [
    "ALGORITHMS",
    "REWARDS",
    "Algorithm",
    "DistillationRunConfig",
    "DraftHeadRunConfig",
    "DraftRunConfig",
    "HeadsRunConfig",
    "PolicyRunConfig",
    "RewardError",
    "RolloutConfig",
    "train_distilled",
    "train_draft",
    "train_head",
    "train_heads",
    "train_policies_together",
    "train_policy",
]
