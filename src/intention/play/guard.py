"""Who may ask, and how much: the outermost layer of the server. Every refusal is a sentence."""

from __future__ import annotations

import hmac
import json
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["LOOPBACK", "Access", "Guard", "refuse"]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
COOKIE = "intention-play"
LONGEST_PATH = 300
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def refuse(status: int, sentence: str) -> Response:
    return Response(json.dumps({"error": sentence}), status, media_type="application/json")


@dataclass(frozen=True)
class Access:
    """Without a token only this machine's own names are answered; with one, whoever has it."""

    token: str | None = None

    def refusal(self, headers: Headers, query: str) -> Response | None:
        """Why this request is not answered; None: it is."""
        if len(headers.getlist("host")) != 1:
            return refuse(400, "a request names one host")
        host = _name(headers["host"])
        if self.token is None and host not in LOOPBACK:
            # another name that leads here is how a foreign page would get past the browser's rules
            return refuse(403, "this server answers to 127.0.0.1 and localhost only; start it with --host for others")
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return refuse(403, "another page may not ask this server")
        origin = headers.get("origin")
        if origin is not None and _address(origin) != headers["host"].lower():
            return refuse(403, "another page may not ask this server")
        if self.token is not None and not self._known(headers, query):
            return refuse(401, "this server wants the token that it printed: open the whole address with ?token=")
        return None

    def _known(self, headers: Headers, query: str) -> bool:
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            cookie = None
        given = [*parse_qs(query).get("token", []), *([cookie.value] if cookie else [])]
        return any(hmac.compare_digest(one.encode(), (self.token or "").encode()) for one in given)


class Guard:
    """Checks each request before anything reads it, and puts the headers on every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        query = scope["query_string"].decode("latin-1")
        answer = self._check(scope, query)
        await (answer or self.app)(scope, receive, with_headers)

    def _check(self, scope: Scope, query: str) -> Response | None:
        if len(scope["path"]) + len(query) > LONGEST_PATH:
            return refuse(414, f"an address here has at most {LONGEST_PATH} characters; a state goes into the body")
        refusal = self.access.refusal(Headers(scope=scope), query)
        if refusal is None and self.access.token is not None and "token=" in query:  # the cookie serves from here on
            answer = RedirectResponse("/", 303)
            answer.set_cookie(COOKIE, self.access.token, httponly=True, samesite="strict", path="/")
            return answer
        return refusal


def _name(host: str) -> str:
    """The name without its port; "" where there is none."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _address(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
