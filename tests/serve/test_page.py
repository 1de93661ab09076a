"""Chat page at `/`, as a browser shows it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from jaxllm.serve import Backend, ServeConfig, Server
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


@contextlib.contextmanager
def loading(backend: servers.FixedRate) -> Iterator[tuple[Server, str, threading.Event]]:
    """(server whose model is still being loaded, its URL, event that ends the loading)."""
    gate = threading.Event()

    @contextlib.asynccontextmanager
    async def slow() -> AsyncIterator[Backend]:
        await asyncio.to_thread(gate.wait)
        yield backend

    server = Server(ServeConfig(port=0, name="tiny"), slow)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield server, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/", gate
    finally:
        gate.set()
        server.should_exit = True
        thread.join(30)


def style(page: Page, selector: str, name: str) -> Any:
    return page.run(f"getComputedStyle(document.querySelector({selector!r})).{name}")


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_message_sent_before_the_model_is_ready_is_answered(width, scheme, tmp_path):
    backend = servers.FixedRate(0.001, says="Hello there.")
    backend.sampling = {"temperature": 0.2, "top_p": 0.9}
    with loading(backend) as (server, url, gate):
        page = Page(url, tmp_path / "profile")
        try:
            page.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
            page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            page.until(f"innerWidth === {width} && document.getElementById('state').textContent.includes('loading')")
            # Settings take a line on a phone, and have a column of their own beside it.
            page.until(f"document.getElementById('settings').open === {str(width > 768).lower()}")
            low = page.run("document.querySelector('aside').getBoundingClientRect().height")
            assert low < 60 if width < 768 else low > 400
            page.say("Good morning")
            page.until("document.querySelector('.waiting')")
            server.service.start("compiling", 3, 8)
            page.until("document.getElementById('state').textContent === 'compiling: 3 of 8 programs'")
            pictures = [page.picture()]
            assert backend.begun == 0
            # Stopped before it is sent, it is in the field again; then it is sent.
            page.run("document.getElementById('send').click()")
            page.until("document.getElementById('text').value === 'Good morning' && !document.querySelector('.user')")
            page.run("document.getElementById('send').click()")
            page.until("document.querySelector('.waiting')")
            gate.set()
            page.until("document.querySelector('.assistant')?.textContent === 'Hello there.' && !running")
            assert backend.begun == 1
            assert page.run("messages.map((m) => m.role)") == ["user", "assistant"]
            assert page.run("document.querySelector('.waiting, .error')") is None
            assert page.run("document.getElementById('temperature').placeholder") == "0.2"
            assert page.run("document.getElementById('state').textContent") == "4096 tokens"
            if width < 768:
                pictures.append(page.picture())
                page.run("document.querySelector('summary').click()")
                page.until("document.getElementById('settings').open")
            pictures.append(page.picture())
            assert page.run("document.documentElement.scrollWidth") <= width
            dark = style(page, "body", "backgroundColor") == "rgb(23, 24, 26)"
            assert dark == (scheme == "dark")
            for number, picture in enumerate(pictures):
                (tmp_path / f"{width}_{scheme}_{number}.png").write_bytes(picture)
            waiting = [one for one in page.complaints if "503" not in one]  # the log of the browser has each poll
            assert waiting == []
        finally:
            page.close()


def test_a_message_that_fails_can_be_sent_again(tmp_path):
    backend = servers.FixedRate(0.001, says="Hello.")
    with shown(backend, tmp_path, api_keys=("sk-1",)) as page:
        page.until("document.getElementById('state').textContent.includes('API key')")
        page.say("Hi")
        page.until("document.querySelector('.error button')")
        page.run("document.getElementById('key').value = 'sk-1', document.querySelector('.error button').click()")
        page.until("document.querySelector('.assistant:last-of-type, .assistant + .figures') && messages.length === 2")
        assert page.run("messages.map((m) => m.content)") == ["Hi", "Hello."]
        assert page.run("document.querySelector('.error')") is None
