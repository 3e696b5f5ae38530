"""What the rows of `fewshot_resnet` say to the paper's claims."""

from __future__ import annotations

from collections.abc import Sequence

from intention.lab.core.results import Row
from intention.lab.experiments.base import Claim
from intention.lab.experiments.fewshot.judge import ABOVE, SAME, against, claim, same


def claims(rows: Sequence[Row]) -> list[Claim]:
    where = "section 5.2, Table 2"
    text = "Framing Intention as QDA reduces accuracy compared to LS-SVM"
    return [
        claim(
            rows,
            f"{text}, as printed: one pooled covariance, which is LDA {ABOVE}",
            where,
            against("intention", ("intention_lda",)),
        ),
        claim(
            rows,
            f"{text}, with one covariance per class {ABOVE}",
            where,
            against("intention", ("intention_qda",)),
        ),
        claim(
            rows,
            f"The kernelised version matches the unkernelised one {SAME}",
            where,
            against("intention_kernel", ("intention",), same),
        ),
    ]
