"""A download that goes on where it stopped, with a progress bar."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import requests

__all__ = ["Resuming", "reason"]

CHUNK = 1 << 16
TIMEOUT = (10, 60)  # seconds to connect, and without any bytes


class Resuming:
    """A downloader for pooch: what arrived is kept beside the file as .part, and the next time only the rest is sent.

    A part that belongs to another file is found out by pooch, by the hash of the whole, and is gone then.
    """

    def __init__(self, file: Path) -> None:
        self.part = file.with_name(f"{file.name}.part")

    def __call__(self, url: str, output_file: str, pooch: object) -> None:
        start = self.part.stat().st_size if self.part.exists() else 0
        response = _ask(url, start)
        span, _, whole = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
        if response.status_code == 416 and start and whole == str(start):
            response.close()  # all of it is there
        else:
            if response.status_code == 416 or (response.status_code == 206 and not span.startswith(f"{start}-")):
                response.close()
                response = _ask(url, 0)  # the part is not the beginning of this file
            response.raise_for_status()
            self._write(response, start if response.status_code == 206 else 0)
        os.replace(self.part, output_file)

    def _write(self, response: requests.Response, start: int) -> None:
        length = response.headers.get("Content-Length")
        total = start + int(length) if length else None
        name = self.part.name.removesuffix(".part")
        with response, self.part.open("ab" if start else "wb") as file, _progress(name, start, total) as advance:
            for chunk in response.iter_content(CHUNK):
                file.write(chunk)
                advance(len(chunk))
        if total is not None and self.part.stat().st_size != total:
            raise requests.exceptions.ChunkedEncodingError(f"{self.part.stat().st_size} of {total} bytes came")


def reason(error: requests.RequestException) -> str:
    """What went wrong, in a few words."""
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"the server answers {error.response.status_code} {error.response.reason}"
    if isinstance(error, requests.Timeout):
        return "no answer in time"
    if isinstance(error, requests.ConnectionError):
        return "no connection"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return "the connection broke off"
    return f"{type(error).__name__}: {error}"


def _ask(url: str, start: int) -> requests.Response:
    headers = {"Accept-Encoding": "identity"}  # the bytes of the file, whose hash is known
    if start:
        headers["Range"] = f"bytes={start}-"
    return requests.get(url, stream=True, timeout=TIMEOUT, headers=headers)


@contextlib.contextmanager
def _progress(name: str, start: int, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, one line elsewhere. Gives what to call with the number of new bytes."""
    goes_on = f", goes on after {start / 1e6:.1f} MB" if start else ""
    size = "" if total is None else f" ({total / 1e6:.1f} MB)"
    print(f"downloading {name}{size}{goes_on}", flush=True)
    if not sys.stdout.isatty():
        yield lambda count: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    with Progress(BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), transient=True) as bar:
        task = bar.add_task(name, total=total, completed=start)
        yield lambda count: bar.advance(task, count)
