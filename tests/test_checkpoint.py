"""A run that is killed, interrupted or starved of disk continues as the same run."""

import json
import os
import pickle
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
from conftest import ROOT, SCRIPTS, run_main
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_runs import read_curve, tree_of

import offdae_dae

TINY = "--small --num-envs 16 --learning-starts 1000 --batch-size 64 --buffer-size 4000 --eval-episodes 8 "
TINY += "--channels 16 --hidden 128 --learning-rate 1e-3 --max-episode-frames 1000 --steps-per-update 64 "
TINY = [*TINY.split(), *"--run-name run --resume --total-timesteps 4000".split()]


def start(script, directory, *arguments, tiny=(*TINY, "--checkpoint-interval", "0.3"), **options):
    """The script as a user starts it. Everything that it prints goes to the pipe."""
    command = [sys.executable, str(ROOT / f"{script}.py"), *tiny, *map(str, arguments)]
    directory.mkdir(exist_ok=True)
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) | options
    return subprocess.Popen(command, cwd=directory, env=os.environ | dict(OMP_NUM_THREADS="1"), **options)


def wait_for(condition, process):
    """Look often, for ten minutes at most, until the condition holds or the process has ended."""
    for _ in range(60_000):
        if condition() or process.poll() is not None:
            return
        time.sleep(0.01)
    raise TimeoutError


def finish(process, status=0):
    printed = process.communicate(timeout=600)[0]
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


def main(directory, *arguments, signal_at=None, status=0):
    """`main` of DAE in this process; a SIGTERM comes in the update of that number."""
    directory.mkdir(exist_ok=True)
    update, made = offdae_dae.update, []

    def signalled_update(*x):
        made.append(1)
        if len(made) == signal_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(*x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offdae_dae, "update", signalled_update)
        try:  # pytest.raises would keep the frames of `main`, and so its lock
            run_main(offdae_dae, directory, *TINY, *arguments)
            code = 0
        except SystemExit as stop:
            code = stop.code
    assert code == status


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("unfinished")
    main(directory, signal_at=20, status=75)
    return directory


@pytest.fixture
def copied(unfinished, tmp_path):
    """A copy of a run of DAE that was interrupted."""
    shutil.copytree(unfinished / "runs", tmp_path / "runs")
    return tmp_path


# ----------------------------------------------------------------------------------------------------- in this process
def test_interrupted_and_resumed_it_is_the_same_run(tmp_path):
    """Sixteen updates in a step, and a signal in the sixth: the other updates come after --resume, from the checkpoint
    alone. The other run writes no checkpoint at all."""
    arguments = ["--steps-per-update", 1, "--total-timesteps", 1600, "--learning-starts", 1504]
    main(tmp_path, "--checkpoint-interval", 0, *arguments)
    for signal_at, status in ((6, 75), (6, 75), (30, 75), (None, 0)):
        main(tmp_path / "parts", *arguments, signal_at=signal_at, status=status)
        (tmp_path / "parts" / "runs" / "run" / "args.json").write_text("{")  # it is for people and reports
    assert outcome(tmp_path / "parts") == outcome(tmp_path)


def test_interrupted_without_checkpoints_it_has_failed(tmp_path, capsys):
    main(tmp_path, "--checkpoint-interval", 0, signal_at=1, status=1)
    assert "interrupted, without a checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "run" / "checkpoint.pt").exists()


@pytest.mark.parametrize("interval", [0.01, 1800])
def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, capsys, interval):
    """Whether the next checkpoint or the next point of the curve, after 4,000 frames, comes first."""
    rate = ["--learning-rate", "1e30", "--total-timesteps", 2_000_000, "--checkpoint-interval", interval]
    main(tmp_path, *rate, status=1)
    line = next(line for line in capsys.readouterr().err.splitlines() if "not finite at frame" in line)
    frame = int(line.split("at frame ")[1].split(": ")[0].split(", ")[0].replace(",", ""))
    assert 1064 < frame <= 4_000 and line.startswith("offdae_dae.py: runs/run: ")
    assert ("weights" in line) == (interval < 1)
    saved = offdae_dae.read(tmp_path / "runs" / "run" / "checkpoint.pt", "cpu")
    assert 0 < saved["log"]["frames"] < frame and all(value.isfinite().all() for value in saved["network"].values())
    assert not (tmp_path / "runs" / "run" / "eval.json").exists()


