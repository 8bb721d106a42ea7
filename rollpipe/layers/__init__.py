"""Networks and actors: the actor contract, perceptrons, distributions, heads, encoders, policies and critics."""

from .actor import Actor, check_signature
from .distributions import Categorical, Gaussian, GaussianParams, Joint
from .encoders import Concatenate, Flatten, OneHot, encoder_for
from .heads import CategoricalHead, ClampedStd, GaussianHead, JointHead, head_for
from .mlp import MLP, RunningNorm, orthogonal_linear
from .policies import CategoricalPolicy, Critic, GaussianPolicy, MLPPolicy, Policy

__all__ = [
    'Actor', 'Categorical', 'CategoricalHead', 'CategoricalPolicy', 'ClampedStd', 'Concatenate', 'Critic', 'Flatten',
    'Gaussian', 'GaussianHead', 'GaussianParams', 'GaussianPolicy', 'Joint', 'JointHead', 'MLP', 'MLPPolicy', 'OneHot',
    'Policy', 'RunningNorm',
    'check_signature', 'encoder_for', 'head_for', 'orthogonal_linear',
]
