"""Three tasks of multiple choice that need no download: what texts say next, and capitals.

Rows are those of ``jaxllm.evals.tasks``: a prompt, four choices, and the place of the right one. Wrong choices are
taken from other places of the same text, so that style alone does not tell them apart.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHOICES, PROMPT, CONTINUATION = 4, 12, 4
"""Choices of a row, and words of a prompt and of a choice."""
CAPITALS = {
    "Mongolia": "Ulaanbaatar", "Nepal": "Kathmandu", "Bhutan": "Thimphu", "Laos": "Vientiane", "Cambodia": "Phnom Penh",
    "Myanmar": "Naypyidaw", "Sri Lanka": "Colombo", "Kazakhstan": "Astana", "Uzbekistan": "Tashkent",
    "Kyrgyzstan": "Bishkek", "Armenia": "Yerevan", "Georgia": "Tbilisi", "Azerbaijan": "Baku", "Moldova": "Chisinau",
    "Estonia": "Tallinn", "Latvia": "Riga", "Lithuania": "Vilnius", "Slovenia": "Ljubljana", "Croatia": "Zagreb",
    "Albania": "Tirana", "Bulgaria": "Sofia", "Morocco": "Rabat", "Algeria": "Algiers", "Ghana": "Accra",
    "Senegal": "Dakar", "Mali": "Bamako", "Uganda": "Kampala", "Zambia": "Lusaka", "Angola": "Luanda",
    "Madagascar": "Antananarivo", "Bolivia": "Sucre", "Ecuador": "Quito", "Uruguay": "Montevideo",
    "Paraguay": "Asuncion", "Honduras": "Tegucigalpa", "Nicaragua": "Managua", "Jamaica": "Kingston",
    "Iceland": "Reykjavik", "Malta": "Valletta", "Oman": "Muscat",
}  # fmt: skip


def write_tasks(folder: Path, texts: dict[str, str], items: int) -> list[Path]:
    """Writes a task of continuations for each text, and one of capitals, of at most ``items`` rows; their files."""
    rng = random.Random(0)
    parts = {name: _continuations(text, items, rng) for name, text in texts.items()} | {
        "capitals": _capitals(items, rng)
    }
    files = []
    for name, rows in parts.items():
        files.append(folder / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files


def _continuations(text: str, items: int, rng: random.Random) -> list[dict[str, Any]]:
    """The words that follow a prompt, among three runs of words from elsewhere in the text."""
    words = text.split(" ")
    places = rng.sample(range(PROMPT, len(words) - CONTINUATION), items * CHOICES)
    rows = []
    for own in (places[i : i + CHOICES] for i in range(0, len(places), CHOICES)):
        choices = [" ".join(words[i : i + CONTINUATION]) for i in own]
        rows.append(_row(" ".join(words[own[0] - PROMPT : own[0]]), choices, rng))
    return rows


def _capitals(items: int, rng: random.Random) -> list[dict[str, Any]]:
    rows = []
    for country in list(CAPITALS)[:items]:
        wrong = rng.sample([name for name in CAPITALS.values() if name != CAPITALS[country]], CHOICES - 1)
        rows.append(_row(f"The capital of {country} is", [CAPITALS[country], *wrong], rng))
    return rows


def _row(prompt: str, choices: Sequence[str], rng: random.Random) -> dict[str, Any]:
    """A row whose first choice is right, shuffled."""
    order = rng.sample(range(len(choices)), len(choices))
    return {"prompt": prompt, "choices": [f" {choices[i]}" for i in order], "answer": order.index(0)}