def refused(directory, capsys, *arguments):
    """The one line that a resumed run is refused with; it leaves everything as it was."""
    before = tree_of(directory)
    main(directory, *arguments, status=2)
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and tree_of(directory) == before
    return error


def test_damaged_checkpoints_are_refused_and_not_touched(copied, capsys):
    """Every truncation; a flipped bit unless it is in the zip file's padding, where it changes nothing."""
    path, rng = copied / "runs" / "run" / "checkpoint.pt", np.random.default_rng(0)
    whole, original, harmless = path.read_bytes(), offdae_dae.read(path, "cpu"), 0
    assert len(original["replay"]["ring"]["terminal"]) < 2 * original["replay"]["frames"]  # not the whole ring
    truncated = [whole[:size] for size in (0, 1, 100, len(whole) - 1, *rng.integers(0, len(whole), 4))]
    flipped = [bytearray(whole) for _ in range(20)]
    for content in flipped:
        content[rng.integers(len(whole))] ^= 1 << rng.integers(8)
    for content in [*truncated, *flipped, b"not a checkpoint" * 1000]:
        path.write_bytes(content)
        try:
            unharmed = pickle.dumps(offdae_dae.read(path, "cpu")) == pickle.dumps(original)
        except SystemExit:
            assert "damaged" in capsys.readouterr().err
            assert "checkpoint.pt is " in refused(copied, capsys)
        else:
            assert unharmed and content in flipped
            harmless += 1
    assert harmless < 5


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


def test_other_arguments_scripts_and_versions_are_refused_by_name(copied, capsys):
    for flag, value in dict(env_id="breakout", n=16, hidden=64, seed=2, total_timesteps=13000).items():
        flag = f"--{flag.replace('_', '-')}"
        error = refused(copied, capsys, flag, value)
        assert f"checkpoint.pt was saved with {flag} " in error and error.rstrip().endswith(f", not {value}")
    assert "was saved with --target-network True, not False" in refused(copied, capsys, "--no-target-network")
    path = copied / "runs" / "run" / "checkpoint.pt"
    saved = offdae_dae.read(path, "cpu")
    changes = [dict(script="offdae_tree"), dict(sha256="0" * 64), dict(args=saved["args"] | dict(cvae_channels=8))]
    for change in changes:
        offdae_dae.write_atomically(path, saved | change)
        script = change.get("script", "offdae_dae")
        assert f"was saved by another version of {script}.py" in refused(copied, capsys)
    offdae_dae.write_atomically(path, saved | dict(evil=Evil()))
    assert "damaged or not of this project" in refused(copied, capsys) and not (copied / "evil").exists()


@pytest.mark.parametrize("env_id", offdae_dae.GAMES)
def test_restored_games_continue_as_the_original(env_id, tmp_path):
    """Steps beside the original, in which episodes end and games draw random numbers."""
    args = offdae_dae.Args(env_id=env_id, num_envs=4, max_episode_frames=500)
    seeds = offdae_dae.spawn_seeds(args)[2]
    original, restored, rng = *(offdae_dae.Games(args, seeds) for _ in range(2)), np.random.default_rng(0)
    for _ in range(333):
        original.step(rng.integers(len(original.action_set), size=4))
    offdae_dae.write_atomically(tmp_path / "games.pt", dict(script="offdae_dae", args={}, games=vars(original)))
    vars(restored).update(offdae_dae.read(tmp_path / "games.pt", "cpu")["games"])
    assert all(game.random is game.env.random for game in restored.games)
    original.finished, restored.finished = [], []
    for _ in range(400):
        actions = rng.integers(len(original.action_set), size=4)
        for left, right in zip(original.step(actions), restored.step(actions), strict=True):
            np.testing.assert_array_equal(left, right)
        np.testing.assert_array_equal(original.states, restored.states)
    assert original.finished == restored.finished and original.finished


