"""``jaxllm size``: compute-optimal model size, tokens and hyperparameters for a FLOP budget, and the cost."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from jaxllm.cli.command_parser import parse_command


def size(argv: list[str]) -> int:
    """Size a model and its training for a budget: `jaxllm size --flops 1e21`."""
    parse_command(_size, argv, "jaxllm size")
    return 0


def _size(
    *,
    flops: float,
    law: Literal["chinchilla", "hoffmann", "kaplan"] = "chinchilla",
    vocab_size: int = 128_256,
    seq_len: int = 8192,
    unique: float | None = None,
    on: str = "",
    mfu: float = 0.4,
    hardware: Path | None = None,
    save: Path | None = None,
) -> None:
    """Computes parameters, tokens, batch size and learning rate for a FLOP budget, a model of that size, and its cost.

    Args:
        flops: training budget in FLOP, such as 1e21; 6 per parameter and token.
        law: scaling law: chinchilla (refitted), hoffmann (as published) or kaplan.
        vocab_size: vocabulary size of the model.
        seq_len: sequence length in tokens.
        unique: number of unique training tokens; beyond them the run repeats epochs, and the split accounts for it.
        on: topology, or several separated by commas, to estimate time and cost for.
        mfu: model FLOPs utilisation, as a share of the peak.
        hardware: TOML or JSON file that changes or adds kinds of hardware.
        save: recipe file (FILE.py) to write.
    """
    from jaxllm.cli import UsageError
    from jaxllm.plan import hardware as table
    from jaxllm.plan.hardware import Cluster
    from jaxllm.plan.scaling_laws import (
        LAWS,
        ParametricLaw,
        count_parameters,
        effective_data,
        model_of_size,
        plan_repeated_data,
        step_law,
    )
    from jaxllm.plan.training_cost import cost_of_time

    for name, value in (("flops", flops), ("vocab_size", vocab_size), ("seq_len", seq_len), ("unique", unique)):
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"--{name.replace('_', '-')} {value}: give a positive number.")
    if not 0 < mfu <= 1:
        raise UsageError(f"--mfu {mfu}: give a share of the peak FLOP/s, above 0 and at most 1.")
    known = table.TABLE if hardware is None else table.read(hardware)
    clusters = [Cluster.parse(name, known) for name in on.split(",") if name]

    chosen = LAWS[law]
    found, scarce = chosen.best(flops), None
    if unique is not None and found.tokens > unique:
        if not isinstance(chosen, ParametricLaw):
            raise UsageError(f"--unique {unique}: --law {law} has no loss to weigh repeats by; choose another law.")
        scarce = plan_repeated_data(chosen, flops, unique)
        found = scarce.size
    model = model_of_size(found.parameters, vocab_size)
    whole, body = count_parameters(model)
    tokens = flops / 6 / whole
    rate, batch = step_law(body, tokens)
    rows = round_rows(batch / seq_len)
    steps = math.ceil(tokens / (rows * seq_len))

    print(f"{flops:.3g} FLOP by {LAWS[law].source}:")
    loss = "" if found.loss is None else f", loss {found.loss:.2f} on the law's data"
    print(f"  {_big(found.parameters)} parameters, {_big(found.tokens)} tokens{loss}")
    if unique is not None and scarce is not None:
        print(f"  of these, {_big(unique)} different tokens: {scarce.lost:.3f} more than with as many fresh ones")
    for other in LAWS:
        if other != law:
            one = LAWS[other].best(flops)
            print(f"  {_big(one.parameters)} and {_big(one.tokens)} by {LAWS[other].source}")
    block = model.pattern[0]
    print(
        f"model: {model.layers} layers of width {model.embed_dim}, {block.attention.heads} heads, "  # type: ignore[union-attr]
        f"MLP {block.mlp.hidden}: {_big(whole)} parameters, {_big(body)} without the vocabulary's"  # type: ignore[union-attr]
    )
    print(f"tokens: {_big(tokens)}, {tokens / whole:.1f} a parameter")
    if unique is not None:
        fresh = effective_data(tokens, unique)
        print(f"  {tokens / unique:.1f} epochs of {_big(unique)}, worth {_big(fresh)} fresh ones")
    print(
        f"batch: {_big(rows * seq_len)} tokens = {rows} x {seq_len}, {steps} steps; peak learning rate {rate:.2g} "
        "(Step Law, arXiv:2503.04715, for AdamW)"
    )
    for cluster in clusters:
        seconds = flops / (cluster.devices * cluster.hardware.flops * mfu)
        print(f"{cluster.name} at {mfu:.0%} MFU: {cost_of_time(cluster, tokens, steps, seconds)}")
    if save is not None:
        print(f"saved: {_saved(save, model, seq_len, rows, rate, steps)}")


def round_rows(rows: float) -> int:
    """Batch size rounded to the nearest 2**k or 3 * 2**k, which divides over many devices; the optimum is broad."""
    return min((base << k for base in (1, 3) for k in range(40)), key=lambda found: abs(math.log(found / rows)))


def _saved(path: Path, model: object, seq_len: int, rows: int, rate: float, steps: int) -> str:
    from dataclasses import replace

    from jaxllm.data import DataConfig
    from jaxllm.models.decoder import DecoderConfig
    from jaxllm.optim import OptimConfig, ScheduleConfig
    from jaxllm.plan.plan_export import write_run
    from jaxllm.train import RunConfig

    assert isinstance(model, DecoderConfig)
    run = RunConfig(
        name="sized",
        model=replace(model, dtype="bfloat16", remat="full"),
        data=DataConfig(source="tokens.bin", tokenizer="tokenizer.json", seq_len=seq_len, batch_size=rows),
        optim=OptimConfig(schedule=ScheduleConfig(kind="cosine", peak=float(f"{rate:.3g}"), warmup=0.01, floor=0.1)),
        steps=steps,
        mesh="fsdp",
    )
    return write_run(path, run, "sized", ["A run sized by `jaxllm size`."], "By law.")


def _big(number: float) -> str:
    for least, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= least:
            return f"{number / least:.3g} {letter}"
    return f"{number:.3g}"
