"""The generated table of docs/train/parallelism.md."""

from __future__ import annotations

from tests.parallel import page
from tests.proofs import stored
from tests.proofs.parallelism import pods


def test_the_page_is_what_the_record_says():
    text = page.PAGE.read_text()
    assert text == page.render(text, stored.read("parallelism")), "python -m tests.parallel.page"


def test_a_row_for_every_case():
    each = {" / ".join(case): {"of_memory": 0.25} for case in pods.CASES}
    text = page.table(each)
    assert len(text.splitlines()) == 2 + len(pods.CASES)
    assert "| `llama3_8b` | `fsdp` | `v6e:8x8`, 64 | 7.8 of 31.2 GiB | all-gather over 64: 27.96 GiB;" in text
    assert "Not compiled yet" in page.table(None)
