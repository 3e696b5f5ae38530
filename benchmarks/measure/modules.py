"""A layer with our mixers against nn.TransformerEncoderLayer.

    python benchmarks/measure/modules.py

Inference is eval without gradients, where torch takes its fused path; training is forward and backward with dropout.
All layers of a row are timed in turn within one run, in blocks of calls, one thread, and the medians are compared.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ops
from context import medians
from intention.nn import InformerLayer

SHAPES = [(16, 10, 256, 4), (16, 50, 256, 4), (8, 128, 256, 4), (2, 1024, 512, 8)]
MIXERS = ("attention", "sigma_intention", "intention")


def layers(width: int, heads: int) -> dict[str, nn.Module]:
    made: dict[str, nn.Module] = {"torch": nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True)}
    return made | {m: InformerLayer(width, heads, 4 * width, batch_first=True, mixer=m) for m in MIXERS}


def row(shape: tuple[int, int, int, int], training: bool, seconds: float) -> dict[str, Any]:
    batch, n, width, heads = shape
    torch.manual_seed(0)
    x = torch.randn(batch, n, width)

    def call(layer: nn.Module) -> Callable[[], Any]:
        layer.train(training)

        def infer() -> None:
            with torch.no_grad():
                layer(x)

        return (lambda: layer(x).sum().backward()) if training else infer

    times = medians({name: call(layer) for name, layer in layers(width, heads).items()}, seconds)
    return {"shape": shape, "pass": "training" if training else "inference", "seconds": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each row")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for shape in SHAPES:
        for training in (False, True):
            rows.append(row(shape, training, args.seconds))
            times = rows[-1]["seconds"]
            print(shape, rows[-1]["pass"], {k: round(v / times["torch"], 2) for k, v in times.items()}, flush=True)
    result = {**ops.about(), "layers": rows}
    (Path(__file__).parents[1] / "results" / "modules.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
