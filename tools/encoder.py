"""Trains the encoder that comes with the package: `make encoder`; and those that few-shot heads share.

An encoder learns to tell the 80 training classes of miniImageNet (28 x 28) apart by cross-entropy: Conv4 with 2 x 2 x
64 features, or ResNet-12. It is judged on the 20 classes that it has not seen. A run that was stopped goes on from its
last checkpoint, and one that is finished is judged and written again.

python tools/encoder.py --seed 1 --out encoders/conv4-1.safetensors
python tools/encoder.py --kind resnet12 --epochs 70 --out encoders/resnet12-0.safetensors
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from intention.fewshot.encoders import KINDS, build, normalise
from intention.lab import data
from intention.lab.core.device import find as find_device
from intention.lab.core.place import Place
from intention.lab.core.train import Plan, train

WEIGHTS = Path(__file__).resolve().parent.parent / "src/intention/fewshot/weights/conv4.safetensors"
WIDTHS = {"conv4": 64, "resnet12": 32}
BATCH, SHIFT, SMOOTHING = 128, 3, 0.1
EPISODES, ALPHA = 2000, 1.0  # of the judgement; features are centred and of length 1


class Batch(NamedTuple):
    x: Tensor  # (n, h, w, c) of bytes
    y: Tensor  # (n,)


class Classifier(nn.Module):
    """The encoder, and a linear layer that is thrown away afterwards."""

    def __init__(self, classes: int, kind: str = "conv4", width: int = 64, size: int = 28) -> None:
        super().__init__()
        self.encoder = build(kind, size, 3, width, "bfloat16", round_up=True)
        self.classify = nn.Linear(self.encoder.d, classes)

    def forward(self, batch: Batch) -> Tensor:
        return nnf.cross_entropy(self.classify(self.encoder(normalise(batch.x))), batch.y, label_smoothing=SMOOTHING)


def draw(x: Tensor, y: Tensor, count: int, generator: torch.Generator) -> Batch:
    """Images at random, half of them mirrored, each shifted by up to `SHIFT` pixels; what lies outside is reflected."""
    chosen = torch.randint(len(x), (count,), generator=generator)
    size = x.shape[1]
    shifts = torch.randint(-SHIFT, SHIFT + 1, (2, count, 1), generator=generator)
    rows, columns = _reflected(torch.arange(size) + shifts, size)
    mirrored = torch.rand(count, 1, generator=generator) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    return Batch(x[chosen[:, None, None], rows[:, :, None], columns[:, None, :]], y[chosen])


def _reflected(at: Tensor, size: int) -> Tensor:
    """... 2 1 0 1 2 ..., size - 2, size - 1, size - 2, ..."""
    return (size - 1) - ((size - 1) - at.abs()).abs()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=36)
    parser.add_argument("--folder", type=Path, default=Path("build/encoder"), help="of checkpoint and log")
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    parser.add_argument("--kind", choices=KINDS, default="conv4")
    parser.add_argument("--width", type=int, help="channels of its first block: 64 of conv4, 32 of resnet12")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="auto, cpu, cuda, cuda:N or mps")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    known = data.load("miniimagenet").parts
    x, y = known["train"].x, known["train"].y
    torch.manual_seed(flags.seed)
    model = Classifier(len(known["train"].classes), flags.kind, flags.width or WIDTHS[flags.kind])
    steps = max(1, flags.epochs * len(x) // BATCH)
    plan = Plan(steps, BATCH, 0.1, warmup=200, clip=0.0, optimiser="nesterov", weight_decay=5e-4)
    flags.folder.mkdir(parents=True, exist_ok=True)
    log = flags.folder / "log.jsonl"
    place = Place(flags.folder, partial(tell, log, time.monotonic()), device=find_device(flags.device))
    train(model, partial(draw, x, y), lambda model, batch: model(batch), plan, seed=flags.seed, place=place)
    judge_and_write(model.cpu(), flags.epochs, flags.seed, plan, log, flags.out)


def tell(log: Path, start: float, step: int, steps: int, values: Mapping[str, float]) -> None:
    if step % 100 == 0 or step == steps:
        _note(
            log, {"step": step, "steps": steps, "loss": round(values["loss"], 4), "seconds": time.monotonic() - start}
        )


def _note(log: Path, line: Mapping[str, object]) -> None:
    text = json.dumps(line)
    print(text, flush=True)
    with log.open("a", encoding="utf-8") as file:
        file.write(text + "\n")


def judge_and_write(model: Classifier, epochs: int, seed: int, plan: Plan, log: Path, out: Path) -> None:
    """The accuracy on unseen classes, of the weights as they are shipped: in float16, with float32 arithmetic."""
    from intention.fewshot import LsSvm, evaluate, load_encoder, save_encoder

    about = {
        "data": "miniImageNet, 28 x 28, the 80 training classes",
        "classes": data.load("miniimagenet").parts["train"].classes,
        "images": "bytes (x - 114.75) / 68.85, channels first",
        "recipe": f"cross-entropy with label smoothing {SMOOTHING}, crops shifted by up to {SHIFT} pixels (reflected), "
        f"flips; SGD with Nesterov momentum 0.9, rate {plan.learning_rate} to 0 by cosine, {plan.warmup} steps of "
        f"warm-up, weight decay {plan.weight_decay}, batches of {BATCH}, bfloat16",
        "epochs": epochs,
        "seed": seed,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    save_encoder(out, model.encoder, about, half=True)
    unseen = [data.load("miniimagenet").parts[part] for part in ("val", "test")]
    images = torch.cat([part.x for part in unseen])
    labels = torch.cat([unseen[0].y, unseen[1].y + len(unseen[0].classes)])
    encoder = load_encoder(out)
    with torch.inference_mode():
        features = torch.cat([encoder(normalise(some)) for some in images.split(500)])
    found = evaluate(LsSvm(alpha=ALPHA), features, labels, way=5, shot=5, query=15, episodes=EPISODES, seed=0)
    about |= {
        "test": f"5-way 5-shot on the 20 unseen classes, {EPISODES} episodes of 15 queries a class; LS-SVM with an "
        f"intercept, alpha {ALPHA}, on centred features of length 1",
        "accuracy": round(found.accuracy, 4),
        "interval": round(found.interval, 4),
    }
    save_encoder(out, model.encoder, about, half=True)
    _note(log, about | {"bytes": out.stat().st_size})


if __name__ == "__main__":
    main()
