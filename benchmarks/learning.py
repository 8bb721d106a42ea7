"""Learning curves of every algorithm over seeds: a table with the steps until it stays above a threshold, and a picture.

    python benchmarks/learning.py [--only cartpole ppo ...] [--seeds 3] [--steps N] [--quick] [--jobs 2] [--out DIR] [--redraw]

Every run is its own process with one torch thread, and trains through `rollpipe.runs`, with the defaults of the command line unless
`CASES` says otherwise. Between its updates the greedy policy plays the same fresh episodes, which its training never sees. "Steps needed"
ends with the first evaluation that reaches the threshold and after which none falls below it; the last score is the mean of 100 other
episodes after the training. DIR gets `learning.json` with the curves and `learning.png`. Runs that are in the JSON already are kept,
unless they are run again; `--redraw` runs none.
"""
import argparse, json, os, statistics, subprocess, sys, tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym
import numpy as np
from report import header, table

import rollpipe.testing  # noqa: F401    registers Recall-v0
from rollpipe.agents import evaluate
from rollpipe.agents.tabular import QLearning, TabularQ
from rollpipe.layers import RecurrentPolicy
from rollpipe.runs.logs import read_metrics
from rollpipe.pipes.recipes import rollouts
from rollpipe.runs.plots import align
from rollpipe.settings.algorithms import ALGORITHMS, Algorithm
from rollpipe.settings.config import make_config
from rollpipe.runs.folder import start
from rollpipe.runs.training import train

ROOT = Path(__file__).resolve().parents[1]
TAXI = max((name for name in gym.registry if name.startswith('Taxi-v')), key=lambda name: int(name.rpartition('v')[2]))


class Task(NamedTuple):
    "An environment, and when it counts as learned."
    env: str
    title: str
    enough: float  # mean return of an evaluation
    steps: int
    every: int  # steps between evaluations
    episodes: int = 20  # number of episodes of an evaluation
    view: tuple = None  # limits of the picture's y axis


TASKS = dict(
    cartpole=Task('CartPole-v1', 'CartPole-v1', 475, 50_000, 2000, view=(0, 525)),
    pendulum=Task('Pendulum-v1', 'Pendulum-v1', -200, 100_000, 5000, view=(-1500, 0)),
    taxi=Task(TAXI, TAXI, 7.5, 120_000, 5000, 100, view=(-120, 20)),
    recall=Task('Recall-v0', 'Recall: a cue, 20 steps later', .8, 300_000, 5000, 100, view=(-.65, 1.1)))


class Case(NamedTuple):
    "An algorithm with its options and those of its run, as in `make_config`."
    algorithm: str
    options: dict = {}
    run: dict = {}
    steps: int = None  # replaces the steps of the task


def q_table(actor, *, lr=.9, gamma=.9, eps_end=.05, eps_steps=50_000, seed=0):
    "`QLearning` with the signature that the registry needs; it draws nothing at random, so it ignores the seed."
    return QLearning(actor, lr=lr, gamma=gamma, eps_end=eps_end, eps_steps=eps_steps)


ALGORITHMS |= {f'recurrent_{name}': ALGORITHMS[name]._replace(policy=RecurrentPolicy, recurrent=()) for name in ('trpo', 'ppo')}
ALGORITHMS['q_table'] = Algorithm(q_table, rollouts, TabularQ, defaults=dict(n_envs=32, n_steps=8))
NETWORK = dict(hidden=(64,), lr=1e-2, gamma=.9, huber=None, target_every=50, eps_end=.05, eps_steps=50_000, n_envs=32, n_steps=4,
               capacity=50_000, n_batches=4, prioritized=True)
MEMORY = dict(hidden=(32,), memory=32, normalize=False, critic_hidden=(32,), critic_normalize=False, n_envs=32, n_steps=63,
              gamma=.9, lam=0.)
CASES = dict(
    cartpole={
        'REINFORCE': Case('reinforce'), 'A2C': Case('a2c'), 'PPO': Case('ppo'), 'NPG': Case('npg'), 'TRPO': Case('trpo'),
        'V-trace': Case('vtrace', dict(lanes=2), dict(workers=2, lag=None))},
    pendulum={'PPO': Case('ppo'), 'TRPO': Case('trpo')},
    taxi={
        'Q table': Case('q_table'), 'DQN': Case('dqn', NETWORK | dict(double=False)), 'double DQN': Case('dqn', NETWORK),
        'duelling DQN': Case('dqn', NETWORK | dict(duelling=True))},
    recall={'PPO': Case('recurrent_ppo', MEMORY, steps=60_000), 'TRPO': Case('recurrent_trpo', MEMORY)})
