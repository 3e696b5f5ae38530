"""Few-shot on your photos. With text and pictures: docs/tutorials/fewshot.md"""

import random

import matplotlib.pyplot as plt
import numpy as np
import torch
from PIL import Image, ImageDraw

from intention.fewshot import FewShotClassifier

CLASSES = ("disc", "ring", "square", "cross", "triangle")


# Images
def draw(name: str, generator: random.Random) -> Image.Image:
    """A shape of random place, size and colour on a random ground."""
    ground, ink = (tuple(generator.randint(*levels) for _ in range(3)) for levels in ((150, 255), (0, 110)))
    image = Image.new("RGB", (64, 64), ground)
    pen, r = ImageDraw.Draw(image), generator.randint(14, 22)
    x, y = (generator.randint(26, 38) for _ in range(2))
    box = (x - r, y - r, x + r, y + r)
    if name == "disc":
        pen.ellipse(box, fill=ink)
    elif name == "ring":
        pen.ellipse(box, outline=ink, width=6)
    elif name == "square":
        pen.rectangle(box, fill=ink)
    elif name == "cross":
        pen.line((x - r, y, x + r, y), fill=ink, width=7)
        pen.line((x, y - r, x, y + r), fill=ink, width=7)
    else:
        pen.polygon(((x, y - r), (x - r, y + r), (x + r, y + r)), fill=ink)
    return image


def images(count: int, seed: int) -> tuple[torch.Tensor, list[str]]:
    """Bytes (n, 64, 64, 3) and a label for each."""
    generator = random.Random(seed)
    labels = [name for name in CLASSES for _ in range(count)]
    return torch.from_numpy(np.stack([np.asarray(draw(name, generator)) for name in labels])), labels


support, labels = images(5, seed=0)
figure, axes = plt.subplots(2, 5, figsize=(7, 3))
for axis, i in zip(axes.T.flat, [5 * c + n for c in range(5) for n in range(2)], strict=True):
    axis.imshow(support[i])
    axis.set_title(labels[i], fontsize=9)
    axis.axis("off")
plt.show()

# Fit and ask
model = FewShotClassifier("conv4").fit(support, labels)
query, truth = images(40, seed=1)
right = [a == b for a, b in zip(model.predict(query), truth, strict=True)]
print(f"{len(truth)} new images, {100 * sum(right) / len(right):.0f}% right; chance is 20%")
for name in CLASSES:
    own = [good for good, label in zip(right, truth, strict=True) if label == name]
    print(f"    {name:9s} {sum(own)} of {len(own)}")


# Which example is wrong?
wrong = [*labels]
wrong[3] = "cross"  # a disc
model = FewShotClassifier("conv4").fit(support, wrong)
for suspect in model.suspects(3):
    print(suspect)


# Examples and classes that come later
more, names = images(20, seed=2)
model = FewShotClassifier("conv4").fit(support, labels).add(more, names)
right = [a == b for a, b in zip(model.predict(query), truth, strict=True)]
print(f"with 20 examples more of each class {100 * sum(right) / len(right):.0f}% right")
