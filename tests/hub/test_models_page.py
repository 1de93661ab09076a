"""docs/models.md says what the stored record says."""

from __future__ import annotations

import json

import pytest

from tests.hub import models_page


def test_the_page_is_made_of_the_record() -> None:
    if not models_page.RECORD.exists():
        pytest.skip("not stored yet: make proof real_models")
    record = json.loads(models_page.RECORD.read_text())
    assert models_page.PAGE.read_text() == models_page.render(record), "run python -m tests.hub.models_page"
