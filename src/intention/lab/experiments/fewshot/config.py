"""The config of the few-shot experiments: encoders, heads, episodes, budget."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from intention.lab.core.results import Json
from intention.lab.core.train import Plan
from intention.lab.experiments.base import added, chooses, require

__all__ = [
    "ACCURACY",
    "BEFORE",
    "BY_DISTANCE",
    "ERROR",
    "FROM_SCRATCH",
    "HALVES",
    "MODELS",
    "SEEN",
    "SHARED_READING",
    "SHORT",
    "UNSEEN",
    "VALIDATION",
    "Classifier",
    "Config",
    "Longer",
    "MamlNet",
    "Tuned",
    "TunedMaml",
]

ACCURACY, BEFORE, VALIDATION = "accuracy", "accuracy before training", "validation accuracy"
UNSEEN = "accuracy on all unseen classes"  # validation and test classes together
SEEN = "accuracy on training classes"
HALVES = "accuracy on random halves of the unseen classes"
ERROR = "validation error"  # by which rates are searched
BY_DISTANCE = (
    "intention",
    "intention_longer",
    "intention_ce",
    "intention_lda",
    "intention_qda",
    "intention_kernel",
)
SHARED_READING = """
- 5 classes, 5 images of each as context and 15 as queries. Encoders, e_H, heads, optimiser (SGD, momentum 0.9, additive
  weight decay 5·10⁻⁴) and schedule (rate · 0.8^(t/T − 1) from step T on) are the paper's; T is 10,000 there and a tenth
  of all steps here, since "to convergence" gives no length.
- The weights are those of the best evaluation on the validation classes. Test episodes are the same for all models of a
  seed. Evaluation uses the running statistics of batch norm, except in MAML, which has those of the batch.
- miniImageNet at 28×28: 80 classes for training; the 20 others, sorted by name, are 10 for validation and 10 for the
  test. Names are in the order of WordNet: the validation classes are animals but one, the test classes are things, so
  they are harder to tell apart than classes drawn at random. The accuracy on all 20 is measured beside it (the step was
  chosen on 10 of them).
- α is learnable and starts at 10; the weights of e_H keep lengths at the start, whatever its size.
- e_H is linear. Where it is wider than its input (8192 from 64 features), it is computed up to a rotation, with the
  same answers and gradients (`lab/experiments/fewshot/model.Folded`).
- `standard` has convolutions in bfloat16 (the solve is not): no difference from float32 beyond noise was seen in 200
  steps.
