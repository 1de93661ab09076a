"""Mutants of the infer package: scheduler, policies, pages, sampler."""

from tests.mutants.mutant import Mutant

POLICIES = "tests/infer/test_policies.py"
ALLOCATOR = "tests/infer/test_page_allocator.py"
SAMPLER = "tests/infer/test_sampler.py"
DEADLINE = f"{POLICIES}::test_deadlines_come_before_arrival"

MUTANTS = [
    Mutant(
        "top_p_takes_one_more_at_an_exact_mass",
        "jaxllm/infer/runner/sampler.py",
        "weights, 0), axis=1) >= enough, k)\n",
        "weights, 0), axis=1) > enough, k)\n",
        (f"{SAMPLER}::test_top_p_of_an_exact_mass_keeps_no_more",),
    ),
    Mutant(
        "deadlines_in_order_of_arrival",
        "jaxllm/infer/engine/policies.py",
        "            return due + (self.patience if late else 0), job.id\n",
        "            return job.arrived + (self.patience if late else 0), job.id\n",
        (DEADLINE,),
    ),
    Mutant(
        "missed_deadlines_stay_first",
        "jaxllm/infer/engine/policies.py",
        "            return due + (self.patience if late else 0), job.id\n",
        "            return due, job.id\n",
        (f"{POLICIES}::test_deadlines_that_cannot_be_met_wait",),
    ),
    Mutant(
        "deadline_counts_cached_tokens",
        "jaxllm/infer/engine/policies.py",
        "            needs = max(0, len(job.prompt) - job.computed) * view.token_seconds\n",
        "            needs = len(job.prompt) * view.token_seconds\n",
        (f"{POLICIES}::test_deadlines_that_cannot_be_met_wait",),
    ),
    Mutant(
        "registered_page_is_writable",
        "jaxllm/infer/engine/page_allocator.py",
        "        return self.ref_counts[page] == 1 and page not in self._hashes\n",
        "        return self.ref_counts[page] == 1\n",
        (f"{ALLOCATOR}::test_only_a_page_of_its_own_is_written",),
    ),
    Mutant(
        "shared_page_is_writable",
        "jaxllm/infer/engine/page_allocator.py",
        "        return self.ref_counts[page] == 1 and page not in self._hashes\n",
        "        return self.ref_counts[page] >= 1 and page not in self._hashes\n",
        (f"{ALLOCATOR}::test_only_a_page_of_its_own_is_written",),
    ),
]
