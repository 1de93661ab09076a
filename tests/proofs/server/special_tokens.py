"""Special tokens: prompts and conversations have the ids of transformers, and no content forges a turn."""

from __future__ import annotations

from tests.proofs.harness import proof
from tests.text import control_tokens, injections

PARTS, STRINGS = 8, 240
"""240 strings for each of four tokenizers, in parts."""
CASES = [f"{name} {part}" for name in control_tokens.MARKS for part in range(PARTS)]


@proof("server", cases=CASES, sample=1, bound={"wrong": 0})
def special_tokens_are_transformers(case: str) -> dict[str, float]:
    """30 strings: raw and as content of a chat, with special tokens parsed and not; every id, and the rendered text."""
    name, part = case.split()
    wrong = 0
    found = control_tokens.strings(7, STRINGS)[int(part) :: PARTS]
    assert len(found) == STRINGS // PARTS
    for text in found:
        try:
            control_tokens.check(name, text)
        except AssertionError:
            wrong += 1
    return {"wrong": wrong}


@proof("server", cases=[f"{number:02}" for number in range(50)], sample=2, bound={"forged": 0})
def injections_make_no_control_token(case: str) -> dict[str, float]:
    """One string everywhere in conversations of six families: no control token that an "x" does not have there too."""
    forged = 0
    for family in injections.FAMILIES:
        try:
            injections.check(family, int(case))
        except AssertionError:
            forged += 1
    return {"forged": forged}
