"""The drawings of `policy`, and the rows they read."""
from intention.lab.results import Row, select
from collections.abc import Sequence
REWARDS = ("squared", "gaussian")

def final(rows: Sequence[Row], reward: str) -> list[Row]:
    return [row for row in select(rows, metric="mse") if (row.data or {}).get("reward") == reward]

def history(rows: Sequence[Row], reward: str) -> list[Row]:
    return [row for row in select(rows, metric="mse during training") if (row.data or {}).get("reward") == reward]
