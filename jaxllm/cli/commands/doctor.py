"""``jaxllm doctor``: what jaxllm finds on this machine, and which kernels it uses there."""

from __future__ import annotations

import importlib.metadata
import platform

from jaxllm.cli.command_parser import parse_command

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def doctor(argv: list[str]) -> int:
    """Show devices, versions and kernels, which are checked here: `jaxllm doctor`."""
    parse_command(_doctor, argv, "jaxllm doctor")
    return 0


def _doctor() -> None:
    """Shows what jaxllm finds here. On an accelerator that is new to it, this compares its kernels with their
    references, which takes seconds; the verdicts are stored.
    """
    import jax

    from jaxllm.files import cache_root
    from pallas_kernels import OPERATIONS, explain, stored_verdicts

    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    print(f"Python {platform.python_version()} on {platform.platform()}; {versions}")
    kinds = [device.device_kind for device in jax.local_devices()]
    print("devices:  " + ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)))
    print(f"cache:    {cache_root('')}")
    print("\nimplementations of each operation:")
    for operation in OPERATIONS:
        print("  " + explain(operation).replace("\n", "\n  "))
    if found := stored_verdicts():
        print("\nkernels that were compared with their references:")
        for verdict in found:
            print(f"  {verdict.operation}, {verdict.implementation}: {verdict}")
