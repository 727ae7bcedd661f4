"""A run that is killed, interrupted or starved of disk continues as the same run."""

import importlib
import json
import os
import random
import resource
import shutil
import signal
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
TINY += "--max-episode-frames 1000 --steps-per-update 64 --run-name run --resume"
FRAMES = {"offdae_offpolicy": 2400}  # others: 8000


def start(script, directory, *arguments, **options):
    """The script as a user starts it. Everything that it prints goes to the pipe."""
    tiny = [*TINY.split(), "--total-timesteps", str(FRAMES.get(script, 8000)), "--checkpoint-interval", "0.3"]
    return start_with(script, directory, *tiny, *arguments, **options)


def start_with(script, directory, *arguments, **options):
    command = [sys.executable, str(ROOT / f"{script}.py"), *map(str, arguments)]
    directory.mkdir(exist_ok=True)
    output = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(command, cwd=directory, env=os.environ | dict(OMP_NUM_THREADS="1"), **output, **options)


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
    assert points.pop("charts/eval_return") == [(int(rows[-1]["frames"]), pytest.approx(score["mean"]))]
    assert all(len(points[tag]) == len([row for row in rows if row[tag]]) for tag in points) and len(tags) >= 12
    return files, weights, rows, score, points


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A run of DAE that nothing disturbs, not even a checkpoint."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    finish(start("offdae_dae", directory, "--checkpoint-interval", 0))
    return directory


def learning(checkpoint, before=0):
    """Whether there is a checkpoint of a run that has made updates, other than the one of `before`."""
    return checkpoint.exists() and checkpoint.stat().st_mtime_ns > before and checkpoint.stat().st_size > 1_100_000


@pytest.mark.slow
def test_interrupted_by_each_signal_and_resumed_it_is_the_same_run(tmp_path, uninterrupted):
    """While it runs, a second process is told who holds the directory. At last only name and --resume are given."""
    checkpoint = tmp_path / "runs" / "run" / "checkpoint.pt"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        process = start("offdae_dae", tmp_path)
        wait_for(lambda before=before: learning(checkpoint, before), process)
        if number == signal.SIGTERM:
            process.send_signal(signal.SIGSTOP)  # or it might end before the second one has started
            second = finish(start("offdae_dae", tmp_path), status=3)
            process.send_signal(signal.SIGCONT)
            assert f"written by pid {process.pid} on {os.uname().nodename}" in second
        process.send_signal(number)
        printed = finish(process, status=75)
        assert "python offdae_dae.py --runs-dir runs --run-name run --resume" in printed
        saved = offdae_dae.read(checkpoint, "cpu")
        events = EventAccumulator(str(checkpoint.parent), size_guidance={"scalars": 0}).Reload()
        points = [event.step for event in events.Scalars("charts/SPS")]
        assert points == [int(row.split(",")[0]) for row in saved["log"]["curve"]]
    finish(start_with("offdae_dae", tmp_path, "--run-name", "run", "--resume"))
    assert outcome(tmp_path) == outcome(uninterrupted)
    before = tree_of(tmp_path)
    assert "runs/run is finished: return" in finish(start("offdae_dae", tmp_path))
    assert {path: x for path, x in tree_of(tmp_path).items() if path.name != "lock"} == before


def test_a_signal_between_updates_ends_the_step_later(tmp_path):
    """Sixteen updates in the last step, and a signal in the sixth: the other updates come after --resume."""
    arguments = ["--steps-per-update", 1, "--total-timesteps", 1536, "--learning-starts", 1504]
    finish(start("offdae_dae", tmp_path / "whole", *arguments))
    code = "import os, sys, signal, offdae_dae as script; old, count = script.update, []\n"
    code += "def update(*x):\n  count.append(1)\n  len(count) == 6 and os.kill(os.getpid(), signal.SIGTERM)\n"
    code += "  return old(*x)\nscript.update = update; script.main()"
    environment = os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    (tmp_path / "parts").mkdir()
    command = [sys.executable, "-c", code, *TINY.split(), "--checkpoint-interval", "1000", *map(str, arguments)]
    statuses = [subprocess.run(command, cwd=tmp_path / "parts", env=environment).returncode for _ in range(3)]
    assert statuses == [75, 75, 0] and outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


