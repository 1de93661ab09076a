"""Mutants of the parallel room."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "one_f_one_b_warms_up_longer",
        "jaxllm/parallel/pipeline/schedule_generators.py",
        "_alternating(p, m, [p - 1 - s for s in range(p)])",
        "_alternating(p, m, [p - s for s in range(p)])",
        ("tests/parallel/test_pipeline_schedule.py::test_gpipe_and_1f1b_are_as_long_as_theory_says",),
    ),
    Mutant(
        "interleaved_warms_up_shorter",
        "jaxllm/parallel/pipeline/schedule_generators.py",
        "2 * (p - 1 - s) + (v - 1) * p",
        "(p - 1 - s) + (v - 1) * p",
        ("tests/parallel/test_pipeline_schedule.py::test_interleaved_divides_the_bubble_by_its_chunks",),
    ),
    Mutant(
        "the_next_chunk_begins_before_gradients_are_there",
        "jaxllm/parallel/pipeline/generalized_interleaving.py",
        "-(-2 * stages // (3 * group))",
        "-(-stages // (3 * group))",
        ("tests/parallel/test_pipeline_schedule.py::test_groups_of_one_take_the_time_of_1f1b_and_hold_less",),
    ),
    Mutant(
        "zero_bubble_warms_up_as_1f1b",
        "jaxllm/parallel/pipeline/schedule_generators.py",
        '    fewer = 1 if name == "zb_h1" else 2\n',
        '    fewer = 2 if name == "zb_h1" else 1\n',
        ("tests/parallel/test_pipeline_schedule.py::test_zero_bubble",),
    ),
    Mutant(
        "slots_are_free_a_tick_early",
        "jaxllm/parallel/pipeline/schedule_table.py",
        "if end < first), len(ends))",
        "if end <= first), len(ends))",
        (
            "tests/parallel/test_pipeline.py::test_slots_are_as_few_as_things_at_a_time",
            "tests/parallel/test_pipeline.py::test_a_table_run_by_hand_computes_everything",
        ),
    ),
    Mutant(
        "vee_turns_at_the_other_chunks",
        "jaxllm/parallel/pipeline/schedule.py",
        "stages - 1 - stage if vee and chunk % 2 else stage)",
        "stages - 1 - stage if vee and not chunk % 2 else stage)",
        ("tests/parallel/test_pipeline.py::test_every_layer_has_its_place",),
    ),
    Mutant(
        "bubble_of_the_least_busy_stage",
        "jaxllm/parallel/pipeline/schedule.py",
        "1 - self.work(costs) / max(row[-1].end - row[0].start for row in rows)",
        "1 - self.work(costs) / min(row[-1].end - row[0].start for row in rows)",
        ("tests/parallel/test_pipeline_schedule.py",),
    ),
]