"""
MODELS = (
    "intention",
    "attention",
    "neural_process",
    "protonet",
    "maml_first",
    "maml",
    "intention_longer",
    "pretrained",
    "intention_ce",
    "intention_kernel",
    "intention_lda",
    "intention_qda",
    "sigma_intention",
    "intention_tuned",
    "sigma_intention_tuned",
    "attention_tuned",
    "neural_process_tuned",
    "protonet_tuned",
    "maml_tuned",
    "intention_kernel_tuned",
    "intention_lda_tuned",
    "intention_qda_tuned",
)
FROM_SCRATCH = tuple(model for model in MODELS if not model.endswith("_tuned"))


@dataclass(frozen=True)
class Classifier:
    """A head: the size of e_H before it (0: none), hidden layers after it, and how fast all of it learns."""

    latent: int
    learning_rate: float
    decode: tuple[int, ...] = ()
    heads: int = 1

    def __post_init__(self) -> None:
        require(self.latent >= 0, f"latent must be at least 0 (no e_H), got {self.latent}")
        require(all(size > 0 for size in self.decode), f"sizes must be positive, got {self.decode}")
        require(self.heads >= 1, f"heads must be at least 1, got {self.heads}")


@dataclass(frozen=True)
class Longer(Classifier):
    """A head for which more is done: `times` the steps, to a rate of 0, and what else follows."""

    times: int = 3
    tasks: int = 16  # of a step, from the images of its episodes; 0: the episodes themselves
    round_up: bool = True  # Conv4's pooling keeps odd borders: 256 features of 28x28 images instead of 64
    shift: int = 2  # images are mirrored and shifted by up to so many pixels; -1: neither

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, smallest in (("times", 1), ("tasks", 0), ("shift", -1)):
            require(getattr(self, name) >= smallest, f"{name} must be at least {smallest}, got {getattr(self, name)}")


@dataclass(frozen=True)
class Tuned(Classifier):
    """A head on the encoder that all heads share, which has learnt to tell the training classes apart; then both learn
    from episodes, to a rate of 0, and the last weights are kept. The same for all heads but its sizes and rate.
    """

    start: str = "conv4-{seed}"  # a name in encoders/ or of the package, or a path; {seed} is that of the run
    steps: int = 2000
    tasks: int = 16  # of a step, from the images of its episodes; 0: the episodes themselves
    shift: int = 3  # images are mirrored and shifted by up to so many pixels; -1: neither
    frozen: bool = False  # images are encoded once, features are centred and of one length; e_H and the head learn
    alpha: float = added(0.0)  # at the start; 0: that of all
    mirrored: bool = added(False)  # when asked, an image is the mean of its features and those of its mirror image

    def __post_init__(self) -> None:
        super().__post_init__()
        check_start(self.start)
        require(0 <= self.alpha < math.inf, f"alpha must be >= 0 (0: that of all) and finite, got {self.alpha}")
        for name, smallest in (("steps", 1), ("tasks", 0), ("shift", -1)):
            require(getattr(self, name) >= smallest, f"{name} must be at least {smallest}, got {getattr(self, name)}")


def check_start(start: str) -> None:
    require(bool(start), "start must name an encoder, got nothing; tools/encoder.py trains one")
    known = start.replace("{seed}", "")
    require("{" not in known and "}" not in known, f"start may hold {{seed}} and no other braces, got {start!r}")


@dataclass(frozen=True)
class MamlNet:
    """The gradient steps that encoder and linear layer take on the examples of a task."""

    learning_rate: float
    inner_steps: int = 5
    inner_rate: float = 0.01
    validation_episodes: int = 100  # fewer than others have: each takes gradient steps

    def __post_init__(self) -> None:
        require(self.validation_episodes >= 1, f"validation_episodes must be >= 1, got {self.validation_episodes}")
        require(self.inner_steps >= 0, f"inner_steps must be at least 0, got {self.inner_steps}")
        require(0 <= self.inner_rate < math.inf, f"inner_rate must be >= 0 and finite, got {self.inner_rate}")


@dataclass(frozen=True)
class TunedMaml(MamlNet):
    """MAML that begins with the shared encoder."""

    start: str = "conv4-{seed}"
    steps: int = 2000
    mirrored: bool = added(False)  # when asked, scores are the mean of those for a task and for its mirror images

    def __post_init__(self) -> None:
        super().__post_init__()
        check_start(self.start)
        require(self.steps >= 1, f"steps must be at least 1, got {self.steps}")


@dataclass(frozen=True)
class Config:
    """Few-shot classification."""

    data: str = chooses("auto")  # a name, a folder of images, an npz; auto: miniImageNet if it is there, or glyphs
    models: tuple[str, ...] = chooses(FROM_SCRATCH)
    seeds: int = chooses(2)
    maml_seeds: int = chooses(1)  # of second-order MAML, which takes several times as long
    encoder: Literal["conv4", "resnet12"] = "conv4"
    width: int = 64  # channels of Conv4; of ResNet-12's first block, the others have 2, 4 and 8 times as many
    dropblock: float = 0.0
    precision: Literal["float32", "bfloat16"] = "float32"  # of the convolutions
    way: int = 5
    shot: int = 5
    queries: int = 15  # of each class
    steps: int = 100_000
    batch: int = 1  # episodes of a step
    decay_period: int = 10_000
    weight_decay: float = 5e-4
    clip: float = 0.0
    alpha: float = 10.0  # at the start
    evaluation_episodes: int = 1000
    validation_episodes: int = 500
    validations: int = 20  # during training
    intention: Classifier = Classifier(8192, 0.1)
    intention_longer: Longer = Longer(8192, 0.1)
    intention_ce: Classifier = Classifier(8192, 0.1)
    intention_lda: Classifier = Classifier(8192, 0.1)
    intention_qda: Classifier = Classifier(8192, 0.1)
    intention_kernel: Classifier = Classifier(32, 0.1)
    sigma_intention: Classifier = Classifier(512, 0.1)
    attention: Classifier = Classifier(512, 0.05, (512, 512, 512), heads=5)
    neural_process: Classifier = Classifier(2048, 0.1, (1024,))
    protonet: Classifier = Classifier(0, 0.1)
    pretrained: Classifier = Classifier(0, 0.1)
    maml_first: MamlNet = MamlNet(0.1)
    maml: MamlNet = MamlNet(0.1)
    intention_tuned: Tuned = Tuned(8192, 1e-3, alpha=300.0)
    sigma_intention_tuned: Tuned = Tuned(512, 1e-3, (512, 512, 512), heads=5)
    attention_tuned: Tuned = Tuned(512, 1e-3, (512, 512, 512), heads=5)
    neural_process_tuned: Tuned = Tuned(2048, 1e-3, (1024,))
    protonet_tuned: Tuned = Tuned(0, 1e-3)
    maml_tuned: TunedMaml = TunedMaml(1e-3, inner_steps=3, inner_rate=0.05)
    intention_kernel_tuned: Tuned = Tuned(32, 1e-3)
    intention_lda_tuned: Tuned = Tuned(8192, 1e-3)
    intention_qda_tuned: Tuned = Tuned(8192, 1e-3)

    def __post_init__(self) -> None:
        unknown = set(self.models) - set(MODELS)
        require(not unknown, f"there is no model {', '.join(sorted(unknown))} here; there are {', '.join(MODELS)}")
        least = {"seeds": 1, "maml_seeds": 0, "width": 1, "way": 2, "shot": 1, "queries": 1, "validations": 1}
        for name, smallest in (least | {"evaluation_episodes": 2, "validation_episodes": 1}).items():
            require(getattr(self, name) >= smallest, f"{name} must be at least {smallest}, got {getattr(self, name)}")
        require(0 < self.alpha < math.inf, f"alpha must be > 0 and finite, got {self.alpha}")
        require(0 <= self.dropblock < 1, f"dropblock must be 0 to 1, got {self.dropblock}")
        for model in MODELS:
            self.plan(model)

    def plan(self, model: str) -> Plan:
        net = getattr(self, model)
        if isinstance(net, Tuned | TunedMaml):
            every = max(1, net.steps // self.validations)
            return Plan(
                net.steps, self.batch, net.learning_rate, warmup=net.steps // 20, clip=1.0, evaluate_every=every
            )
        longer = model == "intention_longer"
        times = self.intention_longer.times if longer else 1
        return Plan(
            self.steps * times,
            self.batch,
            getattr(self, model).learning_rate,
            "cosine" if longer else "decay",
            decay_period=self.decay_period * times,
            clip=self.clip,
            evaluate_every=max(1, self.steps * times // self.validations),
            optimiser="sgd",
            weight_decay=self.weight_decay,
            keep=VALIDATION,
        )


# what the quick presets of all few-shot experiments change
SHORT: Json = {
    "precision": "float32",
    "width": 16,
    "queries": 5,
    "steps": 100,
    "decay_period": 10,
    "evaluation_episodes": 100,
    "validation_episodes": 50,
    "validations": 2,
}
