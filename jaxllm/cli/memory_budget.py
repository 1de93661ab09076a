"""Memory budgets of a run, ``--within 14GiB --host 64GiB`` or ``--fit``: the remat whose step takes no more."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from jaxllm.cli.errors import UsageError

if TYPE_CHECKING:
    from jaxllm.plan.hardware import Cluster
    from jaxllm.plan.remat_solver import StepBytes
    from jaxllm.train import RunConfig

FIT_SHARE = 0.95
"""Share of a device's memory that ``--fit`` plans for: the rest is for fragments between arrays."""


class MemoryBudget(NamedTuple):
    """Budget of a step.

    Attributes:
        device: bytes of a device; None: of the devices that are here, what they have.
        host: bytes of the host's memory for each device, where layers may keep activations; None: none.
    """

    device: int | None
    host: int | None = None


def budget_of(within: str, host: str | None) -> MemoryBudget:
    """Budget of ``--within`` and ``--host``.

    Raises:
        UsageError: one is not a size.
    """
    return MemoryBudget(_size("--within", within), None if host is None else _size("--host", host))


def without_budget(argv: list[str]) -> tuple[list[str], MemoryBudget | None]:
    """The arguments of `jaxllm train` without ``--within``, ``--host`` and ``--fit``, and the budget that they give.

    Raises:
        UsageError: a size is missing, or they do not go together.
    """
    rest: list[str] = []
    found: dict[str, str] = {}
    words: Iterator[str] = iter(argv)
    for word in words:
        name, _, value = word.partition("=")
        if word == "--fit":
            found[name] = "yes"
        elif name in ("--within", "--host"):
            found[name] = value or next(words, "")
        else:
            rest.append(word)
    if "--fit" in found and "--within" in found:
        raise UsageError("--fit is the memory that the devices have; give it or --within SIZE.")
    if "--host" in found and len(found) == 1:
        raise UsageError("--host SIZE needs --within SIZE, the memory budget of a device, or --fit.")
    host = found.get("--host")
    if "--fit" in found:
        return rest, MemoryBudget(None, None if host is None else _size("--host", host))
    return rest, budget_of(found["--within"], host) if "--within" in found else None


def fitted_here(config: RunConfig, budget: MemoryBudget) -> RunConfig:
    """The run with the remat that fits the budget on the devices that are here; prints the candidates.

    Raises:
        UsageError: nothing fits, and what the least takes; the devices do not say how much memory they have, or have no
            host memory apart from it.
    """
    import jax

    from jaxllm.models.remat import RematError
    from jaxllm.plan.remat_solver import StepBytes
    from jaxllm.train.compile_step import step_memory_here

    device = jax.local_devices()[0]  # of another process's devices nothing is known
    limit = budget.device
    if limit is None:
        there = (device.memory_stats() or {}).get("bytes_limit")
        if there is None:
            raise UsageError(f"--fit: {device.device_kind} does not say how much memory it has; give --within SIZE.")
        limit = int(FIT_SHARE * there)
    cluster = None if budget.host is None else _cluster_here()

    def measure(remat: str) -> StepBytes:
        return StepBytes(*step_memory_here(with_remat(config, remat)))

    try:
        return within_budget(config, MemoryBudget(limit, budget.host), measure, cluster)
    except RematError as error:
        raise UsageError(str(error)) from error


def within_budget(
    config: RunConfig, budget: MemoryBudget, measure: Callable[[str], StepBytes], cluster: Cluster | None
) -> RunConfig:
    """The run with the remat that fits; prints the candidates.

    Args:
        budget: with the bytes of a device.
        measure: compiles the step with a remat.
        cluster: the devices, by which copies to the host take time; needed with ``budget.host`` alone.

    Raises:
        RematError: nothing fits; says what the least takes.
    """
    from jaxllm.parallel.sharding_table_view import columns
    from jaxllm.plan.remat_solver import HostTier, solve
    from jaxllm.train.run import fitting_mesh
    from jaxllm.train.run_model import run_model

    assert budget.device is not None
    tier = None
    if budget.host is not None:
        assert cluster is not None
        mesh = fitting_mesh(config, run_model(config), cluster.devices, cluster.topology.platform)
        tier = HostTier.of(config, cluster, mesh, budget.host)
    solved = solve(config, budget.device, measure, tier)
    candidates = {**solved.named, **solved.tried}
    least = min(one.flops for one in candidates.values())
    rows = [
        (
            remat,
            f"{one.bytes / 2**30:.3f}",
            *([f"{one.host / 2**30:.3f}", f"{one.exposed * 1e3:.1f}"] if tier is not None else []),
            f"{100 * (one.flops / least - 1):.1f}%",
            "chosen" if remat == solved.remat else "",
        )
        for remat, one in candidates.items()
    ]
    of_host = ("of the host", "ms exposed") if tier is not None else ()
    head = ("model.remat", "GiB", *of_host, "extra FLOPs", "")
    print(columns(head, rows, f"<>{'>>' if of_host else ''}><"), end="\n\n", flush=True)
    return with_remat(config, solved.remat)


def _cluster_here() -> Cluster:
    import jax

    from jaxllm.plan.hardware import TABLE, Cluster
    from sharding.topology import GENERATIONS

    device, count = jax.devices()[0], jax.device_count()
    known = (name for name, one in GENERATIONS.items() if one.device_kind == device.device_kind and name in TABLE)
    name = None if device.platform == "cpu" else next(known, None)
    found = None if name is None else Cluster.sized(TABLE[name], count)
    if found is None:
        raise UsageError(
            f"--host: how long copies to the host take is known of {', '.join(TABLE)}, not of {count} times "
            f"{device.device_kind}; leave --host out."
        )
    return found


def with_remat(config: RunConfig, remat: str) -> RunConfig:
    """The run with another ``model.remat``."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, remat=remat))


def _size(name: str, text: str) -> int:
    number = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([GMT])iB)?", text, re.IGNORECASE)
    if number is None or float(number[1]) == 0:
        raise UsageError(f"{name} {text}: give a size, such as 14GiB or 800MiB; a number alone is in GiB.")
    return int(float(number[1]) * 2 ** {"M": 20, "G": 30, "T": 40}[(number[2] or "G").upper()])
