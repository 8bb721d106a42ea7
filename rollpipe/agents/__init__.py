"""What learns from the stream: one algorithm, one file."""

from .checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from .evaluate import Evaluation, RandomActor, evaluate
from .metrics import METRICS, EpisodeReturns
from .trpo import TRPO

__all__ = [
    'Checkpoint', 'EpisodeReturns', 'Evaluation', 'METRICS', 'RandomActor', 'TRPO',
    'evaluate', 'load_checkpoint', 'save_checkpoint',
]
