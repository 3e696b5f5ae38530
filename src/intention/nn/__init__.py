"""Modules: thin shells that hold parameters around `functional` and `fit`."""

from intention.nn.alpha import ContextAlpha, LearnableAlpha
from intention.nn.blocks import (
    Informer,
    InformerDecoderLayer,
    InformerLayer,
    LinTransformer,
    NPFormer,
    SigmaInformer,
    Transformer,
)
from intention.nn.convert import Swapped, swap_attention
from intention.nn.embed import mlp
from intention.nn.gated import GatedIntention, GatedState
from intention.nn.heads import Attention, Intention, LinearAttention, NeuralProcess, SigmaIntention
from intention.nn.language import InformerLM
from intention.nn.mixers import MultiheadAttention, MultiheadDelta, MultiheadLinearAttention, MultiheadNeuralProcess
from intention.nn.multihead import MultiheadIntention

__all__ = [
    "Attention",
    "ContextAlpha",
    "GatedIntention",
    "GatedState",
    "Informer",
    "InformerDecoderLayer",
    "InformerLM",
    "InformerLayer",
    "Intention",
    "LearnableAlpha",
    "LinTransformer",
    "LinearAttention",
    "MultiheadAttention",
    "MultiheadDelta",
    "MultiheadIntention",
    "MultiheadLinearAttention",
    "MultiheadNeuralProcess",
    "NPFormer",
    "NeuralProcess",
    "SigmaInformer",
    "SigmaIntention",
    "Swapped",
    "Transformer",
    "mlp",
    "swap_attention",
]
