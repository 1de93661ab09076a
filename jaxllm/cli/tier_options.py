"""Tiers of streamed weights on the command line: placements that are solved (``--offload fit``), and their rates."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jaxllm.cli.command_parser import check_outputs, make_writable
from jaxllm.cli.errors import UsageError

if TYPE_CHECKING:
    from jaxllm.infer.streaming.fit_request import FitRequest
    from jaxllm.infer.streaming.offload_budget import OffloadBudget
    from jaxllm.infer.streaming.placement_fit import FittedPlacement, ModelBytes
    from jaxllm.infer.streaming.tier_rates import TierRates


@dataclass(frozen=True)
class ServedLoad:
    """Load of an engine, as far as a placement depends on it.

    Attributes:
        sequences: most sequences of a batch.
        step_tokens: most tokens of a step, prompts and completions together; None: the engine's default.
        adapter_ranks: ranks of adapters that the device is to hold.
        max_len: most tokens of a sequence; None: as many as the model was trained on.
        page: tokens of a page of the KV cache.
    """

    sequences: int = 1
    step_tokens: int | None = None
    adapter_ranks: int = 0
    max_len: int | None = None
    page: int = 32


def solve_placement(request: FitRequest, model: ModelBytes, load: ServedLoad) -> OffloadBudget:
    """Solves a placement and prints it as a table, with the speed that is predicted and what limits it.

    Args:
        request: limits.
        model: bytes of the model.
        load: what is served.

    Raises:
        UsageError: nothing fits, or the rates of this device are not known.
    """
    try:
        return _solved(request, model, load).budget
    except ValueError as error:
        raise UsageError(f"--offload: {error}") from None


def solve_format(
    request: FitRequest, bytes_of: Callable[..., ModelBytes], load: ServedLoad
) -> tuple[str, OffloadBudget]:
    """Solves a placement for each of the formats that the weights may have, and chooses the fastest.

    Args:
        request: limits, and formats; of equally fast ones the first is taken.
        bytes_of: bytes of the model with ``weights=`` a format.
        load: what is served.

    Returns:
        (the format, the placement).

    Raises:
        UsageError: nothing fits in any format, or rates are not known.
    """
    from jaxllm.infer.streaming.placement_fit import DoesNotFitError

    found: dict[str, FittedPlacement] = {}
    for weights in request.formats:
        print(f"weights in {weights}:", file=sys.stderr)
        try:
            found[weights] = _solved(request.of_format(weights), bytes_of(weights=weights), load)
        except DoesNotFitError as error:
            print(error, file=sys.stderr)
        except ValueError as error:
            raise UsageError(f"--offload: weights in {weights}: {error}") from None
    if not found:
        raise UsageError(f"--offload: no placement fits in any of the formats {', '.join(request.formats)}; see above.")
    best = max(found, key=lambda weights: found[weights].tokens_per_second)
    print(f"chosen: --weights {best} --offload {found[best].budget}", file=sys.stderr, flush=True)
    return best, found[best].budget


def _solved(request: FitRequest, model: ModelBytes, load: ServedLoad) -> FittedPlacement:
    """The best placement, printed with its table.

    Raises:
        ValueError: nothing fits, or the rates of this device are not known.
    """
    import jax

    from jaxllm.infer.streaming.placement_fit import fit, show
    from jaxllm.infer.streaming.tier_rates import TierRates

    model = dataclasses.replace(model, ends=model.ends + load.adapter_ranks * model.adapter_rank)
    device = jax.devices()[0]
    limits = request.limits(device.device_kind, device.memory_stats(), load.max_len, model.longest)
    limits = dataclasses.replace(limits, page=load.page)
    rates = _published(model, request) if request.rates is None else TierRates.read(request.rates)
    if limits.disk is not None and sum(model.units) > limits.host:
        rates = rates.cold()  # the page cache has no room for the files
    batches = sorted({2**n for n in range(load.sequences.bit_length())} | {load.sequences})
    slots = None if request.slots is None else [request.slots]
    most = 0 if model.mixtures is None else model.mixtures.experts
    if request.slots is not None and request.slots > most:
        raise ValueError(f"experts = {request.slots}; the model has {most} experts a layer that may have slots.")
    found = fit(model, rates, limits, batches, request.windows, request.loaders, slots)
    best = max(found, key=lambda one: one.tokens_per_second)
    print(f"{show(found)}\nchosen for batches of {best.batch}: --offload {best.budget}", file=sys.stderr, flush=True)
    if rates.device != (here := jax.devices()[0].device_kind):
        print(f"rates={request.rates} are of {rates.device}, and this is {here}", file=sys.stderr, flush=True)
    if request.prompt is not None:
        print(_throughput(best, model, rates, request.prompt, limits.length, load), file=sys.stderr, flush=True)
    return best


def _throughput(
    best: FittedPlacement, model: ModelBytes, rates: TierRates, prompt: int, length: int, load: ServedLoad
) -> str:
    """Line with the throughput of requests with prompts: its bound, and of eight times the batch of them."""
    from jaxllm.infer.engine_config import EngineConfig
    from jaxllm.infer.streaming.placement_fit import predict
    from jaxllm.infer.streaming.throughput_bound import EngineLimits, Workload, bound, predicted

    def seconds(tokens: float) -> float:
        return predict(model, rates, best.budget, max(1, round(tokens)), length).seconds

    work = Workload(8 * best.batch, prompt, length - prompt)
    most = max(best.batch, load.step_tokens or EngineConfig.max_batched_tokens)
    limits = EngineLimits(most, best.batch, best.batch * length)
    bounded = bound(seconds, limits, work)
    return (
        f"requests of {prompt} + {length - prompt} tokens, steps of at most {limits.tokens}: at most "
        f"{bounded.tokens_per_second:.1f} generated tokens/s (limit: {bounded.limit}); "
        f"{predicted(seconds, limits, work):.1f} for {work.requests} requests"
    )


def _published(model: ModelBytes, request: FitRequest) -> TierRates:
    """Rates by data sheet; that of the disk is measured by reading one file.

    Raises:
        ValueError: there is no data sheet of this device.
    """
    import jax

    from jaxllm.compiler.device_peaks import peak_of
    from jaxllm.infer.streaming.tier_benchmark import measure_disk
    from jaxllm.infer.streaming.tier_rates import roofline_rates
    from jaxllm.plan.hardware import TABLE

    kind = jax.devices()[0].device_kind
    hardware = next((one for one in TABLE.values() if peak_of(kind) == (one.flops, one.bandwidth)), None)
    if hardware is None:
        raise ValueError(
            f"fit: no data sheet of a {kind} is known here: measure it with `jaxllm bench MODEL --tiers FILE`, and "
            "give rates=FILE."
        )
    disk = hardware.host if request.disk is None else measure_disk(request.disk)
    return roofline_rates(
        kind, sum(model.units), model.parameters,
        flops=hardware.flops, bandwidth=hardware.bandwidth, host=hardware.host, disk=disk,
        expert_parameters=model.expert_parameters, routed=model.routed,
    )  # fmt: skip


def bench_tiers(
    model: str, file: Path, dtype: str | None, weights: str, batches: tuple[int, ...], prompt: int, disk: Path | None
) -> int:
    """Measures a model's tiers, prints them and writes them to a file.

    Raises:
        UsageError: the file or the directory on the disk cannot be written; before anything is measured.
    """
    from jaxllm.convert.source_layers import open_layers
    from jaxllm.infer.streaming.tier_benchmark import measure_tiers

    disk = disk or Path(tempfile.gettempdir())
    make_writable(disk, f"--tiers-disk {disk}")
    check_outputs(tiers=file)
    loaded, layers = open_layers(model, dtype=dtype, weights=weights)
    rates = measure_tiers(
        loaded, layers, disk, batches=batches, prompt=prompt,
        tell=lambda what: print(f"measuring {what}", file=sys.stderr, flush=True),
    )  # fmt: skip
    rates.write(file)
    print(rates)
    return 0
