"""The hyperparameters of the experiments on images: MNIST, few-shot classification and anomaly detection."""

from __future__ import annotations

from intention.lab.experiments.base import label
from intention.lab.paper.lines import NOT_PRINTED, SAME, UNPRINTED, Entry, rows

__all__ = ["ANOMALY", "FEW_SHOT", "FEW_SHOT_RESNET", "KERNELS", "PIXELS"]

PIXELS = rows(
    "MNIST",
    "pixels",
    ("images per iteration", 1, "batch", 8, "one for each task; a step has 8 tasks, as in the sine regression"),
    ("context pixels", 264, "points"),
    ("queries", "all pixels"),
    ("models", "those of the sine regression"),
    ("MAML: inner rate", 0.1, "maml.inner_rate"),
    ("positions", "positional encoding"),
    ("frequencies of the encoding", NOT_PRINTED, "frequencies", SAME, "periods across the image"),
    ("optimiser", NOT_PRINTED, "", "Adam"),
    ("loss", NOT_PRINTED, "", "MSE"),
    ("iterations", NOT_PRINTED, "steps"),
    *UNPRINTED,
)


def _decayed(model: str, rate: float) -> list[Entry]:
    return [
        (f"{label(model)}: learning rate", rate, f"{model}.learning_rate"),
        (f"{label(model)}: decay rate", 0.8),
        (f"{label(model)}: start of the decay", 10_000),
        (f"{label(model)}: period of the decay", 10_000, "decay_period"),
    ]


LENGTH: Entry = ("length", "to convergence", "steps", 100_000, "no number is printed; the best validation is kept")
TASKS: list[Entry] = [
    ("classes per task", 5, "way"),
    ("context images per class", 5, "shot"),
    ("target images per class", 15, "queries"),
]
SGD: list[Entry] = [
    ("optimiser", "SGD"),
    ("momentum", 0.9),
    ("weight decay, additive", 5e-4, "weight_decay"),
    ("schedule", "exponential"),
    LENGTH,
]
UNPRINTED_SHOTS: list[Entry] = [
    ("tasks of an iteration", NOT_PRINTED, "batch"),
    ("α at the start", NOT_PRINTED, "alpha", SAME, "learnable"),
    ("largest norm of a gradient", NOT_PRINTED, "clip", SAME, "0 is no limit"),
]
BY_NAME = "the 20 test classes of the usual split: the first 10 by name validate"

FEW_SHOT = rows(
    "Few-shot classification",
    "fewshot",
    ("classes for training, validation and test", (80, 10, 10), "", SAME, BY_NAME),
    ("image size", (28, 28)),
    ("images per class", 600),
    *TASKS,
    ("evaluation tasks (Table 1)", 1000, "evaluation_episodes"),
    ("loss of Intention", "MSE"),
    ("loss of Neural Process and Attention", "softmax cross-entropy"),
    *SGD,
    ("Intention: encoders", ("Matching Nets", "ResNet12"), "", SAME, "Table 1 and Table 2"),
    ("Intention: e_H, linear kernel", 8192, "intention.latent"),
    ("Intention: e_H, Gaussian kernel", 32, "intention_kernel.latent"),
    *_decayed("intention", 0.1),
    ("Attention: encoder", "Matching Nets"),
    ("Attention: e_H", 512, "attention.latent"),
    ("Attention: e_H is shared by", "K, Q, V", "", "K, Q", "e_V gives 512 numbers, the encoder 64: V has its own"),
    ("Attention: e_V", (512, 512, 512)),
    ("Attention: e_P", (512, 512, 512, 5)),
    ("Attention: heads", 5, "attention.heads"),
    *_decayed("attention", 0.05),
    ("Neural Process: encoder", "Matching Nets"),
    ("Neural Process: e_H", 2048, "neural_process.latent"),
    ("Neural Process: e_V", (512, 512, 512), "", "none", "named in the text, not used by the formula"),
    ("Neural Process: e_P", (1024, 5)),
    ("Neural Process: mean over", "each class"),
    *_decayed("neural_process", 0.1),
    ("MAML: learning rate", NOT_PRINTED, "maml.learning_rate"),
    ("MAML: inner steps", NOT_PRINTED, "maml.inner_steps"),
    ("MAML: inner rate", NOT_PRINTED, "maml.inner_rate"),
    ("non-linearity", "ReLU"),
    *UNPRINTED_SHOTS,
)

