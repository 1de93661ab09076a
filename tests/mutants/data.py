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
    Mutant(
        "targets_are_the_inputs",
        "jaxllm/data/sequence_packing.py",
        "        target = tokens[source + 1].astype(np.int32)\n",
        "        target = tokens[source].astype(np.int32)\n",
        ("tests/data/test_packing.py::test_copying_pieces_equals_gathering_places",),
    ),
    Mutant(
        "loss_mask_of_the_inputs",
        "jaxllm/data/sequence_packing.py",
        "np.where(loss_mask[source + 1], target, -1)",
        "np.where(loss_mask[source], target, -1)",
        ("tests/data/test_packing.py::test_loss_masks_by_hand",),
    ),
    Mutant(
        "segments_count_from_zero",
        "jaxllm/data/sequence_packing.py",
        "segment_ids[into] = np.repeat(number + 1, length)",
        "segment_ids[into] = np.repeat(number, length)",
        ("tests/data/test_packing.py::test_copying_pieces_equals_gathering_places",),
    ),
    Mutant(
        "worst_fit",
        "jaxllm/data/sequence_packing.py",
        "(fits & -fits).bit_length() - 1",
        "fits.bit_length() - 1",
        ("tests/data/test_packing.py::test_best_fit_equals_the_textbook_loop",),
    ),
    Mutant(
        "epochs_repeat_their_order",
        "jaxllm/data/dataset.py",
        "            epoch, place = epoch + 1, 0\n",
        "            epoch, place = epoch, 0\n",
        ("tests/data/test_dataset.py::test_a_batch_over_two_epochs_has_the_rows_of_both",),
    ),
    Mutant(
        "all_shards_take_the_first_rows",
        "jaxllm/data/dataset.py",
        "    return step * batch_size + begin, end - begin\n",
        "    return step * batch_size, end - begin\n",
        ("tests/data/test_dataset.py::test_shards_make_up_the_global_batch",),
    ),
    Mutant(
        "heldout_repeats_its_last_source",
        "jaxllm/data/dataset.py",
        "np.where(rows < starts[-1], rows - starts[part], -1)",
        "np.where(rows <= starts[-1], rows - starts[part], -1)",
        ("tests/data/test_dataset.py::test_heldout_is_each_row_once_in_order_then_padding",),
    ),
    Mutant(
        "damaged_token_files_are_opened",
        "jaxllm/data/token_files.py",
        '    if about.get("sha256", found) != found:\n',
        '    if about.get("sha256") is None:\n',
        ("tests/data/test_tokens.py::test_a_damaged_cache_entry_is_made_again",),
    ),
    Mutant(
        "skipping_leaves_one_batch",
        "jaxllm/data/skip_batches.py",
        "            step += end - first\n",
        "            step += end - first - 1\n",
        ("tests/data/test_skip_batches.py",),
    ),
    Mutant(
        "skipping_begins_a_step_late",
        "jaxllm/data/skip_batches.py",
        "            if step < first:\n",
        "            if step <= first:\n",
        ("tests/data/test_skip_batches.py",),
    ),
    Mutant(
        "ngram_similarity_of_one_band",
        "jaxllm/data/quality/dedup.py",
        "own[band * rows : (band + 1) * rows]",
        "own[:rows]",
        ("tests/data/test_quality.py::test_pairs_above_the_threshold_are_found",),
    ),
]
