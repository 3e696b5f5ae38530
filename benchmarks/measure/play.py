"""`intention play`: how long a drag step takes, measured in the page from the hand's move to the new picture.

    python benchmarks/measure/play.py                 prints a table, writes benchmarks/results/play.json
    python benchmarks/measure/play.py --browsers 10   also: so many pages at once, each must get its own answers

The server runs as users start it, in a process of its own; the browser is the system's Chromium, headless.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import Browser, Page, sync_playwright

from intention.play import fields
from intention.play.scenes import SCENES

OUT = Path(__file__).resolve().parents[1] / "results" / "play.json"
LIMIT = 30.0  # milliseconds
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
HANDLES = {"pixels": ".paper", "stream": ".scrub"}  # where the hand does not take a point


@contextmanager
def served() -> Iterator[str]:
    words = [sys.executable, "-m", "intention.lab", "play", "--no-open"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().removeprefix("intention play: ").strip().rstrip("/")
        process.terminate()


def opened(browser: Browser, address: str, link: str) -> Page:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{address}/#{link}")
    page.wait_for_selector(".scene.drawn")
    return page


def drag_times(page: Page, scene: str, steps: int) -> list[float]:
    """A hand moves a handle to and fro, one step after the other has been drawn."""
    handle = page.locator(HANDLES.get(scene, ".plot .point:not(.still) .body")).first
    box = handle.bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.evaluate("play.times.length = 0")
    for step in range(steps):
        before = page.evaluate("play.answers")
        page.mouse.move(x + 1 + 2 * (step % 20), y - 1 - step % 10)
        while page.evaluate("play.answers") == before:
            time.sleep(0.002)
    page.mouse.up()
    times = page.evaluate("play.times")
    return times[min(5, len(times) // 2) :]  # the first ones are of a cold path


def first_picture(browser: Browser) -> float:
    """Seconds from the command to the first picture, less those that importing torch takes."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    torch_alone = time.perf_counter() - start
    start = time.perf_counter()
    with served() as address:
        page = opened(browser, address, "line")
        seconds = time.perf_counter() - start
        page.close()
    return seconds - torch_alone


def together(browser: Browser, address: str, count: int) -> dict[str, Any]:
    """Pages that drag their sliders at the same time, each with another alpha."""
    contexts = [browser.new_context() for _ in range(count)]
    pages = [context.new_page() for context in contexts]
    for number, page in enumerate(pages):
        page.goto(f"{address}/#line?alpha={-5 + number / 2}")
        page.wait_for_selector(".scene.drawn")
    for page in pages:
        page.evaluate("""() => { let i = 0; const slider = document.querySelector('#field-temperature');
            const next = () => { slider.value = (i++ % 40) / 10 - 1; slider.dispatchEvent(new Event('input')); };
            window.timer = setInterval(next, 20) }""")
    time.sleep(5)
    for page in pages:
        page.evaluate("clearInterval(timer)")
    time.sleep(1)
    mixed, answers = 0, []
    for number, page in enumerate(pages):
        shown = page.evaluate("({state: play.state, answer: play.answer, answers: play.answers})")
        state = fields.check(SCENES["line"].fields, shown["state"])
        same = shown["answer"]["found"] == SCENES["line"].compute(state)["found"]
        mixed += not same or state["alpha"] != -5 + number / 2
        answers.append(shown["answers"])
    for context in contexts:
        context.close()
    return {"pages": count, "answers": sum(answers), "mixed": mixed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--browsers", type=int, default=10)
    parser.add_argument("--out", type=Path, default=OUT)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        result["seconds to the first picture, after torch"] = round(first_picture(browser), 2)
        result["milliseconds of a drag step"] = {}
        with served() as address:
            for scene in SCENES:
                page = opened(browser, address, scene)
                times = drag_times(page, scene, flags.steps)
                page.close()
                told = {
                    "median": round(statistics.median(times), 1),
                    "90%": round(sorted(times)[int(0.9 * len(times))], 1),
                }
                result["milliseconds of a drag step"][scene] = told
                print(f"{scene:8} median {told['median']:6.1f} ms, 90% {told['90%']:6.1f} ms", flush=True)
            result["at once"] = together(browser, address, flags.browsers)
        browser.close()
    flags.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in result.items() if not isinstance(value, str)}))
    slow = {name: told for name, told in result["milliseconds of a drag step"].items() if told["median"] > LIMIT}
    print(f"over {LIMIT:g} ms: {slow or 'none'}")


if __name__ == "__main__":
    main()
