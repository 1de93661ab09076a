"""Layer-parallel drafts: consecutive layers of a draft model run at once (EasySpec, arXiv:2502.02493).

Layers are grouped, N after another. While tokens are drafted, all attention layers of a group read the group's input,
so that none waits for another; then all feed-forward layers of the group run, each on that input plus what the
attention layers up to its own add. This is an approximation ("fuzzy" in the paper), with two collectives a group where
each layer is on a device of its own. With N = 1 it is the model as it is.

Keys and values of such tokens are not those of the model. Once the served model has verified a draft, the accepted
tokens are read again, by the exact layers in one pass (recalibration), with which the next draft begins: the KV cache
of all known tokens is exact. Verification compares tokens, so completions are those of plain decoding in any case.

Over devices the exact pass runs layer after layer, each on the device that holds it. The paper's pass is tensor
parallel; a layer's weights would then be on all devices.

Legend: N layers of a group, P devices, I layers of a group on a device, R slots, T tokens, D embed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

import sharding
from jaxllm.infer.runner.dense_cache import DenseCache, empty_cache
from jaxllm.infer.runner.serving_mesh import serving_model
from jaxllm.infer.speculate.draft_model import ServedModel, check_draft_model
from jaxllm.infer.speculate.self_draft import layer_params
from jaxllm.infer.speculate.slot_draft import SlotDraftProposer, SlotTokens
from jaxllm.models import Functional
from jaxllm.models.decoder import Block

AXIS = "layers"
"""Mesh axis over which the layers of a group are spread."""


class LayerParallelProposer(SlotDraftProposer):
    """Layer-parallel drafts of an engine; see ``BatchProposer``.

    Args:
        model, params: draft model and its weights.
        served: model that the proposals are for.
        parallel: number of layers of a group.
        devices: devices that they are spread over, a divisor of it; one: they run there one after the other, with the
            same values.

    Raises:
        ValueError: the draft cannot propose for the served model, or its layers cannot be spread; says why.
    """

    def __init__(self, model: Functional, params: Any, served: ServedModel, parallel: int, devices: list[jax.Device]):
        super().__init__(serving_model(model), served)
        check_draft_model(model, served, self._max_len)
        if served.mesh is not None and served.mesh.size > 1:
            raise ValueError(
                "speculate: layers in parallel draft for a model on one device; on a mesh leave parallel out."
            )
        config = model.config
        self._parallel, self._ways = min(parallel, config.layers), len(devices)
        self._check_spread()
        self._mesh = jax.sharding.Mesh(np.asarray(devices), (AXIS,))
        place = NamedSharding(self._mesh, PartitionSpec())
        params = jax.tree.map(lambda x: x.addressable_data(0), params)  # without the mesh that it was loaded on
        ends = {name: value for name, value in params.items() if name != "segments"}
        layers = [layer_params(model, params, layer) for layer in range(config.layers)]
        if self._ways == 1:
            device = place = jax.sharding.SingleDeviceSharding(devices[0])
            spread: Any = jax.device_put(tuple(layers), device)
        else:
            spread = jax.tree.map(self._spread, *layers)
        self._params = {"ends": jax.device_put(ends, place), "layers": spread}
        try:
            cache = empty_cache(config, self._slots, self._scratch + 1)
        except NotImplementedError as error:
            raise ValueError(f"speculate: layers in parallel: {error} Leave parallel out.") from error
        where = place if self._ways == 1 else NamedSharding(self._mesh, PartitionSpec(AXIS))
        self._where = where
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self._params)
        held = jax.device_put((cache.k, cache.v), where)
        self.compile({"params": abstract}, held, place, ["layer parallel", self._parallel, self._ways])

    @property
    def device_bytes(self) -> int:
        """Bytes of the draft's weights and KV cache on one device."""
        leaves = jax.tree.leaves((self._params, self._cache))
        return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in leaves)

    def weights(self) -> tuple[Any, ...]:
        """Weights of the draft."""
        return (self._params,)

    def draft(self, params: Any, held: Any, given: SlotTokens) -> tuple[Int[Array, "R N"], Any]:
        """Reads tokens by the exact layers, which recalibrates the KV cache, and drafts with layers in parallel."""
        if self._ways == 1:
            return self._on_device(params, held, given)
        ends, spread = PartitionSpec(), PartitionSpec(AXIS)
        specs = {"ends": ends, "layers": PartitionSpec(None, AXIS)}
        run = jax.shard_map(
            self._on_device, mesh=self._mesh, in_specs=(specs, spread, ends), out_specs=(ends, spread), check_vma=False
        )
        return run(params, held, given)

    def _on_device(self, params: Any, held: Any, given: SlotTokens) -> tuple[Int[Array, "R N"], Any]:
        """Program of one device; its layers are ``Float[Array, "groups I ..."]``, or the model's own list on one."""
        positions = jnp.where(given.there, given.position, self._scratch)
        hidden, cache = self._forward(params, given.tokens, positions, DenseCache(*held), self._exact)
        first = self.sample(self.model.head(params["ends"], given.last(hidden))[:, 0], given, 0)

        def one(carry: Any, number: Array) -> Any:
            token, cache = carry
            place = self.place_of(given, number)[:, None]
            hidden, cache = self._forward(params, token[:, None], place, cache, self._fuzzy)
            token = self.sample(self.model.head(params["ends"], hidden)[:, 0], given, number + 1)
            return (token, cache), token

        numbers = jnp.arange(self._steps - 1, dtype=jnp.int32)
        (_, cache), others = jax.lax.scan(one, (first, cache), numbers)
        assert isinstance(cache, DenseCache)
        return jnp.concatenate([first[None], others]).T, (cache.k, cache.v)

    def _forward(
        self, params: Any, tokens: Array, positions: Array, cache: Any, group: Callable[..., Any]
    ) -> tuple[Float[Array, "R T D"], Any]:
        """Hidden states of tokens, by groups of layers."""
        x = self.model.embed(params["ends"], tokens, positions)
        with sharding.use_rules(self.model.rules):
            for blocks in self._groups(params["layers"]):
                x, cache = group(blocks, x, positions, cache)
        return x, cache

    def _groups(self, layers: Any) -> list[list[tuple[Array, Block]]]:
        """(row of the KV cache, block) of a device's layers, by groups."""
        numbers = range(0, self.model.config.layers, self._parallel)
        if self._ways == 1:
            own = [(jnp.int32(row), self._block(row, layers[row])) for row in range(self.model.config.layers)]
            return [own[first : first + self._parallel] for first in numbers]
        each = self._parallel // self._ways
        return [
            [
                (jnp.int32(group * each + i), self._block(0, jax.tree.map(lambda x, g=group, i=i: x[g, i], layers)))
                for i in range(each)
            ]
            for group in range(len(numbers))
        ]

    def _block(self, layer: int, params: Any) -> Block:
        for number, (blocks, repeats) in enumerate(self.model.config.segments):
            if layer < len(blocks) * repeats:
                return self.model.block(number, layer % len(blocks), params, layer)
            layer -= len(blocks) * repeats
        raise AssertionError("there is no such layer")

    def _exact(self, blocks: list[tuple[Array, Block]], x: Array, positions: Array, cache: Any) -> tuple[Array, Any]:
        """The layers of a group one after the other, each device its own in its turn."""

        def own(x: Array, cache: Any) -> tuple[Array, Any]:
            for row, block in blocks:
                x, cache = block(x, positions, row, cache)
            return x, cache

        if self._ways == 1:
            return own(x, cache)
        me = jax.lax.axis_index(AXIS)
        for turn in range(self._ways):
            x, cache = jax.lax.cond(me == turn, own, lambda x, cache: (x, cache), x, cache)
            x = jax.lax.psum(jnp.where(me == turn, x, 0), AXIS)
        return x, cache

    def _fuzzy(self, blocks: list[tuple[Array, Block]], x: Array, positions: Array, cache: Any) -> tuple[Array, Any]:
        """The layers of a group at once."""
        attended = list[Array]()
        for row, block in blocks:
            one, cache = block.attention_branch(x, positions, row, cache)
            attended.append(one)
        own = jnp.stack(attended)
        every = own if self._ways == 1 else jax.lax.all_gather(own, AXIS, tiled=True)
        streams = x + jnp.cumsum(every, axis=0)
        first = 0 if self._ways == 1 else jax.lax.axis_index(AXIS) * len(blocks)
        added = jnp.zeros_like(x)
        for i, (row, block) in enumerate(blocks):
            one, cache = block.mlp_branch(streams[first + i], row, cache)
            added = added + one
        return streams[-1] + (added if self._ways == 1 else jax.lax.psum(added, AXIS)), cache

    def _spread(self, *layers: Array) -> Array:
        """A weight of all layers: those of each group next to each other, on the devices in turn."""
        stacked = np.stack([np.asarray(x) for x in layers])
        grouped = stacked.reshape(-1, self._parallel, *stacked.shape[1:])
        return jax.device_put(grouped, NamedSharding(self._mesh, PartitionSpec(None, AXIS)))

    def _check_spread(self) -> None:
        """Checks that the layers can be spread over the devices.

        Raises:
            ValueError: they cannot; says why.
        """
        if self._ways == 1:
            return
        config, why = self.model.config, ""
        if self._parallel % self._ways:
            why = f"parallel = {self._parallel} is no multiple of {self._ways} devices"
        elif config.layers % self._parallel:
            why = f"the draft has {config.layers} layers, no multiple of parallel = {self._parallel}"
        elif any(block != config.blocks[0] for block in config.blocks):
            why = "the draft has layers of several kinds"
        if why:
            raise ValueError(f"speculate: {why}: give another number, or one device.")
