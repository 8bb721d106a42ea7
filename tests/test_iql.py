"IQL beside an independent computation: several updates from the same weights, with all networks, their targets and optimisers."

import math

import pytest
import torch
from test_off_policy import SPACES, random_fragment, successor

from rollpipe.agents.offline import IQL
from rollpipe.layers import MLPPolicy
from rollpipe.layers.critic import QVCritic

RATE = 3e-3
UPDATES = 6


def leaves(weights, biases):
    return [x.detach().double().clone().requires_grad_() for x in (*weights, *biases)]


def answer(net, x, activation):
    "Outputs of a perceptron whose weights `[n_in, n_out]` come before its biases."
    weights, biases = net[: len(net) // 2], net[len(net) // 2 :]
    for k, (weight, bias) in enumerate(zip(weights, biases)):
        x = x @ weight + bias
        if k + 1 < len(weights):
            x = activation(x)
    return x


def descend(adam, loss):
    adam.zero_grad()
    loss.backward()
    adam.step()


class PlainIQL:
    """Implicit Q-learning step by step, in double precision, from the equations 5 to 7 of Kostrikov et al. 2021.

    It takes initial weights from the learner, and nothing else. Observations are normalised by the moments of all that came in earlier
    updates; those of the target critics by the moments that the critics had when the targets moved.
    """

    def __init__(self, agent, expectile, beta, gamma, tau, max_weight, horizon):
        self.expectile = expectile
        self.beta = beta
        self.gamma = gamma
        self.tau = tau
        self.max_weight = max_weight
        self.horizon = horizon
        actor, critic = agent.actor, agent.critic
        hidden, mean = actor.trunk.hidden[0], actor.head.mean
        value, last = critic.value_net.hidden[0], critic.value_net.last
        self.policy = leaves([hidden.weight.T, mean.weight.T], [hidden.bias, mean.bias])
        self.log_std = actor.head.log_std.detach().double().clone().requires_grad_()
        self.value = leaves([value.weight.T, last.weight.T], [value.bias, last.bias])
        self.q = [
            leaves([w[k] for w in critic.net.weights], [b[k, 0] for b in critic.net.biases])
            for k in range(2)
        ]
        self.target = [[x.detach().clone() for x in q] for q in self.q]
        self.adams = dict(
            value=torch.optim.Adam(self.value, RATE),
            q=torch.optim.Adam(self.q[0] + self.q[1], RATE),
            policy=torch.optim.Adam([*self.policy, self.log_std], RATE),
        )
        low, high = (torch.from_numpy(x).double() for x in (SPACES[1].low, SPACES[1].high))
        self.middle = (low + high) / 2
        self.half = (high - low) / 2
        self.seen = []
        self.moments = self.target_moments = (0.0, 1.0)
        self.steps = 0

    def action_values(self, q, obs, position):
        return answer(q, torch.cat([obs, position]), torch.relu).squeeze()

    def state_value(self, obs):
        return answer(self.value, obs, torch.relu).squeeze()

    def log_likelihood(self, obs, act):
        "Of the action that was drawn, even if the environment got another one, clipped to its bounds."
        mean = self.middle + self.half * answer(self.policy, obs, torch.tanh)
        std = self.log_std.exp()
        density = torch.exp(-0.5 * ((act - mean) / std) ** 2) / (std * math.sqrt(2 * math.pi))
        return density.log().sum()

    def update(self, rows):
        "One update from steps `(obs, act, rew, next obs, terminated)`; returns what it measured."
        mean, std = self.moments
        steps = []
        old_q = []
        goals = []
        # What the two critics move towards is computed before any of them moves.
        with torch.no_grad():
            for obs, act, rew, after, terminated in rows:
                position = ((act - self.middle) / self.half).clamp(-1, 1)
                older = (obs - self.target_moments[0]) / self.target_moments[1]
                old_q.append(min(self.action_values(q, older, position) for q in self.target))
                future = 0.0 if terminated else self.gamma * self.state_value((after - mean) / std)
                goals.append(rew + future)
                steps.append(((obs - mean) / std, position, act))

        value_loss = 0.0
        for (obs, _, _), q in zip(steps, old_q):
            u = q - self.state_value(obs)
            value_loss += (self.expectile if u >= 0 else 1 - self.expectile) * u**2 / len(steps)
        q_loss = 0.0
        for (obs, position, _), goal in zip(steps, goals):
            for q in self.q:
                q_loss += 0.5 * (self.action_values(q, obs, position) - goal) ** 2 / len(steps)
        descend(self.adams["value"], value_loss)
        descend(self.adams["q"], q_loss)

        weights = []
        policy_loss = 0.0
        for (obs, _, act), q in zip(steps, old_q):
            advantage = float(q - self.state_value(obs).detach())
            weights.append(min(math.exp(self.beta * advantage), self.max_weight))
            policy_loss -= weights[-1] * self.log_likelihood(obs, act) / len(steps)
        rate = RATE * (1 + math.cos(math.pi * self.steps / self.horizon)) / 2
        self.adams["policy"].param_groups[0]["lr"] = rate
        descend(self.adams["policy"], policy_loss)

        for target, q in zip(self.target, self.q):
            for old, new in zip(target, q):
                old.copy_((1 - self.tau) * old + self.tau * new.detach())
        self.steps += len(steps)
        self.seen += [obs for obs, *_ in rows]
        seen = torch.stack(self.seen)
        self.target_moments = self.moments
        self.moments = seen.mean(0), (seen.var(0, unbiased=False) + 1e-8).sqrt()
        return dict(
            loss_expectile=float(value_loss.detach()),
            loss_value=float(q_loss.detach()),
            loss_policy=float(policy_loss.detach()),
            adv_weight=sum(weights) / len(weights),
            q_target=float(sum(goals)) / len(goals),
        ), weights


def rows_of(fragment):
    "The valid steps of a fragment, one by one."
    state = fragment.state
    return [
        (
            state.obs[t, b].double(),
            state.act[t + 1, b].double(),
            state.rew[t + 1, b].double(),
            successor(fragment, t, b).double(),
            bool(fragment.term[t + 1, b]),
        )
        for t, b in fragment.valid.nonzero().tolist()
    ]


@pytest.mark.parametrize("outside", [False, True], ids=["inside the bounds", "beyond the bounds"])
def test_updates_are_those_of_the_equations(outside):
    options = dict(expectile=0.8, beta=2.0, gamma=0.9, tau=0.3, max_weight=1.5)
    agent = IQL(
        MLPPolicy.for_env(SPACES, hidden=(8,), seed=0),
        QVCritic.for_env(SPACES, hidden=(8,), normalize=True, seed=1),
        lr=RATE,
        decay_steps=150,
        **options,
    )
    plain = PlainIQL(agent, horizon=150, **options)
    at_bound = 0
    for seed in range(UPDATES):
        fragment = random_fragment(T=4, B=5, seed=seed)
        if outside:
            state = fragment.state
            fragment = fragment._replace(state=state._replace(act=2 * state.act))
        measured = agent.update(fragment)
        expected, weights = plain.update(rows_of(fragment))
        at_bound += sum(weight == options["max_weight"] for weight in weights)
        for name, x in expected.items():
            assert float(measured[name]) == pytest.approx(x, rel=1e-4, abs=1e-5), (seed, name)
    assert 0 < at_bound < plain.steps  # both sides of the greatest weight are there

    def close(mine, other):
        torch.testing.assert_close(mine.detach().double(), other.detach(), rtol=1e-4, atol=1e-5)

    def layers(net):
        return [net[0].T, net[2], net[1].T, net[3]]

    actor, critic, target = agent.actor, agent.critic, agent.target
    value_net = critic.value_net
    of_policy = [*actor.trunk.hidden.parameters(), *actor.head.mean.parameters()]
    of_value = [*value_net.hidden.parameters(), *value_net.last.parameters()]
    close(actor.head.log_std, plain.log_std)

    # Weights, and the averages that their optimisers keep of them
    def averages(optimizer, params):
        states = [optimizer.state[p] for p in params]
        return [[state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")]

    for name, mine, params in (
        ("policy", of_policy, plain.policy),
        ("value", of_value, plain.value),
    ):
        optimizer = agent.optimizers["policy" if name == "policy" else "critic"]
        found = [mine, *averages(optimizer, mine)]
        expected = [params, *averages(plain.adams[name], params)]
        for these, those in zip(found, expected):
            for p, x in zip(these, layers(those)):
                close(p, x)

    of_q = [*critic.net.weights, *critic.net.biases]
    found = [of_q, *averages(agent.optimizers["critic"], of_q)]
    both = [[q, *averages(plain.adams["q"], q)] for q in plain.q]
    for these, first, second in zip(found, *both):
        for k, p in enumerate(these):
            close(p, torch.stack([first[k], second[k]]).reshape(p.shape))
    for k, p in enumerate([*target.net.weights, *target.net.biases]):
        close(p, torch.stack([q[k] for q in plain.target]).reshape(p.shape))
