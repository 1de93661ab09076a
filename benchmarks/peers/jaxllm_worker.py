"""Our side of a comparison: the step that ``jaxllm train`` runs and the engine of ``jaxllm generate``."""

from __future__ import annotations

import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.peers import protocol
from benchmarks.peers.as_run import as_run
from benchmarks.peers.setting import Product
from jaxllm.data import Batch
from jaxllm.infer import Engine, EngineConfig, SamplingParams
from jaxllm.models import functional, param_count
from jaxllm.optim import optimizer
from jaxllm.parallel.compiler_flags import options
from jaxllm.train import init_state, jit_step
from jaxllm.train.run import build_value_and_grad
from jaxllm.train.step.step_builder import build_step, run_state, step_links
from jaxllm.train.step.step_chain import link_states
from sharding import MeshSpec


class JaxllmSide(protocol.Side):
    """jaxllm's side of a comparison."""

    def __init__(self, start: protocol.Start):
        super().__init__(start)
        self._programs, self._compile_seconds = 0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        run = as_run(self.setting)
        self.model = functional(run.model)
        device = jax.devices()[0]
        self.mesh = MeshSpec.parse(run.mesh).build([device])
        transform = optimizer(run.optim, run.steps, self.model.logical_axes())
        abstract = run_state(run, self.model, transform, self.mesh)
        extras = link_states(step_links(run))
        step = jit_step(
            build_step(run, self.model, build_value_and_grad(run, self.model, self.mesh), transform), abstract
        )
        self.batch = jax.device_put(self._batch(), NamedSharding(self.mesh, PartitionSpec(None, None)))
        chosen = options(device.platform, device.device_kind, run.compiler_options)
        with jax.set_mesh(self.mesh):
            self.step = step.lower(abstract, self.batch).compile(compiler_options=chosen or None)
            self.state = init_state(self.model, transform, self.mesh, run.seed, abstract, extras=extras)
        self._engines: dict[int, Engine] = {}

    def _batch(self) -> Batch:
        s = self.setting
        tokens = np.random.default_rng(0).integers(0, s.vocab, (s.batch, s.seq_len), dtype=np.int32)
        targets = np.full_like(tokens, -1)
        targets[:, :-1] = tokens[:, 1:]
        positions = np.broadcast_to(np.arange(s.seq_len, dtype=np.int32), tokens.shape).copy()
        return Batch(tokens, targets, np.ones_like(tokens), positions)

    def _listen(self, event: str, seconds: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self._programs += 1
        if event.startswith("/jax/core/compile/"):  # tracing, lowering, compiling
            self._compile_seconds += seconds

    def about(self) -> dict[str, object]:
        """Versions, device and parameter count."""
        return {
            "name": "jaxllm",
            "versions": {"jax": jax.__version__},
            "parameters": param_count(self.state.params),
        }

    def train(self, steps: int) -> float:
        """Runs training steps and returns the last loss."""
        metrics: dict[str, Any] = {}
        with jax.set_mesh(self.mesh):
            for _ in range(steps):
                self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready(self.state)
        return float(metrics["loss"])

    def peak_bytes(self) -> int:
        """Peak memory in bytes."""
        seen = jax.local_devices()[0].memory_stats() or {}
        return seen.get("peak_bytes_in_use", super().peak_bytes())

    def decode(self, batch: int) -> int:
        """Generates tokens for a batch and returns their number."""
        s = self.setting
        if batch not in self._engines:
            sizes = EngineConfig(
                max_sequences=batch, max_batched_tokens=batch * s.prompt, max_len=s.prompt + s.new_tokens,
                decode_steps=32, prefix_cache=False,
                samplers=("plain",), buckets=(batch * s.prompt,),
            )  # fmt: skip
            self._engines[batch] = Engine.of(self.model, self.state.params, sizes)
        engine = self._engines[batch]
        greedy = SamplingParams(max_tokens=s.new_tokens, temperature=0.0)
        prompt = np.asarray(self.batch.tokens)[0, : s.prompt]
        requests = [engine.submit(prompt, greedy) for _ in range(batch)]
        while engine.busy:
            engine.step()
        return sum(len(request.sequences[0].tokens) - s.prompt for request in requests)

    def product_seconds(self, product: Product) -> float:
        """Seconds of one matmul of the training step alone."""
        shape = (product.batch,) if product.batch > 1 else ()
        key = jax.random.key(0)
        a_shape, b_shape = (*shape, product.rows, product.inner), (*shape, product.inner, product.columns)
        if product.layout == "TN":
            a_shape = (*shape, product.inner, product.rows)
        if product.layout == "NT":
            b_shape = (*shape, product.columns, product.inner)
        a, b = jax.random.normal(key, a_shape), jax.random.normal(key, b_shape)
        multiply = jax.jit(
            lambda a, b: jnp.matmul(
                a.mT if product.layout == "TN" else a,
                b.mT if product.layout == "NT" else b,
            )
        )
        multiply(a, b).block_until_ready()

        def run() -> float:
            start = time.perf_counter()
            multiply(a, b).block_until_ready()
            return time.perf_counter() - start

        return min(run() for _ in range(protocol.REPEATS))

    def compiled(self) -> dict[str, float]:
        """Tracing and compile time, and the number of programs."""
        return {"programs": self._programs, "seconds": self._compile_seconds}


if __name__ == "__main__":
    sys.exit(protocol.serve(JaxllmSide))
