"""A run as a folder for others: what is in it, that it is the same policy, and the way to a hub and back.

The client of the hub is a stand-in; where huggingface_hub is installed, it talks to a server of the test's own as well.
"""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from command_line import SMALL_LINE, error_of, rollpipe, settings
from gallery import files_of, refused

from rollpipe.agents.checkpoint import load_checkpoint
from rollpipe.agents.evaluate import Evaluation
from rollpipe.pipes.data.nested import first_difference
from rollpipe.pipes.keeping.files import write_atomically
from rollpipe.runs import load_agent, pack
from rollpipe.runs.folder import load_run
from rollpipe.runs.pack import PACK_FILES, card, local_copy
from rollpipe.traces.history import History

OBS = np.array([[0.1, 0.0, -0.1, 0.2], [-0.2, 0.3, 0.1, 0.0]], np.float32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pack") / "run"
    evaluated = "--eval-every '512 steps' --eval-episodes 2 --final-episodes 2"
    words = f"train a2c CartPole-v1 --steps 1024 {evaluated} {SMALL_LINE} --out"
    assert rollpipe(words, folder) == 0
    return folder


@pytest.fixture
def run(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / "run"))


def front_matter(text):
    _, front, body = text.split("---\n", 2)
    lines = (line.partition(": ") for line in front.splitlines())
    return {name: json.loads(value) for name, _, value in lines}, body


def same_policy(a, b):
    states = (agent.actor.state_dict() for agent in (a, b))
    answers = (agent.actor.predict(OBS)[0] for agent in (a, b))
    return first_difference(*states) is None and np.array_equal(*answers)


@pytest.mark.slow
def test_what_a_pack_holds(run, capsys):
    packed = run / "pack"
    assert rollpipe(f"pack {run} --episodes 3 --seed 0") == 0
    out = capsys.readouterr().out
    has = {*os.listdir(packed)}
    least = {"README.md", "checkpoint.safetensors", "config.json", "fingerprint.json", "curve.png"}
    assert least <= has <= {*PACK_FILES} and "hf upload OWNER/NAME" in out
    assert ("policy.onnx" in has) == bool(find_spec("onnx") and find_spec("onnxscript"))

    # The card has the numbers of the same episodes.
    front, body = front_matter((packed / "README.md").read_text())
    (result,) = front["model-index"][0]["results"]
    assert front["library_name"] == "rollpipe"
    assert {"a2c", "CartPole-v1", "reinforcement-learning"} <= {*front["tags"]}
    assert rollpipe(f"evaluate {packed} --episodes 3 --seed 0") == 0
    told = capsys.readouterr().out.strip()
    assert told in body and result["dataset"]["name"] == "CartPole-v1"
    value = float(result["metrics"][0]["value"].split()[0])
    assert value == pytest.approx(float(told.split()[1]), abs=0.06)
    for text in (
        "![the learning curve](curve.png)",
        "| `n_envs` | `4` |",
        "EnvStepper(CartPole-v1",
    ):
        assert text in body

    # The policy and the configuration are those of the run.
    assert same_policy(load_agent(run), load_agent(packed))
    ours, theirs = (load_checkpoint(x / "checkpoint.safetensors") for x in (run, packed))
    config = json.loads((packed / "config.json").read_text())
    assert theirs.config == config == ours.config and theirs.stream is None


def film(run, update):
    "The path of a film of a run, which has the number of its update as its content."
    path = run / "videos" / f"update-{update:06}.gif"
    path.write_bytes(b"%d" % update)
    return path


@pytest.mark.slow
def test_no_file_of_a_pack_is_a_pickle(run):
    for path in pack(run, episodes=1).iterdir():
        head = path.read_bytes()[:9]
        if path.suffix == ".safetensors":
            assert head[8:] == b"{"  # behind a length, whose first byte may be that of a pickle
            continue
        assert head[:2] != b"PK" and head[:1] != b"\x80", path  # an archive of torch, a pickle


