"""PPO whose features also have to predict the next observation."""

from torch import nn

from rollpipe import PPO, Critic, MLPPolicy, on_policy


class PredictingPPO(PPO):
    """A network that is an attribute of the learner is trained by its optimiser, and saved with it.

    `c_predict` is the weight of the prediction's loss.
    """

    c_predict: float = 0.1

    def __post_init__(self):
        super().__post_init__()
        self.predict_next = nn.Linear(64, 4)  # from the 64 units of the actor's hidden layer

    def loss(self, batch):
        loss, metrics = super().loss(batch)
        observations = batch.state.obs  # [T + 1, B, 4]
        features = self.actor.hidden_features(observations[:-1])
        error = self.predict_next(features) - observations[1:]

        # Where an episode ends, the next row belongs to another one.
        goes_on = batch.valid & ~batch.state.fin[1:]
        prediction = error[goes_on].square().mean()
        metrics = {**metrics, "predicting/error": prediction.detach()}
        return loss + self.c_predict * prediction, metrics


def main():
    actor = MLPPolicy.for_env("CartPole-v1", seed=0)
    critic = Critic.for_env("CartPole-v1", seed=1)
    agent = PredictingPPO(actor, critic, lr=1e-3)
    errors = []
    for _, batch in zip(range(20), on_policy("CartPole-v1", actor, critic, n_steps=64, seed=0)):
        errors.append(float(agent.update(batch)["predicting/error"]))
    print(f"squared error of the prediction: {errors[0]:.3f} at first, {errors[-1]:.3f} at last")
    return errors[-1] / errors[0]


if __name__ == "__main__":
    main()
