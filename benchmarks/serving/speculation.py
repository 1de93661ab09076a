"""Speculative decoding: tokens/s of plain decoding and of each proposer, in alternating rounds of one engine.

python -m benchmarks.serving.speculation [--model smollm2] [--batches 1,16] [--draft MODEL] [--self 26] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

from jaxllm.infer.speculate.draft_length import FixedDraftLength


class NoDrafts(FixedDraftLength):
    """Plain decoding, by the engine that verifies at other times."""

    def counts(self, sequences: list[Any]) -> dict[Any, int]:
        """No drafts."""
        return {}


def prompts(llm: Any, batch: int, tokens: int) -> list[list[int]]:
    """Parts of this repository's code, which repeats itself as code does."""
    folder = Path(__file__).resolve().parents[2] / "jaxllm" / "infer"
    files = sorted(folder.rglob("*.py"), key=lambda path: -path.stat().st_size)[:batch]
    return [llm.ids(path.read_text("utf-8")[2000 : 2000 + 8 * tokens])[:tokens] for path in files]


def measure(llm: Any, side: tuple[Any, Any], batch: int, prompt: int, tokens: int) -> dict[str, float]:
    """Tokens a second once all sequences decode, and tokens of a sequence that a pass of the served model gives."""
    from jaxllm.infer import SamplingParams
    from jaxllm.infer.engine.engine_metrics import EngineMetrics

    engine, params = llm.engine, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    engine.proposer = engine.scheduler.proposer = side[0]
    engine.draft_length = engine.scheduler.draft_length = side[1]
    engine.metrics = EngineMetrics()
    reading = {engine.submit(ids, params).id for ids in prompts(llm, batch, prompt)}
    clock, made, passes = 0.0, 0, 0
    while engine.busy:
        for piece in engine.step():
            made += len(piece.tokens) if clock else 0
            reading -= {piece.request.id} if piece.tokens else set()
        if not reading and not clock:
            clock, passes = time.perf_counter(), sum(one.passes for one in engine.metrics.programs.values())
    seconds = time.perf_counter() - clock
    passes = sum(one.passes for one in engine.metrics.programs.values()) - passes
    metrics = engine.metrics
    return {
        "tokens_per_second": made / seconds,
        "tokens_per_pass": made / batch / max(1, passes),
        "acceptance": metrics.accepted_tokens / max(1, metrics.proposed_tokens),
    }


def sides(llm: Any, draft: str | None, kept: int | None) -> dict[str, tuple[Any, Any]]:
    """Proposer and length of drafts of each side."""
    from jaxllm.infer.speculate.draft_argument import load_draft, parse_draft
    from jaxllm.infer.speculate.draft_length import AdaptiveDraftLength
    from jaxllm.infer.speculate.draft_model import ServedModel
    from jaxllm.infer.speculate.ngram import NgramProposer
    from jaxllm.infer.speculate.self_draft import SelfDraftProposer

    engine, config = llm.engine, llm.engine.config
    runner = engine.runner
    served = ServedModel(runner.model, runner.params, config, llm.tokenizer, engine.vocab_size)
    most, buckets = config.verify_tokens, (config.decode_buckets, config.prompt_buckets)
    found = {"plain": (NgramProposer(), NoDrafts(0)), "ngram": (NgramProposer(), AdaptiveDraftLength(most, *buckets))}
    found["ngram, fixed"] = NgramProposer(), FixedDraftLength(most)
    if draft is not None:
        found["draft"] = load_draft(parse_draft(draft), served), AdaptiveDraftLength(most, *buckets)
    if kept is not None:
        found["self"] = SelfDraftProposer(kept, served), AdaptiveDraftLength(most, *buckets)
    return found


def main(argv: list[str] | None = None) -> None:
    """Prints a row for each side and batch size: medians over the rounds, and the ratio to plain decoding."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.speculation")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft", help="draft model with the same tokenizer")
    parser.add_argument("--self", dest="kept", type=int, help="layers that a self-draft keeps")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--prompt", type=int, default=192)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    from jaxllm.infer import LLM, EngineConfig

    results = []
    for batch in map(int, args.batches.split(",")):
        sizes = EngineConfig(
            max_sequences=batch, max_len=args.prompt + args.tokens, samplers=("plain",), prefix_cache=False,
            speculate="ngram",
        )  # fmt: skip
        llm = LLM(args.model, sizes)
        contenders = sides(llm, args.draft, args.kept)
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
        for turn in range(-1, args.rounds):  # the first is not measured
            for name in contenders if turn % 2 else reversed(contenders):
                figures = measure(llm, contenders[name], batch, args.prompt, args.tokens)
                if turn >= 0:
                    rounds[name].append(figures)
        for name, measured in rounds.items():
            ratios = [
                one["tokens_per_second"] / plain["tokens_per_second"]
                for one, plain in zip(measured, rounds["plain"], strict=True)
            ]
            row = {key: median(one[key] for one in measured) for key in measured[0]}
            results.append({"batch": batch, "side": name, "ratio": median(ratios), "ratios": ratios, **row})
            print(
                f"batch {batch:3} {name:14} {row['tokens_per_second']:8.1f} tokens/s  {median(ratios):5.2f} of plain "
                f"({min(ratios):.2f}-{max(ratios):.2f})  {row['tokens_per_pass']:.2f} tokens a pass  "
                f"{row['acceptance']:.0%} accepted",
                flush=True,
            )
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
