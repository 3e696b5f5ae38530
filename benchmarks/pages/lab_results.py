"""README.md and, in docs/, results.md, lab.md, sequences.md, gallery.md and lab/*.svg from results/standard and real.

python benchmarks/pages/lab_results.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from intention.lab import experiments
from intention.lab.core import results
from intention.lab.core.results import Row, estimate_log, select
from intention.lab.experiments import find
from intention.lab.experiments.base import Claim, label, tally
from intention.lab.experiments.compare import by_model
from intention.lab.experiments.stability.claims import errors
from intention.lab.report.cards import shown_claim
from intention.lab.report.figures import standalone
from intention.lab.report.sections import Drawn, Section, section
from table import fill, markdown

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "results" / "standard", ROOT / "results" / "real")
GROUPS = (("Claims of the paper", False), ("Lines of our own", True))
GATED = tuple(f"{name}_gated" for name in ("attention", "linear_attention", "delta", "gated_delta"))


class Task(NamedTuple):
    """A row of README's table: what is compared, and with whom."""

    name: str
    experiment: str
    metric: str
    baselines: Sequence[str]
    x: float | None = None
    data: Mapping[str, str | int] = {}
    form: str = ".2g"
    own: str = "intention"


TASKS = (
    Task("sine curve from 10 points", "sine", "mse", ("attention", "neural_process", "maml"), x=10),
    Task("linear regression in context", "in_context", "mse", ("transformer", "linear_attention", "delta")),
    Task("rotation and scale from 5 pairs", "kabsch", "mse", ("attention", "neural_process", "mlp"), data={"dims": 2}),
    Task("policy from rewards", "policy", "mse", ("attention", "neural_process", "mlp"), data={"reward": "squared"}),
    Task("image from a third of its pixels", "pixels", "mse", ("attention", "neural_process", "maml"), x=264),
    Task("text, bits per character", "text", "bits per character", GATED, form=".3f", own="intention_gated"),
)
TABLES = {  # marker in docs/sequences.md -> experiment, how the title of its table begins
    "bits": ("text", "The same as numbers"),
    "parts": ("text", "What the parts are worth"),
    "recalled": ("recall", "Mixed lengths as numbers"),
    "regression": ("in_context", "The same as numbers"),
    "drift": ("in_context", "Drift as numbers"),
}


def rows() -> list[Row]:
    return [row for folder in FOLDERS for row in results.read_folder(folder)]


def sections(rows: list[Row]) -> list[Section]:
    done = {row.experiment for row in rows}
    found = [section(name, results.select(rows, experiment=name)) for name in experiments.NAMES if name in done]
    problems = [problem for one in found for problem in one.problems]
    if problems:
        raise SystemExit("\n".join(problems))
    return found


def claims(found: list[Section]) -> str:
    """Every claim of the paper, then every line of our own."""
    parts = []
    for title, ours in GROUPS:
        some = [(one.title, claim) for one in found for claim in one.claims if claim.ours == ours]
        body = [
            [_cell(name), _cell(claim.text), _cell(claim.where), _cell(claim.measured), f"**{claim.verdict}**"]
            for name, claim in some
        ]
        table = _left(markdown(["experiment", "claim", "where", "measured", "verdict"], body))
        parts.append(f"### {title}\n\n{counts([claim for _, claim in some])}\n\n{table}")
    return "\n\n".join(parts)


def counts(claims: list[Claim]) -> str:
    """How many claims have which verdict."""
    said = ", ".join(f"{count} {verdict}" for verdict, count in tally(claims).items())
    return f"Of {len(claims)}: {said}; {sum(claim.final for claim in claims)} are final (no case of them is open)."


def short(found: list[Section]) -> str:
    """docs/results.md: one claim of each experiment, those of the paper apart from our own."""
    parts = []
    for title, ours in GROUPS:
        body = []
        for one in found:
            claim = shown_claim(one)
            if claim is not None and claim.ours == ours:
                body.append([_cell(one.title), _cell(claim.text), _cell(claim.measured), f"**{claim.verdict}**"])
        every = [claim for one in found for claim in one.claims if claim.ours == ours]
        table = _left(markdown(["experiment", "claim", "measured", "verdict"], body))
        parts.append(f"**{title}.** {counts(every)}\n\n{table}")
    return "\n\n".join(parts)


