"Recorded steps for learners from data."

from itertools import islice
from pathlib import Path

from rollpipe.agents import RandomActor
from rollpipe.pipes import Recorder, rollouts
from rollpipe.pipes.envs.factories import spaces_of


def recorded(folder, env, n=4):
    "The folder with `n` fragments of 16 steps of 8 environments, of random actions; it is made if it is not there."
    if not Path(folder).exists():
        pipe = rollouts(env, RandomActor(spaces_of(env)[1]), n_steps=16, seed=0)
        for _ in islice(Recorder(pipe, folder), n):
            pass
    return folder
