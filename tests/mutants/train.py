"""Mutants of the train package: the step, its links and its losses."""

from tests.mutants.mutant import Mutant

CHAIN = "tests/train/test_step_chain.py"
RATE = (f"{CHAIN}::test_the_reported_rate_is_the_rate_of_the_update",)

MUTANTS = [
    Mutant(
        "spikes_of_the_summed_loss",
        "jaxllm/train/step/step_links.py",
        '            loss = result.sums.means()["loss"]\n',
        "            loss = result.sums.loss\n",
        (f"{CHAIN}::test_spikes_are_of_the_mean_loss",),
    ),
    Mutant(
        "reported_rate_counts_skipped_steps",
        "jaxllm/train/step/step_links.py",
        "            count = state.step - before.skipped if count is None else count\n",
        "            count = state.step\n",
        RATE,
    ),
    Mutant(
        "reported_rate_counts_skipped_spikes",
        "jaxllm/train/step/step_links.py",
        "state.step - before.skipped if",
        "state.step if",
        RATE,
    ),
    Mutant(
        "reported_rate_counts_overflows",
        "jaxllm/train/step/step_links.py",
        "            count = None if result.skipped is None else schedule_count(state.opt_state)\n",
        "            count = None\n",
        RATE,
    ),
    Mutant(
        "skipped_step_advances_the_optimizer",
        "jaxllm/train/step/step_chain.py",
        "    old = before.params, before.opt_state, no_updates\n",
        "    old = before.params, result.state.opt_state, no_updates\n",
        ("tests/train/test_step_chain.py::test_the_reported_rate_is_the_rate_of_the_update",),
    ),
    Mutant(
        "skipped_step_moves_the_parameters",
        "jaxllm/train/step/step_chain.py",
        "    old = before.params, before.opt_state, no_updates\n",
        "    old = result.state.params, before.opt_state, no_updates\n",
        ("tests/train/test_step_chain.py::test_a_skipped_step_leaves_everything",),
    ),
    Mutant(
        "overflow_raises_the_loss_scale",
        "jaxllm/train/step/numerics.py",
        "self.scale), self.scale / 2)",
        "self.scale), self.scale * 2)",
        ("tests/train/test_step_chain.py::test_an_overflow_halves_the_loss_scale",),
    ),
    Mutant(
        "loss_scale_grows_a_step_late",
        "jaxllm/train/step/numerics.py",
        "grows = steps >= GROWTH_EVERY",
        "grows = steps > GROWTH_EVERY",
        ("tests/train/test_precision.py::test_the_scale_grows_after_as_many_steps_without_overflow",),
    ),
    Mutant(
        "median_of_even_windows_is_the_upper",
        "jaxllm/train/step/loss_spikes.py",
        "jnp.sort(x)[(x.shape[0] - 1) // 2]",
        "jnp.sort(x)[x.shape[0] // 2]",
        ("tests/train/test_spikes.py::test_early_steps_falling_losses_and_new_levels_are_none",),
    ),
    Mutant(
        "spike_of_the_loss_alone",
        "jaxllm/train/step/loss_spikes.py",
        "score = jnp.maximum(jnp.maximum(*above), 0)",
        "score = jnp.maximum(above[0], 0)",
        ("tests/train/test_spikes.py::test_early_steps_falling_losses_and_new_levels_are_none",),
    ),
    Mutant(
        "balance_loss_of_all_positions",
        "jaxllm/train/step/routing_losses.py",
        "        share = jnp.sum(routing.shares.astype(dtype) * real[..., None], axis=(0, 1)) / tokens\n",
        "        share = jnp.sum(routing.shares.astype(dtype), axis=(0, 1)) / tokens\n",
        ("tests/train/test_routing.py::test_losses_are_their_formulas",),
    ),
    Mutant(
        "router_z_loss_is_not_squared",
        "jaxllm/train/step/routing_losses.py",
        "z = jnp.square(jax.nn.logsumexp(routing.logits.astype(dtype), axis=-1))",
        "z = jax.nn.logsumexp(routing.logits.astype(dtype), axis=-1)",
        ("tests/train/test_routing.py::test_losses_are_their_formulas",),
    ),
    Mutant(
        "balance_biases_move_towards_loaded_experts",
        "jaxllm/train/step/routing_losses.py",
        "rate * jnp.sign(mean - counts)",
        "rate * jnp.sign(counts - mean)",
        ("tests/train/test_routing.py::test_biases_move_towards_even_loads",),
    ),
    Mutant(
        "window_counts_no_tokens_at_the_start",
        "jaxllm/train/model_flops.py",
        "(w * (w + 1) / 2 + (seq_len - w) * w) / seq_len",
        "(w * (w - 1) / 2 + (seq_len - w) * w) / seq_len",
        ("tests/train/test_flops.py::test_tokens_attended_to",),
    ),
    Mutant(
        "link_order_reversed",
        "jaxllm/train/step/step_chain.py",
        ("    for link in links:\n        step = step if link.wrap is None else link.wrap(step)\n"),
        ("    for link in reversed(links):\n        step = step if link.wrap is None else link.wrap(step)\n"),
        ("tests/train/test_step_chain.py::test_links_are_applied_in_order_the_first_one_innermost",),
    ),
    Mutant(
        "runs_together_take_the_first_ones_gradients",
        "jaxllm/train/together/together_step.py",
        "lambda x, number=number: x[number], found",
        "lambda x, number=number: x[0], found",
        ("tests/peft/test_together.py::test_each_run_is_as_trained_alone",),
    ),
    Mutant(
        "runs_together_keep_later_checkpoints",
        "jaxllm/train/together/shared_base.py",
        "            saver.set_aside_after(max(common))\n",
        "            pass\n",
        ("tests/peft/test_together.py::test_they_resume_bitwise",),
    ),
]