@pytest.mark.slow
def test_a_pack_is_made_again_and_trained_again(run, tmp_path):
    (run / "videos").mkdir()
    shared = tmp_path / "shared"
    last = int(load_run(run).counters["updates"])
    found = load_run(run, best=True)
    best = last - 2
    data = found._replace(counters={**found.counters, "updates": best}).data()
    write_atomically(run / "best.safetensors", data)
    for n in (best, last, 1_000_000, 2_000_000):
        film(run, n)

    def packed(shown, caption, **options):
        "The pack has the film of this update, with this caption."
        folder = pack(run, shared, episodes=1, **options)
        assert (folder / "replay.gif").read_bytes() == b"%d" % shown
        assert f"![{caption}](replay.gif)" in (folder / "README.md").read_text()
        return folder

    # The film is one of this policy,
    packed(last, "an episode", best=False)
    packed(best, "an episode", best=True)
    film(run, best).unlink()

    # or of the first one after it, or of an earlier one; then the card says so.
    for n in (last, best - 1):
        film(run, n)
        caption = f"an episode of the policy after update {n}"
        folder = packed(n, caption, best=True)
    assert same_policy(load_agent(folder), load_agent(run, best=True))
    shutil.rmtree(run / "videos")
    assert pack(run, shared, episodes=1) == folder and not (folder / "replay.gif").exists()
    again = tmp_path / "again"
    words = f"train a2c CartPole-v1 --config {folder}/config.json --out {again} --quiet"
    assert rollpipe(words) == 0
    assert same_policy(load_agent(again), load_agent(folder))


def test_the_card_of_a_fork_and_of_an_edited_run_says_so(gallery):
    found = load_run(gallery.original("ppo"))
    evaluation = Evaluation(*np.ones((2, 1)), np.ones(1, bool))
    edit = dict(event="edited", at=2, insert="m:scaled", kwargs=dict(by=2))
    fork = dict(event="forked", at=1, run="base", set=dict(lr=0.1), kept={}, inexact=None)
    for history, told in (
        ([fork], "a fork of base after update 1, with lr=0.1"),
        ([*found.history, edit], "m:scaled(by=2) after update 2"),
    ):
        text = card(found._replace(history=History(history)), evaluation, "", set())
        assert f"These options alone do not train it again: {told}." in text
        assert "trains it again" not in text


@pytest.mark.slow
def test_a_pack_takes_the_place_of_nothing_else(run, tmp_path):
    other = Path(shutil.copytree(run, tmp_path / "other"))
    begun = tmp_path / "begun"
    begun.mkdir()
    for name in ("config.json", "checkpoint.safetensors"):
        shutil.copy(run / name, begun / name)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "README.md").write_text("mine")
    packed = pack(run, tmp_path / "packed", episodes=1)
    told = "has other files. Expected a new folder, or one that `rollpipe pack` has written"
    for source, out in ((run, other), (run, run), (run, begun), (run, mine), (packed, packed)):
        before = files_of(out)
        refused(told, pack, source, out, episodes=1)
        assert before == files_of(out)


# -- the hub -----------------------------------------------------------------------------------------------------------


def test_without_the_client_the_extra_is_named(gallery, monkeypatch, capsys):
    "Before any work"
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    run = gallery.original("ppo")
    for words in ("evaluate hf://some/one", f"pack {run} --episodes 1 --push some/one"):
        assert "pip install 'rollpipe[hub]'" in error_of(capsys, words)
    assert local_copy("some/one") == "some/one"  # a path asks no hub
    told = "some/one: there is no such run. Expected a path, or hf://OWNER/NAME"
    refused(told, load_agent, "some/one")


