"""Offloaded runner: a model runner whose KV cache and attention have devices of their own (Lamina, arXiv:2405.01814).

The devices of the weights have no pages, and those of the pages no weights. A step is a chain of programs, of both in
turn, that are all started at once: each waits on its devices for what the other part's program sends, and the host for
none. Queries, keys and values of a step's tokens go to the pages, and the attention output comes back, in every layer.
With ``overlap = "nano"`` a step's rows are two such chains, so that both parts compute at the same time: the paper's
rotation of batches, of two.

Decode tokens go through the programs of steps with prefill, one a step: a loop on the device would need both parts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxllm.infer.attention_pool.attention_seam import AttentionCall
from jaxllm.infer.attention_pool.offloaded_step import CALL_AXES, Q_SENT, AttentionStep, Kind, RowSet, WeightStep
from jaxllm.infer.attention_pool.pool_devices import PoolDevices, carried
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.pools.pool_argument import AttentionPoolSizes
from jaxllm.infer.pools.pooled_runner import check_pools
from jaxllm.infer.runner.model_runner import ModelRunner
from jaxllm.infer.runner.program_cache import EngineProgram, config_key
from jaxllm.infer.runner.serving_mesh import check_mesh, fresh, put, serving_model
from jaxllm.infer.runner.step.step_shape import StepShape
from jaxllm.models import DecoderConfig, Functional, has_unstacked_layers, unstack_layers
from jaxllm.models.attention_context import AttentionParams
from sharding import ShardingError


@dataclass
class TransferCounts:
    """Counts of what went from one part of the engine to the other.

    Attributes:
        steps: steps that were started.
        sent_bytes: bytes of queries, keys, values and attention sinks, to the devices of attention.
        returned_bytes: bytes of attention outputs, to the devices of the weights.
    """

    steps: int = 0
    sent_bytes: int = 0
    returned_bytes: int = 0


@dataclass(frozen=True)
class LayerCut:
    """Layer as the attention pool sees it.

    Attributes:
        kind: see ``Kind``.
        repeat: which repeat of the segment's group.
        group: its layer group.
        params: static parameters of its attention.
        program: end of the name of its attention program; layers whose attention is alike share it.
    """

    kind: Kind
    repeat: int
    group: int
    params: AttentionParams
    program: str


class OffloadedRunner(ModelRunner):
    """Runner of a model with an attention pool; see ``ModelRunner``.

    Args:
        model, params: model and all of its weights, on any devices; they are copied to the devices of the weights.
        config: sizes of the engine, with ``pools``.
        mesh: None: both parts have meshes of their own.
        options: of ``ModelRunner``.

    Raises:
        ValueError: there is a mesh, there are fewer devices, or several processes; or a layer cannot be cut.
        ShardingError: heads do not divide over the devices of a part.

    Attributes:
        weight_devices, page_devices: both parts; the first devices have the weights.
        transfers: what went from one to the other.
    """

    def __init__(
        self, model: Functional, params: Any, config: EngineConfig, *, mesh: Mesh | None = None, **options: Any
    ):
        sizes = check_pools(config, mesh)
        assert isinstance(sizes, AttentionPoolSizes)
        spans = sizes.axis == "context" and sizes.attention > 1
        self._pages_model = serving_model(model, span=spans)
        devices = jax.devices()[: sizes.devices]
        self.weight_devices = PoolDevices(devices[: sizes.model], "tensor", serving_model(model).rules)
        self.page_devices = PoolDevices(devices[sizes.model :], sizes.axis, self._pages_model.rules)
        latent = any(block.attention.kv_spec.latent for block in model.config.blocks)
        check_mesh(self.page_devices.mesh, latent=latent, span=spans)
        check_heads(model.config, self.weight_devices.parts, self.page_devices.parts)
        self.transfers = TransferCounts()
        self._whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        if self.weight_devices.mesh is None:
            place = self.weight_devices.sharding()
            params = jax.tree.map(lambda x: put(x, place), params)
        params = params if has_unstacked_layers(params) else unstack_layers(params)
        options["layers"] = "given"
        super().__init__(model, params, config, mesh=self.weight_devices.mesh, **options)
        numbers = range(model.config.layers)
        self._numbers = [
            [put(np.int32(n), part.sharding()) for n in numbers] for part in (self.weight_devices, self.page_devices)
        ]

    @property
    def devices(self) -> list[Any]:
        """Devices of both parts, those of the weights first."""
        return [*self.weight_devices.devices, *self.page_devices.devices]

    # Steps

    def run(self, shape: StepShape, packed: np.ndarray, masks: np.ndarray | None = None) -> Any:
        """Starts all programs of a step; see ``ModelRunner``."""
        weights, own, name = self._weights, self.weight_devices, shape.name
        ends, layers = _ends(weights), [weights["segments"][str(s.kind[0])][s.repeat] for s in self._cuts]
        params = [layer[str(cut.kind[1])] for layer, cut in zip(layers, self._cuts, strict=True)]
        sent = put(packed, self._per_replica)
        with self.page_devices.on():
            there = put(packed, self.page_devices.sharding("batch"))
            self.pools, requests = self.programs[f"{name}-pages"](self.pools, there)
        with own.on():
            rows, calls = self.programs[f"{name}-begin"](ends, params[0], self.last, sent)
        rows, calls = list(rows), list(calls)
        single = "-single" if self._has_single(shape) and _is_single(shape, packed) else ""
        attended: list[Any] = [None] * len(rows)
        for number, cut in enumerate(self._cuts):
            last = number + 1 == len(self._cuts)
            for half in range(len(rows)):
                attended[half] = self._attend(f"{name}-{cut.program}{single}", requests[half], calls[half], number)
                if not last:
                    turn = self.programs[_turn(name, cut.kind, self._cuts[number + 1].kind)]
                    arguments = rows[half], attended[half], self._numbers[0][number]
                    with own.on():
                        stream, calls[half] = turn(params[number], params[number + 1], *arguments)
                    rows[half] = (stream, rows[half][1])
        with own.on():
            arguments = ends, params[-1], tuple(rows), tuple(attended), self._numbers[0][-1], self.last, sent
            if shape.full:
                legal = self.all_tokens(shape) if masks is None else put(masks, self._per_replica)
                self.last, out, self.state = self.programs[f"{name}-end"](*arguments, self.state, legal)
            else:
                self.last, out = self.programs[f"{name}-end"](*arguments)
        self.transfers.steps += 1
        out.copy_to_host_async()
        return out

    def _attend(self, program: str, requests: Any, call: Any, number: int) -> Any:
        """Starts the attention of a layer; returns its output on the devices of the weights."""
        weights, pages = self.weight_devices, self.page_devices
        arrays: list[Any] = []
        for pieces, axes in zip(call, CALL_AXES, strict=True):
            array, size = (None, 0) if pieces is None else carried(pieces, weights, pages, *axes)
            arrays.append(array)
            self.transfers.sent_bytes += size
        with pages.on():
            self.pools, made = self.programs[program](self.pools, requests, tuple(arrays), self._numbers[1][number])
        attended, size = carried(made, pages, weights, *Q_SENT)
        self.transfers.returned_bytes += size
        return attended

    # Weights

    @property
    def _expected(self) -> Any:
        return self._whole

    def swap(self, params: Any) -> None:
        """Replaces the weights, for the same programs; see ``ModelRunner``."""
        self.check(params)
        params = params if has_unstacked_layers(params) else unstack_layers(params)
        self.params = jax.tree.map(fresh, params, self._abstract)
        self._combine()

    # Programs

    @functools.cached_property
    def _cuts(self) -> list[LayerCut]:
        """Layers in order."""
        found, programs = [], dict[Any, str]()
        calls = self._calls
        for segment, (group, repeats) in enumerate(self.model.config.segments):
            for repeat in range(repeats):
                for block in range(len(group)):
                    call, number = calls[segment, block], len(found)
                    own = next(i for i, one in enumerate(self.spec.groups) if number in one.layers)
                    like = [
                        own,
                        call.params,
                        *(None if x is None else (x.shape[2:], str(x.dtype)) for x in call.arrays),
                    ]
                    program = programs.setdefault(str(like), f"attend-{len(programs)}")
                    found.append(LayerCut((segment, block), repeat, own, call.params, program))
        return found

    @functools.cached_property
    def _calls(self) -> dict[Kind, AttentionCall]:
        """Shapes of the attention call of each kind of layer, of one row."""
        shape = self.shape(1, False, "full" in self.config.samplers)
        step = WeightStep(self._step(shape), self.weight_devices, self.page_devices)
        return {kind: self._abstract_call(step, kind, 1) for kind in self._kinds}

    @property
    def _kinds(self) -> list[Kind]:
        return [(s, b) for s, (group, _) in enumerate(self.model.config.segments) for b in range(len(group))]

    def _abstract_call(self, step: WeightStep, kind: Kind, rows: int) -> AttentionCall:
        """Shapes of an attention call of so many rows."""
        params: list[AttentionParams] = []

        def arrays(weights: Any, rows: Any) -> tuple[Any, ...]:
            call = step.call(kind, weights, rows)
            params.append(call.params)
            return call.arrays

        with self.weight_devices.on():
            found = jax.eval_shape(arrays, self._abstract_layer(kind), tuple(self._abstract_rows(rows)))
        q, k, v, sinks = found
        return AttentionCall(q, k, v, sinks, params[0])

    def _abstract_layer(self, kind: Kind) -> Any:
        return self._abstract["segments"][str(kind[0])][0][str(kind[1])]

    def _abstract_rows(self, rows: int) -> RowSet:
        """Shapes of a ``RowSet`` of so many rows."""
        own, config = self.weight_devices, self.model.config
        place = own.sharding("batch", "residual_seq", "act_embed")
        hidden = jax.ShapeDtypeStruct((1, rows, config.embed_dim), jnp.dtype(config.dtype), sharding=place)
        positions = jax.ShapeDtypeStruct((1, rows), jnp.int32, sharding=own.sharding("batch", "seq"))
        if self.model.config.pre_gated:
            with own.on():
                stream = jax.eval_shape(self.model.stream, hidden)
            known = jax.ShapeDtypeStruct((), bool, sharding=own.sharding())
            return RowSet(type(stream)(hidden, hidden, known), positions)
        return RowSet(hidden, positions)

    def _programs_of(self, shape: StepShape) -> list[EngineProgram]:
        """See ``ModelRunner``: those of both parts, one for each kind of layer, or of two layers in a row."""
        key = [config_key(shape), self.config.pools]
        inputs, whole = self._abstract_inputs(shape), self._step(shape)
        weights_step = WeightStep(whole, self.weight_devices, self.page_devices)
        on_pages = dataclasses.replace(whole, model=self._pages_model, forward_model=self._pages_model)
        pages_step = AttentionStep(on_pages, self.page_devices, self.weight_devices)
        ends, halves = _ends(self._abstract_weights), 2 if shape.halves else 1
        rows = self._abstract_rows(-(-shape.tokens // halves))
        size, number = rows.positions.shape[1], self._abstract_number(self.weight_devices)
        first, last = self._cuts[0].kind, self._cuts[-1].kind

        def on_weights(name: str, function: Any, arguments: Mapping[str, Any], donated: tuple[str, ...] = ()) -> None:
            one = EngineProgram(f"{shape.name}-{name}", function, arguments, donated, key)
            found.append(one)

        def on_page_devices(name: str, function: Any, arguments: Mapping[str, Any]) -> None:
            devices = self.page_devices.devices
            found.append(EngineProgram(f"{shape.name}-{name}", function, arguments, ("pools",), key, devices))

        found: list[EngineProgram] = []
        begin = {"ends": ends, "weights": self._abstract_layer(first), "last": inputs["last"]}
        on_weights("begin", functools.partial(weights_step.begin, first), begin | {"packed": inputs["packed"]})
        attended = self._abstract_attended(size)
        for kinds in self._pairs():
            layers = {n: self._abstract_layer(k) for n, k in zip(("weights", "following"), kinds, strict=True)}
            arguments = layers | {"rows": tuple(rows), "attended": attended[kinds[0]], "number": number}
            on_weights(_turn("", *kinds)[1:], functools.partial(weights_step.turn, kinds), arguments)
        arguments = {
            "ends": ends, "weights": self._abstract_layer(last), "rows": (tuple(rows),) * halves,
            "attended": (attended[last],) * halves, "number": number, **inputs,
        }  # fmt: skip
        end = functools.partial(weights_step.end, last)
        on_weights("end", end, arguments, ("last", "state"))

        pools = self._abstract_pools()
        where = self.page_devices.sharding("batch")
        packed = jax.ShapeDtypeStruct(inputs["packed"].shape, jnp.int32, sharding=where)
        on_page_devices("pages", pages_step.pages, {"pools": pools, "packed": packed})
        with self.page_devices.on():
            _, requests = jax.eval_shape(pages_step.pages, pools, packed)
        (requests, *_) = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), requests)
        if self.page_devices.mesh is None:
            requests = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), requests)
        number = self._abstract_number(self.page_devices)
        for cut in {cut.program: cut for cut in self._cuts}.values():
            arguments = {"pools": pools, "requests": requests, "call": self._abstract_sent(cut, size), "number": number}
            for single in (False, True) if self._has_single(shape) else (False,):
                attend = functools.partial(pages_step.attend, cut.group, cut.params, single)
                on_page_devices(cut.program + ("-single" if single else ""), attend, arguments)
        return found

    def _pairs(self) -> Iterator[tuple[Kind, Kind]]:
        """Kinds of two layers in a row, each pair once."""
        kinds = [cut.kind for cut in self._cuts]
        yield from dict.fromkeys(itertools.pairwise(kinds))

    def _has_single(self, shape: StepShape) -> bool:
        """Whether a step of a shape may be of single tokens alone, for which attention has a program of its own."""
        return shape.tokens == shape.requests

    def _abstract_number(self, part: PoolDevices) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((), jnp.int32, sharding=part.sharding())

    def _abstract_attended(self, rows: int) -> dict[Kind, jax.ShapeDtypeStruct]:
        """Shape of the attention output of each kind of layer."""
        place, found = self.weight_devices.sharding(*Q_SENT), {}
        for kind, call in self._calls.items():
            size = (1, rows, call.q.shape[2], call.value_dim)
            found[kind] = jax.ShapeDtypeStruct(size, call.q.dtype, sharding=place)
        return found

    def _abstract_sent(self, cut: LayerCut, rows: int) -> tuple[Any, ...]:
        """Shapes of the arrays of an attention call on the devices of attention."""
        found: list[Any] = []
        for x, axes in zip(self._calls[cut.kind].arrays, CALL_AXES, strict=True):
            if x is None:
                found.append(None)
                continue
            heads = axes.index(next(name for name in axes if name is not None))
            size = list(x.shape) if x.ndim == 1 else [1, rows, *x.shape[2:]]
            size[heads] = max(size[heads], self.page_devices.parts)
            found.append(jax.ShapeDtypeStruct(tuple(size), x.dtype, sharding=self.page_devices.sharding(*axes)))
        return tuple(found)

    @functools.cached_property
    def _program_names(self) -> dict[StepShape, list[str]]:
        return {shape: [one.name for one in self._programs_of(shape)] for shape in self._shapes}

    def _page_program(
        self, name: str, function: Any, arguments: dict[str, Any], donated: tuple[str, ...] = ()
    ) -> EngineProgram:
        made = super()._page_program(name, function, arguments, donated)
        return dataclasses.replace(made, devices=self.page_devices.devices)

    # Where pages are

    @property
    def _page_mesh(self) -> Mesh | None:
        return self.page_devices.mesh

    @property
    def _page_rules(self) -> Any:
        return self.page_devices.rules

    @property
    def _page_device(self) -> Any:
        return self.page_devices.devices[0]

    def _page_sharding(self, *logical: str | None) -> jax.sharding.Sharding:
        return self.page_devices.sharding(*logical)

    @property
    def _bytes_beside_pages(self) -> int:
        return 0

    @property
    def _span(self) -> int:
        return len(self.page_devices.devices) // self.page_devices.parts

    @property
    def _device_count(self) -> int:
        return len(self.page_devices.devices)


def check_heads(config: DecoderConfig, weights: int, pages: int) -> None:
    """Checks that the heads of all layers divide over the devices of both parts.

    Args:
        weights, pages: shards of heads of each part.

    Raises:
        ShardingError: names the layer and the pool.
    """
    for number, block in enumerate(config.blocks):
        heads, kv_heads = block.attention.heads, block.attention.kv_spec.kv_heads
        for pool, parts in (("model", weights), ("attention", pages)):
            few = kv_heads < parts and parts % kv_heads == 0
            spreads = pool == "attention" and not block.attention.kv_spec.latent
            if heads % parts or (kv_heads % parts and not few):
                raise ShardingError(
                    f"pools: layer {number} has {heads} heads and {kv_heads} of keys and values, which do not divide "
                    f"over {pool}=tensor:{parts}: give a number of devices that divides them"
                    + (", or spread pages instead (attention=context:N)." if spreads else ".")
                )


def _ends(weights: Any) -> Any:
    """Parameters outside of blocks."""
    return {name: value for name, value in weights.items() if name != "segments"}


def _turn(name: str, kind: Kind, following: Kind) -> str:
    return f"{name}-turn-{kind[0]}.{kind[1]}-{following[0]}.{following[1]}"


def _is_single(shape: StepShape, packed: np.ndarray) -> bool:
    """Whether no request of a step has more than one token."""
    return bool(np.diff(shape.inputs.views(packed[0])["starts"]).max(initial=0) <= 1)
