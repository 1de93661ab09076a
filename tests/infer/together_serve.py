"""One of several processes of an engine: process 0 takes requests and prints what came of them, the others follow.

python -m tests.infer.together_serve MESH MODEL WAY SEED
"""

from __future__ import annotations

import json
import os
import sys

import jax
import numpy as np
import pytest

import tests.environment  # noqa: F401
from jaxllm.parallel.cluster import detect
from jaxllm.parallel.distributed import DistributedConfig, running


def main(mesh: str, model: str, way: str, seed: int) -> None:
    jax.config.update("jax_num_cpu_devices", int(os.environ["SERVED_DEVICES"]))
    from tests.infer import engines, meshes
    from tests.proofs.engine.programs import Compilations

    with running(detect(os.environ), DistributedConfig(start_timeout=200, lost_after=30)) as group:
        engine, heard = meshes.over(mesh, model, engines.ENGINES[way], "float64"), Compilations()
        if not group.leads:
            with pytest.raises(RuntimeError, match="follows process 0"):
                engine.submit([1, 2])
            with heard:
                engine.follow()
            assert heard.names == []
            return
        asked = engines.traffic(np.random.default_rng(seed), engine.config, 8 * engine.device.spec.replicas)
        with heard:
            made = engines.serve(engine, asked)
        engine.close()
        tokens = sum(len(s.logprobs) for request in made for s in request.sequences)
        with jax.default_device(jax.local_devices()[0]):
            error = engines.error(model, "float64", made)
        print(json.dumps({"error": error, "tokens": tokens, "compiled": len(heard.names)}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
