"""Cache placement: how many batches share a pass through the layers, and where their KV cache and streams are.

FlexGen's block (arXiv:2303.06865, section 4.2): its batches compute one after the other in a layer before the next
layer's weights are wanted, so weights are read once for all of them, and of the KV cache only the parts of a batch that
computes, and of the next, have to be on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

StreamTier = Literal["device", "host"]
STREAM_TIERS: tuple[StreamTier, ...] = ("device", "host")
PARTS_ON_DEVICE = 2
"""Parts of the KV cache on the device at a time, by default: one computes while the next one is read."""


@dataclass(frozen=True)
class CachePlacement:
    """Placement of the KV cache of the batches of a block. A part is the KV cache of one batch in one unit of layers.

    Attributes:
        batches: batches that take turns in each unit; each has ``EngineConfig.max_sequences`` sequences.
        device_bytes: bytes of parts that stay on the device; None: all of them.
        host_bytes: bytes of the others that stay in host memory; None: all others.
        disk: directory for files of the rest.
        streams: where the residual streams of batches are while others compute.
        tokens: tokens of a batch that the KV cache has pages for; None: those of all its sequences at full length.
        window: parts of the others on the device at a time, the one that computes among them.
    """

    batches: int = 1
    device_bytes: int | None = None
    host_bytes: int | None = None
    disk: Path | None = None
    streams: StreamTier = "device"
    tokens: int | None = None
    window: int = PARTS_ON_DEVICE

    def __post_init__(self) -> None:
        if (
            self.batches < 1
            or self.window < 1
            or min(self.device_bytes or 0, self.host_bytes or 0) < 0
            or (self.tokens is not None and self.tokens < 1)
        ):
            raise ValueError(
                f"placement of the KV cache: batches = {self.batches}, window = {self.window}, device_bytes = "
                f"{self.device_bytes}, host_bytes = {self.host_bytes}, tokens = {self.tokens}; give 1 or more batches, "
                "parts of the window and tokens, and 0 or more bytes."
            )
        if self.streams not in STREAM_TIERS:
            raise ValueError(f"placement of the KV cache: streams = {self.streams!r}; legal: {STREAM_TIERS}.")
        if self.host_bytes is not None and self.disk is None:
            raise ValueError(
                f"placement of the KV cache: host_bytes = {self.host_bytes} leaves parts to files; give a directory as "
                "disk."
            )

    def __str__(self) -> str:
        """Bytes by tier, for people."""
        mib = lambda size: f"{size / 2**20:.0f} MiB"  # noqa: E731
        where = "on the device"
        if self.device_bytes is not None:
            where = f"{mib(self.device_bytes)} on the device, the rest on the host"
        if self.host_bytes is not None:
            where = (
                f"{mib(self.device_bytes or 0)} on the device, {mib(self.host_bytes)} on the host, the rest in files"
            )
        turns = f"{self.batches} batches by turns, " if self.batches > 1 else ""
        return f"{turns}KV cache {where}, streams on the {self.streams}"

    @property
    def leaves_device(self) -> bool:
        """Whether parts may be elsewhere than on the device."""
        return self.device_bytes is not None
