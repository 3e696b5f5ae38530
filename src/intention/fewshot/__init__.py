"""Few-shot learning: encoders, episodes, heads, and a classifier for images of your own. docs/fewshot.md tells more."""

from intention.fewshot.encoders import Conv4, ResNet12, normalise
from intention.fewshot.evaluation import Evaluation, against_shots, evaluate, unit
from intention.fewshot.files import about_encoder, load_encoder, save_encoder
from intention.fewshot.heads import LDA, QDA, Kernel, LsSvm, Matching, Process, Prototypes, SigmaIntention
from intention.fewshot.logistic import Logistic
from intention.fewshot.maml import Maml
from intention.fewshot.sampling import Episodes, EpisodeSampler, episodes