@pytest.mark.parametrize("moment", ["importing", "training"])
def test_ctrl_c_quits(tmp_path, moment):
    """While MinAtar is imported at once; in a slow update, the second time."""
    arguments = ["--total-timesteps", 200_000] if moment == "importing" else ["--batch-size", 4096, "--channels", 128]
    arguments += [] if moment == "importing" else ["--buffer-size", 20_000]
    process = start("offdae_dae", tmp_path, *arguments)
    if moment == "training":
        wait_for(lambda: learning(tmp_path / "runs" / "run" / "checkpoint.pt"), process)
        process.send_signal(signal.SIGINT)
    else:
        wait_for(lambda: "pandas" in open(f"/proc/{process.pid}/maps").read(), process)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    began = time.time()
    printed = process.communicate(timeout=60)[0]
    assert process.returncode in (-signal.SIGINT, 75) and time.time() - began < 20 and "Traceback" not in printed
    assert moment == "training" or not (tmp_path / "runs").exists()


def test_on_a_terminal_ctrl_c_says_at_once_what_happens(tmp_path):
    terminal, other_end = os.openpty()
    command = [sys.executable, str(ROOT / "offdae_dae.py"), "--small", "--run-name", "seen"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=other_end)
    wait_for((tmp_path / "runs" / "seen" / "checkpoint.pt").exists, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 75
    assert "Finishing this step, then a checkpoint. Ctrl-C quits now." in os.read(terminal, 100_000).decode()


def kill_and_resume(script, directory, kills, rng):
    """SIGKILL at random moments: while it starts, trains, writes and evaluates. Then let it end."""
    run = directory / "runs" / "run"
    for _ in range(kills):
        process = start(script, directory)
        moment = rng.choice(["args.json", "checkpoint.pt", "checkpoint.pt", "checkpoint.pt.tmp", "curve.csv"])
        wait_for((run / moment).exists, process)
        time.sleep(rng.choice([0, rng.uniform(0, 0.8), rng.uniform(0, 3)]))
        process.kill()
        process.communicate()
    finish(start(script, directory))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_killed_many_times_each_script_ends_the_same(name, tmp_path):
    finish(start(name, tmp_path / "uninterrupted", "--checkpoint-interval", 0))
    kill_and_resume(name, tmp_path / "killed", kills=4, rng=random.Random(SCRIPTS.index(name)))
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "uninterrupted")


@pytest.mark.slow
@pytest.mark.parametrize("room", [2**20, 2**18, 1000])
def test_a_full_disk_costs_a_checkpoint_not_the_run(tmp_path, uninterrupted, room):
    """Enough room for the model but not for a checkpoint, or for neither: then the score is still printed."""
    checkpoint = tmp_path / "runs" / "run" / "checkpoint.pt"
    process = start("offdae_dae", tmp_path)
    wait_for(lambda: learning(checkpoint), process)
    process.terminate()
    finish(process, status=75)
    old = checkpoint.read_bytes()

    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    printed = finish(start("offdae_dae", tmp_path, preexec_fn=small_files), status=0 if room == 2**20 else 1)
    assert "warning: no checkpoint at frame 8,000: [Errno 27] File too large" in printed
    if room == 2**20:
        assert outcome(tmp_path)[1:4] == outcome(uninterrupted)[1:4]
    else:
        assert "\nreturn " in printed and "model and score not saved, [Errno 27]" in printed
        assert checkpoint.read_bytes() == old and "Traceback" not in printed


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory):
    """A run of DAE that was interrupted, to be copied."""
    directory = tmp_path_factory.mktemp("unfinished")
    process = start("offdae_dae", directory)
    wait_for(lambda: learning(directory / "runs" / "run" / "checkpoint.pt"), process)
    process.terminate()
    finish(process, status=75)
    return directory


