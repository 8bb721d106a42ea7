"""Milliseconds of one TRPO update by phase, as a ratio to a hand-written one by double back-propagation in the same run.

    python benchmarks/trpo_update.py [--cases 2048x64 25000x64 25000x256] [--repeats 5] [--threads 1]

A case is the number of rows and the width of two tanh layers; observation 17, Gaussian action 6. Both updates start from the same weights
and do the same work: gradient of the surrogate, 10 conjugate-gradient iterations with damping 0.1, line search on surrogate and KL; it is
checked that they arrive at the same weights. The hand-written one records the gradient of the KL once, and gets the curvature of its step
without a further product. `VARIANTS` lists further ways to update. Making a preconditioner counts as part of the iterations.
The critic is compared with 20 full-batch Adam steps. Runs are interleaved, and every run starts from the same state.
"""

import copy
import math
import statistics
from time import perf_counter

import gymnasium as gym
import numpy as np
import torch
from report import header, options_of, spread, table
from torch import nn
from torch.autograd import grad

from rollpipe.agents import natural_gradient
from rollpipe.agents.critics import explained_variance
from rollpipe.agents.linearization import Linearization, fisher_product
from rollpipe.agents.natural_gradient import distribution_on, policy_rows
from rollpipe.layers import Critic, MLPPolicy
from rollpipe.pipes.data.fragment import Fragment

B = 8
N_OBS = 17
N_ACT = 6
MAX_KL = 0.01
DAMPING = 0.1
CG_ITERS = 10
PRECONDITIONED = dict(precondition=512, cg_iters=5)
VARIANTS = {
    "ten iterations": dict(precondition=0),
    "preconditioner of 512 rows, five iterations": PRECONDITIONED,
    "ten iterations, fvp_subsample=0.1": dict(precondition=0, fvp_subsample=0.1),
    "preconditioner, five iterations, fvp_subsample=0.1": PRECONDITIONED | dict(fvp_subsample=0.1),
}


# ---- the update by double back-propagation, with nothing but torch


class Plain:
    "A Gaussian perceptron policy and its TRPO update, as one would write them by hand."

    def __init__(self, policy, hidden):
        self.net = nn.Sequential(
            nn.Linear(N_OBS, hidden),
            nn.Tanh(),
            nn.Linear(hidden, hidden),
            nn.Tanh(),
            nn.Linear(hidden, N_ACT),
        )
        self.log_std = nn.Parameter(policy.head.log_std.detach().clone())
        self.params = [*self.net.parameters(), self.log_std]
        with torch.no_grad():
            layers = [*policy.trunk.hidden, policy.head.mean]
            for p, q in zip(
                self.net.parameters(), [p for layer in layers for p in layer.parameters()]
            ):
                p.copy_(q)

    def log_prob(self, mean, act):
        z = (act - mean) / self.log_std.exp()
        return -(0.5 * z * z + self.log_std + 0.5 * math.log(2 * math.pi)).sum(-1)

    def kl(self, old_mean, old_log_std, mean):
        square = (2 * (old_log_std - self.log_std)).exp() + (
            (old_mean - mean) / self.log_std.exp()
        ).square()
        return (self.log_std - old_log_std + 0.5 * square - 0.5).sum(-1).mean()

    def assign(self, theta):
        with torch.no_grad():
            for p, x in zip(self.params, theta.split([p.numel() for p in self.params])):
                p.copy_(x.view_as(p))

    def update(self, obs, act, adv, old_logp):
        "Seconds of the three phases."
        start = perf_counter()
        flat = lambda gs: torch.cat([g.reshape(-1) for g in gs])
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        mean = self.net(obs)
        before = ((self.log_prob(mean, act) - old_logp).exp() * adv).mean()
        g = flat(grad(before, self.params, retain_graph=True))
        old_mean = mean.detach()
        old_log_std = self.log_std.detach().clone()
        theta = flat([p.detach() for p in self.params])
        middle = perf_counter()
        slope = flat(grad(self.kl(old_mean, old_log_std, mean), self.params, create_graph=True))
        x = torch.zeros_like(g)
        r = g
        p = g
        rr = g @ g
        for _ in range(CG_ITERS):
            Ap = flat(grad(slope @ p, self.params, retain_graph=True)) + DAMPING * p
            alpha = rr / (p @ Ap)
            x = x + alpha * p
            r = r - alpha * Ap
            rr, old_rr = r @ r, rr
            p = r + rr / old_rr * p
        step = x * (2 * MAX_KL / (x @ (g - r))).sqrt()
        searching = perf_counter()
        rate = float(g @ step)
        with torch.no_grad():
            for k in range(10):
                scale = 0.8**k
                self.assign(theta + scale * step)
                mean = self.net(obs)
                gain = float(((self.log_prob(mean, act) - old_logp).exp() * adv).mean() - before)
                if (
                    float(self.kl(old_mean, old_log_std, mean)) <= MAX_KL
                    and gain >= 0.1 * scale * rate > 0
                ):
                    break
            else:
                self.assign(theta)
        return dict(
            gradient=middle - start,
            iterations=searching - middle,
            search=perf_counter() - searching,
        )

    def weights(self):
        return torch.cat([p.detach().reshape(-1) for p in self.params])


