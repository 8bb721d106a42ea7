"""Networks and actors: the contract, layers, distributions, heads, encoders, policies and critics."""

from .actor import Actor
from .bounded_policies import DeterministicPolicy, SquashedPolicy
from .critic import ActionCritic, Critic
from .distributions import Categorical, Gaussian
from .encoders import ConvTrunk, encoder_for
from .heads import head_for
from .mlp import MLP
from .policies import CategoricalPolicy, GaussianPolicy, MLPPolicy, Policy
from .q_networks import QPolicy, QuantilePolicy, RecurrentQPolicy
from .recurrent import GRU, LSTM, MemoryCritic, RecurrentPolicy
from .running_norm import RunningNorm

__all__ = [
    "ActionCritic",
    "Actor",
    "Categorical",
    "CategoricalPolicy",
    "ConvTrunk",
    "Critic",
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
