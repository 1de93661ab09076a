"""Mutants of the convert room."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "upcycled_experts_one_fewer",
        "jaxllm/convert/upcycle.py",
        "                for _ in range(count):\n",
        "                for _ in range(count - 1):\n",
        ("tests/infer/test_upcycle.py::test_copies_and_routers_by_hand",),
    ),
    Mutant(
        "upcycled_layers_mixed",
        "jaxllm/convert/upcycle.py",
        "layer[filled : filled + part.size] = part",
        "layer[: part.size] = part",
        ("tests/infer/test_upcycle.py::test_copies_and_routers_by_hand",),
    ),
    Mutant(
        "upcycled_router_has_unit_variance",
        "jaxllm/convert/upcycle.py",
        " * shape[1] ** -0.5).astype(dtype)",
        ").astype(dtype)",
        ("tests/infer/test_upcycle.py::test_copies_and_routers_by_hand",),
    ),
]
