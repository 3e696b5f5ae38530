"""The README's animation of the scene Line, taken from the page itself: `make gif`. Needs Chromium.

A point is dragged, then alpha goes to infinity: Intention becomes linear attention, and sigma-Intention attention.
"""

from __future__ import annotations

import argparse
import io
import math
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from intention.play import command, server

OUT = Path(__file__).resolve().parents[1] / "docs" / "play.gif"
SIZE, WIDTH, COLOURS = {"width": 1240, "height": 900}, 900, 128
LARGEST = 1_000_000  # bytes


def settle(page: Page) -> None:
    while page.evaluate("play.busy()"):
        page.wait_for_timeout(10)
    page.wait_for_timeout(30)


def frames(page: Page) -> Iterator[tuple[Image.Image, int]]:
    """Pictures, and for how many milliseconds each is shown."""
    yield shot(page), 1200
    box = page.locator(".plot").nth(4).locator(".point .body").nth(9).bounding_box()  # in the picture of Intention
    assert box is not None
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    for step in range(1, 17):
        page.mouse.move(x + 20 * math.sin(math.pi * step / 16), y + 75 * math.sin(math.pi * step / 16))
        settle(page)
        yield shot(page), 90
    page.mouse.up()
    yield shot(page), 500
    page.evaluate("location.hash = '#line?scale=alpha'")
    page.wait_for_timeout(300)
    settle(page)
    for step in range(35):
        slider = f"document.querySelector('#field-alpha').value = {-2.5 + step / 4}"
        page.evaluate(f"{slider}; document.querySelector('#field-alpha').dispatchEvent(new Event('input'))")
        settle(page)
        yield shot(page), 100
    yield shot(page), 2500


def shot(page: Page) -> Image.Image:
    work = page.locator(".work").bounding_box()
    assert work is not None
    height = page.locator(".panels").evaluate("panels => panels.getBoundingClientRect().height")
    area = {"x": work["x"] - 6, "y": work["y"] - 6, "width": work["width"] + 12, "height": height + 12}
    image = Image.open(io.BytesIO(page.screenshot(clip=area))).convert("RGB")  # pyright: ignore[reportArgumentType]
    return image.resize((WIDTH, round(image.height * WIDTH / image.width)), Image.Resampling.LANCZOS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    flags = parser.parse_args()
    listener = command.bind("127.0.0.1", 0)
    running = uvicorn.Server(uvicorn.Config(server.app(), log_level="error", ws="none"))
    threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True).start()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, reduced_motion="reduce", color_scheme="light")  # pyright: ignore
        page.goto(f"http://127.0.0.1:{listener.getsockname()[1]}/#line")
        page.wait_for_selector(".scene.drawn")
        settle(page)
        taken = list(frames(page))
        browser.close()
    running.should_exit = True
    sample = Image.new("RGB", (WIDTH, 3 * taken[0][0].height))
    for place, number in enumerate((0, len(taken) // 2, len(taken) - 1)):
        sample.paste(taken[number][0], (0, place * taken[0][0].height))
    palette = sample.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    pictures = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image, _ in taken]
    times = [time for _, time in taken]
    pictures[0].save(flags.out, save_all=True, append_images=pictures[1:], duration=times, loop=0, optimize=True)
    size = flags.out.stat().st_size
    print(f"{flags.out}: {len(pictures)} pictures, {size} bytes")
    if size > LARGEST:
        raise SystemExit(f"it has more than {LARGEST} bytes: take fewer pictures or colours")


if __name__ == "__main__":
    main()
