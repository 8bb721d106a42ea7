"""The card of each algorithm: what it is, its source and its equation, its actions, options and presets, and how it learns.

`cards.toml` has what no program knows. All else is read from the algorithm and from the results of the benchmarks.
"""

import inspect
import io
import json
import re
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from rollpipe.settings.algorithms import ALGORITHMS, options_for
from rollpipe.settings.files import presets_of, read_table
from rollpipe.settings.listing import kinds_for

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "benchmarks" / "results"
# The benchmarks with the presets, or close to them. Their rows are about rollpipe alone.
BENCHES = "learning", "classic", "off_policy", "box2d", "mujoco", "off_policy_mujoco", "crossq"
MOST_CHARTS = 3


def curves_of(algorithm):
    "Environment -> (label, seed) -> list of (steps, mean return). The first benchmark with an environment counts."
    curves = {}
    for bench in BENCHES:
        of_bench = {}
        for line in (RESULTS / bench / "report.jsonl").read_text().splitlines():
            row = json.loads(line)
            if row["algorithm"] == algorithm and row["kind"] == "training":
                of_env = of_bench.setdefault(row["environment"], {})
                points = of_env.setdefault((row["label"], row["seed"]), [])
                points.append((row["steps"], row["mean"]))
        curves = of_bench | curves
    return curves


def picture(curves):
    "One chart for each environment: a line for each seed, as SVG."
    matplotlib.rcParams["svg.hashsalt"] = "rollpipe"  # the same file again
    environments = list(curves)[:MOST_CHARTS]
    figure = Figure(figsize=(3.3 * len(environments), 2.5), layout="constrained")
    for axes, env in zip(np.atleast_1d(figure.subplots(1, len(environments))), environments):
        labels = list(dict.fromkeys(label for label, _ in curves[env]))
        for (label, _), points in curves[env].items():
            steps, means = zip(*sorted(points))
            axes.plot(steps, means, color=f"C{labels.index(label)}", linewidth=1)
        for k, label in enumerate(labels if len(labels) > 1 else ()):
            axes.plot([], [], color=f"C{k}", label=label)
        if len(labels) > 1:
            axes.legend(fontsize=7, frameon=False)
        axes.set_title(env, fontsize=9)
        axes.set_xlabel("environment steps", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.xaxis.set_major_formatter(
            lambda x, _: f"{x / 1e6:g}M" if x >= 1e6 else f"{x / 1e3:g}k" if x else "0"
        )
        axes.spines[["top", "right"]].set_visible(False)
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata=dict(Date=None))
    return file.getvalue()


def description(learner):
    "The paragraphs of a docstring before its arguments and examples: without the source, and the source."
    text = inspect.cleandoc(learner.__doc__)
    text = text.split("\n\nArgs:")[0]
    paragraphs = [
        " ".join(x.split()) for x in text.split("\n\n") if not x.strip().startswith(">>>")
    ]
    sources = [x for x in paragraphs if re.match("Sources?:", x)]
    others = [x for x in paragraphs if x not in sources]
    return others, " ".join(re.sub("^Sources?: *", "", x) for x in sources)


def cell(text):
    return str(text).replace("|", "\\|").replace("\n", " ")


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(cell, row)) + " |" for row in lines)


def preset_rows(algorithm):
    for name, preset in presets_of(algorithm).items():
        settings = [f"{key}={x}" for key, x in preset.items() if key not in ("envs", "actions")]
        environments = ", ".join(preset.get("envs", [])) or name
        yield environments, f"`{' '.join(settings)}`"


def card(name, written, has_picture):
    "The page of an algorithm."
    algorithm = ALGORITHMS[name]
    learner = algorithm.learner
    about, source = description(learner)
    parts = [f"# {written['title']}", *about]
    facts = [
        ("name", f"`{name}`"),
        ("class", f"{{py:obj}}`{learner.__module__}.{learner.__name__}`"),
        ("source", source or "-"),
        ("learns from", written["learns_from"]),
        ("actions", ", ".join(kinds_for(name))),
    ]
    parts.append(table(("", ""), facts))
    parts.append(f"$$\n{written['equation']}\n$$\n\n{written['symbols']}")

    # It can be pasted: what learns from data needs to know where they are.
    needs_data = " --data runs/x/recording" if written["learns_from"].startswith("recorded") else ""
    env = "CartPole-v1" if "Discrete" in kinds_for(name) else "Pendulum-v1"
    parts.append(f"```sh\nrollpipe train {name} {env}{needs_data}\n```")

    if has_picture:
        parts.append("## How it learns")
        parts.append(f"![Returns of {written['title']} over environment steps]({name}.svg)")
        parts.append(
            "Each line is the mean return of one seed's policy, by evaluations without exploration. "
            "[Results](../results.md) says how they were measured."
        )

    parts.append("## Its own options")
    own = [option for option in options_for(name) if option.part == "learner"]
    rows = [(f"`{x.flag}`", f"`{x.default_text}`", x.changes, x.help) for x in own]
    parts.append(table(("option", "default", "in a run that goes on", "meaning"), rows))
    parts.append(
        f"`rollpipe list options {name}` has those of the pipeline and the networks, too, and "
        "[Change options while it learns](../howto/change.md) the ways to change one."
    )

    presets = list(preset_rows(name))
    if presets:
        parts.append("## Presets")
        parts.append(table(("environments", "settings"), presets))
    return "\n\n".join(parts) + "\n"


def cards(out):
    "Write the pages of all algorithms, and the page that lists them."
    written = read_table(HERE / "cards.toml")
    if written.keys() != ALGORITHMS.keys():
        raise SystemExit(
            f"docs/cards.toml differs from the algorithms: {written.keys() ^ ALGORITHMS.keys()}"
        )
    rows = []
    for name, entry in written.items():
        curves = curves_of(name)
        if curves:
            out.write(f"algorithms/{name}.svg", picture(curves))
        out.write(f"algorithms/{name}.md", card(name, entry, bool(curves)))
        link = f"[{entry['title']}]({name}.md)"
        rows.append((link, f"`{name}`", entry["learns_from"], ", ".join(kinds_for(name))))
    index = [
        "# Algorithms",
        "Each has a card: its equation and source, what it can act on, its options and presets, and how it learns.",
        table(("algorithm", "name", "learns from", "actions"), rows),
        "```{toctree}\n:hidden:\n" + "\n".join(written) + "\n```",
    ]
    out.write("algorithms/index.md", "\n\n".join(index) + "\n")