FEW_SHOT_RESNET = rows(
    "Few-shot classification, Table 2",
    "fewshot_resnet",
    *TASKS,
    ("evaluation tasks (Table 2)", 1000, "evaluation_episodes"),
    ("encoder", "ResNet12"),
    ("channels of its first block", NOT_PRINTED, "width"),
    *SGD,
    ("Intention: e_H", 8192, "intention.latent"),
    *_decayed("intention", 0.1),
    ("Intention-kernel: e_H", 32, "intention_kernel.latent"),
    *_decayed("intention_kernel", 0.1),
    ("kernel", "exp(γ|x − y|²)", "", "exp(−γ|x − y|²)", "with the printed sign it is not positive definite"),
    ("γ at the start", NOT_PRINTED, "", "1 / size of e_H", "learnable"),
    ("QDA: covariance", "pooled", "", "pooled, and one per class", "pooled it is LDA; QDA is a line of its own"),
    ("QDA, pooled: e_H", NOT_PRINTED, "intention_lda.latent"),
    ("QDA, one per class: e_H", NOT_PRINTED, "intention_qda.latent"),
    *UNPRINTED_SHOTS,
)

KERNELS = rows(
    "Kernel performance experiments",
    "fewshot_latent",
    ("kernels", ("linear", "Gaussian")),
    ("latent sizes", (16, 32, 64, 128), "latents"),
    *TASKS,
    ("encoder", NOT_PRINTED, "encoder"),
    *SGD,
    *UNPRINTED_SHOTS,
)

PER_HEAD = "4 heads of 256 are printed too: each has 256, all together 1024"
OURS = "against overfitting; the recipe as it is printed is run beside it"

ANOMALY = rows(
    "Anomaly detection",
    "anomaly",
    (
        "features",
        "ResNet34, pre-trained on ImageNet, frozen",
        "",
        "MobileNetV2, pre-trained on ImageNet, frozen",
        "`intention embed` makes those of any other network",
    ),
    ("size of the features", 512, "dims", SAME, "principal components"),
    ("images for training", 50_000, "", 41_500, "83 classes of 500: 50,000 would be 83.3 classes of 600"),
    ("images for testing", 10_000, "", 10_200, "17 classes of 600, never seen; 83 × 100 of seen classes beside them"),
    ("split over", "labels"),
    ("items, outliers among them (section 5.5)", (10, 1)),
    ("heads", 4, "heads"),
    ("size of a head", 256),
    ("hidden size", 1024, "width"),
    ("input dropout", 0.2, "input_dropout"),
    ("epochs", 100),
    ("learning rate", 5e-5, "learning_rate"),
    ("schedule", "cosine warmup"),
    ("period of the warmup", 100),
    ("loss", "softmax cross-entropy"),
    ("layers", (1, 4), "layers"),
    ("α", "sigmoid(θ)"),
    ("e_X, linear, shared by the heads, then ReLU", (1024,)),
    ("e_K, e_V, e_Q, e_Z, linear, per head", (1024,), "", (256,), PER_HEAD),
    ("e_C", (1024, 1024), "", (1024, 256), PER_HEAD),
    ("after the heads, linear", (1024,)),
    ("e_O", (2048, 1024)),
    ("norm", "LayerNorm after each sum"),
    ("optimiser", NOT_PRINTED, "", "Adam"),
    ("sets of an iteration", NOT_PRINTED, "batch"),
    ("scale of the map, Transformer", 1, "", "1 / √d", "section 5.5 names the Transformer, which has it"),
    (
        "scale of the map, Lin-Transformer",
        1,
        "",
        "1 / √(d N)",
        "the output has the variance of the values at the start",
    ),
    ("scale of the map, Informer", 1, "", "by d and N", "the output has the variance of the values at the start"),
    ("scale of the map, σInformer", 1, "", "by d and N", "its entries have variance near 1 at the start"),
    ("dropout inside the layers", NOT_PRINTED, "dropout", SAME, OURS),
    ("share of sets of mixed classes", NOT_PRINTED, "mixed", SAME, OURS),
    ("weights at the start", NOT_PRINTED, "start", SAME, OURS),
)
