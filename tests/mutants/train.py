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
]
