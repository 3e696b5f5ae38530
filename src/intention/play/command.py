"""`intention play`: start the server and open the page, or write one scene's picture and code into a folder."""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
import threading
import time
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
import uvicorn

from intention.lab.core.files import LabError
from intention.play import export, server
from intention.play.fields import Wrong
from intention.play.guard import LOOPBACK, Access

__all__ = ["ABOUT", "Flags", "play"]

ABOUT = "KVQ space in the browser: every picture is computed by this library while you drag."


@dataclass(frozen=True)
class Flags:
    link: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="LINK")] = ""
    """A scene and its state, as the page's address shows them: line, '#line?alpha=-2', or the whole address."""
    host: Annotated[str, tyro.conf.arg(metavar="ADDRESS")] = "127.0.0.1"
    """Listen there. Beyond this machine everybody who connects needs the token that is printed."""
    port: int = 0
    """0 takes a free one."""
    open: bool = True
    """Open the page in the browser."""
    export: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Start nothing: write the picture of LINK (svg, png) and the lines of Python that compute it into this folder."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be 0 to 65535, got {self.port}")
        if self.export is not None and not self.link:
            raise ValueError("--export writes one scene: give its LINK, for instance line")


def play(flags: Flags) -> int:
    try:
        scene, state = export.parse_link(flags.link)
    except Wrong as error:
        raise LabError(str(error)) from error
    if flags.export is not None:
        for path in export.write(flags.export, scene, state):
            print(path)
        return 0
    fragment = export.fragment(flags.link)
    listener = bind(flags.host, flags.port)
    access = Access(None if flags.host in LOOPBACK else secrets.token_urlsafe(16))
    url = address(listener, access, fragment)
    print(f"intention play: {url}", flush=True)
    if access.token is not None:
        print("Everybody who can reach this address and has the token can ask this server.", file=sys.stderr)
    print("Ctrl-C stops it.", flush=True)
    if flags.open:
        threading.Thread(target=_open_soon, args=(url,), daemon=True).start()
    config = uvicorn.Config(
        server.app(access),
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=200,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=2,
        ws="none",
    )
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])
    print("stopped")
    return 0


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens, so that the address is known before the server starts."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        family, kind, protocol, _, where = found
        listener = socket.socket(
            family, kind, protocol
        )  # without its protocol asyncio leaves Nagle on: 40 ms an answer
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(128)
    except OSError as error:
        raise LabError(f"cannot listen on {host} port {port}: {error}; leave --port out to take a free one") from error
    return listener


def address(listener: socket.socket, access: Access, fragment: str) -> str:
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    token = "" if access.token is None else f"?token={access.token}"
    return f"http://{host}:{port}/{token}{fragment}"


def _open_soon(url: str) -> None:
    time.sleep(0.3)  # the server accepts from the moment of listening; this only keeps its first lines together
    with contextlib.suppress(webbrowser.Error):
        webbrowser.open(url)
