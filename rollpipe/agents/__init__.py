"""What learns from the stream: one algorithm, one file."""

from .a2c import A2C
from .checkpoint import load_checkpoint, save_checkpoint
from .dqn import DQN
from .evaluate import RandomActor, evaluate
from .gradient_learner import ActorCriticLearner, GradientLearner
from .intrinsic.rnd import RND
from .learner import Learner
from .metrics import EpisodeReturns
from .npg import NPG
from .off_policy.ddpg import DDPG
from .off_policy.qr_dqn import QRDQN
from .off_policy.sac import SAC
from .off_policy.td3 import TD3
from .parallel_evaluation import ParallelEvaluation
from .ppo import PPO
from .reinforce import REINFORCE
from .tabular import QLearning
from .trpo import TRPO
from .vtrace import VTrace

__all__ = [
    "A2C",
    "ActorCriticLearner",
    "DDPG",
    "DQN",
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
