"""The picture of README: the curves of `benchmarks/results/peers` on the four environments of version 5.

    python benchmarks/peers_picture.py            # writes docs/peers.png

Lines are interquartile means over the runs, and bands are 95 % intervals by the bootstrap, as in `rollpipe report`.
"""

from pathlib import Path

from matplotlib.figure import Figure

from rollpipe.results.collect import read_results
from rollpipe.results.tables import curve_of, draw_curve
from rollpipe.runs.plots import save_figure, style

ROOT = Path(__file__).resolve().parents[1]
NAMES = {
    "trpo": ("rollpipe, TRPO", "C3"),
    "sb3-contrib": ("sb3-contrib, TRPO", "C0"),
    "tianshou": ("Tianshou, TRPO", "C2"),
    "stable-baselines3": ("Stable-Baselines3, PPO", "C1"),
}


def main():
    rows = read_results(ROOT / "benchmarks/results/peers").rows
    environments = sorted({row.env for row in rows if row.env.endswith("-v5")})
    figure = Figure(figsize=(12, 3.4), dpi=130, layout="constrained")
    for axes, env in zip(figure.subplots(1, len(environments)), environments):
        for label, (name, color) in NAMES.items():
            row = next(row for row in rows if row.env == env and row.label == label)
            draw_curve(axes, curve_of(row), color, f"{name} ({len(row.complete)} seeds)")
        style(axes, env)
        axes.set_xticks([0, 500_000, 1_000_000], ["0", "500k", "1M steps"])
    axes = figure.axes[0]
    axes.set_ylabel("return of the greedy policy")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    save_figure(figure, ROOT / "docs/peers.png")


if __name__ == "__main__":
    main()
