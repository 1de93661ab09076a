"""Methods of adaptation: their definitions, and on meshes as on one device."""

from __future__ import annotations

from jaxllm.peft.method_table import ADAPTER_METHODS
from tests.peft import test_expert_adapters, test_methods, test_virtual_tokens
from tests.peft.adapter_meshes import sharded_error
from tests.proofs.harness import proof

KINDS = tuple(sorted(ADAPTER_METHODS))
MESHES = (
    "fsdp=2",
    "tensor=2",
    "fsdp=2,tensor=2",
    "context=2",
    "stage=2",
    "stage=2,fsdp=2,tensor=2",
    "expert=2,fsdp=2 of experts",
)


CASES = [
    (kind, mesh)
    for kind in KINDS
    for mesh in MESHES
    if not ("context" in mesh and kind in ("longlora", "prefix", "prompt"))  # refused
]


@proof("adapters", cases=CASES, sample=1, float64=True, bound=1e-10)
def sharded_is_unsharded(case: tuple[str, str]) -> float:
    """Loss, gradients and initialisation on several devices, less those of one."""
    return sharded_error(*case)


@proof("adapters", cases=KINDS, sample=1, float64=True, bound=1e-10)
def a_method_is_its_definition(kind: str) -> float:
    """Loss and gradients of the adapter: those of the dense merged weight, as which it starts; of each token through
    its experts, one by one; of each document alone with dense attention to its virtual tokens.
    """
    if kind in test_methods.KINDS:
        return test_methods.error_of_definition(kind)
    if kind in test_expert_adapters.KINDS:
        return test_expert_adapters.error_of_definition(kind)
    return test_virtual_tokens.error_of_definition(kind)


@proof("adapters", cases=("cosine",), sample=1, float64=True)
def lora_ga_steps_along_the_gradient(case: str) -> None:
    """Cosine of the first effective update and the full gradient, beside LoRA's of the same rank."""
    test_methods.test_lora_ga_steps_along_the_gradient()
