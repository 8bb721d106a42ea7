"Sizes that somebody typed, or that stand in a file, are compared with the available memory before anything is built."

import io

import pytest
from gymnasium.spaces import Box, Discrete
from toys import Counting, Plain

from rollpipe.agents.checkpoint import save_checkpoint
from rollpipe.cli.main import main
from rollpipe.layers import (
    GRU,
    LSTM,
    MLP,
    ActionCritic,
    ConvTrunk,
    Critic,
    MLPPolicy,
    QPolicy,
    QuantilePolicy,
    RecurrentPolicy,
    SquashedPolicy,
)
from rollpipe.layers.critic import StackedMLP
from rollpipe.layers.encoders import Embeddings
from rollpipe.layers.q_networks import DuellingHead
from rollpipe.pipes import (
    DataError,
    EnvStepper,
    FragmentCollector,
    FragmentStacker,
    Minibatcher,
    Replay,
    ReplayMemory,
    replayed,
)
from rollpipe.pipes.data import errors
from rollpipe.pipes.data.errors import CheckpointError
from rollpipe.runs.folder import load_run, resume, start
from rollpipe.runs.states import edited
from rollpipe.runs.training import train
from rollpipe.settings.config import make_config


def fragments():
    return FragmentCollector(EnvStepper(Counting, Plain(), 2, seed=0), 4)


@pytest.mark.parametrize(
    "options",
    [
        dict(capacity=10**14),
        dict(capacity=10**14, prioritized=True),
        dict(batch_size=10**14),
        dict(batch_size=10**9, length=10**4, capacity=10**4),
    ],
    ids=str,
)
def test_a_replay_that_no_machine_has_room_for_is_refused_when_it_is_made(options):
    with pytest.raises(DataError) as e:
        Replay(fragments(), **{"capacity": 2000, **options})
    name = next(name for name in ("batch_size", "capacity") if options.get(name, 0) > 10**8)
    assert e.value.pipe in ("Replay", "ReplayMemory") and "not enough memory" in str(e.value)
    assert f"{name}={options[name]:,}, which needs" in e.value.got


def test_the_ring_is_compared_with_the_memory_that_there_is(monkeypatch):
    size = ReplayMemory(100)
    size.add(next(iter(fragments())))
    needed = size.store.records.nbytes
    for free in (needed, needed - 1):
        monkeypatch.setattr(errors, "available_memory", lambda free=free: free)
        memory = ReplayMemory(100)
        if free == needed:
            memory.add(next(iter(fragments())))
        else:
            with pytest.raises(
                DataError,
                match=f"ReplayMemory: not enough memory.*got capacity=100, which needs {needed:,} bytes",
            ):
                memory.add(next(iter(fragments())))


def test_samples_are_compared_when_the_size_of_a_step_is_known(monkeypatch):
    pipe = replayed(
        Counting, Plain(), n_envs=2, n_steps=4, capacity=20, batch_size=300, warmup=0, seed=0
    )
    monkeypatch.setattr(errors, "available_memory", lambda: 300 * 2 * 100)
    with pytest.raises(
        DataError, match="Replay: not enough memory.*got batch_size=300, which needs"
    ):
        next(iter(pipe))


def test_a_file_replay_needs_no_memory(tmp_path, monkeypatch):
    memory = ReplayMemory(100, path=tmp_path)
    monkeypatch.setattr(errors, "available_memory", lambda: 100)
    ReplayMemory(100, path=tmp_path)
    memory.add(next(iter(fragments())))