# ---- rollpipe's update, with a timer around each part


def make(rows, hidden):
    "Policy, critic and a fragment of smooth random advantages and returns."
    torch.manual_seed(0)
    T = rows // B
    spaces = gym.spaces.Box(-np.inf, np.inf, (N_OBS,)), gym.spaces.Box(-np.inf, np.inf, (N_ACT,))
    policy, critic = (
        cls.for_env(spaces, hidden=(hidden, hidden), normalize=False, seed=0)
        for cls in (MLPPolicy, Critic)
    )
    obs = torch.randn(T + 1, B, N_OBS)
    with torch.no_grad():
        dist, _ = policy.params(obs, None, None, None, hx=(), stepno=None)
        act = policy.dist.sample(dist, policy.draw_noise((T + 1, B)))
        logp = policy.dist.log_prob(dist, act)
    ret = torch.tanh(obs[:-1] @ torch.randn(N_OBS, 8) / 4).sum(-1) + torch.sin(2 * obs[:-1, :, 0])
    adv = (act * torch.tanh(obs @ torch.randn(N_OBS, N_ACT) / 4)).sum(-1)[:-1] + torch.randn(T, B)
    return (
        policy,
        critic,
        Fragment.from_steps(
            obs, act[:-1], torch.zeros(T, B), actor=dict(dist=dist, logp=logp), adv=adv, ret=ret
        ),
    )


def timed_update(policy, critic, fragment, **kw):
    "Seconds by phase of one update of copies of `policy` and `critic` (or None); the copies are returned as well."
    agent = natural_gradient.TRPO(
        copy.deepcopy(policy), copy.deepcopy(critic), max_kl=MAX_KL, damping=DAMPING, **kw
    )
    seconds = {}
    places = dict(
        conjugate_gradients=natural_gradient,
        preconditioner=natural_gradient.NaturalGradientLearner,
        backtrack_line_search=natural_gradient,
    )
    real = {name: getattr(module, name) for name, module in places.items()}

    def clocked(name):
        def call(*args, **kw):
            start = perf_counter()
            try:
                return real[name](*args, **kw)
            finally:
                seconds[name] = perf_counter() - start

        return call

    try:
        for name in real:
            setattr(places[name], name, clocked(name))
        m = agent.update(fragment)
    finally:
        for name in real:
            setattr(places[name], name, real[name])
    iterations = seconds["conjugate_gradients"] + seconds["preconditioner"]
    search = seconds["backtrack_line_search"]
    return dict(
        gradient=m["seconds_policy"] - iterations - search,
        iterations=iterations,
        search=search,
        critic=m.get("seconds_critic", 0.0),
        accepted=m["accepted"],
    ), agent


def seconds_of(fn, repeats=1):
    start = perf_counter()
    for _ in range(repeats):
        fn()
    return (perf_counter() - start) / repeats


def product_and_forward(policy, fragment):
    "Seconds of one Fisher product and of one forward pass over the whole batch."
    agent = natural_gradient.TRPO(policy)
    rows = policy_rows(fragment)
    lin = Linearization(distribution_on(policy, rows), agent.params)
    product = fisher_product(lin, policy.dist.fisher, rows.weight)
    v = torch.randn(sum(p.numel() for p in agent.params))
    product(v)

    @torch.no_grad()
    def forward():
        policy.params(rows.state.obs, None, None, None, hx=(), stepno=None)

    forward()
    return seconds_of(lambda: product(v), 3), seconds_of(forward, 3)


def full_batch_steps(critic, fragment, n=20):
    "Seconds and explained variance of `n` Adam steps on the whole batch, by hand."
    critic = copy.deepcopy(critic)
    start = perf_counter()
    critic.observe_returns(fragment.ret)
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
    obs = fragment.state.obs[:-1]
    for _ in range(n):
        optimizer.zero_grad()
        ((critic(obs) - fragment.ret) / critic.ret_std).square().mean().backward()
        optimizer.step()
    return perf_counter() - start, explained(critic, fragment)


