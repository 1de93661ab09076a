"""Mutants of the checkpoint package and of files that survive a power cut."""

from tests.mutants.mutant import Mutant

CUT = "tests/checkpoint/test_power_cut.py"
COMMITTED = (f"{CUT}::test_committed_checkpoints_survive",)
REPLACED = (f"{CUT}::test_replaced_files_are_old_or_new",)
WHOLE = (f"{CUT}::test_a_new_directory_is_whole",)
BLOCKS = ("tests/checkpoint/test_integrity.py::test_damage_in_any_block",)

MUTANTS = [
    Mutant(
        "sync_waits_for_nothing",
        "jaxllm/files.py",
        "        os.fsync(handle)\n",
        "        pass\n",
        (*COMMITTED, *WHOLE, f"{CUT}::test_the_signing_key_is_never_a_part"),
    ),
    Mutant(
        "commit_syncs_no_metadata",
        "jaxllm/checkpoint/storage/step_directories.py",
        "        self.files.sync(sorted({*files, *folders, saving}))\n",
        "        self.files.sync(sorted({*folders, saving}))\n",
        COMMITTED,
    ),
    Mutant(
        "commit_renames_before_it_syncs",
        "jaxllm/checkpoint/storage/step_directories.py",
        """        self.files.sync(sorted({*files, *folders, saving}))
        self.files.rename(saving, self.folder(step))
        self.files.sync([""])
""",
        """        self.files.rename(saving, self.folder(step))
        self.files.sync(sorted(name.replace("saving", "step", 1) for name in {*files, *folders, saving}))
        self.files.sync([""])
""",
        COMMITTED,
    ),
    Mutant(
        "commit_does_not_sync_the_root",
        "jaxllm/checkpoint/storage/step_directories.py",
        """        self.files.rename(saving, self.folder(step))
        self.files.sync([""])
""",
        """        self.files.rename(saving, self.folder(step))
""",
        COMMITTED,
    ),
    Mutant(
        "commit_does_not_sync_folders_of_leaves",
        "jaxllm/checkpoint/storage/step_directories.py",
        "{*files, *folders, saving}",
        "{*files, saving}",
        COMMITTED,
    ),
    Mutant(
        "commit_does_not_sync_the_folder",
        "jaxllm/checkpoint/storage/step_directories.py",
        "        self.files.sync(sorted({*files, *folders, saving}))\n",
        "        self.files.sync(sorted({*files, *folders} - {saving}))\n",
        COMMITTED,
    ),
    Mutant(
        "large_chunks_are_not_synced",
        "jaxllm/checkpoint/checkpoint_writer.py",
        "                files.sync([name])  # while other files are written and hashed\n",
        "                pass\n",
        COMMITTED,
    ),
    Mutant(
        "small_chunks_are_not_synced",
        "jaxllm/checkpoint/checkpoint_writer.py",
        '    files.sync(f"{folder}/{name}" for name in small)\n',
        "",
        COMMITTED,
    ),
    Mutant(
        "deletion_overtakes_its_rename",
        "jaxllm/checkpoint/storage/step_directories.py",
        '            self.files.sync([""])  # or else a power cut may undo the rename and keep the deletions\n',
        "",
        COMMITTED,
    ),
    Mutant(
        "run_directory_is_not_synced",
        "jaxllm/files.py",
        "        sync(folder.parent)\n",
        "        pass\n",
        COMMITTED,
    ),
    Mutant(
        "atomic_write_without_fsync",
        "jaxllm/files.py",
        "            os.fsync(file.fileno())\n",
        "",
        (*REPLACED, "tests/infer/test_program_cache.py::test_a_power_cut_leaves_a_program_or_none"),
    ),
    Mutant(
        "atomic_write_renames_before_fsync",
        "jaxllm/files.py",
        "            os.fsync(file.fileno())\n        os.replace(temporary, path)\n",
        "            os.replace(temporary, path)\n            os.fsync(file.fileno())\n",
        REPLACED,
    ),
    Mutant(
        "new_directory_is_not_synced",
        "jaxllm/files.py",
        "            sync(inner)\n",
        "            pass\n",
        WHOLE,
    ),
    Mutant(
        "name_of_a_new_directory_is_not_synced",
        "jaxllm/files.py",
        "        sync(path.parent)\n",
        "",
        WHOLE,
    ),
    Mutant(
        "signing_key_is_not_synced",
        "jaxllm/infer/runner/executable_signature.py",
        "        sync(part)\n",
        "",
        (f"{CUT}::test_the_signing_key_is_never_a_part",),
    ),
    Mutant(
        "any_signing_key_will_do",
        "jaxllm/infer/runner/executable_signature.py",
        "    if len(key) != KEY_BYTES:\n",
        "    if len(key) > KEY_BYTES:\n",
        (f"{CUT}::test_a_damaged_signing_key_is_refused",),
    ),
    Mutant(
        "mapped_leaf_is_verified_in_its_first_block",
        "jaxllm/checkpoint/storage/stored_leaf.py",
        "        for number in range(self.blocks):\n            self._verified_block(number)\n",
        "        for number in range(1):\n            self._verified_block(number)\n",
        BLOCKS,
    ),
    Mutant(
        "slice_is_verified_in_its_first_block",
        "jaxllm/checkpoint/storage/stored_leaf.py",
        "        blocks = [self._verified_block(number) for number in range(low, high + 1)]\n",
        "        blocks = [self._verified_block(number) for number in range(low, low + 1)]\n",
        BLOCKS,
    ),
    Mutant(
        "any_verified_block_stands_for_all",
        "jaxllm/checkpoint/storage/stored_leaf.py",
        "        if number not in self._checked:\n",
        "        if not self._checked:\n",
        BLOCKS,
    ),
    Mutant(
        "retention_keeps_one_fewer",
        "jaxllm/checkpoint/config.py",
        "        newest = sorted(steps)[-self.keep_last :]\n",
        "        newest = sorted(steps)[1 - self.keep_last :]\n",
        ("tests/checkpoint/test_atomic.py::test_retention",),
    ),
    Mutant(
        "retention_keeps_every_other_step",
        "jaxllm/checkpoint/config.py",
        "s % self.keep_every == 0]",
        "s % self.keep_every]",
        ("tests/checkpoint/test_atomic.py::test_retention",),
    ),
    Mutant(
        "longer_files_pass",
        "jaxllm/checkpoint/checkpoint_reader.py",
        "        if size != expected.bytes:\n",
        "        if size < expected.bytes:\n",
        ("tests/checkpoint/test_integrity.py::test_cut_and_missing_files",),
    ),
    Mutant(
        "failed_saves_leave_their_folder",
        "jaxllm/checkpoint/checkpointer.py",
        "            self._directory.abandon(step)\n",
        "            pass\n",
        ("tests/checkpoint/test_atomic.py::test_a_failing_disk_is_reported_once_and_harms_nothing",),
    ),
    Mutant(
        "parity_of_the_first_piece",
        "jaxllm/checkpoint/memory/erasure_coding.py",
        "        total ^= gf_multiply(int(factor), piece)\n",
        "        total = gf_multiply(int(factor), piece)\n",
        ("tests/checkpoint/test_memory.py::test_any_pieces_give_all_back",),
    ),
    Mutant(
        "field_of_another_polynomial",
        "jaxllm/checkpoint/memory/erasure_coding.py",
        "    inverses[1:] = power[255 - log[1:]]\n",
        "    inverses[1:] = power[254 - log[1:]]\n",
        ("tests/checkpoint/test_memory.py::test_any_pieces_give_all_back",),
    ),
    Mutant(
        "blocks_are_combined_without_their_order",
        "jaxllm/checkpoint/storage/leaf_hashing.py",
        ("    for digest in blocks:\n        whole.update"),
        ("    for digest in sorted(blocks):\n        whole.update"),
        ("tests/checkpoint/test_integrity.py::test_a_leaf_hash_is_of_its_blocks_in_order",),
    ),
    Mutant(
        "token_file_is_written_in_place",
        "jaxllm/data/token_files.py",
        "    with atomic(path) as file, tempfile.TemporaryFile() as masks:\n",
        '    with path.open("wb") as file, tempfile.TemporaryFile() as masks:\n',
        (f"{CUT}::test_token_files_are_whole_or_refused",),
    ),
]
