"""What the rows of `fewshot_latent` say to the paper's claims."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from intention.lab.core.results import Row, select
from intention.lab.experiments.base import Claim
from intention.lab.experiments.compare import UNTESTED, share, together
from intention.lab.experiments.fewshot.config import ACCURACY
from intention.lab.experiments.fewshot.judge import ABOVE, Part, above, claim, each_seed, judged_on, same_seeds

__all__ = ["claims", "finding", "latents", "of_latent"]

SMALL = (16, 32)  # sizes of e_H
PAIR = ("intention_kernel", "intention")


def claims(rows: Sequence[Row]) -> list[Claim]:
    text = "The kernelised version reaches better performance in a smaller latent size regime"
    where = "section 5.2, Figure 14"
    return [claim(rows, f"{text}, at {SMALL[0]} and {SMALL[1]} {ABOVE}", where, _small_latents)]


def of_latent(rows: Iterable[Row], latent: int) -> list[Row]:
    return [row for row in rows if (row.data or {}).get("latent") == latent]


def latents(rows: Iterable[Row]) -> list[int]:
    return sorted(
        {int(row.data["latent"]) for row in select(rows, metric=ACCURACY) if row.data and "latent" in row.data}
    )


def _small_latents(some: list[Row]) -> Part:
    texts, verdicts = [], dict.fromkeys(SMALL, UNTESTED)
    for latent in sorted({*latents(some), *SMALL}):
        here = of_latent(some, latent)
        kernel, linear = (judged_on(here, model) for model in PAIR)
        verdict = above(*same_seeds(kernel, linear, "intention"))
        if latent in SMALL:
            verdicts[latent] = verdict
        if kernel and linear:
            both = f"{each_seed('intention_kernel', kernel)}, {each_seed('intention', linear)}"
            texts.append(f"at {latent}: {both} ({verdict})")
    return "; ".join(texts), together(list(verdicts.values()))


def finding(rows: Sequence[Row]) -> str:
    parts = []
    for latent in sorted({*latents(rows)[:1], *latents(rows)[-1:]}):
        here = of_latent(rows, latent)
        kernel, linear = (share(row.value for row in judged_on(here, name).values()) for name in PAIR)
        parts += [f"with {latent} numbers {kernel} are right, without {linear}"] if kernel and linear else []
    text = "Answers on new classes by the size of the latent, with a kernel and without"
    return f"{text}: {'; '.join(parts)}." if parts else ""
