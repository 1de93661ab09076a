"""A Ray cluster of two nodes, one of which is lost while a corpus is prepared."""

from __future__ import annotations

import importlib.util
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from jaxllm.data.prepare.corpus_config import read_corpus_config
from jaxllm.data.prepare.preparation import prepare_corpus
from tests import environment
from tests.proofs.corpus.histories import contents, done_tasks, draw_corpus
from tests.proofs.harness import proof


@proof("corpus", count=3, sample=1, parallel=False, counts=("lost",))
def a_lost_node_gives_the_same_bytes(seed: int) -> dict[str, float]:
    """Two nodes of a local Ray cluster, each with processes of its own; one is removed when some tasks are done: the
    bytes are those of one uninterrupted process. Without the package ray nothing is shown, and no node is lost."""
    if importlib.util.find_spec("ray") is None:
        return {"lost": 0.0}
    import ray
    from ray.cluster_utils import Cluster

    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as name:
        corpus = draw_corpus(Path(name), rng)
        out = Path(name) / "out"
        prepare_corpus(read_corpus_config(corpus))
        expected = contents(out)
        out.rename(Path(name) / "expected")
        env = {"env_vars": {"PYTHONPATH": str(environment.ROOT), "JAX_PLATFORMS": "cpu"}}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 << 20})
        second = cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        lost = threading.Event()
        try:
            ray.init(address=cluster.address, runtime_env=env, log_to_driver=False)
            cluster.wait_for_nodes()
            until = int(rng.integers(2, 8))

            def lose() -> None:
                while done_tasks(out) < until:
                    time.sleep(0.005)
                cluster.remove_node(second, allow_graceful=False)
                lost.set()

            thread = threading.Thread(target=lose)
            thread.start()
            prepare_corpus(read_corpus_config(corpus), on="ray", workers=2)
            thread.join(60)
            assert lost.is_set()
            assert contents(out) == expected
        finally:
            ray.shutdown()
            cluster.shutdown()
    return {"lost": 1.0}
