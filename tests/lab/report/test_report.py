"""The report: nothing in it can run or load, the same rows give the same bytes, configs are never mixed."""

from __future__ import annotations

import csv
import dataclasses
import html
import importlib.util
import io
import itertools
import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from intention.lab import experiments
from intention.lab.core.files import LabError
from intention.lab.core.results import Row, append, estimate, select
from intention.lab.experiments.base import (
    COLOURS,
    Claim,
    Job,
    Net,
    Plot,
    added,
    chooses,
    label,
    relevant,
    without_added,
)
from intention.lab.report import write_report
from intention.lab.report.cards import DIAGRAMS, brief, card, shown_claim
from intention.lab.report.choose import choose, own, rebuild
from intention.lab.report.figures import to_svg
from intention.lab.report.sections import Section, section
from intention.lab.report.text import to_csv, to_html, to_markdown

HOSTILE = "<script>alert(1)</script>"
VOID = {"meta", "br", "img", "hr", "link", "input"}


@dataclass(frozen=True)
class Config:
    models: tuple[str, ...] = chooses(("intention", "attention"))
    seeds: int = chooses(3)
    steps: int = 7
    sizes: tuple[int, ...] = (2, 3)
    intention: Net = Net((5,))
    attention: Net = Net((11,), heads=5)


def _jobs(config: Config) -> list[Job]:
    return [Job("first", config, model, seed) for model in config.models for seed in range(config.seeds)]


def _claims(rows: list[Row]) -> list[Claim]:
    found = {model: estimate([row.value for row in select(rows, model=model)]) for model in ("intention", "attention")}
    text = "; ".join(f"{model} {value} from {value.count}" for model, value in found.items())
    return [Claim("Intention wins", "Figure 1", text, "holds"), Claim("It is =1+1", "Table 2", "-1", "does not hold")]


def _finding(rows: list[Row]) -> str:
    return f"Intention is right <b> {estimate([row.value for row in rows]).mean:.4f} times."


def _draw(rows: list[Row]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        axes.plot([1, 2], [row.value, 1.0], "o-", color=COLOURS.get(row.model, "black"), label=label(row.model))
    axes.set(xscale="log", xlabel="points", ylabel="α <b>")
    axes.legend()
    return figure


def _plot(rows: list[Row]) -> list[Plot]:
    table = [["Model", "MSE"], *([row.model, str(row.value)] for row in rows)]
    return [
        Plot("Error <b>", "Over *all* `points`.", lambda: _draw(rows)),
        Plot("Numbers", "The same.", table=table),
        Plot("Again", "Once more.", lambda: _draw(rows)),
    ]


def _experiment(**changes: Any) -> SimpleNamespace:
    presets = {"quick": Config(), "standard": replace(Config(), steps=17), "paper": replace(Config(), steps=50_000)}
    fields: dict[str, Any] = {
        "TITLE": "First & only",
        "PLACE": "Figure 1",
        "READING": "\n- α is **not** given: `alpha` <i>starts</i> at 1.\n- Second\n  line.\n\nA paragraph.\n",
        "EXCLUSIVE": False,
        "Config": Config,
        "PRESETS": presets,
        "jobs": _jobs,
        "claims": _claims,
        "finding": _finding,
        "plot": _plot,
    }
    return SimpleNamespace(**{**fields, **changes})


@pytest.fixture
def fake(monkeypatch):
    """Two experiments, `first` and `second`, in place of the real ones; returns a way to change `first`."""
    known = {"first": _experiment(), "second": _experiment(TITLE="The second")}
    monkeypatch.setattr(experiments, "NAMES", tuple(known))
    monkeypatch.setattr(experiments, "find", lambda name: known[name])
    return lambda **changes: known.update(first=_experiment(**changes))


def _plain(config: Any) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(config)))


def _rows(config: Config = Config(), value: float = 0.5, experiment: str = "first", seconds: float = 1.5) -> list[Row]:  # noqa: B008
    return [
        Row(experiment, job.id, "quick", _plain(config), job.model, job.seed, "mse", value + 0.01 * job.seed,
            x=5, interval=(0.1, 0.9), data={"secret": [1]}, seconds=seconds, intention="0.1.0", torch="2.13.0")
        for job in _jobs(config)
    ]  # fmt: skip


