"""Networks and actors: the contract, layers, distributions, heads, encoders, policies and critics."""

from .actor import Actor
from .by_group import ActorByGroup, CriticByGroup
from .critic import ActionCritic, Critic
from .encoders import ConvTrunk, encoder_for
from .heads import Categorical, Gaussian, head_for
from .mlp import MLP, RunningNorm
from .policies import (
    CategoricalPolicy,
    DeterministicPolicy,
    GaussianPolicy,
    MLPPolicy,
    Policy,
    SquashedPolicy,
)
from .q_networks import QPolicy, QuantilePolicy, RecurrentQPolicy
from .recurrent import GRU, LSTM, MemoryCritic, RecurrentPolicy

__all__ = [
    "ActionCritic",
    "Actor",
    "ActorByGroup",
    "Categorical",
    "CategoricalPolicy",
    "ConvTrunk",
    "Critic",
    "CriticByGroup",
    "DeterministicPolicy",
    "GRU",
    "Gaussian",
    "GaussianPolicy",
    "LSTM",
    "MLP",
    "MLPPolicy",
    "MemoryCritic",
    "Policy",
    "QPolicy",
    "QuantilePolicy",
    "RecurrentPolicy",
    "RecurrentQPolicy",
    "RunningNorm",
    "SquashedPolicy",
    "encoder_for",
    "head_for",
]
