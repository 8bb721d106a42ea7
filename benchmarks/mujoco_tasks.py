"""TRPO and PPO on MuJoCo for a million steps, beside the published figures. It takes hours, so run it by hand.

    python benchmarks/mujoco_tasks.py [--envs Hopper-v5 HalfCheetah-v5] [--algos trpo ppo] [--steps 1000000] [--seeds 3] ...

TRPO has the settings of rl-baselines3-zoo and PPO those of Tianshou, as far as rollpipe has them; all of them are printed. Observations and
advantages are normalised; rewards are divided by the deviation of their discounted return (`RewardScaler`, inserted into the pipeline that
`rollpipe.runs.training` has built). The greedy policy plays 10 fresh episodes every 50 000 steps, and 100 others at the end, all for the
environment's own rewards. DIR gets `mujoco.json` with the curves. Runs that are in it already are kept, unless they are run again: with
`--only-seeds 1` a training can be spread over several calls.

This file is not called `mujoco.py`, because that would hide the package of that name.

The published figures differ: Tianshou publishes the best mean of the evaluations of a run, the others publish the last policy. Both are
printed for rollpipe. Some settings differ from the published ones: learning rates do not decay (Tianshou: to 0), the critic also keeps
the scale of its targets, advantages are not computed anew in each epoch (Tianshou), and the zoo's PPO is tuned for each environment.
"""
import argparse, json, statistics
from pathlib import Path

from learning import ROOT, in_processes, learn
from report import header, table

from rollpipe.pipes import Lanes, RewardScaler
from rollpipe.settings.config import make_config

SHARED = dict(gamma=.99, lam=.95, hidden=(64, 64), critic_hidden=(64, 64), normalize=True, critic_normalize=True)
OPTIONS = dict(
    trpo=SHARED | dict(n_envs=2, n_steps=1024, max_kl=.01, damping=.1, cg_iters=25, backtrack=.8, max_backtracks=10, critic_lr=1e-3,
                       critic_epochs=20),
    ppo=SHARED | dict(n_envs=8, n_steps=256, epochs=10, minibatch=64, clip=.2, c_value=.25, c_entropy=0., lr=3e-4, max_grad_norm=.5,
                      log_std=-.5))
EXCEPTIONS = {('trpo', 'HalfCheetah-v5'): dict(max_kl=.04)}
SCALED = dict(gamma=.99, clip=10.)
# After 1 M steps on older versions of the environments: mean and deviation over 10 seeds, over 3 seeds (TRPO), or over the episodes of one
# policy, tuned for that environment (PPO: benchmark.md of rl-baselines3-zoo)
PUBLISHED = {
    ('trpo', 'Hopper-v5'): ('2046 +- 1038', '3372 +- 215'), ('trpo', 'HalfCheetah-v5'): ('4471 +- 805', '1803 +- 46'),
    ('ppo', 'Hopper-v5'): ('2609 +- 701', '2410 +- 10'), ('ppo', 'HalfCheetah-v5'): ('5784 +- 1244', '5819 +- 664')}


def options(algorithm, env): return OPTIONS[algorithm] | EXCEPTIONS.get((algorithm, env), {})


def one(env, algorithm, seed, steps, every, episodes) -> dict:
    "The run of one algorithm with one seed."
    config = make_config(algorithm, env, options(algorithm, env), seed=seed, steps=steps)
    return dict(task=env, name=algorithm, **learn(config, every, episodes, RewardScaler.inserter(after=Lanes, **SCALED)))


def spread(values):
    "Mean and standard deviation, in the form of the published figures."
    return f'{statistics.mean(values):.0f}' + (f' +- {statistics.stdev(values):.0f}' if len(values) > 1 else '')


def rows_of(runs, envs, algorithms):
    "Rows of the table."
    for env in envs:
        for algorithm in algorithms:
            found = [run for run in runs if (run['task'], run['name']) == (env, algorithm)]
            if not found: continue
            tianshou, zoo = PUBLISHED.get((algorithm, env), ('', ''))
            steps, seconds = (statistics.median(x) for x in ([r['steps'][-1] for r in found], [r['seconds'] for r in found]))
            yield [env, algorithm, len(found), f'{steps:,.0f}', spread([run['final'] for run in found]), zoo,
                   spread([max(run['returns']) for run in found]), tianshou, f'{seconds:.0f}']


def settings(envs, algorithms) -> str:
    "All hyper-parameters, including those with default values."
    lines = []
    for algorithm in algorithms:
        given = make_config(algorithm, envs[0], OPTIONS[algorithm])['options']
        lines.append(f'{algorithm}: ' + ', '.join(f'{name}={value}' for name, value in given.items()))
        lines += [f'{algorithm} on {env}: ' + ', '.join(f'{name}={value}' for name, value in EXCEPTIONS[algorithm, env].items())
                  for env in envs if (algorithm, env) in EXCEPTIONS]
    return '\n'.join([*lines, 'RewardScaler: ' + ', '.join(f'{name}={value}' for name, value in SCALED.items())])


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument('--envs', nargs='+', default=['Hopper-v5', 'HalfCheetah-v5'])
    args.add_argument('--algos', nargs='+', default=['trpo', 'ppo'], choices=list(OPTIONS))
    args.add_argument('--steps', type=int, default=1_000_000)
    args.add_argument('--seeds', type=int, default=3)
    args.add_argument('--only-seeds', type=int, nargs='+', metavar='SEED', help="run only these seeds")
    args.add_argument('--every', type=int, default=50_000, help="steps between evaluations")
    args.add_argument('--jobs', type=int, default=2, help="number of runs at the same time")
    args.add_argument('--out', type=Path, default=ROOT/'runs'/'mujoco', metavar='DIR', help="folder of mujoco.json")
    args.add_argument('--one', type=json.loads, help=argparse.SUPPRESS)
    args = args.parse_args()
    if args.one:
        print(json.dumps(one(*args.one)))
        return
    print(header(('torch', 'gymnasium', 'mujoco', 'rollpipe')))
    print(settings(args.envs, args.algos), '\n', flush=True)
    jobs = [(env, algorithm, seed, args.steps, min(args.every, args.steps), 10) for seed in args.only_seeds or range(args.seeds)
            for env in args.envs for algorithm in args.algos]
    runs = in_processes(__file__, jobs, args.jobs, args.out/'mujoco.json')
    print(table(['environment', 'algorithm', 'seeds', 'steps', 'last policy', 'contrib, zoo', 'best evaluation', 'Tianshou',
                 'wall time [s]'], rows_of(runs, args.envs, args.algos)))


if __name__ == '__main__': main()
