"""Speculative decoding: tokens/s of plain decoding and of each proposer, in alternating rounds of one engine.

    python -m benchmarks.serving.speculation [--model smollm2] [--batches 1,16] [--draft MODEL] [--self 26 or FILE]
        [--json FILE]

Two kinds of text: code of this repository, and a piece of it over and over. N-grams and the given drafts run with the
adaptive length, and n-grams also with fixed ones, beside which the adaptive one's choice is judged. With --json a cell
(text and batch) is written when it is measured; the same command goes on from there, and prints the table at the end.
Figures are of the time in which the whole batch decodes; the last column is of all tokens from the first request on.
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


TEXTS = ("code", "repeating")
PIECE = 48
"""Tokens of the piece that repeating text consists of."""
FIXED = (1, 2, 4)
"""Fixed lengths of drafts."""


def prompts(llm: Any, text: str, batch: int, tokens: int) -> list[list[int]]:
    """Parts of this repository's code, which repeats itself as code does; or a short one of each, over and over."""
    folder = Path(__file__).resolve().parents[2] / "jaxllm" / "infer"
    files = sorted(folder.rglob("*.py"), key=lambda path: -path.stat().st_size)[:batch]
    parts = [llm.ids(path.read_text("utf-8")[2000 : 2000 + 8 * tokens])[:tokens] for path in files]
    return parts if text == "code" else [(part[:PIECE] * tokens)[:tokens] for part in parts]


def measure(llm: Any, side: tuple[Any, Any], asked: list[list[int]], tokens: int) -> dict[str, float]:
    """Tokens a second while all sequences decode, and of the whole batch; tokens of a sequence that a pass gives.

    Drafts take some sequences to their end before the others, and then the batch is smaller: the first figure is of
    this batch size, as where requests wait for the slots of those that end; the second of a batch that none joins.
    """
    from jaxllm.infer import SamplingParams
    from jaxllm.infer.engine.engine_metrics import EngineMetrics

    engine, params = llm.engine, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    engine.proposer = engine.scheduler.proposer = side[0]
    engine.draft_length = engine.scheduler.draft_length = side[1]
    engine.metrics = EngineMetrics()
    start = time.perf_counter()
    unread = {engine.submit(ids, params).id for ids in asked}
    begun: tuple[float, int] | None = None
    steady: dict[str, float] = {}
    made = 0
    while engine.busy:
        pieces = engine.step()
        ended = any(piece.finish for piece in pieces)
        if ended and begun is None:
            raise SystemExit(f"--tokens {tokens}: a sequence ends before all of the batch have begun: give more.")
        made += sum(len(piece.tokens) for piece in pieces) if begun else 0
        unread -= {piece.request.id for piece in pieces if piece.tokens}
        clock, passes = time.perf_counter(), sum(one.passes for one in engine.metrics.programs.values())
        if not unread and begun is None:
            begun = clock, passes
        elif begun is not None and not steady and ended:
            steady["tokens_per_second"] = made / (clock - begun[0])
            steady["tokens_per_pass"] = made / len(asked) / max(1, passes - begun[1])
    metrics = engine.metrics
    return steady | {
        "whole": len(asked) * tokens / (time.perf_counter() - start),
        "acceptance": metrics.accepted_tokens / max(1, metrics.proposed_tokens),
    }


def sides(llm: Any, draft: str | None, kept: str | None) -> dict[str, tuple[Any, Any]]:
    """Proposer and length of drafts of each side."""
    from jaxllm.infer.speculate.draft_argument import load_draft, parse_draft
    from jaxllm.infer.speculate.draft_length import AdaptiveDraftLength
    from jaxllm.infer.speculate.draft_model import ServedModel
    from jaxllm.infer.speculate.ngram import NgramProposer
    from jaxllm.infer.speculate.self_draft import SelfDraftProposer
    from jaxllm.infer.speculate.trained_draft import load_draft_file

    engine, config = llm.engine, llm.engine.config
    runner = engine.runner
    served = ServedModel(runner.model, runner.params, config, llm.tokenizer, engine.vocab_size)
    most, buckets = config.verify_tokens, (config.decode_buckets, config.prompt_buckets)
    found = {"plain": (NgramProposer(), NoDrafts(0)), "ngram": (NgramProposer(), AdaptiveDraftLength(most, *buckets))}
    found |= {f"ngram, {count} fixed": (NgramProposer(), FixedDraftLength(count)) for count in FIXED if count <= most}
    if draft is not None:
        found["draft"] = load_draft(parse_draft(draft), served), AdaptiveDraftLength(most, *buckets)
    if kept is not None:
        own = int(kept) if kept.isdecimal() else load_draft_file(Path(kept))
        found["self"] = SelfDraftProposer(own, served), AdaptiveDraftLength(most, *buckets)
    return found


