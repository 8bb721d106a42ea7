"""An algorithm of one's own is a loss. This one learns only from actions that did better than expected."""

from rollpipe import Critic, MLPPolicy, evaluate, on_policy
from rollpipe.agents import ActorCriticLearner


class GoodSurprises(ActorCriticLearner):
    "A2C whose advantages are cut at zero. Fields are options: `lr` has another default here."

    lr: float = 1e-3

    def loss(self, batch):
        # Rows that are no transition are left out of every loss.
        valid = batch.valid
        log_probability = self.actor.replay(batch)["logp"]  # [T, B], with gradients
        policy = -(batch.adv.clamp(min=0) * log_probability)[valid].mean()
        error = self.critic(batch.state.obs[:-1]) - batch.ret
        value = error[valid].square().mean()
        metrics = dict(loss_policy=policy.detach(), loss_value=value.detach())
        return policy + self.c_value * value, metrics


def main():
    actor = MLPPolicy.for_env("CartPole-v1", seed=0)
    critic = Critic.for_env("CartPole-v1", seed=1)
    agent = GoodSurprises(actor, critic, lr=3e-3)
    pipe = on_policy("CartPole-v1", actor, critic, n_envs=8, n_steps=32, seed=0)
    for update, batch in zip(range(200), pipe):
        metrics = agent.update(batch)
        if update % 50 == 49:
            print(f"update {update + 1}: explained variance {metrics['explained_variance']:.2f}")
    result = evaluate("CartPole-v1", actor, n_episodes=20, seed=0)
    print(result)
    return result.mean


if __name__ == "__main__":
    main()
