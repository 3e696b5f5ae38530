"""Swap the attention of a ViT and a BERT. With text and pictures: docs/tutorials/swap.md"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, ViTConfig, ViTForImageClassification

from intention.integrations.transformers import register

register(alpha=1.0, scale="auto")
MIXERS = ("sdpa", "sigma_intention", "intention")


# A ViT that tells where a bright bar lies
def bars(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Images with one bright row of eight, in noise; the label is the row."""
    label = torch.randint(8, (count,), generator=generator)
    image = torch.randn(count, 1, 16, 16, generator=generator)
    image += 1.2 * (torch.arange(16) // 2 == label[:, None])[:, None, :, None]
    return image, label


def train(model: nn.Module, sample: Callable[[nn.Module, torch.Generator], torch.Tensor], steps: int) -> float:
    """The mean loss of the last ten steps; each model sees the same batches."""
    generator = torch.Generator().manual_seed(0)
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    losses = []
    for _ in range(steps):
        loss = sample(model, generator)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


size: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
torch.manual_seed(0)
config = ViTConfig(image_size=16, patch_size=4, num_channels=1, **size)
config.num_labels = 8
vit = ViTForImageClassification(config)


def classify(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    image, label = bars(32, generator)
    return nn.functional.cross_entropy(model(image).logits, label)


for mixer in MIXERS:
    model = copy.deepcopy(vit)
    model.set_attn_implementation(mixer)  # the line
    print(f"ViT with {mixer:16s} loss {train(model, classify, 60):.2f} (chance 2.08)")


# A BERT that fills a gap
torch.manual_seed(0)
bert = BertForMaskedLM(BertConfig(vocab_size=20, max_position_embeddings=16, **size))


def fill(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    tokens = torch.randint(1, 20, (32, 3), generator=generator).repeat(1, 4)
    hidden = tokens.clone()
    hidden[:, 7] = 0
    return nn.functional.cross_entropy(model(hidden).logits[:, 7], tokens[:, 7])


for mixer in MIXERS:
    model = copy.deepcopy(bert)
    model.set_attn_implementation(mixer)
    print(f"BERT with {mixer:16s} loss {train(model, fill, 120):.2f} (chance 2.94)")
