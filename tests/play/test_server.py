"""The server: who is answered, what is refused, and that it is always with a sentence."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("starlette", reason="needs the extra play")

from starlette.testclient import TestClient

from intention.play import fields, files, server
from intention.play.guard import Access
from intention.play.scenes import SCENES

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def client():
    with TestClient(server.app(), base_url="http://127.0.0.1:8000", raise_server_exceptions=False) as made:
        yield made


def point(x, y):
    return json.dumps({"points": [[x, y]]})


def raw(text):
    return f'{{"points": [[{text}, 0]]}}'


LINE = "/answer/line"
BODIES = {  # name: body, all to the scene Line
    "nothing": "",
    "not JSON": "hello",
    "half of an object": '{"points": [[0, 1]',
    "two objects": "{}{}",
    "a comment": "{} // comment",
    "single quotes": "{'points': []}",
    "trailing comma": '{"points": [],}',
    "not UTF-8": b'{"points": "\xff\xfe"}',
    "UTF-16": '{"points": []}'.encode("utf-16"),
    "null byte": '{"poi\x00nts": []}',
    "lone surrogate": '{"scale": "\\ud800"}',
    "NaN": raw("NaN"),
    "Infinity": raw("Infinity"),
    "minus Infinity": raw("-Infinity"),
    "1e999": raw("1e999"),
    "minus 1e999": raw("-1e999"),
    "a number of 5000 digits": raw("9" * 5000),
    "a number of 400 digits": raw("9" * 400),
    "hexadecimal": raw("0x10"),
    "a number as text": raw('"1"'),
    "true as a number": raw("true"),
    "null as a number": raw("null"),
    "an object as a number": raw("{}"),
    "a list as a number": raw("[1]"),
    "out of range": point(3.001, 0),
    "far out of range": point(1e300, 0),
    "tiny beyond": point(-3.0000001, 0),
    "a list": "[]",
    "a text": '"line"',
    "a number": "7",
    "null": "null",
    "true": "true",
    "unknown name": '{"colour": 1}',
    "name of a method": '{"__class__": 1}',
    "prototype": '{"__proto__": {"alpha": 1}}',
    "empty name": '{"": 1}',
    "very long name": json.dumps({"x" * 5000: 1}),
    "name twice": '{"alpha": 1, "alpha": 2}',
    "points null": '{"points": null}',
    "points text": '{"points": "0_1"}',
    "points object": '{"points": {"0": [0, 1]}}',
    "points number": '{"points": 3}',
    "points of text": '{"points": ["ab"]}',
    "points of null": '{"points": [null]}',
    "points flat": '{"points": [1, 2]}',
    "row too short": '{"points": [[1]]}',
    "row too long": '{"points": [[1, 1, 1]]}',
    "row empty": '{"points": [[]]}',
    "61 points": json.dumps({"points": [[0, 0]] * 61}),
    "3000 points": json.dumps({"points": [[0, 0]] * 3000}),
    "too large": json.dumps({"points": [[0.123456789, 0]] * 9000}),
    "much too large": " " * 5_000_000,
    "large and valid": '{"alpha": 1' + " " * 40_000 + "}",
    "100 levels": "[" * 100 + "]" * 100,
    "10000 levels": "[" * 10_000 + "]" * 10_000,
    "10000 levels in a field": '{"points": ' + "[" * 10_000 + "]" * 10_000 + "}",
    "objects inside": '{"a":' * 3000 + "1" + "}" * 3000,
    "alpha text": '{"alpha": "1"}',
    "alpha list": '{"alpha": [1]}',
    "alpha null": '{"alpha": null}',
    "alpha true": '{"alpha": true}',
    "alpha too large": '{"alpha": 6.01}',
    "alpha too small": '{"alpha": -1e9}',
    "alpha huge whole": '{"alpha": ' + "1" * 4000 + "}",
    "gamma out of range": '{"gamma": 2.5}',
    "temperature NaN": '{"temperature": NaN}',
    "temperature out of range": '{"temperature": 10}',
    "kernel unknown": '{"kernel": "rbf"}',
    "kernel as code": "{\"kernel\": \"__import__('os').system('id')\"}",
    "kernel number": '{"kernel": 0}',
    "kernel null": '{"kernel": null}',
    "kernel list": '{"kernel": ["gaussian"]}',
    "kernel upper case": '{"kernel": "GAUSSIAN"}',
    "features path": '{"features": "../../etc/passwd"}',
    "features markup": '{"features": "<script>alert(1)</script>"}',
    "scale empty": '{"scale": ""}',
    "intercept number": '{"intercept": 1}',
    "intercept text": '{"intercept": "true"}',
    "intercept null": '{"intercept": null}',
    "band list": '{"band": []}',
}
REQUESTS = {  # name: method, path, headers, body, status
    "no content type": ("POST", LINE, {}, "{}", 415),
    "a form": ("POST", LINE, {"content-type": "application/x-www-form-urlencoded"}, "alpha=1", 415),
    "plain text": ("POST", LINE, {"content-type": "text/plain"}, "{}", 415),
    "multipart": ("POST", LINE, {"content-type": "multipart/form-data; boundary=x"}, "--x--", 415),
    "gzip": ("POST", LINE, {**JSON, "content-encoding": "gzip"}, b"\x1f\x8b", 415),
    "get a question": ("GET", LINE, {}, "", 404),
    "put": ("PUT", LINE, JSON, "{}", 405),
    "delete": ("DELETE", "/", {}, "", 405),
    "patch": ("PATCH", "/style.css", {}, "", 405),
    "options": ("OPTIONS", LINE, {}, "", 405),
    "trace": ("TRACE", "/", {}, "", 405),
    "unknown method": ("HELLO", "/", {}, "", 405),
    "post to the page": ("POST", "/", JSON, "{}", 405),
    "unknown scene": ("POST", "/answer/circle", JSON, "{}", 404),
    "scene of another case": ("POST", "/answer/LINE", JSON, "{}", 404),
    "unknown question": ("POST", "/run/line", JSON, "{}", 404),
    "choose elsewhere": ("POST", "/choose/plane", JSON, "{}", 404),
    "scene as code": ("POST", "/answer/__init__", JSON, "{}", 404),
    "a file of the system": ("GET", "/etc/passwd", {}, "", 404),
    "up and away": ("GET", "/../../../../etc/passwd", {}, "", 404),
    "up, encoded": ("GET", "/%2e%2e/%2e%2e/server.py", {}, "", 404),
    "up, twice encoded": ("GET", "/%252e%252e/server.py", {}, "", 404),
    "up, with backslashes": ("GET", "/..%5c..%5cserver.py", {}, "", 404),
    "null byte in the path": ("GET", "/index.html%00.png", {}, "", 404),
    "a Python file": ("GET", "/server.py", {}, "", 404),
    "the weights": ("GET", "/weights/sine-maml.safetensors", {}, "", 404),
    "a file address": ("GET", "//etc/passwd", {}, "", 404),
    "the folder": ("GET", "/scenes/", {}, "", 404),
    "a drive": ("GET", "/C:/Windows/win.ini", {}, "", 404),
    "a long path": ("GET", "/" + "a" * 5000, {}, "", 414),
    "a long query": ("GET", "/?" + "a" * 5000, {}, "", 414),
    "another host": ("GET", "/", {"host": "evil.example"}, "", 403),
    "another host with our port": ("POST", LINE, {**JSON, "host": "evil.example:8000"}, "{}", 403),
    "our name inside another": ("GET", "/", {"host": "127.0.0.1.evil.example"}, "", 403),
    "our name as a user": ("GET", "/", {"host": "127.0.0.1@evil.example"}, "", 403),
    "an empty host": ("GET", "/", {"host": ""}, "", 403),
    "a broken host": ("GET", "/", {"host": "[::1"}, "", 403),
    "another origin": ("POST", LINE, {**JSON, "origin": "http://evil.example"}, "{}", 403),
    "another port": ("POST", LINE, {**JSON, "origin": "http://127.0.0.1:9999"}, "{}", 403),
    "a null origin": ("POST", LINE, {**JSON, "origin": "null"}, "{}", 403),
    "a broken origin": ("POST", LINE, {**JSON, "origin": "http://[::1"}, "{}", 403),
    "from another site": ("POST", LINE, {**JSON, "sec-fetch-site": "cross-site"}, "{}", 403),
    "from a sibling": ("GET", "/scenes", {"sec-fetch-site": "same-site"}, "", 403),
    "a state in the address": ("GET", "/answer/line?alpha=1", {}, "", 404),
}
OTHERS = {  # of other scenes: name: scene, state
    "truth missing": ("plane", {"truth": []}),
    "two truths": ("plane", {"truth": [[1, 1], [2, 2]]}),
    "81 points on the plane": ("plane", {"points": [[0, 0]] * 81}),
    "where unknown": ("plane", {"where": "elsewhere"}),
    "a class too many": ("classes", {"points": [[0, 0, 3]]}),
    "a negative class": ("classes", {"points": [[0, 0, -1]]}),
    "a point without class": ("classes", {"points": [[0, 0]]}),
    "a brush as number": ("classes", {"brush": 0}),
    "21 points on the map": ("map", {"points": [[0, 0]] * 21}),
    "four points of the rabbit": ("rabbit", {"points": [[0, 0]] * 4}),
    "six points of the rabbit": ("rabbit", {"points": [[0, 0]] * 6}),
    "observations with values": ("sine", {"points": [[0, 0]]}),
    "an amplitude of 0": ("sine", {"amplitude": 0}),
    "a mask of one digit": ("pixels", {"seen": "f"}),
    "a mask of other letters": ("pixels", {"seen": "g" * 196}),
    "a mask in upper case": ("pixels", {"seen": "F" * 196}),
    "a mask as number": ("pixels", {"seen": 15}),
    "a mask with spaces": ("pixels", {"seen": " " * 196}),
    "a mask of full-width digits": ("pixels", {"seen": "\uff11" * 196}),
    "a drawing too short": ("pixels", {"drawn": "0" * 783}),
    "a drawing as list": ("pixels", {"drawn": [0] * 784}),
    "a glyph that is not there": ("pixels", {"glyph": "\u0000"}),
    "a glyph of two": ("pixels", {"glyph": "KK"}),
    "forgetting everything": ("stream", {"forget": 0}),
    "after the end": ("stream", {"at": 240}),
    "a window without end": ("stream", {"window": 1e9}),
}


def check_refused(response, status=None):
    assert response.status_code == status if status else 400 <= response.status_code < 500
    sentence = response.json()["error"]
    assert 10 < len(sentence) < 300
    assert "Traceback" not in sentence
    assert response.headers["content-security-policy"].startswith("default-src 'none'")


@pytest.mark.parametrize("name", BODIES)
def test_a_malformed_question_gets_4xx_and_a_sentence(client, name):
    check_refused(client.post(LINE, content=BODIES[name], headers=JSON))


@pytest.mark.parametrize("name", REQUESTS)
def test_a_hostile_request_gets_4xx_and_a_sentence(client, name):
    method, path, headers, body, status = REQUESTS[name]
    response = client.request(method, path, headers=headers, content=body or None)
    if method == "HEAD":
        assert response.status_code == status
    else:
        check_refused(response, status)


@pytest.mark.parametrize("name", OTHERS)
def test_a_state_that_cannot_be_gets_422_and_a_sentence(client, name):
    scene, state = OTHERS[name]
    check_refused(client.post(f"/answer/{scene}", json=state), 422)


def test_these_are_more_than_100_kinds_and_the_server_is_still_up(client):
    assert len(BODIES) + len(REQUESTS) + len(OTHERS) >= 130
    assert client.post(LINE, json={}).status_code == 200


def test_an_error_says_what_came_and_what_was_wanted(client):
    said = {
        "{}{}": "the question is not JSON that can be read (JSONDecodeError)",
        '{"alpha": "1"}': 'alpha is "1"; wanted a number from -6 to 6',
        '{"kernel": "rbf"}': 'kernel is "rbf"; wanted one of gaussian, laplacian, polynomial, arccosine, linear',
        '{"points": [[0]]}': "points[0] is [0]; wanted 2 numbers: x, y",
        '{"points": [[0, 9]]}': "points[0] y is out of range; wanted a number from -2 to 2",
    }
    for body, sentence in said.items():
        assert client.post(LINE, content=body, headers=JSON).json()["error"] == sentence


@pytest.mark.parametrize("name", SCENES)
def test_every_scene_answers_its_default_state_and_shows_its_code(client, name):
    found = client.post(f"/answer/{name}", json={})
    assert found.status_code == 200
    assert found.json()["found"]
    assert "found = " in client.post(f"/code/{name}", json={}).json()["code"]
    assert client.get("/scenes").json()[name]["fields"] == json.loads(json.dumps(fields.about(SCENES[name].fields)))


@pytest.mark.parametrize("path", files.read())
def test_every_file_of_the_page_is_served_with_its_type_and_loads_nothing_foreign(client, path):
    response = client.get(path)
    assert response.status_code == 200
    assert response.headers["content-type"] == files.read()[path].type
    assert response.headers["x-content-type-options"] == "nosniff"
    text = response.text.replace("http://www.w3.org/2000/svg", "").replace("https://arxiv.org/abs/2305.10203", "")
    assert "http://" not in text
    assert "https://" not in text
    assert "@import" not in text
    assert "innerHTML" not in text
    assert "eval(" not in text


def test_without_the_token_another_machine_gets_nothing():
    with TestClient(server.app(Access("secret")), base_url="http://192.168.1.7:8000") as client:
        for path in ("/", "/scenes", "/style.css", "/?token=wrong", "/?token="):
            check_refused(client.get(path), 401)
        check_refused(client.post(LINE, json={}), 401)
        check_refused(client.post(LINE, json={}, headers={"cookie": "intention-play=wrong"}), 401)
        assert client.get("/?token=secret", follow_redirects=False).status_code == 303
        assert client.post(LINE, json={}).status_code == 200  # the cookie
        assert "secret" not in client.get("/").text


def test_too_many_questions_wait_no_longer(monkeypatch):
    monkeypatch.setattr(server, "WAITING", 3)
    release = threading.Event()
    monkeypatch.setitem(server.ANSWERS, "answer", lambda scene, state: {"waited": release.wait(10)})
    with TestClient(server.app(), base_url="http://127.0.0.1") as client, ThreadPoolExecutor(4) as pool:
        first = [pool.submit(client.post, LINE, json={}) for _ in range(3)]
        time.sleep(0.5)
        check_refused(client.post(LINE, json={}), 429)
        release.set()
        assert [future.result().status_code for future in first] == [200] * 3


def test_a_question_that_does_not_arrive_is_given_up(monkeypatch, address):
    monkeypatch.setattr(server, "PATIENCE", 0.2)
    head = (
        b"POST /answer/line HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    )
    assert b" 408 " in sent(address, head)


@pytest.mark.parametrize(
    "line",
    [b"\x00\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n"],
)
def test_what_is_not_http_is_answered_by_400_and_the_server_stays(address, line):
    assert b" 400 " in sent(address, line).split(b"\r\n")[0]
    assert (
        b" 200 " in sent(address, b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").split(b"\r\n")[0]
    )


def sent(address, content):
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall(content)
        return connection.recv(100_000)


def test_a_failure_is_a_sentence_too(client, monkeypatch):
    def fail(scene, state):
        raise RuntimeError("no such luck")

    monkeypatch.setitem(server.ANSWERS, "answer", fail)
    response = client.post(LINE, json={})
    assert response.status_code == 500
    assert response.json()["error"] == "this could not be computed (RuntimeError: no such luck)"
