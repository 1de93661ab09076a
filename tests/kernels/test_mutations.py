"""Mutations of kernels are of the code as it is: `make proof kernels` would find out only when it comes to them."""

from __future__ import annotations

import pytest

from tests import environment
from tests.proofs.kernels.mutants import bodies

BODIES = bodies()


@pytest.mark.parametrize("operation", BODIES)
def test_each_text_is_in_its_module_and_the_mistake_is_another(operation):
    body = BODIES[operation]
    folder = environment.ROOT / getattr(body, "PACKAGE", f"pallas_kernels.{operation}").replace(".", "/")
    gone = [
        f"{mutant}: {text!r} is not in {module}.py"
        for mutant, (module, text, mistake) in body.MUTATIONS.items()
        if text == mistake or text not in (folder / f"{module}.py").read_text()
    ]
    assert not gone, "\n".join(gone)
