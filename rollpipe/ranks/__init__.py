"""Processes that learn together.

They sum their numbers, draw minibatches of their joined batch, check that their batches and
learners are alike, and have a part of the pipeline each.
"""

from .collectives import *
from .division import *
from .launch import *
