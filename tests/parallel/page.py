"""Generated table of docs/train/parallelism.md, from the record of `make proof parallelism`.

python -m tests.parallel.page        writes it
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from jaxllm.parallel.sharding_table_view import size
from sharding.topology import Topology
from tests import environment
from tests.proofs import stored
from tests.proofs.parallelism import pods
from tests.proofs.parallelism.traffic import wanted

PAGE = environment.ROOT / "docs" / "train" / "parallelism.md"
BEGIN, END = "<!-- pods: generated -->\n", "<!-- end -->"


def table(each: Mapping[str, Mapping[str, float]] | None) -> str:
    """Rows of recipes and topologies.

    Args:
        each: errors of each case, of the record; None if there are none.
    """
    if each is None:
        return "Not compiled yet: `make proof parallelism ONLY=pods`.\n"
    lines = ["| recipe | plan | devices | memory per device | sent per device, each step |", "|---|---|---|---|---|"]
    for recipe, on in pods.CASES:
        run, topology = pods.run_of(recipe), Topology.parse(on)
        share = each[f"{recipe} / {on}"]["of_memory"]
        total = topology.hbm_bytes or 0
        kinds = [f"{kind} over {n}: {size(number)}" for kind, n, number in _sent(recipe, topology.num_devices)]
        plan = run.mesh + (", sequence" if run.parallel.sequence else "")
        memory = f"{share * total / 2**30:.1f} of {total / 2**30:.1f} GiB"
        lines.append(f"| `{recipe}` | `{plan}` | `{on}`, {topology.num_devices} | {memory} | {'; '.join(kinds)} |")
    return "\n".join(lines) + "\n"


@functools.cache
def _sent(recipe: str, num_devices: int) -> list[tuple[str, int, int]]:
    sent = wanted(pods.run_of(recipe), num_devices)
    return [(*key, number) for key, number in sorted(sent.items(), key=lambda item: -item[1])]


def render(page: str, record: Mapping[str, Any]) -> str:
    """The page with its table renewed."""
    each = next((case["each"] for case in record["cases"] if case["name"] == "pods"), None)
    start = page.index(BEGIN) + len(BEGIN)
    return page[:start] + table(each) + page[page.index(END, start) :]


def write() -> None:
    """Writes the table."""
    PAGE.write_text(render(PAGE.read_text(), stored.read("parallelism")))


if __name__ == "__main__":
    write()
    print(PAGE)
