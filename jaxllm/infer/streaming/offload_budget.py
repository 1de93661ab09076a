"""Offload budget: how many bytes of a model's layers the device and the host may hold, as a user gives it.

``window=2,device=4GiB,host=8GiB,disk=DIR``: all parts may be left out. As many layers as fit stay on the device, as
many of the others on the host, each spread evenly over the model; the rest is read from files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxllm.infer.streaming.blocks.cache_placement import STREAM_TIERS, CachePlacement, StreamTier
from jaxllm.infer.streaming.experts.expert_schedule import SCHEDULES, AbsentExperts
from jaxllm.infer.streaming.experts.expert_slots import LOOK_AHEAD, Eviction, LookAhead
from jaxllm.infer.streaming.streamed_weights import WeightPlacement, most_that_fit, spread

USAGE = "window=LAYERS,device=GiB,host=GiB,disk=DIR,loaders=THREADS,experts=SLOTS,evict=lru|score,"
USAGE += f"ahead={'|'.join(LOOK_AHEAD)},"
USAGE += f"experts_host=GiB,absent={'|'.join(SCHEDULES)},slices=N,active=FILE,"
USAGE += "kv_limit=GiB,batches=N,kv_device=GiB,kv_host=GiB,kv_tokens=N,"
USAGE += f"streams={'|'.join(STREAM_TIERS)}"
_WORDS = {"evict": ("lru", "score"), "ahead": LOOK_AHEAD, "absent": SCHEDULES, "streams": STREAM_TIERS}
_UNITS = {"": 2**30, "b": 1, "gib": 2**30, "mib": 2**20, "kib": 2**10, "gb": 10**9, "mb": 10**6, "kb": 10**3}


@dataclass(frozen=True)
class OffloadBudget:
    """Bytes of layers on the device and the host.

    Attributes:
        window: layers that are on the device while they compute, see ``WeightPlacement``.
        device: bytes of layers that stay on the device, besides the window.
        host: bytes of layers that stay on the host; None: of all others.
        disk: directory for files of the rest; None: none.
        loaders: threads that read layers.
        experts: experts of each mixture layer on the device, see ``WeightPlacement``; the others are on the host, and
            the bytes above are of the rest of the layers. 0: experts go with their layers.
        evict: which expert leaves.
        ahead: which experts are loaded before they are wanted, see ``WeightPlacement``.
        experts_host: bytes of experts in the host's memory, the others in files of ``disk``; None: all.
        absent: who computes experts that are in no slot, see ``WeightPlacement``.
        slices: slices of each dense feed-forward layer, which are its experts then, see ``mlp_slices``; 0: layers are
            whole.
        active: file of ``ActiveSlices``: a token takes the slices that are predicted to be active; None: all.
        kv_limit: most bytes of the KV cache of one batch, on each device; None: what there is room for.
        batches: batches that compute by turns in each layer, see ``CachePlacement``.
        kv_device: bytes of the KV cache of all batches that stay on the device; None: all.
        kv_host: bytes of the rest in host memory, the others in files of ``disk``; None: all of the rest.
        kv_tokens: tokens of a batch that the KV cache has pages for; None: those of all its sequences at full length.
        streams: where the residual streams of batches are while others compute.
    """

    window: int = 2
    device: int = 0
    host: int | None = None
    disk: Path | None = None
    loaders: int = 2
    experts: int = 0
    experts_host: int | None = None
    evict: Eviction = "lru"
    ahead: LookAhead = "router"
    absent: AbsentExperts = "load"
    slices: int = 0
    active: Path | None = None
    kv_limit: int | None = None
    batches: int = 1
    kv_device: int | None = None
    kv_host: int | None = None
    kv_tokens: int | None = None
    streams: StreamTier = "device"

    @classmethod
    def parse(cls, text: str, *, limits: bool = False) -> OffloadBudget:
        """Reads a budget.

        Args:
            text: its parts.
            limits: the bytes are limits of a placement that is to be solved, so that ``host`` needs no disk.

        Raises:
            ValueError: names the part that is not legal.
        """
        found: dict[str, object] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            if name in found:
                raise ValueError(f"{name} is given twice in {text!r}.")
            if (
                name in ("window", "loaders", "experts", "slices", "batches", "kv_tokens")
                and value.isdecimal()
                and int(value)
            ):
                found[name] = int(value)
            elif name in ("device", "host", "experts_host", "kv_limit", "kv_device", "kv_host") and (
                number := re.fullmatch(r"([0-9.]+)\s*([GMK]i?B|B)?", value, re.I)
            ):
                found[name] = int(float(number[1]) * _UNITS[(number[2] or "").lower()])
            elif value in _WORDS.get(name, ()):
                found[name] = value
            elif name in ("disk", "active") and value:
                found[name] = Path(value)
            else:
                raise ValueError(f"{part!r} is no part of an offload budget; give {USAGE}, such as window=2,host=8GiB.")
        if "host" in found and "disk" not in found and not limits:
            raise ValueError(f"{text!r} limits the host's bytes; give disk=DIR for the other layers.")
        if not {"absent", "evict", "ahead", "experts_host"}.isdisjoint(found) and "experts" not in found:
            raise ValueError(f"{text!r} says what becomes of experts in no slot; give experts=SLOTS too.")
        if "slices" in found and "experts" not in found:
            raise ValueError(f"{text!r} cuts layers into slices; give experts=SLOTS, how many are on the device, too.")
        if "active" in found and "slices" not in found:
            raise ValueError(f"{text!r} says which slices are active; give slices=N, those that the file is of, too.")
        if "experts_host" in found and "disk" not in found:
            raise ValueError(f"{text!r} limits the experts on the host; give disk=DIR for files of the others.")
        if "experts" in found and not found.keys().isdisjoint(("batches", "kv_device", "kv_tokens", "streams")):
            raise ValueError(
                f"{text!r}: experts in slots do not go with batches by turns or a KV cache by tier; leave one out."
            )
        if "kv_limit" in found and not found.keys().isdisjoint(("batches", "kv_device", "kv_tokens", "streams")):
            raise ValueError(
                f"{text!r}: kv_limit is for one batch, whose KV cache is on the device; give kv_tokens and kv_device "
                "in its place."
            )
        if "kv_host" in found and not {"kv_device", "disk"} <= found.keys():
            raise ValueError(
                f"{text!r} limits the KV cache on the host; give kv_device=GiB, how much of it stays on the device, "
                "and disk=DIR for files of the rest."
            )
        if "disk" in found:
            found.setdefault("host", 0)
        return cls(**found)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """The text that ``parse`` reads."""
        parts = [f"window={self.window}", f"device={self.device}B"]
        parts += [] if self.host is None else [f"host={self.host}B"]
        parts += [] if self.disk is None else [f"disk={self.disk}"]
        parts.append(f"loaders={self.loaders}")
        if self.experts:
            parts += [] if self.experts_host is None else [f"experts_host={self.experts_host}B"]
            parts += [f"experts={self.experts}", f"evict={self.evict}", f"ahead={self.ahead}", f"absent={self.absent}"]
            parts += [f"slices={self.slices}"] if self.slices else []
            parts += [] if self.active is None else [f"active={self.active}"]
        parts += [] if self.kv_limit is None else [f"kv_limit={self.kv_limit}B"]
        if self.cache is not None:
            parts.append(f"batches={self.batches}")
            parts += [] if self.kv_device is None else [f"kv_device={self.kv_device}B"]
            parts += [] if self.kv_host is None else [f"kv_host={self.kv_host}B"]
            parts += [] if self.kv_tokens is None else [f"kv_tokens={self.kv_tokens}"]
            parts.append(f"streams={self.streams}")
        return ",".join(parts)

    @property
    def cache(self) -> CachePlacement | None:
        """Placement of the KV cache; None: one batch, whose KV cache is on the device."""
        if (self.batches, self.kv_device, self.kv_tokens, self.streams) == (1, None, None, "device"):
            return None
        return CachePlacement(
            self.batches, self.kv_device, self.kv_host, self.disk, self.streams, tokens=self.kv_tokens
        )

    def placement(self, unit_bytes: Sequence[int], on_device: Sequence[int] | None = None) -> WeightPlacement:
        """Places units of these sizes, in order.

        Args:
            unit_bytes: bytes of each unit of the model, without experts where these have slots.
            on_device: bytes of each unit on each device of a mesh; None: the same.
        """
        resident = most_that_fit(unit_bytes if on_device is None else on_device, self.device)
        others = spread(unit_bytes, resident)[1]
        on_host = None if self.host is None else most_that_fit(others, self.host)
        return WeightPlacement(
            self.window, resident, on_host, self.disk, self.loaders, expert_slots=self.experts, eviction=self.evict,
            ahead=self.ahead, absent=self.absent, expert_host_bytes=self.experts_host, cache=self.cache,
            kv_bytes=self.kv_limit,
        )  # fmt: skip
