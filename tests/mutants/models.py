"""Mutants of the models package, and of how configurations of other libraries are read."""

from tests.mutants.mutant import Mutant

PEER = "tests/hub/test_peer_parts.py"
YARN = (f"{PEER}::test_yarn_is_that_of_transformers",)
LONGROPE = (f"{PEER}::test_longrope_changes_beyond_the_original_length",)
ROUTER = (f"{PEER}::test_grouped_router_is_that_of_transformers",)

MUTANTS = [
    Mutant(
        "yarn_ramp_ends_at_the_last_pair",
        "jaxllm/models/layers/rope_scaling.py",
        "        low, high = max(low, 0), min(high, dims - 1)\n",
        "        low, high = max(low, 0), min(high, dims // 2 - 1)\n",
        YARN,
    ),
    Mutant(
        "yarn_ramp_is_not_clamped_above",
        "jaxllm/models/layers/rope_scaling.py",
        "        low, high = max(low, 0), min(high, dims - 1)\n",
        "        low = max(low, 0)\n",
        YARN,
    ),
    Mutant(
        "yarn_ramp_is_not_clamped_below",
        "jaxllm/models/layers/rope_scaling.py",
        "        low, high = max(low, 0), min(high, dims - 1)\n",
        "        low, high = low, min(high, dims - 1)\n",
        YARN,
    ),
    Mutant(
        "longrope_is_long_at_the_original_length",
        "jaxllm/models/layers/rope_scaling.py",
        "        return jnp.where((length > self.original_length)[:, None], long, short)\n",
        "        return jnp.where((length >= self.original_length)[:, None], long, short)\n",
        LONGROPE,
    ),
    Mutant(
        "length_is_the_last_position",
        "jaxllm/models/layers/rope.py",
        "positions.max(axis=1) + 1, dtype)",
        "positions.max(axis=1), dtype)",
        LONGROPE,
    ),
    Mutant(
        "mscale_inverted",
        "jaxllm/hub/families/rope_fields.py",
        "        attention = grown[0] / grown[1]\n",
        "        attention = grown[1] / grown[0]\n",
        YARN,
    ),
    Mutant(
        "one_mscale_is_enough",
        "jaxllm/hub/families/rope_fields.py",
        "    if attention is None and above and below:\n",
        "    if attention is None and above and (below := below or 1.0):\n",
        YARN,
    ),
    Mutant(
        "scores_of_other_groups_are_zero",
        "jaxllm/models/moe/router.py",
        "    return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(worth.shape)\n",
        "    return jnp.where(kept[..., None], grouped, 0.0).reshape(worth.shape)\n",
        ROUTER,
    ),
    Mutant(
        "groups_are_chosen_without_the_balance_bias",
        "jaxllm/models/moe/router.py",
        "        worth = _in_best_groups(config, worth)\n",
        "        worth = jnp.where(jnp.isfinite(_in_best_groups(config, scores)), worth, -jnp.inf)\n",
        ROUTER,
    ),
    Mutant(
        "combine_weights_have_the_balance_bias",
        "jaxllm/models/moe/router.py",
        "        weights = jnp.take_along_axis(scores, experts, axis=-1)\n",
        "        weights = jnp.take_along_axis(worth, experts, axis=-1)\n",
        ROUTER,
    ),
]
