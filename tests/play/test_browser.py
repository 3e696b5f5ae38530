"""The page in a real browser: pictures follow the hand, and their numbers are the library's."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("starlette", reason="needs the extra play")

from intention import features, fit, kernels
from intention.play import fields
from intention.play.scenes import SCENES

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}


def shown(page, name):
    return page.evaluate(f"play.{name}")


def until(page, condition):
    """Playwright's own waiting evaluates text in the page, which its policy forbids."""
    for _ in range(500):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(20)
    raise TimeoutError(condition)


def settled(page, act):
    """Do something, and wait until the last answer has come and the address is written."""
    before = shown(page, "answers")
    act()
    until(page, f"play.answers > {before} && !play.busy()")


def picture(page):
    return page.locator(".panels").inner_html()


def drag(page, point, dx, dy):
    box = point.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + dx / 2, y + dy / 2)
    page.mouse.move(x + dx, y + dy)
    page.mouse.up()


def close(got, want, atol=2e-5):
    got = torch.tensor([math.nan if x is None else x for x in got], dtype=torch.float64)
    torch.testing.assert_close(got, want.double().flatten(), atol=atol, rtol=1e-4)


def first_point(page):
    return page.locator(".plot").first.locator(".point:not(.still) .body").first


@pytest.mark.parametrize("name", SCENES)
def test_a_scene_loads_and_a_drag_changes_picture_numbers_and_address(show, name):
    own = show(name)
    assert own.title() == f"{SCENES[name].title} · Intention play"
    before, state = picture(own), shown(own, "state")
    handle = first_point(own) if "points" in SCENES[name].fields else own.locator(HANDLES[name])
    settled(own, lambda: drag(own, handle, 40, -30))
    assert shown(own, "state") != state
    assert picture(own) != before
    assert own.url.split("#")[1].startswith(f"{name}?")
    # the picture's numbers are what the library answers for the state that the page is in
    state = fields.check(SCENES[name].fields, shown(own, "state"))
    assert shown(own, "answer")["found"] == SCENES[name].compute(state)["found"]


HANDLES = {"pixels": ".paper", "stream": ".scrub"}  # where the hand does not take a point


def test_line_shows_the_librarys_numbers(show):
    own = show("line")
    settled(own, lambda: drag(own, first_point(own), 60, -50))
    state, found = shown(own, "state"), shown(own, "answer")["found"]
    x, y = torch.tensor(state["points"], dtype=torch.float64).split(1, -1)
    query = torch.linspace(-3, 3, 121, dtype=torch.float64)[:, None]
    phi = features.fourier(kernels.Gaussian(1.0), x, 64, torch.Generator().manual_seed(0))
    weight, n = torch.full((14,), 1 / 14, dtype=torch.float64), 14
    K, Q, alpha = phi(x), phi(query), 10**-2.5
    close(found["attention"], torch.softmax(10 * Q @ K.mT, -1) @ y)
    close(found["linear_attention"], Q @ K.mT @ y / n)
    sigma = torch.linalg.inv(K.mT @ K / n + alpha * torch.eye(64, dtype=torch.float64))
    close(found["intention"], Q @ sigma @ K.mT @ y / n)
    close(found["sigma_intention"], torch.softmax(10 * Q @ sigma @ K.mT, -1) @ y, 1e-4)
    close(found["kernel"], fit(x, y, alpha, weight, kernel=kernels.Gaussian(1.0))(query))
    close(shown(own, "answer")["left_out"], fit(K, y, alpha, weight).leave_one_out())


def test_alpha_to_infinity_is_linear_attention_and_attention(show):
    own = show("line?alpha=5.5&scale=alpha")
    assert 0 < shown(own, "answer")["distance"]["intention"] < 1e-3
    own.locator("#field-alpha").focus()
    settled(own, lambda: own.keyboard.press("End"))
    answer = shown(own, "answer")
    assert own.locator("output[for=field-alpha]").inner_text() == "∞"
    assert answer["distance"]["intention"] < 1e-12
    assert answer["distance"]["sigma_intention"] < 1e-12
    assert answer["found"]["intention"] == answer["found"]["linear_attention"]
    assert answer["found"]["sigma_intention"] == answer["found"]["attention"]
    curves = [own.locator(".plot .curves path:first-child").nth(i).get_attribute("d") for i in range(5)]
    attention, linear, _, sigma, intention = curves
    assert intention == linear
    assert sigma == attention
    assert attention != linear


