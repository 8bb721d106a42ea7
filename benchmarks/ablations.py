"""TRPO that takes every truncation for a termination, as the algorithm `trpo_terminating` of the command line.

    rollpipe bench benchmarks/specs/ablation.toml --import benchmarks.ablations --jobs 2

For it an episode that a time limit cuts off is worth nothing afterwards, as for a loop that knows a single flag `done`. The other rows of
the ablation are options of TRPO.
"""

from fastcore.meta import delegates

from rollpipe.pipes import AdvantageBuffer, on_policy
from rollpipe.pipes.graph.pipe import Pipe
from rollpipe.settings.algorithms import ALGORITHMS, register_algorithm


class Terminating(Pipe):
    "Call every end of an episode a termination, in a stream of `Fragment`s."

    def stream(self, items):
        for fragment in items:
            yield fragment._replace(term=fragment.term | fragment.state.fin)


@delegates(on_policy)
def terminating(env, actor, critic=None, *, edits=(), **kwargs):
    "`on_policy` with `Terminating` before the advantages."
    return on_policy(
        env, actor, critic, edits=[Terminating.inserter(before=AdvantageBuffer), *edits], **kwargs
    )


register_algorithm("trpo_terminating", ALGORITHMS["trpo"]._replace(pipeline=terminating))
