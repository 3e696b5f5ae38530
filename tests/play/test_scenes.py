"""What scenes compute: the code they show computes the same, in any state; links and exports."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("starlette", reason="needs the extra play")

from intention.lab import cli
from intention.play import command, export, fields, models
from intention.play.fields import Choice, Digits, Flag, Number, Points, Wrong
from intention.play.scenes import SCENES

ROOT = Path(__file__).parents[2]


def drawn(field, chance):
    """Some state of a field, its ends among them."""
    if isinstance(field, Number):
        return chance.choice([field.low, field.high, field.default, round(chance.uniform(field.low, field.high), 2)])
    if isinstance(field, Choice):
        return chance.choice(list(field.options))
    if isinstance(field, Flag):
        return chance.random() < 0.5
    if isinstance(field, Digits):
        return chance.choice(["", "".join(chance.choice("0123456789abcdef") for _ in range(field.length))])
    count = chance.choice([field.least, min(field.least + 1, field.most), field.most, len(field.default)])
    return [row_of(field, chance) for _ in range(count)]


def row_of(field, chance):
    """A row of points; a class is a whole number."""
    return [
        float(chance.randint(int(low), int(high))) if column == "class" else round(chance.uniform(low, high), 2)
        for column, low, high in field.columns
    ]


def states(scene, count):
    chance = random.Random(scene.name)
    yield {}
    for _ in range(count):
        yield {name: drawn(field, chance) for name, field in scene.fields.items()}


def numbers_of(found):
    return torch.tensor([float("nan") if x is None else float(x) for x in found], dtype=torch.float64)


@pytest.mark.parametrize("name", SCENES)
def test_the_code_that_is_shown_computes_what_is_shown(name):
    scene = SCENES[name]
    for given in states(scene, 6):
        state = fields.check(scene.fields, given)
        found = json.loads(json.dumps(scene.compute(state), allow_nan=False))["found"]
        if not found:
            continue  # no points, nothing to compute
        space = {}
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # points at one place: told, and shown as it is
            exec(scene.code(state), space)
        assert space["found"].keys() == found.keys()
        for key, want in space["found"].items():
            want = torch.as_tensor(want).double().flatten()
            torch.testing.assert_close(numbers_of(found[key]), want, atol=1e-4, rtol=1e-4, equal_nan=True, msg=key)


@pytest.mark.parametrize("name", SCENES)
def test_no_state_is_too_hard(name):
    """No points, one point, all of them at one place, the ends of every slider."""
    scene = SCENES[name]
    chance = random.Random(1)
    for end in ("low", "high"):
        given = {key: getattr(field, end) for key, field in scene.fields.items() if isinstance(field, Number)}
        for key, field in scene.fields.items():
            if isinstance(field, Points):
                row = row_of(field, chance)
                for count in {field.least, min(max(field.least, 1), field.most), field.most}:
                    json.dumps(
                        scene.compute(fields.check(scene.fields, {**given, key: [row] * count})), allow_nan=False
                    )


@pytest.mark.parametrize("name", SCENES)
def test_a_link_is_read_as_it_is_written(name):
    scene = SCENES[name]
    for given in states(scene, 3):
        state = fields.check(scene.fields, given)
        found, read = export.parse_link(f"#{name}?{link(scene, state)}")
        assert found is scene
        assert read == state


def link(scene, state):
    """As the page's state.js writes it."""
    words = []
    for name, field in scene.fields.items():
        value = state[name]
        if isinstance(field, Points):
            value = ";".join("_".join(f"{x:g}" for x in row) for row in value)
        elif isinstance(field, Flag):
            value = int(value)
        words.append(f"{name}={value}")
    return "&".join(words)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("circle", "there is no scene 'circle'; there are map, line"),
        ("line?alpha", "name=value&name=value"),
        ("line?alpha=x", 'alpha has "x"; wanted a number'),
        ("line?alpha=nan", "alpha is not finite"),
        ("line?colour=red", 'there is no "colour" in this scene; there are points, alpha'),
        ("line?points=1_2_3", "wanted 2 numbers: x, y"),
        ("line?intercept=yes", 'intercept is "yes"; wanted true or false'),
    ],
)
def test_a_link_that_cannot_be_meant_is_told(text, said):
    with pytest.raises(Wrong, match=said.replace("?", r"\?").replace("(", r"\(")):
        export.parse_link(text)


