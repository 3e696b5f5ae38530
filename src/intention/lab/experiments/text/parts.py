"""The parts of a gated layer, changed one at a time: what each is worth on text."""

from __future__ import annotations

from typing import Any

__all__ = ["ABLATED", "ABLATION", "AS_IT_IS", "PARTS"]

ABLATED = "intention_gated"
ABLATION = "bits with a part changed"
AS_IT_IS = "as it is"
PARTS: dict[str, dict[str, Any]] = {  # name -> options of `nn.GatedIntention`
    AS_IT_IS: {},
    "no convolution": {"taps": 0},
    "no convolution of v": {"convolved": "qk"},
    "no SiLU": {"silu": False},
    "no unit q and k": {"unit": False},
    "no input gate": {"beta": False},
    "no forgetting": {"gamma": False},
    "no output gate": {"gate": False},
    "output norm": {"output_norm": True},
    "alpha from 1": {"alpha": 1.0},
    "alpha from 0.01": {"alpha": 0.01},
    "alpha per head": {"alpha_per": "head"},
}
