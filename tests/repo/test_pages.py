"""What people read first: README's code runs, links and anchors exist, every public name has a page and an example."""

import importlib
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
PAGES = [page for page in PAGES if "_build" not in page.parts]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", ["README.md", "docs/quickstart.md"])
def test_the_code_of_what_people_paste_runs(name):
    """Block after block in one program, in a process of its own: `register` changes transformers for all."""
    code = blocks(ROOT / name)
    assert len(code) >= 3
    assert not any(line.startswith(">>>") for block in code for line in block.splitlines())
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "\n".join(code)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert run.returncode == 0, run.stderr


def test_the_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    for block in re.findall(r"^```\w+\n(.*?)^```", "\n".join(lines), re.MULTILINE | re.DOTALL):
        assert max(map(len, block.splitlines())) <= 88
    first = "\n".join(lines).index("hero.svg")
    assert first < 500  # the picture comes first
    for picture in re.findall(r'src(?:set)?="([^"]+)"', "\n".join(lines)):
        assert (ROOT / picture).exists(), picture


def test_pictures_show_the_numbers_beside_them():
    """`python tools/hero.py --draw`, `python benchmarks/pages/speed_figure.py` and `python tools/badges.py`."""
    pictures = DOCS / "pictures"
    for name in ("hero", "hero-dark"):
        text = (pictures / f"{name}.svg").read_text()
        for answer in json.loads((pictures / "hero.json").read_text()).values():
            times = answer["errors"][0] / answer["errors"][1]
            assert f"error {times:.0f} times" in text or f"error {times:.1f} times" in text
    rows = json.loads((ROOT / "benchmarks" / "results" / "native.json").read_text())["heads"]
    last = [row for row in rows if row["threads"] == 1 and row["shape"][1] == 65536]
    for row in last:
        times = row["seconds"]["sdpa"] / row["seconds"]["native"]
        assert f"{times:.0f}×" in (pictures / "speed.svg").read_text()
    badges = load("badges")
    assert badges.FILE.read_text() == badges.draw()
    assert len(badges.facts()) == 4


def anchor(title):
    """As code hosts and MyST make it from a heading."""
    return re.sub(r"[^\w -]", "", re.sub(r"[`*]", "", title).strip().lower()).replace(" ", "-")


