"""Milliseconds of a recurrent layer over a fragment, packed, as a ratio to step by step in the same run.

    python benchmarks/recurrent.py [--cells gru lstm] [--sizes 8 64] [--repeats 5] [--threads 1]

T = 128, 64 features, memory 64. Episodes: none end within the fragment ("none"); they end after 50 steps on average ("many"); they are 20
steps long ("short"); one ends in each column, at any row, and the rest of the column is frozen ("sticky"). The phases are a forward pass,
a forward and backward pass, and the two products that a trust-region step needs for each direction: Jacobian-vector and vector-Jacobian.
For comparison there are a hand-written loop that runs torch's layer from one row where any episode begins to the next, and torch's layer
over the whole fragment without any reset (the floor). The runs are interleaved and give the same numbers.
"""

import statistics
from time import perf_counter

import torch
from report import header, options_of, spread, table
from torch.autograd import grad

from rollpipe.layers import GRU, LSTM

T = 128
F = 64
H = 64
CELLS = dict(gru=GRU, lstm=LSTM)


def ends(kind, n_envs):
    "`fin` [T, B]; row 0 begins no episode."
    generator = torch.Generator().manual_seed(0)
    fin = torch.rand(T, n_envs, generator=generator) < (0.02 if kind == "many" else 0)
    if kind == "short":
        fin = (
            torch.arange(T)[:, None] + torch.randint(20, (n_envs,), generator=generator)
        ) % 20 == 0
    if kind == "sticky":
        fin = torch.arange(T)[:, None] >= torch.randint(1, T, (n_envs,), generator=generator)
    fin[0] = False
    return fin


def by_segments(layer, x, fin, hx):
    "Run the layer from one row where any episode begins to the next such row."
    cuts = [0, *(fin.any(1).nonzero()[:, 0]).tolist(), T]
    y = []
    for i, j in zip(cuts, cuts[1:]):
        if i:
            hx = torch.utils._pytree.tree_map(lambda h, i=i: h * ~fin[i][:, None], hx)
        out, hx = layer.rnn(x[i:j], hx)
        y.append(out)
    return torch.cat(y)


def variants(cell, n_envs, kind):
    "name -> function that runs the layer, and the inputs."
    torch.manual_seed(0)
    step = CELLS[cell](F, H, method="step")
    packed = CELLS[cell](F, H)
    packed.load_state_dict(step.state_dict())
    x = torch.randn(T, n_envs, F)
    fin = ends(kind, n_envs)
    hx = step.initial(torch.randn(1, n_envs, H))
    return dict(
        step=(step, lambda: step(x, fin, hx)[0]),
        packed=(packed, lambda: packed(x, fin, hx)[0]),
        segments=(packed, lambda: by_segments(packed, x, fin, hx)),
        floor=(packed, lambda: packed.rnn(x, hx)[0]),
    )


def phases(layer, run):
    "Milliseconds of a forward pass, of forward and backward pass, and of both Jacobian products; and the result."
    times = []
    params = list(layer.parameters())
    with torch.no_grad():
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    start = perf_counter()
    y = run()
    grad(y, params, torch.ones_like(y), retain_graph=True)
    times.append(perf_counter() - start)
    at = torch.zeros_like(y, requires_grad=True)
    v = [torch.ones_like(p) for p in params]
    g = grad(y, params, at, create_graph=True)
    start = perf_counter()
    tangent = grad(g, at, v, retain_graph=True)[0]
    grad(y, params, tangent)
    return [1000 * t for t in (*times, perf_counter() - start)], y.detach()


def measure(cell, n_envs, kind, repeats):
    "Rows of the table: one for each of the three phases."
    runs = variants(cell, n_envs, kind)
    results = {name: phases(*run)[1] for name, run in runs.items()}
    for name in ("packed", "segments"):
        torch.testing.assert_close(results[name], results["step"], rtol=1e-6, atol=1e-6)
    times = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(phases(*run)[0])
    rows = []
    for i, phase in enumerate(("forward", "with backward", "JVP + VJP")):
        ms = {name: [t[i] for t in ts] for name, ts in times.items()}
        ratio = {name: [a / b for a, b in zip(ms[name], ms["step"])] for name in ms}
        rows.append(
            [
                cell,
                n_envs,
                kind,
                phase,
                f"{statistics.median(ms['step']):.1f}",
                *(spread(ratio[name]) for name in ("packed", "segments", "floor")),
            ]
        )
    return rows


if __name__ == "__main__":
    parser = options_of(__doc__, cells=["gru", "lstm"], sizes=[8, 64], repeats=5, threads=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(header(("torch", "rollpipe")))
    rows = [
        row
        for cell in args.cells
        for n in args.sizes
        for kind in ("none", "many", "short", "sticky")
        for row in measure(cell, n, kind, args.repeats)
    ]
    print(
        table(
            [
                "cell",
                "B",
                "ends",
                "phase",
                "step by step [ms]",
                "packed / step",
                "segments / step",
                "no resets / step",
            ],
            rows,
        )
    )
