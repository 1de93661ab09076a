"""``jaxllm plan --on cluster.toml``: ranks layouts on unequal devices and links."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from jaxllm.cli.errors import UsageError

if TYPE_CHECKING:
    from jaxllm.plan.hardware import Hardware
    from jaxllm.train import RunConfig


def plan_unequal(
    config: RunConfig,
    file: Path,
    table: Mapping[str, Hardware],
    *,
    top: int,
    explain: int | None,
    save: Path | None,
    json: Path | None,
) -> int:
    """Searches, prints and saves plans for an unequal cluster; the exit status is 1 if none fits."""
    from jaxllm.files import write_json
    from jaxllm.plan.unequal import unequal_view
    from jaxllm.plan.unequal.unequal_cluster import read_cluster
    from jaxllm.plan.unequal.unequal_search import search_unequal

    cluster = read_cluster(file, table)
    print(unequal_view.described_cluster(config, cluster))
    found = search_unequal(config, cluster)
    if not found.plans:
        print(unequal_view.nothing_fits_unequal(found, cluster))
        return 1
    plans = found.plans[:top]
    print(f"\npredicted, {len(plans)} of {len(found.plans)} plans that fit ({found.tried} layouts tried)\n")
    print(unequal_view.unequal_ranking(plans, cluster))
    for number, plan in enumerate(plans, 1):
        print(f"\n{unequal_view.described_plan(number, plan, cluster)}")
    if explain is not None:
        if explain > len(plans):
            raise UsageError(f"--explain {explain}: {len(plans)} plans are shown for {cluster.name}.")
        if plans[explain - 1].splits:
            print(f"\n{explain}: {unequal_view.described_splits(plans[explain - 1])}")
    if save is not None:
        chosen = plans[explain - 1] if explain else plans[0]
        print(f"\nsaved: {unequal_view.write_unequal_recipe(save, chosen, cluster)}")
    if json is not None:
        write_json(json, [unequal_view.unequal_json(plan, cluster) for plan in plans])
        print(f"\nsaved: {json}")
    return 0