def measure_cell(args: argparse.Namespace, text: str, batch: int) -> list[dict[str, Any]]:
    """Rows of one kind of text and batch size: medians over the rounds, and the ratio to plain decoding."""
    from jaxllm.infer import LLM, EngineConfig

    sizes = EngineConfig(
        max_sequences=batch, max_len=args.prompt + args.tokens, samplers=("plain",), prefix_cache=False,
        speculate="ngram",
    )  # fmt: skip
    llm = LLM(args.model, sizes, background=False)
    contenders, asked = sides(llm, args.draft, args.kept), prompts(llm, text, batch, args.prompt)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for turn in range(-1, args.rounds):  # the first is not measured
        for name in contenders if turn % 2 else reversed(contenders):
            figures = measure(llm, contenders[name], asked, args.tokens)
            if turn >= 0:
                rounds[name].append(figures)
    found = []
    for name, measured in rounds.items():
        pairs = list(zip(measured, rounds["plain"], strict=True))
        ratios = [one["tokens_per_second"] / plain["tokens_per_second"] for one, plain in pairs]
        whole = median(one["whole"] / plain["whole"] for one, plain in pairs)
        row = {key: median(one[key] for one in measured) for key in measured[0]}
        beside = {"ratio": median(ratios), "ratios": ratios, **row, "whole": whole}
        found.append({"text": text, "batch": batch, "side": name, **beside})
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown table, and after it the adaptive length of n-grams beside the best of plain and fixed ones."""
    lines = [
        "| text | batch | | tokens/s | beside plain | tokens a pass | accepted | until all end, beside plain |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        beside = f"{row['ratio']:.2f} ({min(row['ratios']):.2f}-{max(row['ratios']):.2f})"
        lines.append(
            f"| {row['text']} | {row['batch']} | {row['side']} | {row['tokens_per_second']:.1f} | {beside} "
            f"| {row['tokens_per_pass']:.2f} | {row['acceptance']:.0%} | {row['whole']:.2f} |"
        )
    lines.append("")
    for text, batch in dict.fromkeys((row["text"], row["batch"]) for row in rows):
        ratios = {row["side"]: row["ratio"] for row in rows if (row["text"], row["batch"]) == (text, batch)}
        best = max((ratio, side) for side, ratio in ratios.items() if side == "plain" or side.endswith("fixed"))
        share = ratios["ngram"] / best[0]
        lines.append(f"{text}, batch {batch}: adaptive n-grams have {share:.2f} of the best fixed length ({best[1]})")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Measures the cells that ``--json`` lacks, and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.speculation")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft", help="draft model with the same tokenizer")
    parser.add_argument("--self", dest="kept", help="layers that a self-draft keeps, or the file of a trained one")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--texts", default=",".join(TEXTS))
    parser.add_argument("--prompt", type=int, default=192)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file of the rows; cells that it has are not measured again")
    args = parser.parse_args(argv)
    texts = args.texts.split(",")
    if unknown := [text for text in texts if text not in TEXTS]:
        parser.error(f"--texts {unknown[0]}: there are {', '.join(TEXTS)}.")
    settings = {name: getattr(args, name) for name in ("model", "draft", "kept", "prompt", "tokens", "rounds")}
    settings["measured until"] = "the first sequence ends"  # files of other definitions do not go on
    rows: list[dict[str, Any]] = []
    if args.json is not None and args.json.exists():
        stored = json.loads(args.json.read_text())
        if stored["settings"] != settings:
            parser.error(f"{args.json} is of other settings, {stored['settings']}: give another file, or remove it.")
        rows = stored["rows"]
    for text in texts:
        for batch in map(int, args.batches.split(",")):
            if any((row["text"], row["batch"]) == (text, batch) for row in rows):
                continue
            rows += measure_cell(args, text, batch)
            print(f"{text}, batch {batch}: measured", flush=True)
            if args.json is not None:
                args.json.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
