"""docs/models.md agrees with the stored record."""

from __future__ import annotations

import pytest

from tests.hub import models_page


def test_the_page_is_made_of_the_record() -> None:
    if not models_page.RECORD.exists():
        pytest.skip("not stored yet: make proof real_models")
    assert models_page.PAGE.read_text() == models_page.current(), "run python -m tests.hub.models_page"
