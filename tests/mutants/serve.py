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
]
