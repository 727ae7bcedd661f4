"""A run that is killed, interrupted or starved of disk goes on as the same run."""

import importlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import ROOT, SCRIPTS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_runs import read_curve, tree_of

import offdae_dae

TINY = "--small --num-envs 16 --learning-starts 1000 --batch-size 64 --buffer-size 4000 --eval-episodes 8 "
TINY = [*TINY.split(), "--max-episode-frames", "1000", "--run-name", "run", "--resume"]
FRAMES = {"offdae_offpolicy": 2400}  # others: 8000


def start(script, directory, *arguments, **options):
    """The script as a user starts it. Everything that it prints goes to the pipe."""
    tiny = [*TINY, "--total-timesteps", str(FRAMES.get(script, 8000)), "--checkpoint-interval", "0.3"]
    command = [sys.executable, str(ROOT / f"{script}.py"), *tiny, *map(str, arguments)]
    environment = os.environ | dict(OMP_NUM_THREADS="1", SLURM_JOB_ID="77")
    directory.mkdir(exist_ok=True)
    output = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(command, cwd=directory, env=environment, **output, **options)


def wait_for(condition, process):
    """Look often, for a minute at most, until the condition holds or the process has ended."""
    for _ in range(6000):
        if condition() or process.poll() is not None:
            return
        time.sleep(0.01)
    raise TimeoutError


def finish(process, status=0):
    printed = process.communicate(timeout=120)[0]
    assert process.returncode == status, printed
    return printed


def outcome(directory):
    """All that a run leaves behind, its speed apart."""
    run = directory / "runs" / "run"
    files = sorted(path.name for path in run.iterdir() if not path.name.startswith("events"))
    model = torch.load(run / "model.pt", weights_only=True)
    networks = [model[part] for part in ("network", "target_network", "cvae") if part in model]
    weights = [(key, value.numpy().tobytes()) for network in networks for key, value in network.items()]
    rows = [{tag: value for tag, value in row.items() if tag != "charts/SPS"} for row in read_curve(run)]
    score = json.loads((run / "eval.json").read_text()) | dict(seconds=0)
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag != "charts/SPS"]
    points = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}
    assert all(len(points[tag]) == len([row for row in rows if row[tag]]) for tag in tags) and len(tags) >= 11
    return files, weights, rows, score, points


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory):
    """A run of DAE that nothing disturbs, not even a checkpoint."""
    directory = tmp_path_factory.mktemp("left_alone")
    finish(start("offdae_dae", directory, "--checkpoint-interval", 0))
    return directory


@pytest.mark.slow
def test_interrupted_by_each_signal_and_resumed_it_is_the_same_run(tmp_path, left_alone):
    """One command line again and again. While it runs, a second process is told who holds the directory."""
    checkpoint = tmp_path / "runs" / "run" / "checkpoint.pt"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        process = start("offdae_dae", tmp_path)
        wait_for(lambda before=before: checkpoint.exists() and checkpoint.stat().st_mtime_ns > before, process)
        if number == signal.SIGTERM:
            process.send_signal(signal.SIGSTOP)  # or it might end before the second one has started
            second = finish(start("offdae_dae", tmp_path), status=3)
            process.send_signal(signal.SIGCONT)
            assert f"written by host {socket.gethostname()}, pid {process.pid}, job 77" in second
        process.send_signal(number)
        assert "--run-name run --resume goes on" in finish(process, status=75)
        saved = offdae_dae.load(checkpoint)
        events = EventAccumulator(str(checkpoint.parent), size_guidance={"scalars": 0}).Reload()
        assert [event.step for event in events.Scalars("charts/SPS")] == [row["frames"] for row in saved["log"]["rows"]]
    assert "going on from frame" in finish(start("offdae_dae", tmp_path))
    assert outcome(tmp_path) == outcome(left_alone)
    before = tree_of(tmp_path)
    assert "runs/run is finished: return" in finish(start("offdae_dae", tmp_path))
    assert tree_of(tmp_path) == before


