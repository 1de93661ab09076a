"""Expert stage: runs a mixture layer whose experts are in slots, load by load.

The program of such a layer is in three parts: up to the router's choice, which the host reads; the experts that are in
slots, once for each round of loads; and the sum (EdgeMoE, arXiv:2308.14352). Meanwhile the host's processor computes
those that ``expert_schedule`` leaves to it. The rows of each expert are computed once, so slots change no result.

Legend: B replicas (1), T rows of the flat batch, A experts of a token, E experts, N slots, D embed.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxllm.files import digest
from jaxllm.infer.runner.page_programs import Pools
from jaxllm.infer.runner.program_cache import EngineProgram
from jaxllm.infer.streaming.experts.expert_files import ExpertFiles, FileExperts
from jaxllm.infer.streaming.experts.expert_schedule import SCHEDULES, ExpertCosts
from jaxllm.infer.streaming.experts.expert_slots import ExpertSlots, SlotCounts, empty_slots, wanted_experts
from jaxllm.infer.streaming.experts.expert_statistics import ExpertStatistics
from jaxllm.infer.streaming.experts.host_experts import HostExperts, write_expert
from jaxllm.infer.streaming.experts.host_processor import HostProcessor, fastest
from jaxllm.infer.streaming.experts.mixture_parts import MixtureParts, with_experts
from jaxllm.infer.streaming.layer_store import Unit
from jaxllm.infer.streaming.pinned_memory import ON_DEVICE, can_pin, pinned
from jaxllm.infer.streaming.streamed_step import StreamedStep
from jaxllm.infer.streaming.streamed_weights import WeightPlacement
from jaxllm.infer.streaming.weight_file import WeightsUnavailableError
from jaxllm.models.layers.residual_stream import LayerStream

Following = Callable[[], tuple[Unit, str, Any] | None]
"""Gives unit, block and weights of the next mixture layer; None: they are not on the device now."""


@dataclass(frozen=True)
class RoutedLayer:
    """A mixture layer of a step after its router.

    Attributes:
        unit, block: the layer.
        shape: name of the step's shape, with which the names of programs begin.
        weights: of the block, without experts.
        around: parameters outside of blocks, fields of the step's batch, and the layer's number.
        x, h: the residual stream, and the layer's input.
        chosen, shares: experts of each token, and their weights.
        of_router: the router's shares of all experts.
        following: gives unit, block and weights of the next mixture layer, if they are on the device.
        tokens: rows of the flat batch that are of requests.
        guess: that layer, and its experts by this one's stream; None: nobody has asked yet.
    """

    unit: Unit
    block: str
    shape: str
    weights: Any
    around: tuple[Any, Any, Any]
    x: LayerStream
    h: Array
    chosen: Array
    shares: Array
    of_router: Array
    following: Following
    tokens: int
    guess: tuple[tuple[Unit, str], Array] | None = None

    @property
    def made(self) -> str:
        """Beginning of the names of its programs."""
        return f"{self.shape}-layers-{self.unit.segment}-{self.block}"


class ExpertStage:
    """Slots of all mixture layers, and the programs that use them.

    Args:
        experts: experts on the host or in files, by unit and block.
        placement: number of slots, who leaves, and who computes absent ones.
        place: sharding of the device.
        most: most tokens of a step.

    Attributes:
        counts: what was wanted, found and loaded.
        slots: slots of each layer.
        files: files of experts, if there are some.
        looks_ahead: the next layer's router is asked ahead; if so at first, it may be turned off between steps.
        costs: seconds of an expert by names of programs, measured in the first step that runs them, or as given.

    Raises:
        WeightsUnavailableError: the device has no room for the slots.
    """

    def __init__(
        self,
        experts: Mapping[tuple[Unit, str], HostExperts | FileExperts],
        placement: WeightPlacement,
        place: Any,
        most: int,
    ):
        self._experts, self._place, self.looks_ahead = experts, place, placement.ahead == "router"
        self._taken: tuple[tuple[Unit, str], Int[np.ndarray, "T A"]] | None = None
        self._after, self._statistics = dict[tuple[Unit, str], tuple[Unit, str]](), dict[Any, ExpertStatistics]()
        if placement.ahead == "statistics":
            order = sorted(experts, key=lambda key: (key[0].first, int(key[1])))
            self._after = dict(itertools.pairwise(order))
            self._statistics = {b: ExpertStatistics(len(experts[a]), len(experts[b])) for a, b in self._after.items()}
        self._schedule, self._given_costs = SCHEDULES[placement.absent], placement.expert_costs
        self.costs = dict[str, ExpertCosts]()
        self._host = None if placement.absent == "load" else HostProcessor(most)
        device = next(iter(place.device_set))
        for own in experts.values():
            if isinstance(own, HostExperts) and self._host is not None:
                own.each = list(map(self._host.put, own.each))
            elif isinstance(own, HostExperts) and can_pin(device):
                own.each = [pinned(expert, device) for expert in own.each]
        self.files: list[ExpertFiles] = []
        for own in experts.values():
            if isinstance(own, FileExperts) and own.files not in self.files:
                self.files.append(own.files)
        self._loaders = placement.loaders
        self._readers = ThreadPoolExecutor(placement.loaders, "experts")
        weakref.finalize(self, self._readers.shutdown, wait=False, cancel_futures=True)
        self._reads_ahead = dict[tuple[Unit, str], list[tuple[int, int, Future[Any]]]]()
        many = placement.expert_slots
        self.counts = SlotCounts()
        self.slots = {key: ExpertSlots(len(own), many, placement.eviction) for key, own in experts.items()}
        zeros = lambda shape, dtype: jax.device_put(np.zeros(shape, dtype), place)  # noqa: E731
        try:
            buffers = {key: empty_slots(own.whole, many, zeros) for key, own in experts.items()}
            self._buffers = jax.block_until_ready(buffers)
        except jax.errors.JaxRuntimeError as error:  # such as RESOURCE_EXHAUSTED
            raise WeightsUnavailableError(
                f"slots for {many} experts of each of {len(experts)} mixture layers cannot be made on {device}: "
                f"{error}. If its memory is full, give fewer slots (experts=N), a smaller window or fewer resident "
                "layers."
            ) from error
        self._ahead = dict[tuple[Unit, str], set[int]]()

    @property
    def bytes(self) -> int:
        """Bytes of all slots."""
        return sum(x.nbytes for x in jax.tree.leaves(self._buffers))

    def has(self, segment: int, block: str) -> bool:
        """Whether a block of a segment has experts in slots."""
        return any(unit.segment == segment and b == block for unit, b in self._experts)

    def with_slots(self, unit: Unit, block: str, weights: Any) -> Any:
        """Weights of a block with its slots in the place of the experts."""
        return with_experts(weights, self._buffers[unit, block])

    def write_programs(self) -> list[EngineProgram]:
        """Programs that write an expert into a slot, one for each shape of experts and each number of bits."""
        found: dict[str, EngineProgram] = {}
        for key, own in self._experts.items():
            slots = jax.tree.map(lambda x: self._abstract(x.shape, x.dtype), self._buffers[key])
            for expert in own.shapes:
                if (name := _write_name(self._buffers[key], expert)) not in found:
                    content = jax.tree.map(lambda x: self._abstract(x.shape, x.dtype), expert)
                    arguments = {"slots": slots, "number": self._abstract((), np.int32), "content": content}
                    found[name] = EngineProgram(name, write_expert, arguments, ("slots",))
        return list(found.values())

    def programs(
        self, name: str, step: StreamedStep, segment: int, block: str, abstract: Mapping[str, Any], key: Any
    ) -> list[EngineProgram]:
        """Programs of a mixture layer for a step's shape.

        Args:
            name: name of the shape.
            segment, block: the layer, in any repeat.
            abstract: shapes of "params", "weights" of the block without experts, "pools", "batch" and "hidden".
            key: see ``EngineProgram``.
        """
        parts = MixtureParts(step, segment, int(block), abstract["weights"])
        unit = next(unit for unit, b in self._experts if unit.segment == segment and b == block)
        slots = jax.tree.map(lambda x: self._abstract(x.shape, x.dtype), self._buffers[unit, block])
        weights = with_experts(abstract["weights"], slots)
        routed = {
            "params": abstract["params"], "weights": weights, "pools": abstract["pools"], "batch": abstract["batch"],
            "hidden": abstract["hidden"], "layer": self._abstract((), np.int32),
        }  # fmt: skip
        _, x, h, chosen, shares, _ = jax.tree.map(
            lambda a: self._abstract(a.shape, a.dtype), jax.eval_shape(parts.route, *routed.values())
        )
        table = self._abstract(self.slots[unit, block].table.shape, np.int32)
        first = {"experts": slots, "h": h, "chosen": chosen, "shares": shares, "table": table}
        made = f"{name}-layers-{segment}-{block}"
        joined = {name: routed[name] for name in ("params", "weights", "batch", "layer")}
        joined |= {"x": x, "h": h, "total": h}
        programs = [
            EngineProgram(f"{made}-route", parts.route, routed, ("pools",), key),
            EngineProgram(f"{made}-first", functools.partial(parts.experts, total=None), first, (), key),
            EngineProgram(f"{made}-more", parts.experts, first | {"total": h}, ("total",), key),
            EngineProgram(f"{made}-join", parts.join, joined, (), key),
        ]
        if self.looks_ahead:
            programs.append(EngineProgram(f"{made}-predict", parts.predict, {"weights": weights, "x": x}, (), key))
        if self._host is not None:
            programs.append(EngineProgram(f"{made}-add", jnp.add, {"total": h, "other": h}, ("total",), key))
            every = [
                one for (u, b), own in self._experts.items() for one in own.shapes if (u.segment, b) == (segment, block)
            ]
            programs += self._host.programs(f"{segment}-{block}", parts.expert, every, h.shape[-1], h.dtype, key)
        return programs

    def route(
        self,
        programs: Mapping[str, Any],
        name: str,
        unit: Unit,
        block: str,
        layer: Any,
        given: tuple[Any, Any, Any, Any, Any],
        tokens: int,
        following: Following,
    ) -> tuple[Pools, RoutedLayer]:
        """Runs a mixture layer up to its router.

        Args:
            programs: compiled programs by name.
            name: name of the step's shape.
            unit, block: the layer.
            layer: its number, on the device.
            given: parameters outside of blocks, weights of the block without experts, pools, batch, hidden states.
            tokens: rows of the flat batch that are of requests.
            following: gives unit, block and weights of the next mixture layer, if they are on the device.

        Returns:
            the pools, and what ``compute`` takes.
        """
        params, weights, pools, batch, hidden = given
        made = f"{name}-layers-{unit.segment}-{block}"
        own = self.with_slots(unit, block, weights)
        pools, x, h, chosen, shares, of_router = programs[f"{made}-route"](params, own, pools, batch, hidden, layer)
        around = params, batch, layer
        routed = RoutedLayer(unit, block, name, weights, around, x, h, chosen, shares, of_router, following, tokens)
        return pools, self._asked(programs, routed)

    def _asked(self, programs: Mapping[str, Any], routed: RoutedLayer) -> RoutedLayer:
        """The layer with a guess of the next router, if its weights are on the device."""
        if not self.looks_ahead or routed.guess is not None or (found := routed.following()) is None:
            return routed
        unit, block, weights = found
        name = f"{routed.shape}-layers-{unit.segment}-{block}-predict"
        guess = programs[name](self.with_slots(unit, block, weights), routed.x)
        guess.copy_to_host_async()
        return replace(routed, guess=((unit, block), guess))

    def compute(self, programs: Mapping[str, Any], routed: RoutedLayer) -> LayerStream:
        """The hidden states after a mixture layer: runs its experts, and loads those that the next one is to want."""
        key, made, h = (routed.unit, routed.block), routed.made, routed.h
        slots = self.slots[key]
        count = len(slots.table)
        # An expert of weight 0 adds nothing, so nobody wants it: slices that are not active.
        numbers = np.where(np.asarray(routed.shares)[0] == 0, count, np.asarray(routed.chosen)[0])
        wanted = wanted_experts(numbers, routed.tokens, count)
        routed = self._asked(programs, routed)  # its weights may have come meanwhile
        self._see(key, numbers[: routed.tokens])
        if slots.eviction == "score":
            slots.see(np.asarray(routed.of_router)[0, : routed.tokens].mean(axis=0))
        self._finish_ahead(programs, key)
        self._count(key, wanted)
        on_host = self._on_host(programs, routed, wanted, numbers)
        total = None
        by_slots = [expert for expert in wanted if expert not in on_host]
        for some, loads in slots.rounds(by_slots) if by_slots or on_host else [([], [])]:
            self._load(programs, key, loads)
            table = np.full_like(slots.table, slots.slots)
            table[some] = slots.table[some]
            given = self._buffers[key], h, routed.chosen, routed.shares, jax.device_put(table, self._place)
            total = programs[f"{made}-first"](*given) if total is None else programs[f"{made}-more"](*given, total)
            self.counts.rounds += 1
        if on_host:
            other = self._by_host(programs, routed, on_host, numbers)
            total = other if total is None else programs[f"{made}-add"](total, other)
        own = self.with_slots(*key, routed.weights)
        params, batch, layer = routed.around
        hidden = programs[f"{made}-join"](params, own, batch, layer, routed.x, h, total)
        if routed.guess is not None:
            after, guess = routed.guess
            experts = wanted_experts(np.asarray(guess)[0], routed.tokens, len(self.slots[after].table))
            self._load_ahead(programs, after, experts)
        elif key in self._after:
            after, own = self._after[key], numbers[: routed.tokens]
            guess = self._statistics[after].guess(own, own.shape[1])
            self._load_ahead(programs, after, wanted_experts(guess, len(own), len(self.slots[after].table)))
        return hidden

    def _see(self, key: tuple[Unit, str], numbers: Int[np.ndarray, "T A"]) -> None:
        """Counts which experts tokens take after those of the layer before."""
        if self._taken is not None and self._after.get(self._taken[0]) == key:
            self._statistics[key].see(self._taken[1], numbers)
        self._taken = (key, numbers) if self._after else None

    def _on_host(
        self, programs: Mapping[str, Any], routed: RoutedLayer, wanted: list[int], numbers: Int[np.ndarray, "T A"]
    ) -> set[int]:
        """Wanted experts that the host's processor computes. Free slots are filled first, whatever that costs."""
        if self._host is None:
            return set()
        slots = self.slots[routed.unit, routed.block]
        many = np.bincount(numbers[: routed.tokens].reshape(-1), minlength=len(slots.table) + 1)
        rows = {expert: int(many[expert]) for expert in wanted}
        here = [expert for expert in wanted if slots.has(expert)]
        here += [expert for expert in wanted if not slots.has(expert)][: slots.free]
        return self._schedule(rows, here, self._costs(programs, routed))

    def _by_host(
        self, programs: Mapping[str, Any], routed: RoutedLayer, experts: set[int], numbers: Int[np.ndarray, "T A"]
    ) -> Array:
        """Sum of the outputs of experts that the host's processor computes, on the device."""
        assert self._host is not None
        key, n = (routed.unit, routed.block), routed.tokens
        h, shares = np.asarray(routed.h)[0], np.asarray(routed.shares)[0]
        out, left = np.zeros_like(h), sorted(experts)
        while left:  # no more at a time than threads read, which the host has memory for
            some, left = left[: self._loaders], left[self._loaders :]
            try:
                contents = {expert: read.result() for expert, read in zip(some, self._reads(key, some), strict=True)}
            except WeightsUnavailableError:
                self.counts.failures += 1
                raise
            out[:n] += self._host.run(programs, _kind(key), contents, h[:n], numbers[:n], shares[:n])
        self.counts.on_host += len(experts)
        return jax.device_put(out[None], self._place)

    def _costs(self, programs: Mapping[str, Any], routed: RoutedLayer) -> ExpertCosts:
        """Seconds of an expert of a layer in steps of this shape, measured once for all layers of the kind."""
        if self._given_costs is not None:
            return self._given_costs
        key, made = (routed.unit, routed.block), routed.made
        if made not in self.costs:
            assert self._host is not None
            slots = self.slots[key].slots
            content = self._experts[key].read(self.slots[key].first or 0)
            table = np.full_like(self.slots[key].table, slots)
            table[:slots] = np.arange(slots)
            spread = (np.arange(routed.chosen.size) % slots).reshape(routed.chosen.shape).astype(np.int32)
            here, spread = jax.device_put((table, spread), self._place)

            def compute() -> None:
                given = self._buffers[key], routed.h, spread, routed.shares, here
                jax.block_until_ready(programs[f"{made}-first"](*given))

            of_load, of_slots = self.load_seconds(programs, key), fastest(compute)
            of_host = self._host.seconds(programs, _kind(key), content, np.asarray(routed.h)[0])
            self.costs[made] = ExpertCosts(of_load, of_slots / slots, self._host.rows, of_host)
        return self.costs[made]

    def load_seconds(self, programs: Mapping[str, Any], key: tuple[Unit, str]) -> float:
        """Seconds of copying an expert of a layer to a slot; what is in the first slot is written once more."""
        content = self._experts[key].read(self.slots[key].first or 0)

        def load() -> None:
            self._into_slot(programs, key, 0, content)
            jax.block_until_ready(self._buffers[key])

        return fastest(load)

    def _count(self, key: tuple[Unit, str], wanted: list[int]) -> None:
        hits = sum(self.slots[key].has(expert) for expert in wanted)
        self.counts.wanted += len(wanted)
        self.counts.hits += hits
        self.counts.predicted_hits += len(self._ahead.pop(key, set()).intersection(wanted))

    def _reads(self, key: tuple[Unit, str], experts: Sequence[int]) -> list[Future[Any]]:
        """Experts that threads read; those in the host's memory are there at once."""
        own, found = self._experts[key], list[Future[Any]]()
        for expert in experts:
            if own.tier == "disk":
                found.append(self._readers.submit(own.read, expert))
            else:
                found.append(Future())
                found[-1].set_result(own.read(expert))
        return found

    def _load(self, programs: Mapping[str, Any], key: tuple[Unit, str], loads: Sequence[tuple[int, int]]) -> None:
        """Loads experts into slots that they have been given; frees those of experts that cannot be read."""
        reads = self._reads(key, [expert for expert, _ in loads])
        for at, ((_, slot), read) in enumerate(zip(loads, reads, strict=True)):
            try:
                self._write(programs, key, slot, read.result())
            except BaseException as error:
                self.counts.failures += isinstance(error, WeightsUnavailableError)
                for expert, _ in loads[at:]:
                    self.slots[key].forget(expert)
                raise

    def _write(self, programs: Mapping[str, Any], key: tuple[Unit, str], slot: int, content: Any) -> None:
        self._into_slot(programs, key, slot, content)
        self.counts.loads += 1
        self.counts.load_bytes += sum(x.nbytes for x in jax.tree.leaves(content))

    def _into_slot(self, programs: Mapping[str, Any], key: tuple[Unit, str], slot: int, content: Any) -> None:
        slots, number = self._buffers[key], jax.device_put(np.int32(slot), self._place)
        try:
            content = jax.device_put(content, self._place.with_memory_kind(ON_DEVICE))
        except jax.errors.JaxRuntimeError as error:  # such as RESOURCE_EXHAUSTED
            layer = key[0].first + int(key[1])
            raise WeightsUnavailableError(
                f"layer {layer}: an expert cannot be copied from the {self._experts[key].tier} tier to the device: "
                f"{error}. If its memory is full, give fewer slots (experts=N), a smaller window, fewer resident "
                "layers or a smaller KV cache."
            ) from error
        written = programs[_write_name(slots, content)](slots, number, content)
        self._buffers[key] = jax.tree.unflatten(jax.tree.structure(slots), written)

    def _load_ahead(self, programs: Mapping[str, Any], key: tuple[Unit, str], guess: list[int]) -> None:
        """Begins to load experts that a layer is to want; those in files are written to slots when they are read."""
        slots, given = self.slots[key], list[tuple[int, int]]()
        if len(guess) == len(slots.table):  # all are wanted, and so are those that others would push out
            return
        for expert in guess[: slots.slots]:
            if (slot := slots.ahead(expert, keep=guess[: slots.slots])) is not None:
                given.append((expert, slot))
        reads = self._reads(key, [expert for expert, _ in given])
        self._ahead[key] = {expert for expert, _ in given}
        self._reads_ahead[key] = [(expert, slot, read) for (expert, slot), read in zip(given, reads, strict=True)]
        if self._experts[key].tier == "host":
            self._finish_ahead(programs, key)

    def _finish_ahead(self, programs: Mapping[str, Any], key: tuple[Unit, str]) -> None:
        """Writes what was read ahead into slots. What cannot be read is not there, and read again if it is wanted."""
        for expert, slot, read in self._reads_ahead.pop(key, []):
            try:
                self._write(programs, key, slot, read.result())
                self.counts.predicted += 1
            except WeightsUnavailableError:
                self.counts.failures += 1
                self._ahead[key].discard(expert)
                self.slots[key].forget(expert)

    def close(self) -> None:
        """Ends the threads that read experts."""
        self._readers.shutdown(cancel_futures=True)

    def _abstract(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._place)


def _kind(key: tuple[Unit, str]) -> str:
    return f"{key[0].segment}-{key[1]}"


def _write_name(slots: Any, content: Any) -> str:
    """Name of the program that writes an expert of these shapes into slots."""
    shapes = [[*x.shape, str(x.dtype)] for x in jax.tree.leaves((slots, content))]
    return f"expert-{digest(shapes)[:16]}"
