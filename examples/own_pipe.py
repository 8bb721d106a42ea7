"""A pipe of one's own stands in the pipeline: it gives less reward for a strong push."""

from rollpipe import PPO, Critic, FragmentCollector, MLPPolicy, draw, on_policy
from rollpipe.pipes import Pipe, with_rewards


class EffortCost(Pipe):
    """Takes the squared action, times `weight`, from each reward.

    The rewards of the environment stay beside the new ones, so the returns of episodes are true.
    """

    reads = 1  # one item for each that it reads, so the graph knows its length

    def __init__(self, pipe, weight=0.1):
        super().__init__(pipe)
        self.weight = weight

    def stream(self, items):
        for fragment in items:
            # A row has the action that led to it, and its reward.
            effort = fragment.state.act.square().sum(-1)  # [T + 1, B]
            yield with_rewards(fragment, fragment.state.rew - self.weight * effort)


def main():
    actor = MLPPolicy.for_env("Pendulum-v1", seed=0)
    critic = Critic.for_env("Pendulum-v1", seed=1)
    edit = EffortCost.inserter(after=FragmentCollector, weight=0.2)
    pipe = on_policy("Pendulum-v1", actor, critic, n_envs=8, n_steps=64, seed=0, edits=[edit])
    print(draw(pipe))
    agent = PPO(actor, critic)
    for _, batch in zip(range(5), pipe):
        metrics = agent.update(batch)
    print(f"approximate KL divergence {metrics['approx_kl']:.4f}")
    return metrics["approx_kl"]


if __name__ == "__main__":
    main()