def kill_and_resume(script, directory, kills, rng):
    """SIGKILL at random moments: while it starts, trains, writes and evaluates. Then let it end."""
    run = directory / "runs" / "run"
    for _ in range(kills):
        process = start(script, directory)
        moment = rng.choice(["args.json", "checkpoint.pt", "checkpoint.pt", "checkpoint.pt.tmp", "model.pt"])
        wait_for((run / moment).exists, process)
        time.sleep(rng.choice([0, rng.uniform(0, 0.8)]))
        process.kill()
        process.communicate()
    finish(start(script, directory))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_killed_many_times_each_script_ends_the_same(name, tmp_path):
    finish(start(name, tmp_path / "left_alone", "--checkpoint-interval", 0))
    kill_and_resume(name, tmp_path / "killed", kills=4, rng=random.Random(SCRIPTS.index(name)))
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "left_alone")


@pytest.mark.slow
def test_a_full_disk_leaves_the_old_checkpoint_and_the_run_goes_on(tmp_path, left_alone):
    """Files of at most 1 MB: enough for the model, too little for a checkpoint with its replay."""
    checkpoint = tmp_path / "runs" / "run" / "checkpoint.pt"
    process = start("offdae_dae", tmp_path)
    wait_for(checkpoint.exists, process)
    process.terminate()
    finish(process, status=75)
    old = checkpoint.read_bytes()
    assert len(old) > 2**20

    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))

    process = start("offdae_dae", tmp_path, preexec_fn=small_files)
    wait_for((checkpoint.parent / "model.pt").exists, process)  # written after the last checkpoint
    kept = checkpoint.read_bytes()
    printed = finish(process)
    assert kept == old
    assert "warning: no checkpoint at frame 8,000: [Errno 27] File too large" in printed
    assert outcome(tmp_path) == outcome(left_alone)


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory):
    """A run of DAE that was interrupted, to be copied."""
    directory = tmp_path_factory.mktemp("unfinished")
    process = start("offdae_dae", directory)
    wait_for((directory / "runs" / "run" / "checkpoint.pt").exists, process)
    process.terminate()
    finish(process, status=75)
    return directory


def test_interrupted_and_resumed_it_is_the_same_run(unfinished, left_alone, tmp_path):
    shutil.copytree(unfinished, tmp_path / "copy")
    assert "going on from frame" in finish(start("offdae_dae", tmp_path / "copy"))
    assert outcome(tmp_path / "copy") == outcome(left_alone)


@pytest.mark.slow
def test_interrupted_without_checkpoints_it_has_failed(tmp_path):
    process = start("offdae_dae", tmp_path, "--checkpoint-interval", 0, "--total-timesteps", 100_000)
    wait_for((tmp_path / "runs" / "run" / "curve.csv").exists, process)
    time.sleep(1)
    process.terminate()
    assert "interrupted, without a checkpoint" in finish(process, status=1)
    assert not (tmp_path / "runs" / "run" / "checkpoint.pt").exists()


def refused(run, capsys, directory, *arguments):
    """The one line that a resumed run is refused with; it leaves everything as it was."""
    (directory / "runs" / "run" / "lock").unlink(missing_ok=True)
    before = tree_of(directory)
    with pytest.raises(SystemExit) as stop:
        run(offdae_dae, *TINY, "--total-timesteps", 8000, *arguments)
    error = capsys.readouterr().err
    (directory / "runs" / "run" / "lock").unlink()
    assert stop.value.code == 2 and error.count("\n") == 1 and tree_of(directory) == before
    return error


@pytest.fixture
def copied(unfinished, tmp_path):
    """The directory in which the `run` fixture starts `main`, with a copy of the unfinished run."""
    files = unfinished / "runs" / "run"
    (tmp_path / "runs" / "run").mkdir(parents=True)
    for name in ("args.json", "checkpoint.pt"):
        (tmp_path / "runs" / "run" / name).write_bytes((files / name).read_bytes())
    return tmp_path


