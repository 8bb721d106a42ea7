"""Networks and actors: the actor contract, perceptrons, recurrent layers, distributions, heads, encoders, policies and critics."""

from .actor import Actor, check_signature, without_past
from .blocks import Bits, ConvTrunk, Embeddings, ModuleDict, OneHotBits, n_features, onehotbits
from .distributions import Bernoulli, Categorical, Gaussian, GaussianParams, Joint, MultiCategorical
from .encoders import Concatenate, Flatten, OneHot, encoder_for
from .heads import BernoulliHead, CategoricalHead, ClampedStd, GaussianHead, JointHead, MultiCategoricalHead, head_for
from .mlp import MLP, RunningNorm, orthogonal_linear
from .policies import CategoricalPolicy, Critic, GaussianPolicy, MLPPolicy, Policy
from .q_networks import DuellingHead, EpsilonGreedy, QPolicy, RecurrentQPolicy
from .recurrent import GRU, LSTM, MemoryCritic, Recurrent, RecurrentPolicy

__all__ = [
    'Actor', 'Bernoulli', 'BernoulliHead', 'Bits', 'Categorical', 'CategoricalHead', 'CategoricalPolicy', 'ClampedStd', 'Concatenate',
    'ConvTrunk', 'Critic', 'DuellingHead', 'Embeddings', 'EpsilonGreedy', 'Flatten', 'GRU', 'Gaussian', 'GaussianHead',
    'GaussianParams', 'GaussianPolicy', 'Joint', 'JointHead', 'LSTM', 'MLP', 'MLPPolicy', 'MemoryCritic', 'ModuleDict',
    'MultiCategorical', 'MultiCategoricalHead', 'OneHot', 'OneHotBits', 'Policy', 'QPolicy', 'Recurrent', 'RecurrentPolicy',
    'RecurrentQPolicy', 'RunningNorm',
    'check_signature', 'encoder_for', 'head_for', 'n_features', 'onehotbits', 'orthogonal_linear', 'without_past',
]
