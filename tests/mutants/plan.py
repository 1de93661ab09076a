"""Mutants of the plan package: memory and step time by formula."""

from tests.mutants.mutant import Mutant

FORMULAS = "tests/plan/test_formulas.py"
BUBBLE = (f"{FORMULAS}::test_a_pipelines_bubble_is_that_of_its_timeline",)
SLOTS = (f"{FORMULAS}::test_slots_by_formula_are_those_of_the_table",)
ROWS = (f"{FORMULAS}::test_rows_of_experts_are_those_of_the_dispatch",)
MEMORY = "jaxllm/plan/formulas/memory_estimate.py"
TIME = "jaxllm/plan/formulas/step_time.py"

MUTANTS = [
    Mutant(
        "bubble_is_a_share_of_busy_time",
        TIME,
        "    return busy * idle / (1 - idle)\n",
        "    return busy * idle\n",
        BUBBLE,
    ),
    Mutant(
        "bubble_of_one_stage_less",
        TIME,
        "        idle = (work.stages - 1) / (chunks * micro + work.stages - 1)\n",
        "        idle = (work.stages - 1) / (chunks * micro + work.stages)\n",
        BUBBLE,
    ),
    Mutant(
        "bubble_without_chunks",
        TIME,
        "        idle = (work.stages - 1) / (chunks * micro + work.stages - 1)\n",
        "        idle = (work.stages - 1) / (micro + work.stages - 1)\n",
        BUBBLE,
    ),
    Mutant(
        "no_bubble",
        TIME,
        "        _bubble(work, busy, forward),\n",
        "        0.0 * _bubble(work, busy, forward),\n",
        BUBBLE,
    ),
    Mutant(
        "one_f_one_b_holds_a_slot_for_each_stage",
        MEMORY,
        "min(stages, micro), 0, 0)",
        "stages, 0, 0)",
        SLOTS,
    ),
    Mutant(
        "one_f_one_b_holds_all_micro_batches",
        MEMORY,
        "min(stages, micro), 0, 0)",
        "max(stages, micro), 0, 0)",
        SLOTS,
    ),
    Mutant(
        "capacity_beyond_the_tokens",
        MEMORY,
        "    return moe.experts * min(tokens, math.ceil(",
        "    return moe.experts * max(tokens, math.ceil(",
        ROWS,
    ),
    Mutant(
        "capacity_rounded_for_all_experts_together",
        MEMORY,
        "    return moe.experts * min(tokens, math.ceil(moe.capacity * tokens * moe.top_k / moe.experts))\n",
        "    return min(moe.experts * tokens, math.ceil(moe.capacity * tokens * moe.top_k))\n",
        ROWS,
    ),
    Mutant(
        "rows_of_one_shard_alone",
        MEMORY,
        "        return tokens * moe.top_k * shards\n",
        "        return tokens * moe.top_k\n",
        ROWS,
    ),
]