def anchors(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {anchor(title) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("name", [str(page.relative_to(ROOT)) for page in PAGES])
def test_links_and_anchors_exist(name):
    page = ROOT / name
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, part = target.partition("#")
        found = page.parent / path if path else page
        assert found.exists(), target
        assert not part or part in anchors(found), target


def test_what_llms_txt_leads_to_exists():
    links = re.findall(r"\]\(([^)\s]+)\.html\)", (DOCS / "llms.txt").read_text())
    assert len(links) > 15
    assert [link for link in links if not (DOCS / f"{link}.md").exists()] == []


def shown():
    """Names that the pages of docs/reference write out: those of their directives, and of the modules' __all__."""
    names = set()
    for page in (DOCS / "reference").glob("*.md"):
        for kind, name in re.findall(r"^\.\. auto(\w+):: ([\w.]+)$", page.read_text(), re.MULTILINE):
            names |= {f"{name}.{x}" for x in importlib.import_module(name).__all__} if kind == "module" else {name}
    return names


PUBLIC = load("site").public_names()


def test_every_public_name_has_a_page():
    assert len(PUBLIC) > 100
    assert sorted(set(PUBLIC) - shown()) == []


def found(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_every_public_name_has_an_example():
    """In its docstring, in that of a method, or on its page."""
    pages = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    examples = "\n".join(re.findall(r"^```python\n(.*?)^```", pages, re.MULTILINE | re.DOTALL))
    missing = []
    for path in PUBLIC:
        thing = found(path)
        texts = [inspect.getdoc(thing) or ""]
        texts += [getattr(x, "__doc__", None) or "" for x in vars(thing).values()] if inspect.isclass(thing) else []
        own = re.search(rf"\b{path.rpartition('.')[2]}\b", examples)
        if not own and not any(">>>" in text for text in texts):
            missing.append(path)
    assert missing == []


def test_every_public_name_says_what_it_is():
    assert [path for path in PUBLIC if callable(found(path)) and not inspect.getdoc(found(path))] == []


def test_no_line_of_the_public_face_is_passed_over():
    """Lines of names begin at the margin; "module: names" are the others there."""
    lines = (ROOT / "tests" / "repo" / "public_face.txt").read_text().splitlines()
    names = [line for line in lines if line and not line.startswith(" ") and not re.match(r"[\w.]+:", line)]
    assert len(PUBLIC) == len(set(PUBLIC)) == len(names)


@pytest.mark.parametrize("name", load("twins").names())
def test_a_tutorial_has_a_plain_twin(name):
    """After a change: `python tools/twins.py`. The tutorials are run by `make docs`."""
    twins = load("twins")
    assert (ROOT / "examples" / f"{name}.py").read_text() == twins.twin(name)
    assert f"({name}.md)" in (DOCS / "tutorials" / "index.md").read_text()
    page = (DOCS / "tutorials" / f"{name}.md").read_text()
    assert page.startswith("---\nfile_format: mystnb\n")
    assert page.count("```{code-cell} python\n") >= 4


# --- the built site -----------------------------------------------------------------------------------------------


@pytest.fixture
def site(monkeypatch):
    module = load("site")
    monkeypatch.setattr(module, "public_names", lambda: ["intention.fit"])
    return module


GOOD = '<h1 id="top">x</h1><a href="b.html#there">b</a><dt id="intention.fit"></dt><a href="https://x.org">x</a>'


def written(folder, a=GOOD, b='<p id="there">', css=""):
    for name, text in (("a.html", a), ("b.html", b), ("c.css", css)):
        (folder / name).write_text(text)
    return folder


def test_a_site_without_problems(site, tmp_path):
    assert site.problems(written(tmp_path)) == ([], ["https://x.org"])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"a": GOOD + '<script src="https://cdn.org/mathjax.js"></script>'}, "a.html loads https://cdn.org/mathjax.js"),
        ({"a": GOOD + '<img src="//cdn.org/x.png">'}, "a.html loads //cdn.org/x.png"),
        ({"a": GOOD + '<img src="gone.png">'}, "a.html: gone.png leads nowhere"),
        ({"b": "<p>"}, "a.html: b.html#there leads nowhere"),
        ({"a": GOOD.replace("b.html", "d.html")}, "a.html: d.html#there leads nowhere"),
        ({"a": GOOD.replace("intention.fit", "other")}, "intention.fit has no place in the reference"),
        ({"css": "@import 'https://fonts.org/x'"}, "c.css loads from elsewhere"),
        ({"css": "a { background: url(//fonts.org/x) }"}, "c.css loads from elsewhere"),
    ],
)
def test_problems_of_a_site_are_found(site, tmp_path, change, problem):
    assert site.problems(written(tmp_path, **change))[0] == [problem]


def test_pages_are_built_with_formulas_in_them(tmp_path):
    """The configuration of the documentation, and a page of its own: MathML, a copy button, nothing from elsewhere."""
    pytest.importorskip("myst_nb")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("conf.py", "_extensions", "_static", "llms.txt"):
        (source / name).symlink_to(DOCS / name)
    page = "# Page\n\n$K'V$ and\n\n$$\\frac{1}{2}$$\n\n```python\n>>> 1 + 1\n2\n```\n"
    (source / "index.md").write_text(page)
    out = tmp_path / "out"
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", source, out]
    run = subprocess.run(build, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    text = (out / "index.html").read_text()
    assert text.count("<math ") == 2
    assert "<mfrac>" in text
    assert "copybutton" in text
    assert (out / "llms.txt").exists()
    wrong = [problem for problem in load("site").problems(out)[0] if "no place" not in problem]
    assert wrong == []
