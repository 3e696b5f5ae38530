"""One server and one browser for all tests of a worker; a page that notices errors and foreign requests for each.

Plain playwright: the fixtures of pytest-playwright, where that is installed, have other names.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

SIZE = {"width": 1280, "height": 900}
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """http://127.0.0.1:PORT of a running server."""
    uvicorn = pytest.importorskip("uvicorn", reason="needs the extra play")
    from intention.play import command, server

    listener = command.bind("127.0.0.1", 0)
    running = uvicorn.Server(uvicorn.Config(server.app(), log_level="error", ws="none"))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    running.should_exit = True
    thread.join(10)
    listener.close()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (extra dev)")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no Chromium on this machine (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=program, args=FLAGS)
        yield opened
        opened.close()


Open = Callable[..., Any]


@pytest.fixture
def show(chromium: Any, address: str) -> Iterator[Open]:
    """show("line?alpha=-2", color_scheme="dark", ...): the scene, drawn. Errors and foreign requests fail the test."""
    problems: list[str] = []
    contexts = []

    def opened(link: str, **options: Any) -> Any:
        context = chromium.new_context(**{"viewport": SIZE, "reduced_motion": "reduce", **options})
        contexts.append(context)
        own = context.new_page()
        own.set_default_timeout(20_000)
        own.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
        own.on("pageerror", lambda error: problems.append(str(error)))
        foreign = lambda url: not url.startswith((address, "data:", "blob:"))  # noqa: E731
        own.on("request", lambda request: problems.append(request.url) if foreign(request.url) else None)
        own.goto(f"{address}/#{link}")
        own.wait_for_selector(".scene.drawn")
        return own

    yield opened
    for context in contexts:
        context.close()
    assert problems == []
