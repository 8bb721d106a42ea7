"""What rollpipe does in a less plain way for speed, each beside the plain form.

    python benchmarks/plain_forms.py [--only adam numpy ...] [--repeats 15]

CartPole-v1, one thread, processor time. Each row runs the same work with both forms, which take turns. A ratio above 1 says what the less
plain form gains. Where it gains nothing any more, it should go.

adam     `gradient_learner.Adam` and `torch.optim.Adam(fused=True)`: a step, an update of PPO (64 rows in a minibatch), 32 steps of DQN
clip     `clip_gradients` and torch's `clip_grad_norm_`, for actor and critic
eval     `EvalMode`, and `eval`, `no_grad` and `train`: a block that is entered and left
blocks   the policy on blocks of 25,000 rows, and on all rows at once: a product with its Fisher matrix
numpy    numpy's global random state as bytes, and by `get_state` and `set_state`: once there and back, and in fragments of 8 steps
"""

from time import process_time

import numpy as np
import torch
from report import header, options_of, spread, table

from rollpipe import (
    DQN,
    PPO,
    TRPO,
    Critic,
    EnvStepper,
    FragmentCollector,
    Lanes,
    MLPPolicy,
    QPolicy,
    on_policy,
    replayed,
)
from rollpipe.agents import gradient_learner, natural_gradient
from rollpipe.agents.linearization import Linearization, fisher_product
from rollpipe.pipes.graph import modules
from rollpipe.pipes.keeping import random_states

ENV = "CartPole-v1"
PARAMS = [p for net in (MLPPolicy, Critic) for p in net.for_env(ENV, seed=0).parameters()]


class WholeState:
    "numpy's global random state by numpy's own functions."

    def take(self):
        self.full = np.random.get_state(legacy=False)

    def put(self, present=None):
        np.random.set_state(self.full)


class PlainEval:
    "What `EvalMode` does, by torch's own functions, for one module."

    def __init__(self, holder):
        self.holder = holder

    def __enter__(self):
        self.was = self.holder.training
        self.gradients = torch.no_grad()
        self.holder.eval()
        self.gradients.__enter__()

    def __exit__(self, *exception):
        self.gradients.__exit__(*exception)
        self.holder.train(self.was)


def plain_clip(grads, max_norm):
    "torch wants parameters, whose gradients it clips."
    for p, g in zip(PARAMS, grads):
        p.grad = g
    return float(torch.nn.utils.clip_grad_norm_(PARAMS, max_norm))


class Swapped:
    "A name of a module that stands for something else within `with`."

    def __init__(self, module, name, value):
        self.module = module
        self.name = name
        self.value = value
        self.own = getattr(module, name)

    def __enter__(self):
        setattr(self.module, self.name, self.value)

    def __exit__(self, *exception):
        setattr(self.module, self.name, self.own)


def step():
    params = [*MLPPolicy.for_env(ENV, seed=0).parameters()]
    for p in params:
        p.grad = torch.randn_like(p)
    return gradient_learner.Adam(params, lr=0.0, fused=True).step, 2000


def ppo():
    actor = MLPPolicy.for_env(ENV, seed=0)
    critic = Critic.for_env(ENV, seed=1)
    learner = PPO(actor, critic, minibatch=64)
    batch = next(iter(on_policy(ENV, actor, critic, n_steps=256, seed=0)))
    return lambda: learner.update(batch), 1


def dqn():
    actor = QPolicy.for_env(ENV, seed=0)
    learner = DQN(actor)
    batches = iter(replayed(ENV, actor, seed=0))
    for _ in range(50):
        learner.update(next(batches))  # the first ones fill the memory
    return lambda: learner.update(next(batches)), 30


def clip():
    grads = [torch.randn_like(p) for p in PARAMS]
    return lambda: gradient_learner.clip_gradients(grads, 1e9), 500


def eval_mode():
    mode = modules.EvalMode(MLPPolicy.for_env(ENV, seed=0))

    def work():
        with mode:
            pass

    return work, 2000


def blocks():
    learner = TRPO(actor := MLPPolicy.for_env(ENV, seed=0))
    rows = natural_gradient.policy_rows(
        next(
            iter(on_policy(ENV, actor, Critic.for_env(ENV, seed=1), n_envs=50, n_steps=500, seed=0))
        )
    )
    lin = Linearization(natural_gradient.distribution_on(actor, rows), learner.params)
    product = fisher_product(lin, actor.dist.fisher, rows.weight)
    v = torch.randn(sum(p.numel() for p in learner.params))
    return lambda: product(v), 5


def numpy_state():
    state = random_states.NumpyState()

    def work():
        state.take()
        state.put(state)

    return work, 3000


def fragments():
    items = iter(
        Lanes(FragmentCollector(EnvStepper(ENV, MLPPolicy.for_env(ENV, seed=0)), 8), 2, seed=0)
    )
    return lambda: next(items), 200


FORMS = dict(  # row -> (what the plain form replaces, what makes the work and says how often it is done)
    adam_step=((gradient_learner, "Adam", torch.optim.Adam), step),
    adam_ppo=((gradient_learner, "Adam", torch.optim.Adam), ppo),
    adam_dqn=((gradient_learner, "Adam", torch.optim.Adam), dqn),
    clip=((gradient_learner, "clip_gradients", plain_clip), clip),
    eval=((modules, "EvalMode", PlainEval), eval_mode),
    blocks=((natural_gradient, "in_row_blocks", lambda fn, tree, **_: fn(tree)), blocks),
    numpy_state=((random_states, "NumpyState", WholeState), numpy_state),
    numpy_fragments=((random_states, "NumpyState", WholeState), fragments),
)


def seconds(make):
    work, n = make()
    for _ in range(max(1, n // 5)):
        work()
    start = process_time()
    for _ in range(n):
        work()
    return (process_time() - start) / n


def main():
    parser = options_of(__doc__, repeats=15)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="rows whose names begin so"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(header())
    rows = []
    for name, (plain, make) in FORMS.items():
        if options.only and not name.startswith(tuple(options.only)):
            continue
        times = []
        for _ in range(options.repeats):
            own = seconds(make)
            with Swapped(*plain):
                times.append((own, seconds(make)))
        least = [f"{min(side) * 1e6:.0f} us" for side in zip(*times)]
        rows.append([name, *least, spread([slow / own for own, slow in times])])
    print(table(["work", "rollpipe, least", "plain, least", "plain / rollpipe"], rows))


if __name__ == "__main__":
    main()
