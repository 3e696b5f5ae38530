"""Few-shot learning: encoders, episodes, heads, and a classifier for images of your own. docs/fewshot.md tells more."""

from intention.fewshot.backbones import Backbone, backbone
from intention.fewshot.classifier import FewShotClassifier, Suspect
from intention.fewshot.encoders import Conv4, ResNet12, normalise
from intention.fewshot.evaluation import Evaluation, against_shots, evaluate, unit
from intention.fewshot.files import about_encoder, load_encoder, save_encoder
from intention.fewshot.heads import LDA, QDA, Kernel, LsSvm, Matching, Process, Prototypes, SigmaIntention
from intention.fewshot.images import read_images
from intention.fewshot.logistic import Logistic
from intention.fewshot.maml import Maml
from intention.fewshot.sampling import Episodes, EpisodeSampler, episodes

__all__ = [
    "LDA",
    "QDA",
    "Backbone",
    "Conv4",
    "EpisodeSampler",
    "Episodes",
    "Evaluation",
    "FewShotClassifier",
    "Kernel",
    "Logistic",
    "LsSvm",
    "Maml",
    "Matching",
    "Process",
    "Prototypes",
    "ResNet12",
    "SigmaIntention",
    "Suspect",
    "about_encoder",
    "against_shots",
    "backbone",
    "episodes",
    "evaluate",
    "load_encoder",
    "normalise",
    "read_images",
    "save_encoder",
    "unit",
]
