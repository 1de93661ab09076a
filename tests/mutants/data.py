"""Mutants of the data package."""

from tests.mutants.mutant import Mutant

COUNTED = ("tests/data/test_mixture.py::test_max_epochs_by_an_independent_count",)
TRUNCATED = ("tests/data/test_chat.py::test_conversations_are_truncated_to_a_row_of_pairs",)

MUTANTS = [
    Mutant(
        "max_epochs_in_binary_fractions",
        "jaxllm/data/mixture.py",
        "int(Fraction(repr(self.max_epochs)) * self.plan.rows)",
        "int(self.max_epochs * self.plan.rows)",
        COUNTED,
    ),
    Mutant(
        "max_epochs_rounded_to_nearest",
        "jaxllm/data/mixture.py",
        "int(Fraction(repr(self.max_epochs)) * self.plan.rows)",
        "round(Fraction(repr(self.max_epochs)) * self.plan.rows)",
        COUNTED,
    ),
    Mutant(
        "max_epochs_rounded_up",
        "jaxllm/data/mixture.py",
        "int(Fraction(repr(self.max_epochs)) * self.plan.rows)",
        "-int(-Fraction(repr(self.max_epochs)) * self.plan.rows // 1)",
        COUNTED,
    ),
    Mutant(
        "source_ends_where_its_next_row_would_be",
        "jaxllm/data/mixture.py",
        "out.append((phase.position_of_row(k, given[k] - 1), self.sources[k].name))",
        "out.append((phase.end, self.sources[k].name))",
        COUNTED,
    ),
    Mutant(
        "run_may_take_one_step_more_than_the_mixture_has",
        "jaxllm/data/mixture.py",
        "if end is None or steps * self.batch_size <= end:",
        "if end is None or (steps - 1) * self.batch_size <= end:",
        COUNTED,
    ),
    Mutant(
        "conversations_cut_at_the_row_length",
        "jaxllm/data/loader.py",
        "documents.truncate(seq_len + 1)",
        "documents.truncate(seq_len)",
        TRUNCATED,
    ),
    Mutant(
        "truncated_conversations_counted_from_the_row_length",
        "jaxllm/data/loader.py",
        "cut = int((documents.lengths > seq_len + 1).sum())",
        "cut = int((documents.lengths > seq_len).sum())",
        TRUNCATED,
    ),
    Mutant(
        "conversations_that_fit_count_as_truncated",
        "jaxllm/data/loader.py",
        "cut = int((documents.lengths > seq_len + 1).sum())",
        "cut = int((documents.lengths >= seq_len + 1).sum())",
        TRUNCATED,
    ),
]