def test_a_kill_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    child = os.fork()
    if child == 0:
        os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)
        offdae_dae.write_atomically(path, "new" * 1000)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert path.read_bytes() == b"old" and (tmp_path / "file.tmp").exists()
    offdae_dae.write_atomically(path, "new")
    assert path.read_bytes() == b"new" and len(list(tmp_path.iterdir())) == 1


# ------------------------------------------------------------------------------------------ processes and real signals
def learning(checkpoint, before=0):
    """Whether there is a checkpoint of a run that has made updates, other than the one of `before`."""
    return checkpoint.exists() and checkpoint.stat().st_mtime_ns > before and checkpoint.stat().st_size > 1_100_000


def test_ctrl_c_quits_at_once_while_minatar_is_imported(tmp_path):
    process = start("offdae_dae", tmp_path)
    wait_for(lambda: "pandas" in open(f"/proc/{process.pid}/maps").read(), process)
    process.send_signal(signal.SIGINT)
    assert "Traceback" not in finish(process, status=-signal.SIGINT) and not (tmp_path / "runs").exists()


def test_on_a_terminal_ctrl_c_says_what_happens_and_quits_the_second_time(tmp_path):
    terminal, other_end = os.openpty()
    slow = ["--batch-size", 2048, "--channels", 128, "--buffer-size", 20_000, "--learning-starts", 200]
    process = start("offdae_dae", tmp_path, *slow, "--steps-per-update", 1, stderr=other_end)
    wait_for((tmp_path / "runs" / "run" / "checkpoint.pt").exists, process)
    process.send_signal(signal.SIGINT)
    shown = ""
    while "Ctrl-C quits now." not in shown:
        shown += os.read(terminal, 100_000).decode()
    assert "Finishing this step, then a checkpoint." in shown
    process.send_signal(signal.SIGINT)
    assert process.wait(600) in (-signal.SIGINT, 75) and "Traceback" not in shown


@pytest.mark.slow
def test_interrupted_by_each_signal_and_resumed_it_is_the_same_run(tmp_path):
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
    finish(start("offdae_dae", tmp_path, "--run-name", "run", "--resume", tiny=()))
    before = tree_of(tmp_path)
    assert "runs/run is finished: return" in finish(start("offdae_dae", tmp_path))
    assert {path: x for path, x in tree_of(tmp_path).items() if path.name != "lock"} == before
    whole = tmp_path / "uninterrupted"
    finish(start("offdae_dae", whole, "--checkpoint-interval", 0))
    assert outcome(tmp_path) == outcome(whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_killed_many_times_each_script_ends_the_same(name, tmp_path):
    """SIGKILL at random moments: while it starts, trains, writes and evaluates."""
    frames = ["--total-timesteps", 2000 if name == "offdae_offpolicy" else 4000]
    killed, whole, rng = tmp_path / "killed", tmp_path / "uninterrupted", random.Random(SCRIPTS.index(name))
    for _ in range(3):
        process = start(name, killed, *frames)
        moment = rng.choice(["args.json", "checkpoint.pt", "checkpoint.pt", "checkpoint.pt.tmp", "curve.csv"])
        wait_for((killed / "runs" / "run" / moment).exists, process)
        time.sleep(rng.choice([0, rng.uniform(0, 0.8), rng.uniform(0, 2)]))
        process.kill()
        process.communicate()
    finish(start(name, killed, *frames))
    finish(start(name, whole, *frames, "--checkpoint-interval", 0))
    assert outcome(killed) == outcome(whole)


@pytest.mark.slow
@pytest.mark.parametrize("room", [2**20, 1000])
def test_a_full_disk_costs_a_checkpoint_not_the_run(copied, room):
    """Enough room for the model but not for a checkpoint, or for neither: then the score is still printed."""
    checkpoint = copied / "runs" / "run" / "checkpoint.pt"
    old = checkpoint.read_bytes()
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))  # noqa: E731
    printed = finish(start("offdae_dae", copied, preexec_fn=limit), status=0 if room == 2**20 else 1)
    assert "warning: no checkpoint at frame 4,000: [Errno 27] File too large" in printed
    if room == 2**20:
        assert outcome(copied)[2][-1]["frames"] == "4000"
    else:
        assert "\nreturn " in printed and "model and score not saved, [Errno 27]" in printed
        assert checkpoint.read_bytes() == old and "Traceback" not in printed
