"""Mutants of the plan package: memory and step time by formula."""

from tests.mutants.mutant import Mutant

FORMULAS = "tests/plan/test_formulas.py"
BUBBLE = (f"{FORMULAS}::test_a_pipelines_bubble_is_that_of_its_timeline",)
SLOTS = (f"{FORMULAS}::test_slots_by_formula_are_those_of_the_table",)
ROWS = (f"{FORMULAS}::test_rows_of_experts_are_those_of_the_dispatch",)
CAPACITY = ("tests/models/test_moe.py::test_capacity_keeps_first_choices_and_counts_what_it_drops",)
DISPATCH = "jaxllm/models/moe/expert_dispatch.py"
MEMORY = "jaxllm/plan/formulas/memory_estimate.py"
TIME = "jaxllm/plan/formulas/step_time.py"

MUTANTS = [
    Mutant(
        "copies_of_the_state_that_stays",
        "jaxllm/plan/persistent_share.py",
        "passes + streamed * host.seconds_per_byte",
        "passes + stays * host.seconds_per_byte",
        ("tests/plan/test_persistent_share.py::test_nothing_that_fits_is_faster",),
    ),
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
        "held = min(stages, micro)",
        "held = stages",
        SLOTS,
    ),
    Mutant(
        "one_f_one_b_holds_all_micro_batches",
        MEMORY,
        "held = min(stages, micro)",
        "held = max(stages, micro)",
        SLOTS,
    ),
    Mutant(
        "interleaved_chunks_as_many_as_stages_need",
        MEMORY,
        "2 * (stages - 1) + (chunks - 1) * stages",
        "2 * (stages - 1) + chunks * stages",
        SLOTS,
    ),
    Mutant(
        "zero_bubble_waits_for_the_forward_pass",
        TIME,
        "(work.stages - 1) * max(forward, rest)",
        "(work.stages - 1) * forward",
        (f"{FORMULAS}::test_a_bubble_that_depends_on_costs_is_that_of_its_timeline",),
    ),
    Mutant(
        "ring_attention_has_a_kernel_on_gpus",
        "jaxllm/plan/formulas/device_work.py",
        'return taken and not (ring and platform == "gpu")',
        "return taken",
        (f"{FORMULAS}::test_attention_without_a_kernel_moves_its_scores",),
    ),
    Mutant(
        "capacity_beyond_the_tokens",
        DISPATCH,
        "    return min(tokens, math.ceil(",
        "    return max(tokens, math.ceil(",
        CAPACITY,
    ),
    Mutant(
        "capacity_rounded_down",
        DISPATCH,
        "math.ceil(capacity * tokens * top_k / experts)",
        "math.floor(capacity * tokens * top_k / experts)",
        CAPACITY,
    ),
    Mutant(
        "buffers_with_a_capacity_are_exchanged_in_rounds",
        "jaxllm/plan/formulas/device_work.py",
        "    return moe.capacity is None and shards > 1\n",
        "    return shards > 1\n",
        (f"{FORMULAS}::test_buffers_with_a_capacity_are_kept_where_rows_in_rounds_are_sent_again",),
    ),
    Mutant(
        "rows_of_one_shard_alone",
        MEMORY,
        "        return receive_rows(tokens * moe.top_k, shards)\n",
        "        return tokens * moe.top_k\n",
        ROWS,
    ),
    Mutant(
        "all_reduce_sends_once",
        "jaxllm/plan/formulas/collective_time.py",
        'twice = 2 if kind == "all-reduce" else 1\n        latency',
        "twice = 1\n        latency",
        ("tests/plan/test_hardware.py::test_collectives_take_what_links_allow",),
    ),
    Mutant(
        "levels_do_not_overlap",
        "jaxllm/plan/formulas/collective_time.py",
        "        return max(self.near, self.far)\n",
        "        return self.near + self.far\n",
        ("tests/plan/test_hardware.py::test_two_levels_overlap",),
    ),
    Mutant(
        "optimal_size_by_the_other_exponent",
        "jaxllm/plan/scaling_laws.py",
        "(flops / FLOPS) ** (self.beta / (self.alpha + self.beta))",
        "(flops / FLOPS) ** (self.alpha / (self.alpha + self.beta))",
        ("tests/plan/test_scaling.py::test_no_other_split_is_better",),
    ),
    Mutant(
        "tiles_waste_over_one_dimension",
        "jaxllm/plan/formulas/memory_estimate.py",
        "_up(shape[lane], 128)",
        "_up(shape[lane], 64)",
        ("tests/plan/test_formulas.py::test_arrays_on_tpus_fill_tiles_over_the_two_dimensions_that_waste_least",),
    ),
    Mutant(
        "small_runs_are_kept_without_their_sources",
        "jaxllm/plan/mixture_runs.py",
        "to_dict(config), names, sources, self",
        "to_dict(config), names, self",
        ("tests/plan/test_mixture_plan.py::test_runs_are_kept_and_their_key_has_all_that_makes_them",),
    ),
]
