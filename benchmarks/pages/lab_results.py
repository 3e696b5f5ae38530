"""README.md, docs/lab.md, docs/sequences.md and docs/lab/*.svg from rows: results/standard and, of real data, real.

python benchmarks/pages/lab_results.py
"""

from __future__ import annotations

from pathlib import Path

from intention.lab import experiments
from intention.lab.core import results
from intention.lab.core.results import Row
from intention.lab.experiments.base import Claim, tally
from intention.lab.experiments.stability.claims import errors
from intention.lab.report.figures import standalone
from intention.lab.report.sections import Section, section
from table import fill, markdown

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "results" / "standard", ROOT / "results" / "real")
SHORT = {"computations_2d": 1, "normalisation": 1, "policy": 1}  # experiment -> which of its claims, if not the first
GROUPS = (("Claims of the paper", False), ("Lines of our own", True))
FIGURES = ("sine", "policy", "kabsch", "scaling", "pixels", "in_context")  # the first figure of each


def rows() -> list[Row]:
    return [row for folder in FOLDERS for row in results.read_folder(folder)]


def sections(rows: list[Row]) -> list[Section]:
    found = [section(name, results.select(rows, experiment=name)) for name in experiments.NAMES]
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
    """README: one claim of each experiment, those of the paper apart from our own."""
    parts = []
    for title, ours in GROUPS:
        body = []
        for one in found:
            claim = one.claims[SHORT.get(one.name, 0)]
            if claim.ours == ours:
                body.append([_cell(one.title), _cell(claim.text), _cell(claim.measured), f"**{claim.verdict}**"])
        every = [claim for one in found for claim in one.claims if claim.ours == ours]
        table = _left(markdown(["experiment", "claim", "measured", "verdict"], body))
        parts.append(f"**{title}.** {counts(every)}\n\n{table}")
    return "\n\n".join(parts)


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


def _left(table: str) -> str:
    return table.replace("---:", "---")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> None:
    found = sections(rows())
    fill(ROOT / "docs" / "lab.md", "claims", claims(found))
    fill(ROOT / "README.md", "results", short(found))
    fill(ROOT / "docs" / "sequences.md", "errors", forgetting(rows()))
    folder = ROOT / "docs" / "lab"
    folder.mkdir(exist_ok=True)
    for one in found:
        if one.name in FIGURES:
            svg = next(figure.svg for figure in one.figures if figure.svg)
            (folder / f"{one.name}.svg").write_bytes(standalone(svg))


if __name__ == "__main__":
    main()