COLOURS = {
    'REINFORCE': '#cc79a7', 'A2C': '#009e73', 'PPO': '#0072b2', 'NPG': '#e69f00', 'TRPO': '#d55e00', 'V-trace': '#56b4e9',
    'double DQN': '#333333', 'DQN': '#a0522d', 'duelling DQN': '#7b3fa0', 'Q table': '#6b8e23'}


class Watched:
    "An agent that calls `look(steps)` before its first update, and after the first update past every multiple of `every` steps."
    def __init__(self, agent, look, every):
        self.agent, self.look, self.every, self.steps, self.due = agent, look, every, 0, every
        look(0)

    def __getattr__(self, name): return getattr(self.agent, name)

    def update(self, batch):
        metrics = self.agent.update(batch)
        self.steps += int(getattr(batch, 'fresh', batch).valid.sum())
        if self.steps >= self.due:
            self.look(self.steps)
            self.due = (self.steps // self.every + 1) * self.every
        return metrics


def learn(config, every, episodes, edit=lambda pipe: pipe) -> dict:
    "Train by `config` on the edited pipeline. Returns the mean returns of the greedy policy during the training and at the end."
    env, seed, curve = config['env'], config['seed'], dict(steps=[], returns=[])
    with tempfile.TemporaryDirectory() as folder:
        run = start(folder, config)
        actor = run.agent.actor

        def look(steps):
            curve['steps'].append(steps)
            curve['returns'].append(evaluate(env, actor, episodes, n_envs=min(20, episodes), seed=10_000 + seed).mean)

        run = run._replace(agent=Watched(run.agent, look, every), pipe=edit(run.pipe))
        seconds = train(run, progress=False, tensorboard=False)['seconds']
        lag = float(read_metrics(folder)['lag'].mean())
    final = evaluate(env, actor, 100, n_envs=20, seed=20_000 + seed)
    return dict(seed=seed, **curve, final=final.mean, stderr=final.stderr, lag=lag, seconds=seconds)


def one(task, name, seed, steps, every, episodes) -> dict:
    "The run of one case with one seed."
    case = CASES[task][name]
    config = make_config(case.algorithm, TASKS[task].env, case.options, seed=seed, steps=steps, **case.run)
    return dict(task=task, name=name, **learn(config, every, episodes))


def in_processes(file, jobs, at_once, path):
    """Run `file` in a process for each of the `jobs`, read the line of JSON that it prints, and add it to the list in `path`, where it
    replaces a run of the same task, name and seed. Returns that list."""
    runs = json.loads(path.read_text()) if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)

    def work(job):
        return subprocess.run([sys.executable, file, '--one', json.dumps(job)], stdout=subprocess.PIPE, text=True,
                              env=os.environ | dict(OMP_NUM_THREADS='1'))

    with ThreadPoolExecutor(at_once) as pool:
        for job, out in zip(jobs, pool.map(work, jobs)):
            if out.returncode:
                print('failed:', *job, file=sys.stderr)
                continue
            print(*job[:3], file=sys.stderr)
            new = json.loads(out.stdout.splitlines()[-1])
            same = lambda run, new=new: all(run[key] == new[key] for key in ('task', 'name', 'seed'))
            runs = [run for run in runs if not same(run)] + [new]
            path.write_text('[\n' + ',\n'.join(map(json.dumps, runs)) + '\n]\n')
    return runs


def needed(run):
    "Steps until the threshold is reached for good, or None."
    good = [score >= TASKS[run['task']].enough for score in run['returns']]
    return next((n for i, n in enumerate(run['steps']) if all(good[i:])), None)


def grouped(runs) -> dict:
    "(task, name) -> runs by seed, in the order of `CASES`."
    by = {(task, name): sorted((r for r in runs if (r['task'], r['name']) == (task, name)), key=lambda r: r['seed'])
          for task, cases in CASES.items() for name in cases}
    return {key: found for key, found in by.items() if found}


def rows_of(runs):
    "Rows of the table."
    for (task, name), found in grouped(runs).items():
        steps, form = [needed(run) for run in found], '{:.2f}' if task in ('taxi', 'recall') else '{:.0f}'
        median = statistics.median(float('inf') if n is None else n for n in steps)
        yield [TASKS[task].env, f'{TASKS[task].enough:g}', name, 'never' if median == float('inf') else f'{median / 1000:.0f}k',
               ' '.join('never' if n is None else f'{n / 1000:.0f}k' for n in steps),
               ' '.join(form.format(run['final']) for run in found)]


