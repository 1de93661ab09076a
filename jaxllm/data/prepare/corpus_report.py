"""Report of a prepared corpus: one HTML page with counts by rule and samples of the documents dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from html import escape
from typing import Any

from jaxllm.data.prepare.rule_counts import RuleCounts
from jaxllm.svg import number, page, stacked_bar, table


def corpus_report(manifest: Mapping[str, Any], counts: Mapping[str, RuleCounts]) -> str:
    """Report of a corpus, as HTML. counts: those of each source by name, with samples."""
    sources = manifest["sources"]
    total = {name: sum(one[name] for one in sources) for name in ("read", "kept", "tokens")}
    dropped: Counter[str] = Counter()
    for one in sources:
        dropped.update(one["dropped"])
    tiles = [
        ("documents read", f"{total['read']:,}"),
        ("kept", f"{total['kept']:,} ({total['kept'] / max(1, total['read']):.1%})"),
        ("tokens", number(float(total["tokens"]))),
        ("shards", f"{len(manifest['shards']):,}"),
        ("sources", f"{len(sources):,}"),
    ]
    body = [
        "<h1>Prepared corpus</h1>",
        '<div class="tiles">' + "".join(f'<div class="tile"><b>{b}</b><span class="soft">{a}</span></div>'
                                        for a, b in tiles) + "</div>",
        _bar(total["kept"], dropped),
        "<h2>Sources</h2>",
        _panel(table(
            [[one["name"], one["license"], one["read"], one["kept"], one["kept"] / max(1, one["read"]) * 100.0,
              one["tokens"], len(one["files"])] for one in sources],
            ["source", "licence", "read", "kept", "kept %", "tokens", "files"],
        )),
        "<h2>Dropped, by rule</h2>",
        _panel(_dropped_table(sources, dropped)),
    ]  # fmt: skip
    masked: Counter[str] = Counter()
    for one in sources:
        masked.update(one["masked"])
    if masked:
        body += ["<h2>Masked</h2>", _panel(table(sorted(masked.items()), ["mask", "documents changed"]))]
    body += ["<h2>Samples of dropped documents</h2>", *_samples(counts, dropped)]
    empty = [(one["name"], name) for one in sources for name in one["empty_files"]]
    if empty:
        body += ["<h2>Empty files</h2>", _panel(table(empty, ["source", "file"]))]
    libraries = [*manifest["libraries"].items(), ("tokenizer", manifest["tokenizer"]["fingerprint"][:12])]
    body += ["<h2>Made with</h2>", _panel(table(libraries, ["library", "version"]))]
    return page("Prepared corpus", "".join(body))


def _panel(inner: str) -> str:
    return f'<div class="panel wide">{inner}</div>'


def _bar(kept: int, dropped: Counter[str]) -> str:
    most = dropped.most_common(4)
    rest = dropped.total() - sum(count for _, count in most)
    parts = [("kept", float(kept), 0)] + [(name, float(count), i) for i, (name, count) in enumerate(most, start=1)]
    return stacked_bar(parts + ([("other rules", float(rest), 5)] if rest else []), title="documents")


def _dropped_table(sources: list[dict[str, Any]], dropped: Counter[str]) -> str:
    rows = [[rule, count, *(one["dropped"].get(rule, 0) for one in sources)]
            for rule, count in sorted(dropped.items(), key=lambda item: (-item[1], item[0]))]  # fmt: skip
    return table(rows, ["rule", "documents", *(one["name"] for one in sources)]) if rows else "<p>none</p>"


def _samples(counts: Mapping[str, RuleCounts], dropped: Counter[str]) -> list[str]:
    every = RuleCounts()
    for one in counts.values():
        every.add(one)
    out = []
    for rule, count in sorted(dropped.items(), key=lambda item: (-item[1], item[0])):
        shown = []
        for _, where, why, text in every.samples.get(rule, ()):
            note = f" {escape(why.removeprefix(where).removeprefix(':'))}" if why else ""
            body = f"<pre>{escape(text)}</pre>" if text.strip() else ""
            shown.append(f'<div class="panel gap"><p class="soft">{escape(where)}{note}</p>{body}</div>')
        out.append(f"<details><summary>{escape(rule)}: {count:,}</summary>{''.join(shown)}</details>")
    return out
