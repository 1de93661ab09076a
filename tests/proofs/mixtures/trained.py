"""Predicted against trained loss, on mixtures of three sources: plays, Python's library, and its documentation.

Sources that are there without network: the bundled plays, the modules of the standard library and the topics of
``help()``. The target is other modules and topics, so that neither one source nor equal shares are best.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import sysconfig
import tempfile
from pathlib import Path

import numpy as np

from jaxllm.data import SourceConfig
from jaxllm.data.selection.mixture_laws import rank_correlation
from jaxllm.data.selection.simplex_search import round_shares
from jaxllm.plan.mixture_plan import choose_mixture
from jaxllm.plan.mixture_runs import MixtureRuns, MixtureTask, open_task
from jaxllm.train.run_processes import source_hash
from tests import environment
from tests.proofs.harness import proof

RUNS, HELD_OUT = 14, 8
SIZES, SIZE = (100_000, 200_000), 400_000


def opened(folder: Path) -> MixtureTask:
    """Sources and target, in files of a folder."""
    library = Path(sysconfig.get_path("stdlib"))
    modules = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(library.glob("*.py"))]
    topics = [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)]
    texts = {
        "modules": [one for number, one in enumerate(modules) if number % 4],
        "topics": [one for number, one in enumerate(topics) if number % 4],
        "target": [one[:4000] for one in modules[::4][:12]] + topics[::4],
    }
    for name, documents in texts.items():
        rows = (json.dumps({"text": one}) + "\n" for one in documents)
        (folder / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")
    files = [SourceConfig(name, str(folder / f"{name}.jsonl")) for name in texts]
    return open_task([SourceConfig("plays"), *files[:2]], files[2], cache_dir=str(folder / "cache"))


@proof(
    "mixtures",
    cases=(0, 1, 2),
    sample=1,
    bound={
        "rank_correlation_below_1": 0.2,
        "relative_error": 0.05,
        "error_over_that_by_size_alone": 1.0,
        "chosen_over_equal": 0.98,
    },
)
def predicted_loss_is_the_trained_one(seed: int) -> dict[str, float]:
    """Tiny models on mixtures that were not among the small runs, with twice the tokens of the larger of these.

    Rank correlation and root mean square of the relative error of the predicted loss; and the loss of the chosen shares
    over that of equal ones. A prediction by size alone, the same for all mixtures, is the mean predicted log loss.

    Small runs are kept under the hash of the packages' code, so a stopped unit resumes.
    """
    kept = environment.ROOT / ".cache" / "proofs" / "mixture_runs" / source_hash()
    with tempfile.TemporaryDirectory() as folder, environment.optimized():
        task = opened(Path(folder))
        runs = MixtureRuns(task, kept, seed=seed)
        size = runs.size(SIZE)
        choice = choose_mixture(runs, count=RUNS, sizes=SIZES, size=size)
        drawn = np.random.default_rng(seed).dirichlet(np.ones(3), HELD_OUT)
        mixtures = [round_shares(one, 100).tolist() for one in drawn]
        trained = np.array([runs.loss(one, size) for one in mixtures])
        predicted = np.array([choice.predict(one, size) for one in mixtures])
        chosen, equal = runs.loss(choice.shares.tolist(), size), runs.loss([0.34, 0.33, 0.33], size)
    error = np.sqrt(np.mean((predicted / trained - 1) ** 2))
    by_size_alone = np.sqrt(np.mean((np.exp(np.log(predicted).mean()) / trained - 1) ** 2))
    return {
        "rank_correlation_below_1": 1 - rank_correlation(predicted, trained),
        "relative_error": float(error),
        "error_over_that_by_size_alone": float(error / by_size_alone),
        "chosen_over_equal": chosen / equal,
    }