def test_the_button_goes_to_infinity_and_the_other_chooses_alpha(show):
    own = show("line?alpha=5.6")
    own.get_by_role("button", name="α → ∞").click()
    until(own, "play.state.alpha === 6 && play.state.scale === 'alpha'")
    settled(own, lambda: own.get_by_role("button", name="Choose α for me").click())
    until(own, "play.state.scale === 'one'")
    state = shown(own, "state")
    x, y = torch.tensor(state["points"], dtype=torch.float64).split(1, -1)
    phi = features.fourier(kernels.Gaussian(1.0), x, 64, torch.Generator().manual_seed(0))
    chosen = fit(phi(x), y, "loo", torch.full((14,), 1 / 14, dtype=torch.float64)).alpha
    assert state["alpha"] == pytest.approx(math.log10(chosen), abs=1e-3)


@pytest.mark.parametrize("name", SCENES)
def test_a_link_shows_the_same_again(show, name):
    own = show(name)
    number = next((key for key, field in SCENES[name].fields.items() if field.kind == "number"), None)
    if number is None:
        settled(own, lambda: own.get_by_role("button", name="Draw my own").click())
    else:
        own.locator(f"#field-{number}").focus()
        settled(own, lambda: own.keyboard.press("ArrowRight"))
    again = show(own.url.split("#")[1])
    assert shown(again, "state") == shown(own, "state")
    assert shown(again, "answer") == shown(own, "answer")
    assert again.url == own.url


def test_a_wrong_link_is_told_in_a_sentence(chromium, address):
    context = chromium.new_context()
    wrong = context.new_page()
    wrong.goto(f"{address}/#line?alpha=99")
    problem = wrong.locator(".problem")
    problem.wait_for()
    assert problem.inner_text() == "alpha is out of range; wanted a number from -6 to 6"
    context.close()


def test_points_come_and_go_by_click_and_double_click(show):
    own = show("line")
    area = own.locator(".plot").first.bounding_box()
    settled(own, lambda: own.mouse.click(area["x"] + 0.6 * area["width"], area["y"] + 0.75 * area["height"]))
    assert len(shown(own, "state")["points"]) == 15
    settled(own, lambda: first_point(own).dblclick())
    assert len(shown(own, "state")["points"]) == 14
    settled(own, lambda: own.get_by_role("button", name="Start over").click())
    assert own.url.endswith("#line")


def test_keys_alone_do_all_of_it(show):
    own = show("map")
    own.locator("body").press("Tab")  # to the scene, brand, the links of scenes
    for _ in range(30):
        if own.evaluate("document.activeElement.dataset?.scene") == "line":
            break
        own.keyboard.press("Tab")
    own.keyboard.press("Enter")
    own.wait_for_selector(".scene.line.drawn")
    points = len(shown(own, "state")["points"])
    for _ in range(30):
        if own.evaluate("document.activeElement.classList.contains('point')"):
            break
        own.keyboard.press("Tab")
    before = shown(own, "state")["points"][0]
    settled(own, lambda: own.keyboard.press("ArrowUp"))
    assert shown(own, "state")["points"][0][1] == pytest.approx(before[1] + 0.04)
    settled(own, lambda: own.keyboard.press("Shift+ArrowRight"))
    assert shown(own, "state")["points"][0][0] == pytest.approx(before[0] + 0.6)
    settled(own, lambda: own.keyboard.press("Enter"))
    assert len(shown(own, "state")["points"]) == points + 1
    settled(own, lambda: own.keyboard.press("Delete"))
    assert len(shown(own, "state")["points"]) == points
    for _ in range(40):
        if own.evaluate("document.activeElement.name") == "features":
            break
        own.keyboard.press("Tab")
    settled(own, lambda: own.keyboard.press("ArrowDown"))
    assert shown(own, "state")["features"] == "network"