def good_at(rows: list[Row]) -> str:
    """README: where Intention is ahead and where it is not; the baseline with the smallest mean, trained as it was."""
    body = []
    for task in TASKS:
        own = select(rows, experiment=task.experiment, metric=task.metric, **({} if task.x is None else {"x": task.x}))
        own = [row for row in own if all((row.data or {}).get(name) == value for name, value in task.data.items())]
        means = {model: estimate_log(list(seeds.values())).mean for model, seeds in by_model(own).items()}
        other = min(task.baselines, key=lambda model: means[model])
        cells = [f"{label(other)} {means[other]:{task.form}}", f"{means[task.own]:{task.form}}"]
        factor = means[other] / means[task.own]
        shown = f"{factor:.0f}×" if factor >= 10 else f"{factor:.2g}×"
        body.append([f"[{task.name}](docs/gallery.md#{_anchor(find(task.experiment).TITLE)})", *cells, shown])
    return markdown(["task (error)", "best trained baseline", "Intention", "factor"], body)


def gallery(found: list[Section]) -> str:
    """docs/gallery.md: every figure of every experiment, and the command that makes it."""
    parts = []
    for one in found:
        parts.append(f"## {one.title}\n\n{_cell(one.finding)}\n\n{one.place}. `intention run {one.name}`\n")
        drawn = [figure for figure in one.figures if figure.svg]
        parts += [
            f"![{_cell(each.title)}](lab/{_file(one, n)})\n\n*{_cell(each.title)}.* {each.caption}\n"
            for n, each in enumerate(drawn)
        ]
    return "\n".join(parts).strip()


def _anchor(title: str) -> str:
    """As code hosts and MyST make it from a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _file(one: Section, number: int) -> str:
    return f"{one.name}{f'-{number + 1}' if number else ''}.svg"


def forgetting(rows: list[Row]) -> str:
    """docs/sequences.md: errors of float32 answers by ridge and decay, and the ranges of others over the decays."""
    own, *others = (errors(rows, model) for model in ("intention", "solve", "conjugate_gradients"))
    decays = sorted({decay for _, decay in own}, reverse=True)
    body = []
    for alpha in sorted({alpha for alpha, _ in own}, reverse=True):
        cells = [f"{own[alpha, decay]:.0e}" for decay in decays]
        for each in others:
            found = [error for (ridge, _), error in each.items() if ridge == alpha]
            cells.append(f"{min(found):.0e} to {max(found):.0e}")
        body.append([f"{alpha:g}", *cells])
    head = ["λ", *(f"γ = {decay:g}" for decay in decays), "float32 solve per token", "30 steps of conjugate gradients"]
    return markdown(head, body)


def tables(found: list[Section]) -> dict[str, str]:
    """docs/sequences.md: what was trained, by marker."""
    made = {}
    for marker, (name, title) in TABLES.items():
        figure = _figure(found, name, title)
        assert figure.table is not None
        head, *body = ([_cell(text) for text in line] for line in figure.table)
        made[marker] = markdown(head, body)
    return made


def _figure(found: list[Section], name: str, title: str) -> Drawn:
    """The first drawing, or the first one whose title begins like this."""
    figures = next(one.figures for one in found if one.name == name)
    return next(one for one in figures if one.title.startswith(title) and (title or one.svg))


def _left(table: str) -> str:
    return table.replace("---:", "---")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> None:
    found = sections(rows())
    fill(ROOT / "docs" / "lab.md", "claims", claims(found))
    fill(ROOT / "docs" / "results.md", "results", short(found))
    fill(ROOT / "docs" / "gallery.md", "gallery", gallery(found))
    fill(ROOT / "README.md", "good at", good_at(rows()))
    fill(ROOT / "docs" / "sequences.md", "errors", forgetting(rows()))
    for marker, table in tables(found).items():
        fill(ROOT / "docs" / "sequences.md", marker, table)
    folder = ROOT / "docs" / "lab"
    folder.mkdir(exist_ok=True)
    for one in found:
        for number, svg in enumerate([figure.svg for figure in one.figures if figure.svg]):
            (folder / _file(one, number)).write_bytes(standalone(svg))


if __name__ == "__main__":
    main()