@pytest.mark.parametrize("name", SCENES)
def test_export_writes_the_picture_and_code_that_runs(name, tmp_path, capsys):
    assert cli.main(["play", "--export", str(tmp_path), name]) == 0
    svg, png, code = (tmp_path / f"{name}.{kind}" for kind in ("svg", "png", "py"))
    assert capsys.readouterr().out.split() == [str(svg), str(png), str(code)]
    assert svg.read_text(encoding="utf-8").startswith("<?xml")
    assert png.read_bytes().startswith(b"\x89PNG")
    space = {}
    exec(code.read_text(encoding="utf-8"), space)
    found = SCENES[name].compute(fields.check(SCENES[name].fields, {}))["found"]
    for key, want in space["found"].items():
        got = numbers_of(found[key])
        torch.testing.assert_close(got, torch.as_tensor(want).double().flatten(), atol=1e-4, rtol=1e-4)


def test_the_command_says_what_is_wrong(capsys):
    said = {
        ("--export", "x"): "--export writes one scene: give its LINK",
        ("circle",): "there is no scene 'circle'",
        ("--port", "70000"): "port must be 0 to 65535, got 70000",
        ("--host", "no.such.host.invalid", "--no-open"): "cannot listen on no.such.host.invalid",
    }
    for words, sentence in said.items():
        try:
            code = cli.main(["play", *words])
        except SystemExit as end:  # tyro
            code = end.code
        assert code in (1, 2)
        assert sentence in " ".join(capsys.readouterr().err.split())


def test_without_the_extra_it_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "intention.play.command")
    monkeypatch.delattr("intention.play.command")
    assert cli.main(["play"]) == 1
    assert "pip install 'intention[play]'" in capsys.readouterr().err


def test_the_server_starts_answers_and_stops_cleanly():
    import signal
    import urllib.request

    words = [sys.executable, "-m", "intention.lab", "play", "--no-open", "line?alpha=-1"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        address = line.removeprefix("intention play: ").split("#")[0]
        assert address.startswith("http://127.0.0.1:")
        assert line.strip().endswith("/#line?alpha=-1")
        with urllib.request.urlopen(address, timeout=60) as page:
            assert b"Intention play" in page.read()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out.strip().endswith("stopped")
    assert err == ""


def test_beyond_this_machine_a_token_is_asked_for():
    listener = command.bind("0.0.0.0", 0)
    try:
        assert "?token=abc#line" in command.address(listener, command.Access("abc"), "#line")
    finally:
        listener.close()


def test_an_answer_does_not_wait_for_the_one_before():
    """asyncio sends at once what is of a socket that says that it is TCP; otherwise each answer takes 40 ms more."""
    listener = command.bind("127.0.0.1", 0)
    try:
        assert listener.proto == socket.IPPROTO_TCP
    finally:
        listener.close()


@pytest.mark.parametrize(("task", "name"), [(task, name) for task, names in models.NAMES.items() for name in names])
def test_a_model_that_is_shipped_is_small_and_tells_how_it_was_trained(task, name):
    assert models.file(task, name).stat().st_size <= 300_000
    about = models.about(task, name)
    assert "steps" in about["recipe"]
    assert about["by"] == "tools/play_models.py"
    assert about["data"].startswith(("y = a sin(x - b)", "built-in glyphs"))
    ours, start = (dict(make(task, name).named_parameters()) for make in (models.trained, models.untrained))
    assert any(not torch.equal(ours[key], start[key]) for key in ours)


def test_a_wheel_holds_the_page_and_the_models(tmp_path):
    hatchling = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    environment = {**os.environ, "INTENTION_NATIVE": "0"}
    subprocess.run(hatchling, cwd=ROOT, env=environment, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        held = {name for name in opened.namelist() if name.startswith("intention/play/") and not name.endswith(".py")}
    folder = ROOT / "src" / "intention" / "play"
    there = [*(folder / "static").rglob("*.*"), *(folder / "weights").glob("*.*")]
    assert held == {f"intention/play/{path.relative_to(folder).as_posix()}" for path in there}
    assert len(there) >= 25
