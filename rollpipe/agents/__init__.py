"""What learns from the batches of a pipeline: families of algorithms, and what they share."""

from .checkpoint import load_checkpoint, save_checkpoint
from .evaluate import RandomActor, evaluate
from .gradient_learner import ActorCriticLearner, GradientLearner
from .intrinsic import RND
from .learner import Learner
from .metrics import EpisodeInfos, EpisodeReturns
from .natural_gradient import NPG, TRPO
from .off_policy.action_learner import DDPG, SAC, TD3
from .off_policy.q_learner import DQN, QRDQN
from .parallel_evaluation import ParallelEvaluation
from .policy_gradient import A2C, PPO, REINFORCE, VTrace
from .tabular import QLearning

__all__ = [
    "A2C",
    "ActorCriticLearner",
    "DDPG",
    "DQN",
    "EpisodeInfos",
    "EpisodeReturns",
    "GradientLearner",
    "Learner",
    "NPG",
    "PPO",
    "ParallelEvaluation",
    "QLearning",
    "QRDQN",
    "REINFORCE",
    "RND",
    "RandomActor",
    "SAC",
    "TD3",
    "TRPO",
    "VTrace",
    "evaluate",
    "load_checkpoint",
    "save_checkpoint",
]
