"""README.md, docs/lab.md, docs/sequences.md and docs/lab/*.svg from rows: results/standard and, of real data, real.

python benchmarks/pages/lab_results.py
"""

from __future__ import annotations

from pathlib import Path

from intention.lab import experiments
from intention.lab.core import results
from intention.lab.core.results import Row
from intention.lab.experiments.stability.claims import errors
from intention.lab.report.figures import standalone
from intention.lab.report.sections import Drawn, Section, section
from table import fill, markdown

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "results" / "standard", ROOT / "results" / "real")
# experiment -> which of its claims, if not the first
SHORT = {"computations_2d": 1, "normalisation": 1, "policy": 1, "recall": 6, "text": 6}
FIGURES = {  # experiment -> how the title of its figure begins: "" is the first one
    **dict.fromkeys(("sine", "policy", "kabsch", "scaling", "pixels", "in_context"), ""),
    "text": "Plain and gated layers",
}
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
    found = [section(name, results.select(rows, experiment=name)) for name in experiments.NAMES]
    problems = [problem for one in found for problem in one.problems]
    if problems:
        raise SystemExit("\n".join(problems))
    return found


def claims(found: list[Section]) -> str:
    """Every claim."""
    body = [
        [_cell(one.title), _cell(claim.text), _cell(claim.where), _cell(claim.measured), f"**{claim.verdict}**"]
        for one in found
        for claim in one.claims
    ]
    return _left(markdown(["experiment", "claim", "where", "measured", "verdict"], body))


def short(found: list[Section]) -> str:
    """README: one claim of each experiment."""
    body = []
    for one in found:
        claim = one.claims[SHORT.get(one.name, 0)]
        body.append([_cell(one.title), _cell(claim.text), _cell(claim.measured), f"**{claim.verdict}**"])
    return _left(markdown(["experiment", "claim", "measured", "verdict"], body))


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
    fill(ROOT / "README.md", "results", short(found))
    fill(ROOT / "docs" / "sequences.md", "errors", forgetting(rows()))
    for marker, table in tables(found).items():
        fill(ROOT / "docs" / "sequences.md", marker, table)
    folder = ROOT / "docs" / "lab"
    folder.mkdir(exist_ok=True)
    for name, title in FIGURES.items():
        svg = _figure(found, name, title).svg
        assert svg is not None
        (folder / f"{name}.svg").write_bytes(standalone(svg))


if __name__ == "__main__":
    main()