def test_damaged_checkpoints_are_refused_and_left_alone(copied, run, capsys):
    path, rng = copied / "runs" / "run" / "checkpoint.pt", np.random.default_rng(0)
    whole = path.read_bytes()
    truncated = [whole[:size] for size in (0, 1, 31, 32, 33, len(whole) - 1, *rng.integers(0, len(whole), 10))]
    flipped = [bytearray(whole) for _ in range(24)]
    for content, position in zip(flipped, (0, len(whole) - 1, *rng.integers(0, len(whole), 22)), strict=True):
        content[position] ^= 1 << rng.integers(8)
    for content in [*truncated, *flipped, b"not a checkpoint" * 1000]:
        path.write_bytes(content)
        assert "checkpoint.pt: truncated, damaged or not of this project" in refused(run, capsys, copied)


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


def test_code_in_a_checkpoint_is_never_run(copied, run):
    offdae_dae.save(copied / "runs" / "run" / "checkpoint.pt", dict(script="offdae_dae", evil=Evil()))
    with pytest.raises(Exception, match="Weights only load failed"):
        run(offdae_dae, *TINY, "--total-timesteps", 8000)
    assert not (copied / "evil").exists()


OTHER = ["--env-id breakout", "--n 16", "--hidden 64", "--seed 2", "--total-timesteps 13000", "--no-target-network"]


@pytest.mark.parametrize("arguments", OTHER)
def test_other_arguments_are_refused_by_name(copied, run, capsys, arguments):
    """Whether they are those of the directory or, after it was moved there, only those of the checkpoint."""
    name = arguments.split()[0].removeprefix("--no-").removeprefix("--").replace("-", "_")
    error = refused(run, capsys, copied, *arguments.split())
    assert f"runs/run: of a run with {name} " in error and error.rstrip().endswith(f"not {arguments.split()[-1]}") == (
        name != "target_network"
    )
    described = json.loads((copied / "runs" / "run" / "args.json").read_text())
    value = {"env_id": "breakout", "target_network": False}.get(name, arguments.split()[-1])
    described["args"][name] = value if name in ("env_id", "target_network") else int(value)
    (copied / "runs" / "run" / "args.json").write_text(json.dumps(described))
    error = refused(run, capsys, copied, *arguments.split())
    assert f"runs/run/checkpoint.pt: of a run with {name} " in error


def test_another_script_or_version_is_refused(copied, run, capsys):
    path = copied / "runs" / "run" / "checkpoint.pt"
    saved = offdae_dae.load(path)
    offdae_dae.save(path, saved | dict(script="offdae_tree"))
    assert "of a run of offdae_tree.py" in refused(run, capsys, copied)
    offdae_dae.save(path, saved | dict(sha256="0" * 64))
    assert "of another version of offdae_dae.py" in refused(run, capsys, copied)


def test_resume_needs_a_name(run, capsys):
    with pytest.raises(SystemExit) as stop:
        run(offdae_dae, "--small", "--resume")
    assert stop.value.code == 2 and "--resume: needs the --run-name" in capsys.readouterr().err


@pytest.mark.parametrize("interval", [0.01, 1800])
def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, interval):
    """Whether the next checkpoint or the next point of the curve, after 4,000 frames, comes first."""
    rate = ["--learning-rate", "1e30", "--total-timesteps", 2_000_000, "--checkpoint-interval", interval]
    printed = finish(start("offdae_dae", tmp_path, *rate), status=1)
    line = next(line for line in printed.splitlines() if "not finite" in line)
    frame, last = int(line.split("at frame ")[1].split(";")[0].replace(",", "")), line.split("checkpoint: ")[1]
    assert 1064 < frame <= (1300 if interval < 1 else 4_000) and line.startswith("offdae_dae.py: runs/run: losses/")
    if interval > 1:
        assert last == "none"
    else:
        saved = offdae_dae.load(tmp_path / last)
        assert 900 < saved["log"]["frames"] < frame
        assert all(value.isfinite().all() for value in saved["agent"]["network"].values())
    assert not (tmp_path / "runs" / "run" / "eval.json").exists()


