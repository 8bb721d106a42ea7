"""Networks and actors: the actor contract, perceptrons, recurrent layers, distributions, heads, encoders, policies and critics."""

from .actor import Actor, check_signature, without_past
from .distributions import Categorical, Gaussian, GaussianParams, Joint
from .encoders import Concatenate, Flatten, OneHot, encoder_for
from .heads import CategoricalHead, ClampedStd, GaussianHead, JointHead, head_for
from .mlp import MLP, RunningNorm, orthogonal_linear
from .policies import CategoricalPolicy, Critic, GaussianPolicy, MLPPolicy, Policy
from .recurrent import GRU, LSTM, MemoryCritic, Recurrent, RecurrentPolicy

__all__ = [
    'Actor', 'Categorical', 'CategoricalHead', 'CategoricalPolicy', 'ClampedStd', 'Concatenate', 'Critic', 'Flatten',
    'GRU', 'Gaussian', 'GaussianHead', 'GaussianParams', 'GaussianPolicy', 'Joint', 'JointHead', 'LSTM', 'MLP', 'MLPPolicy',
    'MemoryCritic', 'OneHot', 'Policy', 'Recurrent', 'RecurrentPolicy', 'RunningNorm',
    'check_signature', 'encoder_for', 'head_for', 'orthogonal_linear', 'without_past',
]