@torch.no_grad()
def explained(critic, fragment):
    return explained_variance(critic(fragment.state.obs[:-1]), fragment.ret)


def weights(policy):
    return torch.cat(
        [
            p.detach().reshape(-1)
            for layer in (*policy.trunk.hidden, policy.head.mean)
            for p in layer.parameters()
        ]
        + [policy.head.log_std.detach()]
    )


# ---- the tables


def measure(rows, hidden, repeats):
    "Lists of repeats: seconds by phase of the updates, of product and forward pass, of the critic by hand."
    policy, critic, fragment = make(rows, hidden)
    flat = [
        x.flatten(0, 1)
        for x in (
            fragment.state.obs[:-1],
            fragment.state.act[1:],
            fragment.adv,
            fragment.actor["logp"][:-1],
        )
    ]
    runs = {name: [] for name in ("hand", *VARIANTS, "product", "full_batch")}
    for i in range(repeats + 1):  # the first one warms up
        plain = Plain(policy, hidden)
        runs["hand"].append(plain.update(*flat))
        for name, options in VARIANTS.items():
            seconds, agent = timed_update(
                policy, critic if name == "ten iterations" else None, fragment, **options
            )
            runs[name].append(seconds)
            if name != "ten iterations":
                continue
            if not i:
                torch.testing.assert_close(
                    weights(agent.actor), plain.weights(), rtol=1e-2, atol=2e-4
                )
                assert not torch.equal(weights(agent.actor), weights(policy))
            runs["full_batch"].append(
                (*full_batch_steps(critic, fragment), explained(agent.critic, fragment))
            )
        runs["product"].append(product_and_forward(policy, fragment))
    return {name: repeats[1:] for name, repeats in runs.items()}


def whole(run):
    return run["gradient"] + run["iterations"] + run["search"]


def ms(values):
    return spread([1000 * v for v in values], "{:.0f}")


def rows_of(case, runs):
    "Rows of the table of updates."
    for name in ("hand", *VARIANTS):
        phases = [
            ms([run[phase] for run in runs[name]]) for phase in ("gradient", "iterations", "search")
        ]
        gains = [
            spread([whole(run) / whole(mine) for run, mine in zip(runs[other], runs[name])])
            for other in ("hand", "ten iterations")
        ]
        critic = {
            "hand": ms([seconds for seconds, _, _ in runs["full_batch"]]) + " *",
            "ten iterations": ms([run["critic"] for run in runs["ten iterations"]]),
        }
        title = "double back-propagation by hand" if name == "hand" else f"rollpipe, {name}"
        yield [
            case,
            title,
            *phases,
            ms([whole(run) for run in runs[name]]),
            *gains,
            critic.get(name, ""),
        ]


def main():
    args = options_of(__doc__, repeats=5, threads=1)
    args.add_argument(
        "--cases", nargs="+", default=["2048x64", "25000x64", "25000x256"], metavar="ROWSxWIDTH"
    )
    args = args.parse_args()
    torch.set_num_threads(args.threads)
    print(header())
    print(
        f"Observation {N_OBS}, action {N_ACT}, threads: {args.threads}; ms, median (range) of {args.repeats}; times as fast: policy "
        "updates of the same repeat.\n",
        flush=True,
    )
    measured = {case: measure(*map(int, case.split("x")), args.repeats) for case in args.cases}
    print(
        table(
            [
                "rows x width",
                "update",
                "gradient",
                "iterations",
                "line search",
                "policy update",
                "times as fast as by hand",
                "as ten iterations",
                "critic",
            ],
            [row for case, runs in measured.items() for row in rows_of(case, runs)],
        )
    )
    print("\n\\* 20 full-batch Adam steps by hand.\n")
    rows = []
    for case, runs in measured.items():
        _, full, ours = (statistics.median(x) for x in zip(*runs["full_batch"]))
        cost = [run["critic"] / whole(run) for run in runs["ten iterations"]]
        rows.append(
            [
                case,
                spread([p / f for p, f in runs["product"]]),
                spread(cost),
                f"{ours:.3f}",
                f"{full:.3f}",
            ]
        )
    print(
        table(
            [
                "rows x width",
                "Fisher product / forward pass",
                "critic / policy update",
                "explained variance after the fit",
                "after 20 full-batch steps",
            ],
            rows,
        )
    )


if __name__ == "__main__":
    main()
