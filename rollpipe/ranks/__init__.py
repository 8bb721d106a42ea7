"""Processes that learn together.

Sums over them, minibatches of their joined batch, what must be alike, and the pipeline of each.
"""

from .collectives import *
from .division import *
from .launch import *