def test_interrupted_and_resumed_it_is_the_same_run(unfinished, uninterrupted, tmp_path):
    shutil.copytree(unfinished, tmp_path / "copy")
    finish(start("offdae_dae", tmp_path / "copy"))
    assert outcome(tmp_path / "copy") == outcome(uninterrupted)


def test_a_young_checkpoint_is_small(unfinished):
    """Not the whole ring of 4,000 frames, let alone the 1,000,000 of a real run."""
    saved = offdae_dae.read(unfinished / "runs" / "run" / "checkpoint.pt", "cpu")
    assert len(saved["replay"]["ring"]["terminal"]) < 2 * max(saved["replay"]["frames"], 1)


@pytest.mark.slow
def test_interrupted_without_checkpoints_it_has_failed(tmp_path):
    process = start("offdae_dae", tmp_path, "--checkpoint-interval", 0, "--total-timesteps", 100_000)
    wait_for((tmp_path / "runs" / "run" / "curve.csv").exists, process)
    process.terminate()
    assert "interrupted, without a checkpoint" in finish(process, status=1)
    assert not (tmp_path / "runs" / "run" / "checkpoint.pt").exists()


def refused(run, capsys, directory, *arguments):
    """The one line that a resumed run is refused with; it leaves everything as it was."""
    before = tree_of(directory)
    with pytest.raises(SystemExit) as stop:
        run(offdae_dae, *TINY.split(), "--total-timesteps", 8000, *arguments)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and tree_of(directory) == before
    return error


@pytest.fixture
def copied(unfinished, tmp_path):
    """The directory in which the `run` fixture starts `main`, with a copy of the unfinished run."""
    (tmp_path / "runs" / "run").mkdir(parents=True)
    for name in ("args.json", "checkpoint.pt"):
        shutil.copy(unfinished / "runs" / "run" / name, tmp_path / "runs" / "run")
    return tmp_path


def same(left, right):
    """Equality of nested dicts, lists, arrays, tensors and objects."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, np.random.RandomState):
        return same(list(left.get_state()), list(right.get_state()))
    if isinstance(left, (torch.Tensor, np.ndarray)):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    return same(vars(left), vars(right)) if hasattr(left, "__dict__") else left == right


def test_damaged_checkpoints_are_refused_and_not_touched(copied, run, capsys):
    """Every truncation; a flipped bit unless it is in the zip file's padding, where it changes nothing."""
    path, rng = copied / "runs" / "run" / "checkpoint.pt", np.random.default_rng(0)
    whole, harmless = path.read_bytes(), 0
    original = offdae_dae.read(path, "cpu")
    truncated = [whole[:size] for size in (0, 1, 100, len(whole) - 1, *rng.integers(0, len(whole), 10))]
    flipped = [bytearray(whole) for _ in range(40)]
    for content, position in zip(flipped, (0, len(whole) - 1, *rng.integers(0, len(whole), 38)), strict=True):
        content[position] ^= 1 << rng.integers(8)
    for content in [*truncated, *flipped, b"not a checkpoint" * 1000]:
        path.write_bytes(content)
        try:
            unharmed = same(offdae_dae.read(path, "cpu"), original)
        except SystemExit:
            assert "damaged" in capsys.readouterr().err
            assert "checkpoint.pt is " in refused(run, capsys, copied)
        else:
            assert unharmed and content in flipped
            harmless += 1
    assert harmless < 10


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


def test_code_in_a_checkpoint_is_never_run(copied, run, capsys):
    offdae_dae.write_atomically(copied / "runs" / "run" / "checkpoint.pt", dict(script="offdae_dae", evil=Evil()))
    assert "checkpoint.pt is missing, damaged or not of this project" in refused(run, capsys, copied)
    assert not (copied / "evil").exists()


OTHER = ["--env-id breakout", "--n 16", "--hidden 64", "--seed 2", "--total-timesteps 13000", "--no-target-network"]


@pytest.mark.parametrize("arguments", OTHER)
def test_other_arguments_are_refused_by_name(copied, run, capsys, arguments):
    flag, value = (arguments.replace("--no-target-network", "--target-network False")).split()
    error = refused(run, capsys, copied, *arguments.split())
    assert f"checkpoint.pt was saved with {flag} " in error and error.rstrip().endswith(f", not {value}")