def draw(runs, path):
    """The picture: for each task the median of the seeds, with a band from the least to the greatest.

    It ends a while after the last run has reached the threshold for good: everything that is cut off is above the threshold.
    """
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    from PIL import Image
    style = {'font.size': 8, 'axes.spines.top': False, 'axes.spines.right': False, 'axes.edgecolor': '#888888', 'axes.titlesize': 9,
             'xtick.color': '#444444', 'ytick.color': '#444444', 'legend.frameon': False, 'legend.fontsize': 7.5}
    found, tasks = grouped(runs), [task for task in CASES if any(run['task'] == task for run in runs)]
    with plt.rc_context(style):
        n_columns = min(2, len(tasks))
        fig, axes = plt.subplots(-(-len(tasks) // n_columns), n_columns, figsize=(8.4, 5), layout='constrained', squeeze=False)
        for ax in axes.flat[len(tasks):]: ax.remove()
        for ax, task in zip(axes.flat, tasks): _panel(ax, task, {name: group for (t, name), group in found.items() if t == task})
        for ax in axes[-1]: ax.set_xlabel('thousand steps')
        for ax in axes[:, 0]: ax.set_ylabel('mean greedy return')
        fig.savefig(path, dpi=160)
        plt.close(fig)
    with Image.open(path) as image: small = image.convert('RGB').quantize(128, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


def _panel(ax, task, groups):
    last = settled = 0
    for name, runs in groups.items():
        steps, returns = align([(run['steps'], run['returns']) for run in runs])
        ax.fill_between(steps / 1000, returns.min(0), returns.max(0), color=COLOURS[name], alpha=.13, lw=0)
        # NPG equals TRPO as long as no step is shortened, so both lines must be visible
        ax.plot(steps / 1000, np.median(returns, 0), color=COLOURS[name], lw=3.2 if name == 'NPG' else 1.4, label=name)
        last = max(last, steps[-1] / 1000)
        settled = max(settled, *((needed(run) or run['steps'][-1]) / 1000 for run in runs))
    enough = TASKS[task].enough
    ax.axhline(enough, color='#777777', lw=.9, ls=(0, (4, 3)), zorder=1)
    ax.annotate(f'{enough:g}', (1, enough), (3, 0), ('axes fraction', 'data'), 'offset points', color='#777777', va='center')
    ax.set(title=TASKS[task].title, ylim=TASKS[task].view, xlim=(0, min(last, 1.5 * settled)))
    ax.legend(loc='lower right', ncols=1 if len(groups) < 5 else 2, handlelength=1.4)


def chosen(only):
    "The (task, name) that `--only` selects: the named tasks (all, if none is named) with the named algorithms (all, if none is)."
    plain = lambda name: name.lower().replace(' ', '-')
    names = {plain(name) for cases in CASES.values() for name in cases}
    if unknown := [word for word in map(plain, only) if word not in names | TASKS.keys()]:
        raise SystemExit(f"--only: unknown {', '.join(unknown)}; there are {', '.join([*TASKS, *sorted(names)])}")
    words = set(map(plain, only))
    return [(task, name) for task, cases in CASES.items() for name in cases
            if task in (words & TASKS.keys() or TASKS) and plain(name) in (words & names or names)]


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument('--only', nargs='+', default=[], metavar='WORD', help="tasks (cartpole ...) and algorithms (ppo, v-trace ...)")
    args.add_argument('--seeds', type=int, default=3)
    args.add_argument('--steps', type=int, help="number of steps, in place of those of each task")
    args.add_argument('--quick', action='store_true', help="one seed and a tenth of the steps, to see whether it runs")
    args.add_argument('--jobs', type=int, default=2, help="number of runs at the same time")
    args.add_argument('--out', type=Path, default=ROOT/'runs'/'learning', metavar='DIR', help="folder of learning.json and learning.png")
    args.add_argument('--redraw', action='store_true', help="make table and picture from the runs in DIR, without new runs")
    args.add_argument('--one', type=json.loads, help=argparse.SUPPRESS)
    args = args.parse_args()
    if args.one:
        print(json.dumps(one(*args.one)))
        return
    jobs = []
    for seed in range(0 if args.redraw else 1 if args.quick else args.seeds):
        for task, name in chosen(args.only):
            steps = args.steps or (CASES[task][name].steps or TASKS[task].steps) // (10 if args.quick else 1)
            jobs.append((task, name, seed, steps, min(TASKS[task].every, steps), TASKS[task].episodes))
    runs = in_processes(__file__, jobs, args.jobs, args.out/'learning.json')
    draw(runs, args.out/'learning.png')
    print(header())
    print(table(['environment', 'threshold', 'algorithm', 'steps needed', 'by seed', 'last score, by seed'], rows_of(runs)))


if __name__ == '__main__': main()
