"""Mutants of the serve package."""

from tests.mutants.mutant import Mutant

USAGE = ("tests/serve/test_fields.py::test_usage_is_summed_over_prompts_and_completions",)

MUTANTS = [
    Mutant(
        "usage_of_the_first_prompt",
        "jaxllm/serve/generation.py",
        "        usage.prompt = sum(len(job.prompt) for job in jobs)\n",
        "        usage.prompt = len(jobs[0].prompt)\n",
        USAGE,
    ),
    Mutant(
        "usage_of_the_last_output",
        "jaxllm/serve/generation.py",
        "                    usage.completion += len(output.tokens)\n",
        "                    usage.completion = len(output.tokens)\n",
        USAGE,
    ),
    Mutant(
        "context_may_be_exceeded_by_one",
        "jaxllm/serve/generation.py",
        "            if (total := len(job.prompt) + new) > self.backend.max_len:\n",
        "            if (total := len(job.prompt) + new) > self.backend.max_len + 1:\n",
        ("tests/serve/test_fields.py::test_a_context_is_filled_and_not_exceeded",),
    ),
    Mutant(
        "full_context_is_refused",
        "jaxllm/serve/generation.py",
        "            if (total := len(job.prompt) + new) > self.backend.max_len:\n",
        "            if (total := len(job.prompt) + new) >= self.backend.max_len:\n",
        ("tests/serve/test_fields.py::test_a_context_is_filled_and_not_exceeded",),
    ),
    Mutant(
        "queue_takes_one_more",
        "jaxllm/serve/generation.py",
        "        if self.open + sequences > room:\n",
        "        if self.open + sequences > room + 1:\n",
        ("tests/serve/test_fields.py::test_the_queue_is_filled_and_not_exceeded",),
    ),
    Mutant(
        "released_twice",
        "jaxllm/serve/generation.py",
        "            self.open -= sequences\n",
        "            self.open -= sequences + 1\n",
        ("tests/serve/test_fields.py::test_the_queue_is_filled_and_not_exceeded",),
    ),
    Mutant(
        "links_lead_out_of_the_allowed_directories",
        "jaxllm/serve/adapter_routes.py",
        "found = (roots[0] / path).resolve()",
        "found = roots[0] / path",
        ("tests/serve/test_adapters.py::test_others_may_not_and_nothing_is_half_loaded",),
    ),
    Mutant(
        "bare_calls_of_unknown_functions",
        "jaxllm/serve/tools/json_calls.py",
        'if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or name not in functions:',
        'if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):',
        ("tests/serve/test_call_notations.py::test_what_is_no_call_stays_as_it_is",),
    ),
    Mutant(
        "late_headers_are_waited_for",
        "jaxllm/serve/http_connection.py",
        "        if self._awaits_request and self.conn.trailing_data[0]:\n            self._time_headers()\n",
        "        if self._awaits_request and self.conn.trailing_data[0]:\n            self._stop_timer()\n",
        ("tests/serve/test_connections.py::test_headers_that_trickle_in_have_no_more_time",),
    ),
]