@pytest.mark.parametrize("env_id", offdae_dae.GAMES)
def test_restored_games_go_on_as_the_original(env_id, tmp_path):
    """1,000 steps beside the original, in which episodes end and games draw random numbers."""
    args = offdae_dae.Args(env_id=env_id, num_envs=4, max_episode_frames=700)
    seeds = offdae_dae.spawn_seeds(args)[2]
    original, rng = offdae_dae.Games(args, seeds), np.random.default_rng(0)
    for _ in range(333):
        original.step(rng.integers(len(original.action_set), size=4))
    offdae_dae.save(tmp_path / "games.pt", dict(script="offdae_dae", games=offdae_dae.plain(original)))
    restored = offdae_dae.restore(offdae_dae.Games(args, seeds), offdae_dae.load(tmp_path / "games.pt")["games"])
    assert all(game.random is game.env.random for game in restored.games)
    original.finished, restored.finished = [], []
    for _ in range(1000):
        actions = rng.integers(len(original.action_set), size=4)
        for left, right in zip(original.step(actions), restored.step(actions), strict=True):
            np.testing.assert_array_equal(left, right)
        np.testing.assert_array_equal(original.states, restored.states)
    assert original.finished == restored.finished and original.finished
    for left, right in zip(original.games, restored.games, strict=True):
        np.testing.assert_array_equal(left.random.get_state()[1], right.random.get_state()[1])


def leaves(x):
    """Every number, string and tensor in nested dicts and lists, tensors as bytes."""
    if isinstance(x, torch.Tensor):
        yield x.dtype, x.shape, x.numpy().tobytes()
    elif isinstance(x, (dict, list)):
        for value in x.values() if isinstance(x, dict) else x:
            yield from leaves(value)
    else:
        yield x


def test_everything_that_changes_is_in_a_checkpoint(common, tmp_path):
    """Two agents with their replays, one restored from the other: equal in every tensor after further updates."""
    args = common.Args(**common.SMALL | dict(num_envs=4, batch_size=16, buffer_size=200, learning_starts=0))
    games = common.Games(args, common.spawn_seeds(args)[2])

    def play(games, replay, agent, steps):
        for _ in range(steps):
            replay.add(games.step(common.act(agent.network, games, "cpu")))
        return [common.update(args, agent, replay) for _ in range(3)]

    original = dict(
        games=games, replay=common.Replay(args, games.channels, "cpu"), agent=common.Agent(args, games, "cpu")
    )
    play(**original, steps=70)
    state = original | dict(script=common.SCRIPT, random=[torch.default_generator])
    common.save(tmp_path / "state.pt", common.plain(state))
    expected = play(**original, steps=70)
    other = common.Games(args, common.spawn_seeds(args)[2])
    restored = dict(
        games=other, replay=common.Replay(args, games.channels, "cpu"), agent=common.Agent(args, other, "cpu")
    )
    common.restore(restored | dict(script="", random=[torch.default_generator]), common.load(tmp_path / "state.pt"))
    for left, right in zip(expected, play(**restored, steps=70), strict=True):
        assert torch.equal(left, right)
    left, right = (list(leaves(common.plain(parts))) for parts in (original, restored))
    assert left == right and len(left) > 100


def test_a_kill_while_writing_leaves_the_old_file(tmp_path):
    """The child says that it has written half, and is killed before it can rename."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    code = (
        "import offdae_dae, os, pathlib, sys, time; os.fsync = lambda fd: print('half', flush=True) or time.sleep(60); "
    )
    code += "offdae_dae.write_whole(pathlib.Path(sys.argv[1]), b'new' * 1000)"
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "half\n"
    child.kill()
    child.communicate()
    assert path.read_bytes() == b"old" and (tmp_path / "file.tmp").exists()
    importlib.import_module("offdae_dae").write_whole(path, b"new")
    assert path.read_bytes() == b"new" and not (tmp_path / "file.tmp").exists()
