"""A training with three callbacks: a metric, a wish to stop, and a file of one's own."""

from math import inf

from rollpipe.runs import Observer, Wish, make_config, read_metrics, start, train


def largest_weight(run, record):
    "What a callback returns is recorded with the metrics of this update."
    return {"my/largest_weight": max(p.abs().max() for p in run.agent.actor.parameters())}


def good_enough(run, record):
    "A wish may stop the training, or save a checkpoint."
    mean = record.get("return_mean", -inf)  # no episode may have ended yet
    return Wish(stop="the return is above 150" if mean > 150 else None)


class Lines(Observer):
    "Writes one line an update. `close` is called also when the training fails."

    when = "record"

    def begin(self, run):
        self.file = open(run.folder / "returns.txt", "w")

    def after(self, record):
        print(record["steps"], record.get("return_mean"), file=self.file)

    def close(self):
        self.file.close()


def main():
    options = dict(n_envs=8, n_steps=128)
    config = make_config("ppo", "CartPole-v1", options, steps=100_000)
    run = start("runs/callbacks", config, overwrite=True)
    train(run, progress=False, callbacks=[largest_weight, good_enough, Lines()])
    lines = (run.folder / "returns.txt").read_text().splitlines()
    weights = read_metrics(run.folder)["my/largest_weight"]
    print(f"{len(lines)} updates, stopped because {run.history.stopped}")
    return len(lines) == len(weights) == run.counters["updates"]


if __name__ == "__main__":
    main()
