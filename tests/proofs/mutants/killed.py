"""Mutants are killed: each small fault of `tests/mutants` makes the tests named with it fail."""

from __future__ import annotations

from tests.mutants.mutant import rooms, survives
from tests.proofs.harness import proof

ALSO_COVERS = ("jaxllm/*.py", "pallas_kernels/*.py", "sharding/*.py", "tests/*.py")

MUTANTS = {(room, one.name): one for room, found in rooms().items() for one in found if not one.equivalent}


@proof("mutants", cases=tuple(MUTANTS), sample=1)
def mutants_are_killed(case: tuple[str, str]) -> None:
    """The tests pass on the code as it is, and each of them fails with the mutant."""
    assert not (passed := survives(MUTANTS[case])), f"{', '.join(passed)} pass with {' / '.join(case)}"
