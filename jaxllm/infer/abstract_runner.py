"""Abstract runner: the programs of an engine as ``ModelRunner`` compiles them, for devices that are not there."""

from __future__ import annotations

from typing import Any

import jax

import sharding
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.length_limits import choose_max_len
from jaxllm.infer.runner.model_runner import ModelRunner
from jaxllm.infer.runner.paged_cache import check_pages, layer_groups, pool_sizes
from jaxllm.infer.runner.program_cache import EngineProgram
from jaxllm.infer.runner.runner_protocol import RunnerSpec
from jaxllm.infer.runner.serving_mesh import check_mesh, placements, serving_model
from jaxllm.models import Functional


class AbstractRunner(ModelRunner):
    """Description of a runner's programs; it has no arrays and runs nothing.

    Args:
        model: model to serve.
        params: shapes and dtypes of its weights.
        config: sizes of the engine; ``pages`` is given.
        mesh: serving mesh.

    Raises:
        ShardingError: the engine cannot serve the model on this mesh.
        ValueError: ``pages`` is None, or settings that an abstract runner has not.
    """

    def __init__(self, model: Functional, params: Any, config: EngineConfig, mesh: jax.sharding.Mesh):
        if config.pages is None or config.page_size is None:
            raise ValueError("an abstract runner cannot ask a device how much it holds: give pages and page_size.")
        if config.adapter_slots or config.retention is not None or config.verify_tokens or config.draft_features:
            raise ValueError(
                "an abstract runner has no adapters, no retention rule and no speculation: leave them out."
            )
        self.config, self.mesh, self.vocab_size = config, mesh, model.config.vocab_size
        self.model, self._split_model = serving_model(model), serving_model(model, split=True)
        check_mesh(mesh, latent=any(block.attention.kv_spec.latent for block in model.config.blocks))
        places = placements(self.model, params, mesh)
        self._abstract_weights = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), params, places
        )
        with self._on_mesh(), sharding.use_rules(self.model.rules):
            replicas = sharding.axis_size("batch")
        groups, max_len = (
            layer_groups(model.config, config.kv_dtype),
            choose_max_len(model.config, config.max_len, None),
        )
        columns = -(-max_len // config.page_size)
        check_pages(groups, config.page_size)
        pages = pool_sizes(config, groups, config.page_size, columns, config.pages)
        self.spec = RunnerSpec(groups, pages, config.page_size, columns, max_len, model.config.vocab_size, replicas)
        self.adapter_pool, self._heads, self._swaps = None, {}, False
        self._every_row, self._branches, self._tree_tokens = False, 0, 0

    def largest_programs(self) -> dict[str, EngineProgram]:
        """Program of the largest step with prefill, and of the largest decode step, by name."""
        full = "full" in self.config.samplers
        shapes = (
            self.shape(max(self.config.prompt_buckets), False, full),
            self.shape(max(self.config.decode_buckets), True, full),
        )
        return {one.name: one for shape in shapes for one in self._programs_of(shape)}
