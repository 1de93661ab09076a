"""Chat page at `/`, as a browser shows it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest

from jaxllm.serve import ServeConfig
from jaxllm.text import ChatTemplate
from tests.serve import servers
from tests.serve.browser import CHROMIUM, Page
from tests.text.templates import TEMPLATES

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")

SAYS = """<think>
They want **all** of it.
</think>

# A title

Some **bold**, *slanted* and `1 < 2` words, [a link](https://example.org/?a=1&b=2).

- one
- two

| a | b |
|---|---|
| 1 | 2 |

```
if a < b:
```

<img src=x onerror="document.title='broken'"> [x](javascript:alert(1)) [y](https://e.org/"onclick="1)"""


@contextlib.contextmanager
def shown(backend: servers.FixedRate, folder, **fields) -> Iterator[Page]:
    config = ServeConfig(**{"port": 0, "name": "tiny", **fields})
    with servers.running(servers.opener(backend), config) as (_, url):
        page = Page(f"{url}/", folder)
        try:
            yield page
        finally:
            page.close()


@pytest.mark.drawn(0.3)
def test_an_answer_is_drawn(tmp_path):
    backend = servers.FixedRate(0.001, says=SAYS, template=ChatTemplate(TEMPLATES["qwen3"]))
    with shown(backend, tmp_path) as page:
        page.until("document.getElementById('state').textContent === '4096 tokens'")
        page.say("Hello <b>you</b>")
        page.until("document.getElementById('send').textContent === 'Send' && messages.length === 2")
        last = "document.querySelector('.assistant')"
        for selector, text in {
            "details strong": "all", "h1": "A title", ":scope > p strong": "bold", "em": "slanted",
            ":scope > p code": "1 < 2", "a": "a link", "li + li": "two", "th + th": "b", "td": "1",
            "pre code": "if a < b:",
        }.items():  # fmt: skip
            assert page.run(f"{last}.querySelector({selector!r})?.textContent") == text, selector
        assert page.run(f"{last}.querySelector('a').href") == "https://example.org/?a=1&b=2"
        assert page.run("document.querySelector('.user').textContent") == "Hello <b>you</b>"
        assert "tokens/s" in page.run("document.querySelector('.figures').textContent")
        assert page.run("messages[1].content").startswith("# A title")
        # Nothing of a text becomes markup that it is not.
        assert page.run(f"{last}.querySelector('img, [onclick], a[href^=javascript]')") is None
        assert page.run("document.title") == "jaxllm"
        colours = []
        for scheme in ("light", "dark"):
            page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            colours.append(page.run("getComputedStyle(document.body).backgroundColor"))
            assert page.picture().startswith(b"\x89PNG")
        assert colours == ["rgb(251, 251, 250)", "rgb(23, 24, 26)"]
        assert page.complaints == []


def test_stop_ends_the_request_and_keys_are_asked_for(tmp_path):
    backend = servers.FixedRate(0.01)
    with shown(backend, tmp_path, api_keys=("sk-1",)) as page:
        page.until("document.getElementById('state').textContent.includes('API key')")
        page.run("(document.getElementById('key').value = 'sk-1',"
                 "document.getElementById('key').dispatchEvent(new Event('change')))")  # fmt: skip
        page.until("document.getElementById('model').textContent === 'tiny'")
        page.run("document.getElementById('max_tokens').value = 4000")
        page.say("go on")
        page.until("document.querySelector('.assistant')?.textContent.length > 3")
        assert page.run("document.getElementById('send').textContent") == "Stop"
        page.run("document.getElementById('send').click()")
        page.until("document.getElementById('send').textContent === 'Send'")
        end = time.monotonic() + 20
        while backend.held or not backend.closed == backend.begun == 1:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert len(page.run("messages[1].content")) < 4000
        page.run("document.getElementById('clear').click()")
        assert page.run("document.querySelectorAll('.turn').length") == 0
