"""Fit request: an offload budget that is to be solved for, as a user gives it.

``fit,device=20GiB,host=48GiB,disk=DIR``: here the bytes are limits of everything, weights, window and KV cache.
Further parts: ``rates=FILE`` of ``jaxllm bench MODEL --tiers FILE``, ``length=TOKENS`` of a sequence, ``prompt=TOKENS``
of them, ``formats=A+B``, formats that the weights may have, ``batches=N``, most batches that take turns in each layer,
with their KV cache in any tier; ``window``, ``loaders`` and, of mixtures, ``experts`` as in an offload budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from jaxllm.infer.streaming.host_memory import free_host_bytes
from jaxllm.infer.streaming.offload_budget import OffloadBudget
from jaxllm.infer.streaming.placement_fit import LOADERS, WINDOWS, TierLimits
from jaxllm.quant.formats.format_table import packing_names

USAGE = (
    "fit,device=GiB,host=GiB,disk=DIR,rates=FILE,length=TOKENS,prompt=TOKENS,batches=N,window=LAYERS,loaders=THREADS,"
    "experts=SLOTS,formats=FORMAT+FORMAT"
)
SHARE = 0.9
"""Share of the free memory of device and host that is used where no limit is given."""
LENGTH = 1024
"""Tokens of a sequence where neither the request nor the engine has a number."""


@dataclass(frozen=True)
class FitRequest:
    """Limits of a placement that is to be solved.

    Attributes:
        device, host: most bytes; None: most of what is free.
        disk: directory for files of layers; None: none.
        rates: file of ``TierRates``; None: those of data sheets.
        length: tokens of a sequence; None: the engine's ``max_len`` where it is given, else ``LENGTH``.
        windows: windows to choose from.
        loaders: numbers of threads that read layers to choose from.
        batches: most batches that take turns in each layer, whose KV cache is placed too; None: one, on the device.
        prompt: of ``length``, tokens of the prompt, for a throughput with prefill; None: decoding alone is predicted.
        slots: experts of each mixture on the device; None: the best number of them, or whole layers.
        formats: of weights, as for ``--weights``, to choose the fastest from; none: the one that is given there. The
            name of the file of rates has ``{}`` in their place then.
    """

    device: int | None = None
    host: int | None = None
    disk: Path | None = None
    rates: Path | None = None
    length: int | None = None
    windows: tuple[int, ...] = WINDOWS
    loaders: tuple[int, ...] = (OffloadBudget.loaders,)
    prompt: int | None = None
    batches: int | None = None
    slots: int | None = None
    formats: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> FitRequest | None:
        """Reads a request; None: it is a budget.

        Raises:
            ValueError: names the part that is not legal.
        """
        kind, *parts = text.split(",")
        if kind != "fit":
            return None
        own: dict[str, str] = {}
        budget: list[str] = []
        for part in parts:
            name, _, value = part.partition("=")
            if name in ("rates", "length", "prompt", "formats") and value and name not in own:
                own[name] = value
            elif name in ("evict", "ahead", "absent", "slices", "active"):
                raise ValueError(
                    f"{part!r}: fit places layers, and experts in slots which load them; leave it out, or give a "
                    "budget."
                )
            elif name in ("experts_host", "kv_limit", "kv_device", "kv_host", "kv_tokens", "streams"):
                raise ValueError(f"{part!r}: fit finds that; leave it out, or give a budget.")
            else:
                budget.append(part)
        if not own.get("length", "1").isdecimal() or own.get("length") == "0":
            raise ValueError(f"length = {own['length']!r}; give a number of tokens.")
        length = int(own["length"]) if "length" in own else None
        if not own.get("prompt", "1").isdecimal() or own.get("prompt") == "0":
            raise ValueError(f"prompt = {own['prompt']!r}; give a number of tokens.")
        prompt = int(own["prompt"]) if "prompt" in own else None
        if prompt is not None and length is not None:
            check_prompt(prompt, length)
        formats = tuple(own["formats"].split("+")) if "formats" in own else ()
        legal = ["plain", "packed", *packing_names()]
        if unknown := [one for one in formats if one not in legal]:
            raise ValueError(f"formats: {unknown[0]!r} is no format of weights; give some of {', '.join(legal)}.")
        if len(formats) > 1 and "{}" not in own.get("rates", "{}"):
            raise ValueError(
                f"rates = {own['rates']!r} are of one format; write {{}} in its place, such as rates=big-{{}}.json, "
                "and measure each: `jaxllm bench MODEL --weights int4 --tiers big-int4.json`."
            )
        try:
            limits = OffloadBudget.parse(",".join(budget), limits=True)
        except ValueError as error:
            raise ValueError(f"{error} All parts: {USAGE}.") from None
        given = {part.partition("=")[0] for part in budget}
        if "prompt" in own and "batches" in given:
            raise ValueError("prompt predicts the throughput of one batch; leave it out, or batches.")
        return cls(
            limits.device if "device" in given else None,
            limits.host if "host" in given else None,
            limits.disk,
            Path(own["rates"]) if "rates" in own else None,
            length,
            (limits.window,) if "window" in given else WINDOWS,
            (limits.loaders,) if "loaders" in given else LOADERS if limits.disk else (limits.loaders,),
            prompt,
            limits.batches if "batches" in given else None,
            limits.experts or None,
            formats,
        )

    def of_format(self, weights: str) -> FitRequest:
        """The request for weights in one format."""
        rates = None if self.rates is None else Path(str(self.rates).replace("{}", weights))
        return replace(self, rates=rates, formats=())

    def limits(
        self, kind: str, memory: Mapping[str, int] | None, max_len: int | None = None, longest: int = 0
    ) -> TierLimits:
        """Limits with what is free where none is given.

        Args:
            kind: kind of device.
            memory: its ``memory_stats``; None: it has none.
            max_len: most tokens of a sequence of the engine; None: as many as the model was trained on.
            longest: those; 0: not known.

        Raises:
            ValueError: the device does not say what is free, or the prompt is as long as a sequence.
        """
        most = self.device
        if most is None:
            if memory is None or "bytes_limit" not in memory:
                raise ValueError(f"fit: a {kind} does not say how much memory it has: give it, such as device=4GiB.")
            most = int(SHARE * (memory["bytes_limit"] - memory.get("bytes_in_use", 0)))
        host = int(SHARE * free_host_bytes()) if self.host is None else self.host
        length = self.length or max_len or LENGTH
        if self.prompt is not None:
            check_prompt(self.prompt, length)
        return TierLimits(
            most,
            host,
            self.disk,
            length,
            max(self.loaders),
            self.batches,
            max_len=longest if max_len is None else max_len,
        )


def check_prompt(prompt: int, length: int) -> None:
    """Checks that a prompt is shorter than its sequence.

    Raises:
        ValueError: it is not.
    """
    if prompt >= length:
        raise ValueError(f"prompt = {prompt}; give a number of tokens below length = {length}.")