@pytest.mark.slow
def test_a_run_goes_to_a_hub_and_back(run, monkeypatch, capsys, tmp_path):
    told = []

    class HfApi:
        def create_repo(self, name, exist_ok):
            told.append(("create", name, exist_ok))

        def upload_folder(self, *, repo_id, folder_path, allow_patterns, commit_message):
            told.append(("upload", repo_id))
            shutil.copytree(folder_path, tmp_path / "hub")
            return SimpleNamespace(commit_url=f"https://hub/{repo_id}")

    def snapshot_download(name, *, revision, allow_patterns):
        if name != "some/one":
            raise KeyError("404")
        told.append(("download", revision, "policy.pt" in allow_patterns))
        return str(tmp_path / "hub")

    monkeypatch.setitem(
        sys.modules,
        "huggingface_hub",
        SimpleNamespace(HfApi=HfApi, snapshot_download=snapshot_download),
    )
    assert (
        rollpipe("pack", run, "--episodes 1 --push some/one") == 0
        and "https://hub/some/one" in capsys.readouterr().out
    )
    assert 'load_agent("hf://some/one")' in (tmp_path / "hub" / "README.md").read_text()
    assert same_policy(load_agent("hf://some/one@v2"), load_agent(run))
    assert told == [("create", "some/one", True), ("upload", "some/one"), ("download", "v2", False)]
    assert rollpipe("evaluate hf://some/one --episodes 1") == 0
    assert rollpipe("evaluate hf://no/one --episodes 1") == 2
    assert "hf://no/one: cannot be downloaded. Expected hf://OWNER/NAME" in capsys.readouterr().err


class Hub(BaseHTTPRequestHandler):
    "The few answers of a model hub that sending and fetching a small folder need."

    files = {}
    sha = "a" * 40

    @property
    def own(self):
        return f"http://{self.headers['Host']}/some/one"

    def answer(self, content=b"{}", code=200, **headers):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/preupload/main"):
            return self.answer(
                dict(
                    files=[
                        dict(path=x["path"], uploadMode="regular", shouldIgnore=False)
                        for x in json.loads(body)["files"]
                    ]
                )
            )
        if self.path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return self.answer(
                dict(commitUrl=f"{self.own}/commit/{self.sha}", commitOid=self.sha, success=True)
            )
        self.answer(dict(url=self.own, name="some/one", id="some/one"))

    def do_GET(self):
        name = self.path.rpartition("/")[2]
        if "/resolve/" in self.path and name in self.files:
            data = self.files[name]
            return self.answer(
                data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=self.sha
            )
        if "/tree/" in self.path:
            return self.answer(
                [
                    dict(type="file", path=x, size=len(data), oid=hashlib.sha1(data).hexdigest())
                    for x, data in self.files.items()
                ]
            )
        self.answer(
            dict(
                id="some/one",
                modelId="some/one",
                sha=self.sha,
                siblings=[dict(rfilename=x) for x in self.files],
                private=False,
            )
        )

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@pytest.mark.skipif(not find_spec("huggingface_hub"), reason="needs huggingface_hub")
def test_the_client_of_the_hub_sends_and_fetches_it(run, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {
        **os.environ,
        **settings(),
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": "hf_of_the_test",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "*",
        "no_proxy": "*",
    }

    def command(*words):
        done = subprocess.run(
            [sys.executable, "-m", "rollpipe", *map(str, words)],
            env=env,
            text=True,
            capture_output=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        assert "/some/one/commit/aaa" in command(
            "pack", run, "--episodes", 2, "--seed", 0, "--push", "some/one"
        )
        assert {name: data for name, data in Hub.files.items()} == {
            p.name: p.read_bytes() for p in (run / "pack").iterdir()
        }
        Hub.files["evil.pkl"] = b"\x80"
        assert command("evaluate", "hf://some/one", "--episodes", 2, "--seed", 0) == command(
            "evaluate", run, "--episodes", 2, "--seed", 0
        )
        assert not [*(tmp_path / "home").rglob("evil.pkl")] and [
            *(tmp_path / "home").rglob("README.md")
        ]
    finally:
        server.shutdown()
        server.server_close()
