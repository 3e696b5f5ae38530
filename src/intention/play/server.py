"""The server: the page, and answers to its questions. One thread computes; what waits is limited in size and number."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from intention.lab.core.results import Json
from intention.play import fields, files
from intention.play.fields import State, Wrong
from intention.play.guard import Access, Guard, refuse
from intention.play.scenes import SCENES, Scene, line

__all__ = ["app"]

LARGEST = 32_768  # bytes of a body
WAITING = 64  # questions that wait for the thread
PATIENCE = 10.0  # seconds in which a body has arrived
DEEPEST = 6  # lists and objects inside one another

Answer = Callable[[Scene, State], Json]
ANSWERS: dict[str, Answer] = {
    "answer": lambda scene, state: scene.compute(state),
    "code": lambda scene, state: {"code": scene.code(state)},
    "choose": lambda scene, state: line.choose(state),
}


class Worker:
    """One thread that computes for all: torch has one set of threads, and answers stay in order."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1, "torch", initializer=torch.set_num_threads, initargs=(1,))
        self.waiting = 0

    async def compute(self, work: Callable[[], Json]) -> Json:
        if self.waiting >= WAITING:
            raise HTTPException(429, f"{WAITING} questions wait already; ask again in a moment")
        self.waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.pool, work)
        finally:
            self.waiting -= 1


def app(access: Access | None = None) -> Starlette:
    """What uvicorn serves."""
    worker, known = Worker(), files.read()
    about = _json({name: scene.about() for name, scene in SCENES.items()})

    async def page(request: Request) -> Response:
        found = known.get(request.url.path)
        if found is None:
            raise HTTPException(404, "there is no such file; the page is at /")
        return Response(found.content, media_type=found.type)

    async def scenes(request: Request) -> Response:
        return Response(about, media_type="application/json")

    async def ask(request: Request) -> Response:
        scene, what = SCENES.get(request.path_params["scene"]), request.path_params["what"]
        if scene is None or what not in ANSWERS or (what == "choose" and scene.name != "line"):
            raise HTTPException(404, f"there is nothing to ask there; scenes are {', '.join(SCENES)}")
        state = fields.check(scene.fields, parsed(await body(request)))
        found = await worker.compute(lambda: ANSWERS[what](scene, state))
        return Response(_json(found), media_type="application/json")

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        warming = asyncio.create_task(warm(worker))
        yield
        warming.cancel()
        worker.pool.shutdown(wait=False, cancel_futures=True)

    routes = [
        Route("/scenes", scenes, methods=["GET"]),
        Route("/{what}/{scene}", ask, methods=["POST"]),
        Route("/{path:path}", page, methods=["GET"]),
    ]
    handlers: Any = {HTTPException: _refused, Wrong: _wrong, ClientDisconnect: _gone, Exception: _failed}
    guard = Middleware(Guard, access=access or Access())
    return Starlette(routes=routes, middleware=[guard], exception_handlers=handlers, lifespan=lifespan)


async def warm(worker: Worker) -> None:
    """The first call of each is slow, and somebody waits for it. One by one: a question comes in between."""
    for scene in SCENES.values():
        with contextlib.suppress(Exception):  # told when it is asked
            state = fields.check(scene.fields, {})
            await asyncio.get_running_loop().run_in_executor(worker.pool, functools.partial(scene.compute, state))


async def body(request: Request) -> bytes:
    """The whole body, as long as it is small, in time, and says that it is JSON."""
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "a question is JSON: send content-type application/json")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise HTTPException(415, "a question is sent as it is, not compressed")

    async def read() -> bytes:
        content = b""
        async for part in request.stream():
            content += part
            if len(content) > LARGEST:
                raise HTTPException(413, f"a question has at most {LARGEST} bytes")
        return content

    try:
        return await asyncio.wait_for(read(), PATIENCE)
    except asyncio.TimeoutError as error:
        raise HTTPException(408, f"the question did not arrive within {PATIENCE:g} seconds") from error


def parsed(content: bytes) -> Any:
    """JSON with finite numbers, no name twice and little depth."""

    def constant(name: str) -> float:
        raise Wrong(f"{name} is not a number that JSON has")

    def once(pairs: list[tuple[str, Any]]) -> Json:
        if len({name for name, _ in pairs}) < len(pairs):
            raise Wrong("a name stands twice in one object")
        return dict(pairs)

    try:
        found = json.loads(content.decode("utf-8"), parse_constant=constant, object_pairs_hook=once)
    except Wrong:
        raise
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, a number of thousands of digits, too deep
        raise Wrong(f"the question is not JSON that can be read ({type(error).__name__})") from error
    _shallow(found, DEEPEST)
    return found


def _shallow(x: Any, left: int) -> None:
    if isinstance(x, list | dict):
        if not left:
            raise Wrong(f"the question has more than {DEEPEST} levels")
        for item in x.values() if isinstance(x, dict) else x:
            _shallow(item, left - 1)


def _json(x: Json) -> bytes:
    return json.dumps(x, allow_nan=False, separators=(",", ":"), ensure_ascii=False).encode()


def _refused(request: Request, error: HTTPException) -> Response:
    sentences = {404: "there is no such page", 405: "this address takes GET for the page and POST for questions"}
    own = error.detail if error.detail not in ("Not Found", "Method Not Allowed") else sentences[error.status_code]
    return refuse(error.status_code, own)


def _wrong(request: Request, error: Wrong) -> Response:
    return refuse(422, str(error))


def _gone(request: Request, error: ClientDisconnect) -> Response:
    return refuse(400, "the question was not sent to its end")


def _failed(request: Request, error: Exception) -> Response:
    return refuse(500, f"this could not be computed ({type(error).__name__}: {error})")