SPACES = (Box(-1, 1, (4,)), Discrete(2))
N = 10**9
LARGE = {
    "MLPPolicy": (lambda: MLPPolicy.for_env(SPACES, hidden=(8, N)), f"hidden=(8, {N})"),
    "Critic": (lambda: Critic.for_env(SPACES, hidden=(N,)), f"hidden=({N},)"),
    "QPolicy": (lambda: QPolicy.for_env(SPACES, hidden=(N,)), f"hidden=({N},)"),
    "many layers": (lambda: MLP(4, (10**5,) * 10), "hidden=(100000, "),
    "SquashedPolicy": (
        lambda: SquashedPolicy.for_env((SPACES[0], Box(-1, 1, (1,))), hidden=(N,)),
        f"hidden=({N},)",
    ),
    "ActionCritic": (
        lambda: ActionCritic.for_env((SPACES[0], Box(-1, 1, (1,))), hidden=(N,)),
        f"hidden=({N},)",
    ),
    "critics": (lambda: ActionCritic.for_env((SPACES[0], Box(-1, 1, (1,))), n_critics=N), f"k={N}"),
    "QuantilePolicy": (
        lambda: QuantilePolicy.for_env(SPACES, n_quantiles=10**10),
        "n_out=20000000000",
    ),
    "DuellingHead": (lambda: DuellingHead(4, 2, (N,)), f"hidden=({N},)"),
    "RecurrentPolicy": (lambda: RecurrentPolicy.for_env(SPACES, memory=N), f"n_out={N}"),
    "GRU": (lambda: GRU(3, 10**6), "n_out=1000000"),
    "LSTM": (lambda: LSTM(3, 10**4, layers=10**5), "n_out=10000, layers=100000"),
    "embeddings": (
        lambda: MLPPolicy.for_env(
            (Discrete(9), Discrete(2)), encoder=dict(discrete="embed", size=10**10)
        ),
        "size=10000000000",
    ),
    "images": (lambda: ConvTrunk((10, 10), 10**9), "n_out=1000000000"),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_network_that_no_machine_has_room_for_is_refused_before_its_weights_are_made(
    name, monkeypatch
):
    make, what = LARGE[name]

    def init(x, *args, **kwargs):
        assert x.numel() < 10**6, "large weights were made"

    for name in ("kaiming_uniform_", "orthogonal_", "normal_"):
        monkeypatch.setattr(f"torch.nn.init.{name}", init)
    text = r"not enough memory. Expected at most [\d,]+ bytes, got .* parameters, which needs [\d,]+ bytes"
    with pytest.raises(DataError, match=text) as e:
        make()
    assert what in e.value.got


@pytest.mark.parametrize(
    "make",
    [
        lambda: MLP(4, (8, 6), 2),
        lambda: StackedMLP(2, 4, (8,), 1),
        lambda: GRU(3, 5, 2),
        lambda: LSTM(3, 5, 2),
        lambda: Embeddings((2,), 3, size=4),
    ],
)
def test_the_weights_of_a_network_are_compared_with_the_memory_that_there_is(make, monkeypatch):
    "For each weight four numbers: while it is initialised, or with its gradient and the two averages of Adam."
    needed = 16 * sum(p.numel() for p in make().parameters())
    monkeypatch.setattr(errors, "available_memory", lambda: needed)
    make()
    monkeypatch.setattr(errors, "available_memory", lambda: needed - 1)
    with pytest.raises(
        DataError, match=f"{needed // 16:,} parameters, which needs {needed:,} bytes"
    ):
        make()


@pytest.mark.parametrize(
    "words, part",
    [("ppo --hidden", "MLPPolicy"), ("ppo --critic-hidden", "Critic"), ("dqn --hidden", "QPolicy")],
)
def test_layers_of_a_run_that_are_too_large(words, part, tmp_path, capsys):
    algorithm, flag = words.split()
    assert (
        main(
            ["train", algorithm, "CartPole-v1", flag, "1000000000", "--out", str(tmp_path / "run")]
        )
        == 2
    )
    text = capsys.readouterr().err
    assert (
        text.startswith(f"error: {part}: not enough memory")
        and "hidden=(1000000000,)" in text
        and " parameters" in text
    )
    assert text.count("\n") == 1 and not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def dqn(tmp_path_factory):
    options = dict(capacity=1000, warmup=10, batch_size=8, n_steps=8, n_envs=2, hidden=(8,))
    run = start(
        tmp_path_factory.mktemp("dqn") / "run",
        make_config("dqn", "CartPole-v1", options, {}, steps=100),
    )
    train(run, progress=False, tensorboard=False)
    return run


HARMS = [
    dict(capacity=10**12),
    dict(capacity=10**18),
    dict(batch_size=10**12),
    dict(length=10**12),
    dict(hidden=[8] * 10**5),
    dict(n_envs=10**12),
    dict(lanes=10**12),
    dict(n_steps=10**12),
]


@pytest.mark.parametrize("learnt", [True, False])
@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: next(iter(harm)))
def test_a_checkpoint_that_asks_for_too_much_is_refused_before_anything_is_built(
    harm, learnt, dqn, monkeypatch
):
    if learnt:
        counters = dict(
            dqn.counters, steps=10**17, updates=1
        )  # whoever writes such a file writes such counters, too
    else:
        counters = dict(dqn.counters, steps=0, updates=0)
    config = dict(dqn.config, steps=10**18, options={**dqn.config["options"], **harm})
    save_checkpoint(dqn.checkpoint, dqn.agent, config, counters, history=dqn.history)
    monkeypatch.setattr(
        "rollpipe.runs.folder.build", lambda *args: pytest.fail("something was built")
    )
    for load in (load_run, resume):
        with pytest.raises(
            CheckpointError, match=f"not a configuration that was saved.*{next(iter(harm))}"
        ):
            load(dqn.folder)


