"""Mutants of the compiler package: the walkers of a program's text."""

from tests.mutants.mutant import Mutant

HAND = "tests/compiler/test_walker_by_hand.py"
DEAREST = f"{HAND}::test_the_dearest_branch_counts"
SENDS = f"{HAND}::test_a_branch_that_communicates_is_the_dearest"
HOST = (f"{HAND}::test_bytes_to_the_host_are_no_bytes_of_device_memory",)
UNKNOWN = f"{HAND}::test_loops_of_unknown_length"
NESTED = f"{HAND}::test_a_loop_of_unknown_length_within_another"
WALKER = "jaxllm/compiler/program_walker.py"
LINES = "tests/compiler/test_hlo.py::test_an_instruction_over_several_lines_is_read_whole"

MUTANTS = [
    Mutant(
        "cheapest_branch",
        WALKER,
        "return list(runs[weights.index(max(weights))])",
        "return list(runs[weights.index(min(weights))])",
        (DEAREST, SENDS),
    ),
    Mutant(
        "first_branch",
        WALKER,
        "return list(runs[weights.index(max(weights))])",
        "return list(runs[0])",
        (DEAREST, SENDS),
    ),
    Mutant(
        "all_branches",
        WALKER,
        "return list(runs[weights.index(max(weights))])",
        "return [step for run in runs for step in run]",
        (DEAREST,),
    ),
    Mutant(
        "branches_weighed_without_what_they_send",
        WALKER,
        "    return program.cycles or 0, sent, program.flops + program.bytes\n",
        "    return program.cycles or 0, 0, program.flops + program.bytes\n",
        (SENDS,),
    ),
    Mutant(
        "traffic_of_the_cheapest_branch",
        "jaxllm/compiler/hbm_traffic.py",
        "dearest = max(branches, key=",
        "dearest = min(branches, key=",
        (DEAREST,),
    ),
    Mutant(
        "kernels_of_branches_are_not_counted",
        "jaxllm/compiler/hbm_traffic.py",
        "                total.kernels += dearest.kernels\n",
        "",
        (DEAREST,),
    ),
    Mutant(
        "collectives_of_the_cheapest_branch",
        "jaxllm/compiler/collectives.py",
        "sums.add(max(branches, key=",
        "sums.add(min(branches, key=",
        (SENDS,),
    ),
    Mutant(
        "host_copies_count_at_both_ends",
        WALKER,
        "        return Fetch(moved // 2 if host else moved, host)\n",
        "        return Fetch(moved, host)\n",
        HOST,
    ),
    Mutant(
        "host_copies_are_device_traffic",
        WALKER,
        "fetch.bytes * times for fetch, times in self.fetches if not fetch.host)",
        "fetch.bytes * times for fetch, times in self.fetches)",
        HOST,
    ),
    Mutant(
        "host_copies_from_the_host_are_prefetches",
        WALKER,
        "        host = _HOST in instruction.shape or any(_HOST in shape for shape in shapes)\n",
        "        host = not any(_HOST in shape for shape in shapes)\n",
        HOST,
    ),
    Mutant(
        "host_transfers_go_the_other_way",
        "jaxllm/compiler/host_transfers.py",
        'arrays[0] if instruction.opcode == "copy-start" else arrays[-1]',
        "arrays[-1]",
        HOST,
    ),
    Mutant(
        "host_transfers_ignore_loops",
        "jaxllm/compiler/host_transfers.py",
        "times * (1 if turns is None else turns), found)",
        "times, found)",
        HOST,
    ),
    Mutant(
        "unknown_loops_never_run",
        WALKER,
        "self.turns if turns is None else turns, (*",
        "turns or 0, (*",
        (UNKNOWN, NESTED),
    ),
    Mutant(
        "unknown_loops_are_not_counted",
        WALKER,
        "        self.unknown_loops += turns is None\n",
        "        self.unknown_loops = 0\n",
        (UNKNOWN, NESTED),
    ),
    Mutant(
        "collectives_of_inner_unknown_loops_are_not_counted",
        "jaxllm/compiler/collectives.py",
        "        self.unknown_loops += other.unknown_loops\n",
        "",
        (NESTED,),
    ),
    Mutant(
        "traffic_of_inner_unknown_loops_is_told",
        "jaxllm/compiler/hbm_traffic.py",
        "                if turns is None and not outermost:\n",
        "                if turns is None and self.turns < 1:\n",
        (NESTED,),
    ),
    Mutant(
        "inclusive_bounds_run_one_turn_less",
        "jaxllm/compiler/hlo.py",
        '    end += meaning in ("LE", "GE")\n',
        "",
        ("tests/compiler/test_hlo.py::test_trips_in_every_direction",),
    ),
    Mutant(
        "four_bit_values_take_a_byte",
        "jaxllm/compiler/hlo.py",
        "width = int(packed) if packed else",
        "width = 8 if packed else",
        ("tests/compiler/test_hlo.py::test_bytes_of_odd_shapes",),
    ),
    Mutant(
        "any_line_with_a_brace_ends_a_computation",
        "jaxllm/compiler/hlo.py",
        "        elif _END.match(line):\n",
        '        elif line.startswith("}"):\n',
        (LINES,),
    ),
    Mutant(
        "further_lines_of_an_instruction_are_left_out",
        "jaxllm/compiler/hlo.py",
        "attributes=begun.attributes + line",
        "attributes=begun.attributes",
        (LINES,),
    ),
    Mutant(
        "all_reduce_on_a_ring_sends_once",
        "jaxllm/compiler/timeline.py",
        "steps, share = 2 * steps, 2 * share",
        "steps, share = 2 * steps, share",
        ("tests/compiler/test_walker.py::test_what_a_ring_sends",),
    ),
    Mutant(
        "transposed_groups_in_their_own_order",
        "jaxllm/compiler/replica_groups.py",
        '(devices.transpose([int(n) for n in found[2].split(",")]) if found[2] else devices)',
        "devices",
        ("tests/compiler/test_walker.py::test_groups_in_all_notations",),
    ),
]