def _write(folder: Path, rows: list[Row]) -> str:
    report = write_report(folder, rows)
    assert report.problems == []
    return report.path.read_text(encoding="utf-8")


class Page(HTMLParser):
    """Elements with their attributes, and whether all were closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_runs_and_loads_nothing(fake, tmp_path):
    text = _write(tmp_path, _rows() + _rows(experiment="second"))
    page = Page(text)
    tags = {tag for tag, _ in page.found}
    assert not tags & {"script", "link", "iframe", "object", "embed", "base", "form"}
    for tag, attributes in page.found:
        assert not any(name.startswith("on") for name in attributes), tag
        for name in ("src", "href", "xlink:href", "srcset", "action"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)
    assert not re.search(r"@import|url\((?!#)", text)
    assert "default-src 'none'" in text


def test_ids_are_unique_and_links_lead_somewhere(fake, tmp_path):
    page = Page(_write(tmp_path, _rows() + _rows(experiment="second")))
    ids = Counter(value["id"] for _, value in page.found if "id" in value)
    assert ids
    assert set(ids.values()) == {1}
    links = {value[name] for _, value in page.found for name in ("href", "xlink:href") if value.get(name)}
    links |= {f"#{value['aria-labelledby']}" for _, value in page.found if "aria-labelledby" in value}
    assert {f"#{name}" for name in ids} >= {link for link in links if link and link.startswith("#")}
    assert "#first" in links


def test_what_a_reader_needs_is_there(fake, tmp_path):
    rows = _rows()
    text = _write(tmp_path, rows)
    page = Page(text)
    assert next(value for tag, value in page.found if tag == "html") == {"lang": "en"}
    assert any(value.get("name") == "viewport" for tag, value in page.found if tag == "meta")
    headings = [int(tag[1]) for tag, _ in page.found if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(headings))
    svgs = [value for tag, value in page.found if tag == "svg"]
    hero, small, *figures = svgs  # the picture of the report, the card, the figures of the experiment
    assert len(figures) == 2
    assert hero["role"] == "img"
    assert small["aria-hidden"] == "true"
    assert all(value["role"] == "img" and value["aria-label"] in ("Error <b>", "Again") for value in figures)
    assert all("width" not in value and "viewbox" in value for value in svgs)
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    for words in ("intention 0.51 [", "First &amp; only", "Not run: second.", "0.1.0", "2.13.0", "9.0 s", "Seeds 0–2"):
        assert words in text, words
    assert "<strong>not</strong> given: <code>alpha</code> &lt;i&gt;starts&lt;/i&gt; at 1.</li>" in text
    assert re.search(r"<b>1</b> <span class=\"pill does-not-hold\">.*</span> does not hold</span>", text)
    assert "<code>steps</code></th><td>7</td><td>50000</td>" in text  # beside the paper's
    assert "<code>attention.heads</code></th><td>5</td><td>same</td>" in text


def test_pictures_come_first(fake, tmp_path):
    text = _write(tmp_path, _rows() + _rows(experiment="second"))
    places = [text.index(words) for words in ('aria-label="Three tasks', 'class="cards"', 'class="experiment"')]
    assert places == sorted(places)
    found = [value for tag, value in Page(text).found if value.get("class") == "card"]
    assert [value["href"] for value in found] == ["#first", "#second"]
    uses = [value["href"] for tag, value in Page(text).found if tag == "use" and "href" in value]
    assert uses == ["#fig-first-1-figure_1", "#fig-second-1-figure_1"]
    assert text.count("data:image/svg+xml;base64,") == len(DIAGRAMS)
    assert "position: sticky" in text


def test_the_finding_is_on_the_card_and_leads_the_section(fake, tmp_path):
    text = _write(tmp_path, _rows())
    said = "Intention is right &lt;b&gt; 0.5100 times."
    one, other = (match.start() for match in re.finditer(re.escape(said), text))
    assert text.index('class="card"') < one < text.index('class="experiment"') < other
    assert other < text.index("Intention wins", other) < text.index("<figure>", other)
    assert said in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "0.6100 times" in _write(tmp_path, _rows(value=0.6))  # it is told anew, of the rows that are shown


def test_a_claim_that_was_measured_stands_for_the_experiment():
    found = [Claim("Not run", "Figure 1", "", "not tested at this size"), Claim("Run", "Figure 1", "1", "holds")]
    assert shown_claim(Section("first", "First", claims=found)) == found[1]
    assert shown_claim(Section("first", "First", claims=found[:1])) == found[0]
    assert shown_claim(Section("first", "First")) is None


def test_lines_of_our_own_stand_apart(fake, tmp_path):
    ours = Claim("We add a line", "Figure 1, our own line", "2", "not decided")
    fake(claims=lambda rows: [ours, *_claims(rows)])
    text = _write(tmp_path, _rows())
    every = text[text.index('id="all-claims"') :]
    paper, own = every.split("<summary>Our own lines</summary>")
    assert "We add a line" not in paper
    assert "We add a line" in own
    assert "Intention wins" in paper
    assert "Intention wins" not in own


def test_a_card_of_an_experiment_that_failed(fake, tmp_path):
    fake(claims=_fail, plot=_fail)
    report = write_report(tmp_path, _rows())
    assert "Could not be judged: claims failed" in report.path.read_text(encoding="utf-8")
    assert card(section("first", _rows())).picture is None


def test_what_was_measured_is_cut_at_the_end_of_a_part():
    assert brief("short") == "short"
    assert brief("a" * 400) == "a" * 150 + " …"


def test_the_same_rows_give_the_same_bytes(fake, tmp_path, monkeypatch):
    import matplotlib

    kept = []
    for name, date, width in (("a", "1000000000", 1.5), ("b", "1700000000", 7.0)):  # the day and the user's taste
        monkeypatch.setenv("SOURCE_DATE_EPOCH", date)
        monkeypatch.setitem(matplotlib.rcParams, "lines.linewidth", width)
        folder = tmp_path / name
        append(folder / "first.jsonl", _rows())
        append(folder / "second.jsonl", _rows(experiment="second"))
        write_report(folder)
        kept.append({str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()})
        assert matplotlib.rcParams["lines.linewidth"] == width
    assert kept[0] == kept[1]
    assert {"report.html", "report.md", "claims.csv", "rows.csv", "figures/fig-second-3.svg"} < set(kept[0])


@pytest.mark.parametrize("where", ["model", "run", "metric", "preset", "intention", "torch"])
def test_hostile_rows_are_inert(fake, tmp_path, where):
    rows = [replace(row, **{where: HOSTILE if where != "run" else f"{HOSTILE}{row.run}"}) for row in _rows()]
    page = Page(write_report(tmp_path, rows).path.read_text(encoding="utf-8"))
    assert "script" not in {tag for tag, _ in page.found}
    assert "<script" not in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_hostile_names_options_and_config_are_inert(fake, tmp_path):
    bad = f'"><img src=x onerror=alert(1)>{HOSTILE}](javascript:alert(1))'
    rows = [replace(row, config={**row.config, bad: bad}) for row in _rows()]
    rows += [replace(row, experiment=bad) for row in rows[:1]]
    rows += [replace(row, metric="search", data={"options": {bad: bad}, "chosen": True}, model=bad) for row in rows[:1]]
    report = write_report(tmp_path, rows)
    assert len(report.problems) == 1
    assert "there is no experiment" in report.problems[0]
    tags = Counter(tag for tag, _ in Page(report.path.read_text(encoding="utf-8")).found)
    assert tags["script"] == 0
    assert tags["img"] == len(DIAGRAMS)  # those of the paper, which are there without hostile rows, too
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "<script" not in markdown
    assert "<img" not in markdown
    assert not re.search(r"(?<!\\)\]\(javascript", markdown)


def _table(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"), newline="")))


def test_csv_runs_no_formula(fake, tmp_path):
    rows = [replace(row, model="=cmd|'/c calc'!A1", metric=" @SUM(1)", value=-0.5) for row in _rows()]
    write_report(tmp_path, rows)
    found = _table(tmp_path / "rows.csv")
    assert len(found) == len(rows)
    assert {row["model"] for row in found} == {"'=cmd|'/c calc'!A1"}
    assert {row["metric"] for row in found} == {"' @SUM(1)"}
    assert {row["value"] for row in found} == {"-0.5"}  # a number stays one
    assert json.loads(found[0]["config"])["steps"] == 7
    assert "secret" not in (tmp_path / "rows.csv").read_text(encoding="utf-8")
    claims = _table(tmp_path / "claims.csv")
    assert claims[1] == {
        "experiment": "first", "claim": "It is =1+1", "where": "Table 2", "measured": "'-1", "verdict": "does not hold",
        "ours": "paper",
    }  # fmt: skip


def test_configs_are_never_mixed(fake, tmp_path):
    old, new = _rows(replace(Config(), steps=3), 100.0), _rows(value=0.5)
    text = _write(tmp_path, old + new)
    assert "intention 0.51 [0.49, 0.53] from 3" in text
    assert "6 rows of other configs are left out" in text
    assert "100" not in (tmp_path / "claims.csv").read_text(encoding="utf-8")
    assert "intention 100 [1e+02, 1e+02] from 3" in _write(tmp_path, new + old)  # the most recent wins


def test_what_only_chooses_runs_is_not_another_config(fake, tmp_path):
    less = _rows(replace(Config(), seeds=1, models=("intention",)))
    more = [row for row in _rows() if row.run not in {row.run for row in less}]
    text = _write(tmp_path, less + more)
    assert "intention 0.51 [0.49, 0.53] from 3" in text
    assert "left out" not in text
    assert "Not all runs" not in text


def test_runs_that_another_models_size_does_not_touch_are_used_again():
    before = Config()
    after = replace(before, attention=Net((13,)))
    rows = _rows(before)
    changed = [row for row in _rows(after, 0.7) if row.model == "attention"]
    chosen = choose(_experiment(), rows + changed)  # type: ignore[arg-type]
    assert [row for row in chosen.rows if row.model == "intention"] == [row for row in rows if row.model == "intention"]
    assert [row for row in chosen.rows if row.model == "attention"] == changed
    assert chosen.config["attention"]["embed"] == [13]
    assert (chosen.complete, chosen.other_config) == (True, 3)


def test_a_reference_belongs_to_the_run_that_measured_it():
    rows = [replace(row, model="least_squares") for row in _rows() if row.model == "intention"]
    old = [replace(row, model="least_squares") for row in _rows(replace(Config(), intention=Net((3,))))[:3]]
    chosen = choose(_experiment(), old + rows)  # type: ignore[arg-type]
    assert chosen.rows == rows


def test_an_unfinished_config_does_not_hide_a_complete_one(fake, tmp_path):
    complete, begun = _rows(), _rows(replace(Config(), steps=3), 100.0)[:2]
    text = _write(tmp_path, complete + begun)
    assert "intention 0.51 [" in text
    assert "The most recent config is not shown" in text
    cut = [replace(row, rows=2) for row in begun]  # of each run, one row of two is there
    assert "Not all runs" in _write(tmp_path, [replace(row, rows=2) for row in _rows()])
    alone = _write(tmp_path, cut)
    assert "Not all runs of this config are there" in alone
    assert "intention 100 [" in alone


@pytest.mark.parametrize("neighbours", [False, True])
def test_a_run_made_again_counts_once(fake, tmp_path, neighbours):
    rows = _rows(value=9.0) + _rows(seconds=2.0)
    text = _write(tmp_path, sorted(rows, key=lambda row: row.run) if neighbours else rows)
    assert "intention 0.51 [0.49, 0.53] from 3" in text
    assert "6 rows of runs that were made again later are left out" in text
    assert "12 s" in text


def test_the_time_of_a_run_counts_once_however_many_rows_it_has(fake, tmp_path):
    rows = [each for row in _rows() for each in (row, replace(row, metric="other"))]
    assert "<dd>9.0 s</dd>" in _write(tmp_path, rows)


def test_one_seed(fake, tmp_path):
    text = _write(tmp_path, _rows(replace(Config(), seeds=1)))
    assert "intention 0.5 from 1; attention 0.5 from 1" in text
    assert "nan" not in re.sub(r"data:[^\"]*", "", text).lower()  # pictures are in base64


def test_rows_of_another_version_are_shown_with_a_note(fake, tmp_path):
    rows = [replace(row, config={"steps": 7, "gone": 1}) for row in _rows()]
    text = _write(tmp_path, _rows(replace(Config(), steps=3), 9.0) + rows)
    assert "<code>gone</code></th><td>1</td><td>–</td>" in text
    assert "Whether all runs of this config are there cannot be told" in text
    assert "intention 0.51 [0.49, 0.53] from 3" in text


def test_an_unknown_experiment_is_a_problem_not_an_end(fake, tmp_path):
    report = write_report(tmp_path, _rows() + _rows(experiment="third"))
    assert len(report.problems) == 1
    assert report.problems[0].startswith("third: there is no experiment 'third'")
    text = report.path.read_text(encoding="utf-8")
    assert "intention 0.51 [" in text
    assert report.problems[0].replace("'", "&#39;") in text


def _fail(*_: Any) -> Any:
    raise RuntimeError("broken <here>")


def _with_first(draw: Any) -> dict[str, Any]:
    return {"plot": lambda rows: [Plot("One", "", draw), *_plot(rows)]}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"claims": _fail}, "claims failed: RuntimeError: broken <here>"),
        ({"plot": _fail}, "figures failed: RuntimeError: broken <here>"),
        (_with_first(_fail), "figure 'One' failed: RuntimeError: broken <here>"),
        (_with_first(lambda: None), "figure 'One' failed: AttributeError"),
        ({"jobs": _fail, "Config": None}, "its configs cannot be read: TypeError"),
    ],
)
def test_what_fails_costs_only_itself(fake, tmp_path, changes, problem):
    fake(**changes)
    report = write_report(tmp_path, _rows() + _rows(experiment="second"))
    assert [found[: len(problem) + 7] for found in report.problems] == [f"first: {problem}"]
    text = report.path.read_text(encoding="utf-8")
    assert html.escape(problem).replace("&#x27;", "&#39;") in text
    assert 'id="second"' in text
    assert text.count("<svg") >= 2
    assert to_markdown(problem) in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_a_broken_line_is_named_and_nothing_is_lost(fake, tmp_path):
    append(tmp_path / "first.jsonl", _rows())
    before = write_report(tmp_path).path.read_bytes()
    with (tmp_path / "first.jsonl").open("a") as file:
        file.write('{"experiment": "first", "run"\n')
    with pytest.raises(LabError, match=r"first\.jsonl, line 7 is not a row"):
        write_report(tmp_path)
    assert (tmp_path / "report.html").read_bytes() == before


def test_no_rows(tmp_path):
    with pytest.raises(LabError, match="no rows"):
        write_report(tmp_path)
    with pytest.raises(LabError, match="no rows"):
        write_report(tmp_path, [])


def test_search_budget(fake, tmp_path):
    def tried(model: str, rate: float, score: float, chosen: bool = False) -> Row:
        row = next(row for row in _rows() if row.model == "intention")
        data = {"options": {"learning_rate": rate}, "chosen": chosen}
        return replace(row, model=model, metric="search", value=score, data=data, config={"other": 1})

    rows = [tried(model, rate, 0.25, rate == 0.001) for model in ("intention", "attention") for rate in (0.001, 0.003)]
    append(tmp_path / "search" / "first.jsonl", [*rows, replace(rows[0], experiment="second", model="elsewhere")])
    report = write_report(tmp_path, _rows(), tmp_path / "search")
    text = report.path.read_text(encoding="utf-8")
    assert "All models got the same grid of 2 options." in text
    line = '<th scope="row">Attention</th><td class="short">learning_rate = 0.001</td><td class="short">0.25</td>'
    assert line + '<td class="short">chosen</td>' in text
    assert text.count(">chosen<") == 2
    assert "All models got the same grid of 2 options." in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "elsewhere" not in text  # an experiment that this report does not show
    lost = replace(rows[0], value=None, preset="standard")  # diverged; searches of two presets are not averaged
    inside = _write(tmp_path, [*_rows(), *rows, lost])
    assert "not finite" in inside
    assert "<h3>first, quick</h3>" in inside
    assert "<h3>first, standard</h3>" in inside
    inside = _write(tmp_path, _rows() + rows[:3])  # in the folder's own rows; not a config of the experiment
    assert "The models did not get the same grid: Intention 2, Attention 1." in inside
    assert "left out" not in inside


def test_markdown_links_to_figures(fake, tmp_path):
    _write(tmp_path, _rows())
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    links = re.findall(r"!\[[^\n]*\]\((.*?)\)", text)
    assert links == ["figures/fig-first-1.svg", "figures/fig-first-3.svg"]
    for link in links:
        assert ET.parse(tmp_path / link).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert "| Intention wins | Figure 1 | intention 0.51 \\[" in text
    assert "| steps | 7 | 50000 |" in text


def test_figures_take_the_pages_colours_and_fonts():
    def draw() -> Any:
        from matplotlib.figure import Figure

        axes = (figure := Figure()).subplots()
        axes.plot([1, 2], [1, 2], "ok", markeredgecolor="white", label="<i> & $x^2$")
        axes.imshow([[0, 1], [1, 0]])
        axes.legend()
        return figure

    svg = to_svg(draw, "fig-x", "A & B")
    root = ET.fromstring(svg)
    assert "#000000" not in svg
    assert "#ffffff" not in svg
    assert "currentColor" in svg
    assert root.get("fill") == "currentColor"
    assert "DejaVu" not in svg
    assert "<style" not in svg
    assert "metadata" not in svg
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert ids
    assert all(name and name.startswith("fig-x-") for name in ids)
    used = re.findall(r"(?:url\(|href=\")#([^)\"]+)", svg)
    assert used
    assert set(used) <= set(ids)


def test_markdown_of_a_reading():
    assert to_html("a *b* 2 * 3 * 4 [x](https://y)") == "<p>a <em>b</em> 2 * 3 * 4 x (https://y)</p>"
    assert to_html("1. a\n2. b\n   c\n\nd") == "<ol><li>a</li><li>b c</li></ol>\n<p>d</p>"
    assert to_html("`<b>` **c**") == "<p><code>&lt;b&gt;</code> <strong>c</strong></p>"
    assert '<th scope="col">a</th>' in to_html("| a | b |\n|---|---|\n| 1 | 2 |")
    assert to_markdown("a\nb|`c`") == "a b\\|\\`c\\`"
    assert to_csv(("a",), [("+1",), (1,), ("x\ny",)]) == 'a\n\'+1\n1\n"x\ny"\n'


def _written() -> list[str]:
    return [name for name in experiments.NAMES if importlib.util.find_spec(f"intention.lab.experiments.{name}")]


@pytest.mark.parametrize("name", _written())
def test_real_configs_are_read_back(name):
    """A row's config becomes the Config it was, and says the same of what a run depends on."""
    experiment = experiments.find(name)
    choosing = {item.name for item in dataclasses.fields(experiment.Config) if item.metadata.get("chooses")}
    for config in experiment.PRESETS.values():
        assert rebuild(experiment.PRESETS["quick"], _plain(config)) == config
        for model in {job.model for job in experiment.jobs(config)}:
            wanted = json.dumps(relevant(config, model), sort_keys=True)
            assert own(without_added(_plain(config), config), model, choosing) == wanted


def test_a_field_that_was_added_changes_no_run_of_before():
    @dataclasses.dataclass(frozen=True)
    class Before:
        steps: int = 3
        intention: Net = Net((4,))

    @dataclasses.dataclass(frozen=True)
    class After:
        steps: int = 3
        intention: Net = Net((4,))
        noise: float = added(0.5)

    old, new = (Job("x", config, "intention", 0) for config in (Before(), After()))
    assert old.id == new.id
    assert Job("x", After(noise=1.0), "intention", 0).id != old.id
    assert Job("x", After(intention=Net((4,), scale="variance")), "intention", 0).id != old.id
    row = {"steps": 7, "intention": {"embed": [4], "learning_rate": 0.1}}
    assert rebuild(After(noise=9.0, intention=Net((4,), scale="variance")), row) == After(
        7, Net((4,), learning_rate=0.1)
    )
    full = _plain(After(noise=9.0))
    assert without_added(full, After()) == {
        "steps": 3,
        "intention": {k: v for k, v in full["intention"].items() if k != "scale"},
        "noise": 9.0,
    }