def test_the_file_itself_is_accepted(dqn):
    save_checkpoint(dqn.checkpoint, dqn.agent, dqn.config, dqn.counters, history=dqn.history)
    assert load_run(dqn.folder).config["options"]["capacity"] == 1000


def test_a_run_whose_batches_are_cut_is_accepted(tmp_path):
    run = start(
        tmp_path / "run",
        make_config("ppo", "CartPole-v1", dict(n_envs=2, n_steps=32, hidden=(8,)), {}, steps=100),
    )
    train(
        edited(run, Minibatcher.inserter(after=FragmentStacker, size=8)),
        progress=False,
        tensorboard=False,
    )
    assert load_run(run.folder).counters["steps"] == 104


FILES = {"/proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n"}
NEW = {
    "/sys/fs/cgroup/memory.max": "6000000",
    "/sys/fs/cgroup/memory.current": "6000000",
    "/sys/fs/cgroup/memory.stat": "anon 1000000\nfile 5000000\ninactive_file 3000000\nactive_file 1500000\nshmem 500000\n",
}
OLD = {
    "/sys/fs/cgroup/memory/memory.limit_in_bytes": "6000000",
    "/sys/fs/cgroup/memory/memory.usage_in_bytes": "6000000",
    "/sys/fs/cgroup/memory/memory.stat": "inactive_file 1\nactive_file 2\ntotal_inactive_file 3000000\ntotal_active_file 1500000\n",
}


@pytest.mark.parametrize(
    "files, expected",
    [
        ({}, 2**62),
        (FILES, 8_192_000),
        ({**FILES, **NEW}, 4_500_000),
        ({**FILES, **OLD}, 4_500_000),
        ({**FILES, **NEW, "/sys/fs/cgroup/memory.max": "max"}, 8_192_000),
        ({k: x for k, x in NEW.items() if not k.endswith("stat")}, 0),
    ],
    ids=["unknown", "machine", "group", "old group", "no limit", "no numbers"],
)
def test_copies_of_files_do_not_count_as_used(files, expected, monkeypatch):
    "A control group counts the files that the system keeps in free memory; they make room when it is needed."

    def read(path):
        if path not in files:
            raise FileNotFoundError(path)
        return io.StringIO(files[path])

    monkeypatch.setattr(errors, "open", read, raising=False)
    assert errors.available_memory() == expected
