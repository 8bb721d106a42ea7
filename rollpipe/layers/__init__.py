"""Networks and actors: the actor contract, perceptrons, recurrent layers, distributions, heads, encoders, policies and critics."""

from .action_critic import ActionCritic, StackedMLP
from .actor import Actor, check_signature, without_past
from .bounded_policies import BoundedActor, DeterministicPolicy, SquashedPolicy
from .conv import ConvTrunk
from .critic import Critic
from .distributions import Categorical, Gaussian, GaussianParams
from .encoders import Concatenate, Flatten, encoder_for
from .heads import BernoulliHead, CategoricalHead, ClampedStd, GaussianHead, JointHead, MultiCategoricalHead, head_for
from .integers import Bits, Embeddings, OneHot, ToBits, to_bits
from .joint import Bernoulli, Joint, MultiCategorical
from .mlp import MLP, orthogonal_linear
from .module_dict import ModuleDict, n_out_of
from .policies import CategoricalPolicy, GaussianPolicy, MLPPolicy, Policy
from .q_networks import DuellingHead, EpsilonGreedy, QPolicy, RecurrentQPolicy
from .quantile_networks import QuantileHead, QuantilePolicy
from .recurrent import GRU, LSTM, Recurrent
from .recurrent_policies import MemoryCritic, RecurrentPolicy
from .running_norm import RunningNorm
from .squashed import SquashedGaussian
from .unit_box import UnitBox

__all__ = [
    'ActionCritic', 'Actor', 'Bernoulli', 'BernoulliHead', 'Bits', 'BoundedActor', 'Categorical', 'CategoricalHead',
    'CategoricalPolicy', 'ClampedStd', 'Concatenate', 'ConvTrunk', 'Critic', 'DeterministicPolicy', 'DuellingHead', 'Embeddings',
    'EpsilonGreedy', 'Flatten', 'GRU', 'Gaussian', 'GaussianHead', 'GaussianParams', 'GaussianPolicy', 'Joint', 'JointHead', 'LSTM',
    'MLP', 'MLPPolicy', 'MemoryCritic', 'ModuleDict', 'MultiCategorical', 'MultiCategoricalHead', 'OneHot', 'Policy', 'QPolicy',
    'QuantileHead', 'QuantilePolicy', 'Recurrent', 'RecurrentPolicy', 'RecurrentQPolicy', 'RunningNorm', 'SquashedGaussian',
    'SquashedPolicy', 'StackedMLP', 'ToBits', 'UnitBox', 'check_signature', 'encoder_for', 'head_for', 'n_out_of', 'orthogonal_linear',
    'to_bits', 'without_past',
]