def test_another_script_or_version_is_refused(copied, run, capsys):
    path = copied / "runs" / "run" / "checkpoint.pt"
    saved = offdae_dae.read(path, "cpu")
    changes = [dict(script="offdae_tree"), dict(sha256="0" * 64), dict(args=saved["args"] | dict(cvae_channels=8))]
    for change in changes:
        offdae_dae.write_atomically(path, saved | change)
        script = change.get("script", "offdae_dae")
        assert f"was saved by another version of {script}.py" in refused(run, capsys, copied)


def test_args_json_can_be_anything(copied, uninterrupted):
    """It is for people and reports: a run continues from its checkpoint alone."""
    for content in ("", "[]", "{}", "{"):
        (copied / "runs" / "run" / "args.json").write_text(content)
        process = start_with("offdae_dae", copied, "--run-name", "run", "--resume", "--checkpoint-interval", 1000)
        time.sleep(0.5)
        process.terminate()
        process.communicate()
        assert (copied / "runs" / "run" / "args.json").read_text() == content


@pytest.mark.parametrize("interval", [0.01, 1800])
def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, interval):
    """Whether the next checkpoint or the next point of the curve, after 4,000 frames, comes first."""
    rate = ["--learning-rate", "1e30", "--total-timesteps", 2_000_000, "--checkpoint-interval", interval]
    printed = finish(start("offdae_dae", tmp_path, *rate), status=1)
    line = next(line for line in printed.splitlines() if "not finite at frame" in line)
    frame = int(line.split("at frame ")[1].split(": ")[0].split(", ")[0].replace(",", ""))
    assert 1064 < frame <= (1300 if interval < 1 else 4_000) and line.startswith("offdae_dae.py: runs/run: ")
    saved = offdae_dae.read(tmp_path / "runs" / "run" / "checkpoint.pt", "cpu")
    assert (900 if interval < 1 else 0) < saved["log"]["frames"] < frame
    assert all(value.isfinite().all() for value in saved["network"].values())
    assert not (tmp_path / "runs" / "run" / "eval.json").exists()


@pytest.mark.parametrize("env_id", offdae_dae.GAMES)
def test_restored_games_continue_as_the_original(env_id, tmp_path):
    """1,000 steps beside the original, in which episodes end and games draw random numbers."""
    args = offdae_dae.Args(env_id=env_id, num_envs=4, max_episode_frames=700)
    seeds = offdae_dae.spawn_seeds(args)[2]
    original, restored, rng = *(offdae_dae.Games(args, seeds) for _ in range(2)), np.random.default_rng(0)
    for _ in range(333):
        original.step(rng.integers(len(original.action_set), size=4))
    offdae_dae.write_atomically(tmp_path / "games.pt", dict(script="offdae_dae", args={}, games=vars(original)))
    vars(restored).update(offdae_dae.read(tmp_path / "games.pt", "cpu")["games"])
    assert all(game.random is game.env.random for game in restored.games)
    original.finished, restored.finished = [], []
    for _ in range(1000):
        actions = rng.integers(len(original.action_set), size=4)
        for left, right in zip(original.step(actions), restored.step(actions), strict=True):
            np.testing.assert_array_equal(left, right)
        np.testing.assert_array_equal(original.states, restored.states)
    assert original.finished == restored.finished and original.finished and same(vars(original), vars(restored))


def test_a_kill_while_writing_leaves_the_old_file(tmp_path):
    """The child says that it has written half, and is killed before it can rename."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    code = "import offdae_dae, os, pathlib, sys, time\n"
    code += "os.fsync = lambda fd: print('half', flush=True) or time.sleep(60)\n"
    code += "offdae_dae.write_atomically(pathlib.Path(sys.argv[1]), 'new' * 1000)"
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "half\n"
    child.kill()
    child.communicate()
    assert path.read_bytes() == b"old" and (tmp_path / "file.tmp").exists()
    importlib.import_module("offdae_dae").write_atomically(path, "new")
    assert path.read_bytes() == b"new" and not (tmp_path / "file.tmp").exists()
