"Processes that learn together: sums over them, the minibatches of their joined batch, and what must be alike in all of them."
from .collectives import *
from .minibatches import *
from .launch import *
