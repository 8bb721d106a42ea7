"""A run is forked after an update with another option, and the two are compared."""

from rollpipe.runs import diff, fork, make_config, resume, start, train


def main():
    options = dict(n_envs=8, n_steps=64)
    config = make_config("ppo", "CartPole-v1", options, steps=5120)
    base = start("runs/base", config, overwrite=True)
    train(base, progress=False)

    # The same options: the fork equals the run, bit for bit.
    same = fork(base.folder, "runs/same", at=4, overwrite=True)
    train(resume(same), progress=False)
    print(diff(base.folder, same))

    # Another option: it says which, and where the numbers part.
    other = fork(base.folder, "runs/narrow", at=4, overwrite=True, clip=0.05)
    train(resume(other), progress=False)
    difference = diff(base.folder, other)
    print(difference)
    return difference.parting.after


if __name__ == "__main__":
    main()
