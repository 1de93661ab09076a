"""Process of a multi-host engine: process 0 takes requests and prints the results, the others follow.

python -m tests.infer.multihost_serve MESH MODEL WAY SEED
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import jax
import numpy as np
import pytest

import tests.environment  # noqa: F401
from jaxllm.parallel.cluster_environment import detect
from jaxllm.parallel.distributed import DistributedConfig, running


def main(mesh: str, model: str, way: str, seed: int) -> None:
    jax.config.update("jax_num_cpu_devices", int(os.environ["SERVED_DEVICES"]))
    from tests.infer import engines, meshes
    from tests.proofs.engine.programs import Compilations

    with running(detect(os.environ), DistributedConfig(start_timeout=200, lost_after=30)) as group:
        engine, heard = meshes.over(mesh, model, engines.ENGINES[way], "float64"), Compilations()
        if not group.is_leader:
            with pytest.raises(RuntimeError, match="follows process 0"):
                engine.submit([1, 2])
            engine.follow(lambda: moved(model))
            return
        asked = engines.traffic(np.random.default_rng(seed), engine.config, 8 * engine.runner.spec.replicas)
        with heard:
            made = engines.serve(engine, asked)
        with jax.default_device(jax.local_devices()[0]):
            error = engines.error(model, "float64", made)
        # Other weights, as training on another mesh of these processes has them.
        compiled, weights = len(heard.names), moved(model)
        engine.swap(weights)  # the first compiles how they get from mesh to mesh
        with heard:
            engine.swap(weights)
            after = engines.serve(engine, asked)
        compiled += len(heard.names)
        engine.close()
        tokens = sum(len(s.logprobs) for request in made for s in request.sequences)
        with jax.default_device(jax.local_devices()[0]), pytest.MonkeyPatch.context() as patch:
            patch.setattr(engines, "params_of", lambda *_: others(model))
            error = max(error, engines.error(model, "float64", after))
        print(json.dumps({"error": error, "tokens": tokens, "compiled": compiled}))


def others(model: str) -> Any:
    """Weights."""
    from tests import quick
    from tests.infer import engines

    return jax.tree.map(jax.numpy.asarray, quick.params(engines.model_of(model, "float64"), seed=9, scale=0.5))


def moved(model: str) -> Any:
    """The same on all processes, split as training splits them."""
    import sharding
    from jaxllm.infer.runner.serving_mesh import put
    from jaxllm.models import functional
    from tests.infer import engines

    over = sharding.MeshSpec.parse("fsdp=4,tensor=2").build()
    made = functional(engines.model_of(model, "float64"))
    places = sharding.abstract_params(made.abstract(), made.logical_axes(), over, made.rules)
    return jax.tree.map(put, others(model), sharding.shardings_of(places))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
