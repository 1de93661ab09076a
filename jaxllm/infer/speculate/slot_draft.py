"""Slot drafts: a program that reads the tokens of every slot which it has not seen, and drafts after the last.

For proposers that do not run as an engine's model does: draft heads, and layers in parallel. The KV cache is
contiguous, a row for each slot of the batch. It keeps what was read of a sequence; tokens that were drafted are read
again where they were accepted. Drafts are sampled with the seed and position of the served model's token, as those of a
draft model are.

Legend: R slots, T tokens read at once, V vocab, N drafted tokens.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxllm.infer.length_limits import choose_max_len
from jaxllm.infer.runner import sampler
from jaxllm.infer.runner.program_cache import EngineProgram, ProgramCache, config_key, describe
from jaxllm.infer.scheduling.sequence import Sequence
from jaxllm.infer.speculate.draft_model import HeldTokens, ServedModel, until_stop
from jaxllm.models import Functional
from jaxllm.models.packed_weight import native_vectors

READ_TOKENS = (16, 64, 256)
"""Tokens of a sequence that a call reads at once; the smallest that suffices is taken."""


class SlotTokens(NamedTuple):
    """Tokens of a call, of each slot.

    Attributes:
        tokens: token ids, padded on the right.
        start: position of the first.
        count: number of tokens; 0: the slot is left alone.
        found: tokens of the sequence that were found in the prefix cache.
        seeds: sampling seeds.
        temperature: sampling temperatures.
    """

    tokens: Int[Array, "R T"]
    start: Int[Array, " R"]
    count: Int[Array, " R"]
    found: Int[Array, " R"]
    seeds: UInt[Array, " R"]
    temperature: Float[Array, " R"]

    @property
    def position(self) -> Int[Array, "R T"]:
        """Position of each token."""
        return self.start[:, None] + jnp.arange(self.tokens.shape[1], dtype=jnp.int32)

    @property
    def there(self) -> Bool[Array, "R T"]:
        """Whether each is a token, and no padding."""
        return jnp.arange(self.tokens.shape[1], dtype=jnp.int32) < self.count[:, None]

    def last(self, values: Float[Array, "R T D"]) -> Float[Array, "R 1 D"]:
        """Values of the last token of each slot."""
        return jnp.take_along_axis(values, jnp.maximum(self.count - 1, 0)[:, None, None], axis=1)


class SlotDraftProposer(abc.ABC):
    """Slot drafts of an engine, for all sequences of a step together; see ``BatchProposer``.

    Args:
        model: model of the layers that draft, whose KV cache there is.
        served: model that the proposals are for.
    """

    program_cache: ProgramCache

    def __init__(self, model: Functional, served: ServedModel):
        self.model, self._served, self._vocab = model, served, served.vocab_size
        self._slots, self._steps = served.config.max_sequences, served.config.verify_tokens
        self._max_len = choose_max_len(served.model.config, served.config.max_len, served.longest)
        # Drafted tokens may be behind the longest sequence; the last place takes what belongs to no token.
        self._scratch = self._max_len + self._steps
        self._sizes = sorted({min(size, self._max_len) for size in READ_TOKENS})
        self._held: dict[int, HeldTokens] = {}

    @abc.abstractmethod
    def draft(self, *arguments: Any) -> tuple[Int[Array, "R N"], Any]:
        """Reads and drafts: arguments of ``weights``, the KV cache and ``SlotTokens``; returns drafts and the cache."""

    @abc.abstractmethod
    def weights(self) -> tuple[Any, ...]:
        """Arrays that the program takes before the KV cache."""

    @property
    def device_bytes(self) -> int:
        """Bytes on the device that the proposer holds beside the served model: its own weights and KV cache."""
        return sum(x.nbytes for x in jax.tree.leaves(self._cache))

    def compile(self, weights: Mapping[str, Any], cache: Any, place: jax.sharding.Sharding, key: list[Any]) -> None:
        """Compiles the programs, and takes the KV cache.

        Args:
            weights: abstract arrays of ``weights``, by name.
            cache: KV cache.
            place: of the tokens.
            key: JSON-able values of what the programs depend on besides.
        """
        served, self._cache, self._place = self._served, cache, place
        kinds = [*key, *config_key(self.model.config), describe(weights), self._vocab, self._steps]
        kinds += filter(None, [native_vectors(weights)])
        devices = sorted(place.device_set, key=lambda device: device.id)
        self.program_cache = ProgramCache(served.manifest, kinds, devices, served.strict)

        def tokens(size: int) -> dict[str, jax.ShapeDtypeStruct]:
            shapes, dtypes = {"tokens": (self._slots, size)}, {"seeds": jnp.uint32, "temperature": jnp.float32}
            return {
                name: jax.ShapeDtypeStruct(
                    shapes.get(name, (self._slots,)), dtypes.get(name, jnp.int32), sharding=place
                )
                for name in SlotTokens._fields
            }

        held = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), cache)
        programs = [
            EngineProgram(f"draft-{size}", self._draft, {**weights, "cache": held, **tokens(size)}, donated=("cache",))
            for size in self._sizes
        ]
        self._programs = self.program_cache.compile_all(programs)

    def propose_all(self, wanted: list[tuple[Sequence, int]]) -> Many[list[int] | None]:
        """Proposes up to so many tokens for each sequence; None for those that it has not read to their end yet."""
        known = {one: self._known(one) for one, _ in wanted}
        most = max(len(one.tokens) - place for one, place in known.items())
        size = next((size for size in self._sizes if size >= most), self._sizes[-1])
        tokens, numbers = np.zeros((self._slots, size), np.int32), np.zeros((3, self._slots), np.int32)
        seeds, temperature = np.zeros(self._slots, np.uint32), np.zeros(self._slots, np.float32)
        for one, place in known.items():
            some = one.tokens[place : place + size]
            tokens[one.slot, : len(some)] = some
            numbers[:, one.slot] = place, len(some), one.found
            seeds[one.slot], temperature[one.slot] = one.seed, one.request.params.temperature
            self._held[one.slot] = HeldTokens(one, place + len(some))
        given = jax.device_put((tokens, *numbers, seeds, temperature), self._place)
        drafts, self._cache = self._programs[f"draft-{size}"](*self.weights(), self._cache, *given)
        found = np.asarray(drafts)
        return [
            until_stop(one, found[one.slot, :count].tolist()) if len(one.tokens) - known[one] <= size else None
            for one, count in wanted
        ]

    def swap(self, params: Any) -> None:
        """Takes notice of new weights of the served model: what was read is read again."""
        self._held.clear()

    def sample(self, logits: Float[Array, "R V"], given: SlotTokens, number: Array | int) -> Int[Array, " R"]:
        """Samples draft token ``number`` of each slot."""
        logits = jnp.where(jnp.arange(logits.shape[1]) < self._vocab, logits, -jnp.inf)
        return sampler.sample(logits, sampler.SamplerRows(given.seeds, self.place_of(given, number), given.temperature))

    def place_of(self, given: SlotTokens, number: Array | int) -> Int[Array, " R"]:
        """Position of draft token ``number`` of each slot."""
        return jnp.where(given.count > 0, given.start + given.count + number, self._scratch)

    def _known(self, one: Sequence) -> int:
        held = self._held.get(one.slot)
        return 0 if held is None else held.known(one)

    def _draft(self, *arguments: Any) -> tuple[Int[Array, "R N"], Any]:
        own = len(arguments) - len(SlotTokens._fields)
        return self.draft(*arguments[:own], SlotTokens(*arguments[own:]))