def test_a_finger_drags_a_point_on_a_phone(show):
    own = show("line", **PHONE)
    point = own.locator(".plot").first.locator(".point .hit").nth(5)
    point.scroll_into_view_if_needed()
    box = point.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    before = shown(own, "state")["points"][5]
    touch = own.context.new_cdp_session(own)

    def swipe():
        touch.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [{"x": x, "y": y}]})
        for step in (10, 20, 30):
            touch.send("Input.dispatchTouchEvent", {"type": "touchMove", "touchPoints": [{"x": x, "y": y + step}]})
        touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})

    settled(own, swipe)
    after = shown(own, "state")["points"][5]
    assert after[1] < before[1] - 0.2
    assert after[0] == pytest.approx(before[0], abs=0.05)


@pytest.mark.parametrize("name", SCENES)
def test_a_phone_and_the_dark_show_all_of_it(show, name):
    own = show(name, **PHONE, color_scheme="dark")
    own.get_by_role("button", name="Controls").click()  # the sheet at the lower edge
    assert own.locator(".field").first.is_visible()
    assert own.evaluate("document.documentElement.scrollWidth") <= 390
    assert own.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 27)"
    assert own.evaluate("getComputedStyle(document.body).color") == "rgb(228, 231, 235)"
    outside = """() => [...document.querySelectorAll('.card, aside, button, h1, .field, .links a')].filter((e) => {
        const b = e.getBoundingClientRect(); return b.width && (b.left < -1 || b.right > innerWidth + 1) })
        .map((e) => e.className || e.textContent)"""
    assert own.evaluate(outside) == []


def test_a_formula_lights_up_what_changes(show):
    own = show("line")
    own.locator("#field-alpha").focus()
    settled(own, lambda: own.keyboard.press("ArrowRight"))
    lit = own.locator(".mark.lit")
    assert {lit.nth(i).get_attribute("data-of") for i in range(lit.count())} == {"alpha"}
    assert lit.count() == 3  # of Intention, kernel Intention and σIntention


def test_the_code_is_shown_and_the_docs_are_there(show):
    own = show("line?alpha=-1")
    own.get_by_role("button", name="Show the code").click()
    dialog = own.locator("#dialog")
    dialog.locator("pre").first.wait_for()
    assert "F.intention(Q, K, y, **options)" in dialog.inner_text()
    assert "intention play --export DIR '#line?alpha=-1'" in dialog.inner_text()
    own.keyboard.press("Escape")
    own.get_by_role("button", name="docs/functional.md").click()
    assert "Regularised least squares, fitted on (key, value)" in dialog.inner_text()


def test_the_picture_is_saved_as_it_is_shown(show, tmp_path):
    own = show("plane")
    with own.expect_download() as download:
        own.get_by_role("button", name="Save picture").click()
    path = tmp_path / "plane.svg"
    download.value.save_as(path)
    text = path.read_text(encoding="utf-8")
    assert text.count("<svg") == 1 + own.locator("svg.plot").count()
    assert "Intention" in text
    assert "class=" not in text


WAVE = """() => {
    let i = 0;
    const slider = document.querySelector('#field-temperature');
    const next = () => { slider.value = (i++ % 40) / 10 - 1; slider.dispatchEvent(new Event('input')); };
    window.timer = setInterval(next, 15);
}"""


def test_two_pages_get_their_own_answers(show):
    """Each asks again and again; an answer always belongs to the state that was asked."""
    many = [show(f"line?alpha={-4 + i}") for i in range(3)]
    for own in many:
        own.evaluate(WAVE)
    for i, own in enumerate(many):
        until(own, "play.answers > 5")
        own.evaluate("clearInterval(timer)")
        until(own, "!play.busy()")
        state = fields.check(SCENES["line"].fields, shown(own, "state"))
        assert state["alpha"] == -4 + i
        assert shown(own, "answer")["found"] == SCENES["line"].compute(state)["found"]


def test_the_policy_lets_nothing_out(chromium, address):
    """Without the fixture: what is refused here is noted as an error by the browser, as it should be."""
    context = chromium.new_context()
    own, sent = context.new_page(), []
    own.goto(f"{address}/#map")
    own.on("request", lambda request: sent.append(request.url))
    assert own.evaluate("fetch('https://example.org/').then(() => 'sent', () => 'refused')") == "refused"
    attempt = "try { done(new Function('return 1')()) } catch { done('refused') }"
    later = f"new Promise((done) => setTimeout(() => {{ {attempt} }}))"  # not within what playwright evaluates
    assert own.evaluate(later) == "refused"
    assert not [url for url in sent if not url.startswith(address)]
    context.close()
