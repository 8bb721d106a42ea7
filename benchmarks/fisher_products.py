"""Predicted improvement of TRPO's steps by the number of products with the Fisher matrix, with a preconditioner and without.

    python benchmarks/fisher_products.py [--envs CartPole-v1 Pendulum-v1 HalfCheetah-v5] [--updates 100] [--rows 512] [--n-steps 256]

A training with the defaults runs for a number of updates. In each of them the direction is computed several times from the same batch: by
plain conjugate gradients, by those with a preconditioner from `--rows` rows, and with a Fisher matrix from a fraction of the rows. The
improvement that a step predicts is proportional to `g'x / sqrt(x'(F + damping I)x)`, always with the Fisher matrix F of all rows. It is
divided by that of ten plain iterations in the same update.
"""

import math
from itertools import islice

import torch
from report import begun, options_of, table

from rollpipe.agents import TRPO
from rollpipe.agents.linearization import Linearization, fisher_product
from rollpipe.agents.natural_gradient import distribution_on
from rollpipe.layers import Critic, MLPPolicy
from rollpipe.pipes import on_policy

PRODUCTS = (2, 3, 4, 5)
FRACTIONS = (0.5, 0.25, 0.1)
PLAIN = (0, 10, 1.0)  # precondition, cg_iters, fvp_subsample


class Compared(TRPO):
    "A TRPO that notes in `found` what other directions would have predicted, as a share of what ten plain iterations predict."

    def __init__(self, actor, critic, rows, **kw):
        super().__init__(actor, critic, **kw)
        self.settings = [
            PLAIN,
            *((m, n, 1.0) for m in (0, rows) for n in PRODUCTS),
            *((0, 10, part) for part in FRACTIONS),
        ]
        self.found = []

    def direction(self, rows):
        predicted = {}
        before = (self.precondition, self.cg_iters, self.fvp_subsample)
        for setting in self.settings:
            self.precondition, self.cg_iters, self.fvp_subsample = setting
            at = super().direction(rows)
            predicted[setting] = float(at.gradient @ at.cg.x) / math.sqrt(
                self.curvature(rows, at.cg.x)
            )
        self.precondition, self.cg_iters, self.fvp_subsample = before
        self.found.append({setting: x / predicted[PLAIN] for setting, x in predicted.items()})
        return super().direction(rows)

    @torch.enable_grad()
    def curvature(self, rows, x):
        "x'(F + damping I)x"
        product = fisher_product(
            Linearization(distribution_on(self.actor, rows), self.params),
            self.actor.dist.fisher,
            rows.weight,
        )
        return float(x @ product(x) + self.damping * x @ x)


def rows_of(env, updates, rows, n_steps):
    "Rows of the table: least, tenth least, median share of the improvement of ten plain iterations, and how many updates reach 99.9 %."
    actor = MLPPolicy.for_env(env, seed=0)
    critic = Critic.for_env(env, seed=1000)
    agent = Compared(actor, critic, rows, seed=0)
    for batch in islice(on_policy(env, actor, critic, n_envs=8, n_steps=n_steps, seed=0), updates):
        agent.update(batch)
    for m, n, part in agent.settings[1:]:
        shares = sorted(found[m, n, part] for found in agent.found)
        kind = (
            f"preconditioner from {m} rows"
            if m
            else "plain"
            if part == 1
            else f"plain, fvp_subsample={part}"
        )
        yield [
            env,
            kind,
            n,
            *(f"{x:.4f}" for x in (shares[0], shares[len(shares) // 10], shares[len(shares) // 2])),
            f"{sum(x >= 0.999 for x in shares)} of {len(shares)}",
        ]


def main():
    args = options_of(
        __doc__,
        envs=["CartPole-v1", "Pendulum-v1", "HalfCheetah-v5"],
        updates=100,
        rows=512,
        n_steps=256,
    )
    args = begun(args)
    print(
        f"{args.updates} updates with 8 environments x {args.n_steps} steps; the predicted improvement of ten plain iterations is 1.\n"
    )
    print(
        table(
            ["environment", "iterations", "products", "least", "tenth", "median", "99.9 % reached"],
            [
                row
                for env in args.envs
                for row in rows_of(env, args.updates, args.rows, args.n_steps)
            ],
        )
    )


if __name__ == "__main__":
    main()
