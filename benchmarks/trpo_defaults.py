"""Learning curves of TRPO with fewer products and with fewer rows for the Fisher matrix: do they learn what the defaults learn?

    python benchmarks/trpo_defaults.py [--envs CartPole-v1 Pendulum-v1 HalfCheetah-v5] [--seeds 5] [--variants NAME ...] [--out FILE]

8 environments x 256 steps and the defaults of the command line otherwise; a variant changes only what `VARIANTS` says. The trainings run
one after another in this process, and the variants of a seed follow one another. Each that has ended adds a line of JSON to FILE, and
those that are in FILE already are not run again, so a run that was cut off goes on. With `--steps`, name another FILE.

The final return is the mean of 20 fresh episodes of the greedy policy. The area under the curve is the mean over the steps of the return
of the training's own episodes, with straight lines between updates. A variant is compared with the defaults seed by seed; the interval
has 95 % of the mean differences in a bootstrap over the seeds. With five seeds such an interval is too narrow rather than too wide.
"""
import json, tempfile
from itertools import product
from pathlib import Path
from time import process_time

import numpy as np
import torch
from report import header, options_of, table

from rollpipe.agents import evaluate
from rollpipe.settings.config import make_config
from rollpipe.runs.logs import read_metrics
from rollpipe.runs.folder import start
from rollpipe.runs.training import train

ROOT = Path(__file__).resolve().parents[1]
STEPS = {'CartPole-v1': 100_000, 'Pendulum-v1': 100_000, 'HalfCheetah-v5': 200_000}
PRECONDITIONED = dict(precondition=512, cg_iters=5)
VARIANTS = {
    'defaults': {}, 'preconditioned': PRECONDITIONED, 'fvp_subsample=0.1': dict(fvp_subsample=.1),
    'both': PRECONDITIONED | dict(fvp_subsample=.1)}


def area(steps, returns) -> float:
    "Mean of the curve over the steps; updates in which no episode ended have no return. nan, if fewer than two have one."
    known = np.isfinite(returns)
    x, y = steps[known], returns[known]
    if len(x) < 2: return float('nan')
    return float(((y[1:] + y[:-1]) / 2 * np.diff(x)).sum() / (x[-1] - x[0]))


def one(env, variant, seed, steps) -> dict:
    "One training, and what its policy reaches afterwards. Seconds of the training, without the evaluation."
    config = make_config('trpo', env, VARIANTS[variant] | dict(n_envs=8, n_steps=256), seed=seed, steps=steps)
    with tempfile.TemporaryDirectory() as folder:
        run, began = start(folder, config), process_time()
        wall = train(run, progress=False, tensorboard=False)['seconds']
        processor, found = process_time() - began, read_metrics(folder)
    returns = found.get('return_mean', np.full(len(found['steps']), np.nan))
    final = evaluate(env, run.agent.actor, 20, n_envs=20, seed=20_000 + seed).mean
    return dict(env=env, variant=variant, seed=seed, steps=steps, final=final, area=area(found['steps'], returns), wall=wall,
                processor=processor, policy=float(found['seconds_policy'].sum()), products=float(found['cg_iterations'].mean()))


def interval(differences, repeats=10_000) -> str:
    "Mean of the differences, and the interval of 95 % of the means of resampled ones."
    means = np.random.default_rng(0).choice(differences, (repeats, len(differences))).mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return f'{np.mean(differences):+.1f} ({low:+.1f} to {high:+.1f})'


def rows_of(runs, env, variants):
    "Rows of the table for one environment; a variant is compared with the defaults of the same seeds."
    by = {(run['variant'], run['seed']): run for run in runs if run['env'] == env}
    for variant in variants:
        mine = [run for (name, _), run in by.items() if name == variant]
        if not mine: continue
        pairs = [(run, by['defaults', run['seed']]) for run in mine if ('defaults', run['seed']) in by]
        mean = {key: np.mean([run[key] for run in mine]) for key in ('final', 'area', 'wall', 'processor', 'policy', 'products')}
        finals, compared = [run['final'] for run in mine], [''] * 3
        if pairs and variant != 'defaults':
            compared = [interval([a[key] - b[key] for a, b in pairs]) for key in ('final', 'area')]
            compared.append(f"{np.median([b['policy'] / a['policy'] for a, b in pairs]):.2f}")
        yield [env, variant, len(mine), f"{mean['final']:.0f} ({min(finals):.0f} to {max(finals):.0f})", compared[0],
               f"{mean['area']:.0f}", compared[1], *(f"{mean[key]:.1f}" for key in ('wall', 'processor', 'policy')), compared[2],
               f"{mean['products']:.1f}"]


def finished(path) -> list:
    "The runs in the file. A line that was cut off does not count."
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    if lines and not lines[-1].endswith('\n'):
        lines.pop()
        path.write_text(''.join(lines))
    return [json.loads(line) for line in lines]


def main():
    args = options_of(__doc__, seeds=5)
    args.add_argument('--envs', nargs='+', default=list(STEPS), choices=list(STEPS))
    args.add_argument('--variants', nargs='+', default=list(VARIANTS), choices=list(VARIANTS))
    args.add_argument('--steps', type=int, help="number of steps, in place of those of each environment")
    args.add_argument('--out', type=Path, default=ROOT/'runs'/'trpo_defaults.jsonl', metavar='FILE')
    args.add_argument('--table', action='store_true', help="only print the table of what is in FILE")
    args = args.parse_args()
    torch.set_num_threads(1)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    runs = finished(args.out)
    if not args.table: one(args.envs[0], 'both', 0, 2048)    # the first training also imports what torch imports late
    for seed, env, variant in () if args.table else product(range(args.seeds), args.envs, args.variants):
        steps = args.steps or STEPS[env]
        if any((run['env'], run['variant'], run['seed'], run['steps']) == (env, variant, seed, steps) for run in runs): continue
        runs.append(one(env, variant, seed, steps))
        with args.out.open('a') as file: print(json.dumps(runs[-1]), file=file)
    print(header())
    print(table(['environment', 'variant', 'seeds', 'final return, mean (range)', 'to the defaults', 'area', 'to the defaults',
                 'wall time [s]', 'processor time [s]', 'policy [s]', 'policy, times as fast', 'products'],
                [row for env in args.envs for row in rows_of(runs, env, args.variants)]))


if __name__ == '__main__': main()
