"""Whole runs: what they write, what they repeat, what they refuse."""

import csv
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import minatar
import numpy as np
import pytest
import torch
from conftest import ROOT, SCRIPTS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import offdae_dae
import offdae_offpolicy

TINY = "--small --total-timesteps 4000 --num-envs 16 --learning-starts 1000 --batch-size 64 --buffer-size 6000"
TINY = [*TINY.split(), *"--eval-episodes 5 --max-episode-frames 300 --run-name tiny".split()]


def read_curve(directory):
    with open(directory / "curve.csv", newline="") as file:
        return list(csv.DictReader(file))


def tree_of(directory):
    """Every file with its content and time of change."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {path: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in files}


@pytest.fixture(scope="module", params=SCRIPTS)
def alone(request, tmp_path_factory):
    """A run of each script, copied alone into an empty directory."""
    directory = tmp_path_factory.mktemp(request.param)
    shutil.copy(ROOT / f"{request.param}.py", directory)
    command = [sys.executable, f"{request.param}.py", *TINY]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return request.param, directory / "runs" / "tiny", result.stdout


def test_files_of_a_run(alone):
    name, directory, printed = alone
    files = {path.name for path in directory.iterdir()}
    events = [file for file in files if file.startswith("events.out.tfevents")]
    assert files - set(events) == {"args.json", "curve.csv", "eval.json", "model.pt"} and len(events) == 1

    described = json.loads((directory / "args.json").read_text())
    assert described["script"] == name and described["command"].startswith(f"python {name}.py --small")
    assert described["sha256"] == hashlib.sha256((ROOT / f"{name}.py").read_bytes()).hexdigest()
    args = described["args"]
    assert (args["num_envs"], args["total_timesteps"], args["channels"], args["tau"]) == (16, 4000, 16, 0.99)
    assert set(described["versions"]) == {"python", "torch", "minatar", "numpy"}

    result = json.loads((directory / "eval.json").read_text())
    assert len(result["returns"]) == len(result["lengths"]) == len(result["truncated"]) == 5
    assert result["frames"] == sum(result["lengths"]) and max(result["lengths"]) <= 300
    assert f"return {result['mean']:.2f} ± {result['stderr']:.2f}" in printed
    assert "\n4,000 of 4,000 frames, " in "\n" + printed and "5 of 5 episodes, evaluation" in printed

    model = torch.load(directory / "model.pt", weights_only=True)
    assert model["script"] == name and model["args"] == args
    assert all(value.isfinite().all() for value in model["network"].values())
    assert any((model["network"][key] != model["target_network"][key]).any() for key in model["network"])
    if name == "offdae_offpolicy":
        updates = (4000 - 16 - 1000) // 64
        assert model["cvae"]["encoder.1.0.num_batches_tracked"] == updates, "BatchNorm was not in train mode"


def test_curve_and_tensorboard_hold_the_same_points(alone):
    _, directory, _ = alone
    rows, events = read_curve(directory), EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    assert [int(row["frames"]) for row in rows] == list(range(16, 4001, 16))  # fewer steps than points: one each
    for tag in rows[0].keys() - {"frames"}:
        expected = [(int(row["frames"]), float(row[tag])) for row in rows if row[tag]]
        points = [(event.step, event.value) for event in events.Scalars(tag)]
        assert points == [(frames, pytest.approx(value, rel=1e-6)) for frames, value in expected]
    assert all(bool(row["charts/episodic_return"]) == (int(row["charts/episodes"]) > 0) for row in rows)
    # 16 frames a step, the first update is owed at 1000 + 64 frames and seen at the next point
    assert [bool(row["losses/critic"]) for row in rows[60:80]] == [
        (frames - 16 - 1000) // 64 > max(0, frames - 32 - 1000) // 64 for frames in range(61 * 16, 81 * 16, 16)
    ]
    for row in rows:
        rate = 1e-3 * (1 - (int(row["frames"]) - 16) / 4000)
        assert float(row["charts/learning_rate"]) == pytest.approx(rate, rel=1e-5)


def test_evaluate_repeats_the_evaluation_and_changes_nothing(alone, monkeypatch, capsys):
    name, directory, _ = alone
    before = tree_of(directory.parent.parent)
    monkeypatch.chdir(directory.parent.parent)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--evaluate", "runs/tiny"])
    importlib.import_module(name).main()
    score = json.loads((directory / "eval.json").read_text())
    assert f"runs/tiny: return {score['mean']:.2f} ± {score['stderr']:.2f}, 5 episodes" in capsys.readouterr().out
    assert tree_of(directory.parent.parent) == before


def test_evaluate_refuses_another_scripts_run(alone, run, capsys):
    name, directory, _ = alone
    if name == "offdae_dae":
        run(offdae_dae, "--evaluate", directory, "--seed", 3, "--eval-episodes", 2)
        assert "2 episodes" in capsys.readouterr().out
        arguments, words = ["--evaluate", directory, "--env-id", "breakout"], "--evaluate goes only with"
    else:
        arguments, words = ["--evaluate", directory], f"a run of {name}.py"
    with pytest.raises(SystemExit) as stop:
        run(offdae_dae, *arguments)
    assert stop.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.slow
def test_same_command_and_seed_same_run(run):
    """Identical curves (speed apart) and weights; another seed gives others."""
    runs = {}
    for name, seed in [("a", 1), ("b", 1), ("c", 2)]:
        directory = run(offdae_dae, *TINY[:-1], name, "--seed", seed) / "runs" / name
        rows = [{tag: value for tag, value in row.items() if tag != "charts/SPS"} for row in read_curve(directory)]
        model = torch.load(directory / "model.pt", weights_only=True)
        score = json.loads((directory / "eval.json").read_text()) | dict(seconds=0)
        networks = [model[part] for part in ("network", "target_network", "cvae") if part in model]
        weights = [(key, value.numpy().tobytes()) for network in networks for key, value in network.items()]
        runs[name] = rows, weights, score
    assert runs["a"] == runs["b"]
    assert all(left != right for left, right in zip(runs["a"], runs["c"], strict=True))


BAD = [
    ("--env-id pong", "no such game"),
    ("--enf-id asterix", "unknown argument --enf-id"),
    ("stray", "unknown argument stray"),
    ("--n 0", "--n 0: must be at least 1"),
    ("--n -3", "--n -3: must be at least 1"),
    ("--n 1025", "at most batch-size 1024"),
    ("--n 257 --small", "at most batch-size 256"),
    ("--n 8 --max-episode-frames 7", "max-episode-frames"),
    ("--gamma 1", "--gamma 1.0: must be at least 0 and less than 1"),
    ("--gamma -0.1", "less than 1"),
    ("--gamma nan", "less than 1"),
    ("--tau 1", "--tau 1.0: must be"),
    ("--tau -1", "--tau -1.0: must be"),
    ("--channels 0", "--channels 0: must be at least 1"),
    ("--hidden -1", "--hidden -1"),
    ("--batch-size 0", "--batch-size 0: must be at least 1"),
    ("--num-envs 0", "--num-envs 0: must be at least 1"),
    ("--total-timesteps 0", "--total-timesteps 0"),
    ("--eval-episodes 0", "--eval-episodes 0"),
    ("--learning-rate 0", "--learning-rate 0.0: must be positive"),
    ("--learning-starts -1", "--learning-starts -1: must be at least 0"),
    ("--seed -1", "--seed -1: must be at least 0"),
    ("--buffer-size 2047", "batch-size + num-envs * n = 2048"),
    ("--evaluate nowhere", "nowhere/model.pt: no such file"),
    ("--run-name there --small", "runs/there exists"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=[arguments for arguments, _ in BAD])
def test_bad_input_is_refused_in_one_line(run, tmp_path, capsys, arguments, words):
    (tmp_path / "runs" / "there").mkdir(parents=True)
    with pytest.raises(SystemExit) as stop:
        run(offdae_dae, *arguments.split())
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert words in error and error.count("\n") == 1 and error.startswith("offdae_dae.py: ")
    assert not list((tmp_path / "runs" / "there").iterdir()) and len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.parametrize(
    "flag", ["latent-size 0", "decode-every 0", "cvae-channels 0", "ent-coef -1", "cvae-learning-rate 0"]
)
def test_bad_sizes_of_the_cvae_are_refused(run, tmp_path, capsys, flag):
    with pytest.raises(SystemExit) as stop:
        run(offdae_offpolicy, *f"--{flag}".split())
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and flag.split()[0] in error and not list(tmp_path.iterdir())


def test_the_updates_owed_are_made(common, run, monkeypatch):
    """16 frames a step and an update per 4: four in each step from 1000 frames on, each with its learning rate."""
    rates = []

    def update(args, agent, replay, losses):
        rates.append(agent.learning_rate.item())
        return torch.zeros(len(common.LOSSES))

    monkeypatch.setattr(common, "update", update)
    run(common, *TINY, "--total-timesteps", 2000, "--steps-per-update", 4, "--eval-episodes", 1)
    steps = [frames for frames in range(1008, 2000, 16) for _ in range(4 if frames > 1008 else 2)]
    assert rates == pytest.approx([1e-3 * (1 - frames / 2000) for frames in steps], rel=1e-5)


def test_track_starts_weights_and_biases(run, tmp_path, monkeypatch):
    called = {}
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **arguments: called.update(arguments)))
    run(offdae_dae, *TINY, "--total-timesteps", 64, "--track", "--wandb-entity", "us", "--wandb-project-name", "ours")
    assert called.pop("config")["total_timesteps"] == 64
    assert called == dict(project="ours", entity="us", name="tiny", id="tiny", resume="allow", sync_tensorboard=True)


def test_track_without_wandb_is_one_line(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SystemExit) as stop:
        run(offdae_dae, "--small", "--track")
    assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1 and not list(tmp_path.iterdir())


def test_a_typed_flag_wins_over_small(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script", "--small", "--learning-rate", "2.5e-4", "--batch-size", "1024"])
    args = script.parse_args()
    assert (args.learning_rate, args.batch_size, args.hidden, args.small) == (
        2.5e-4,
        1024,
        script.SMALL["hidden"],
        True,
    )


def test_defaults_are_the_papers(script):
    """Table `hyp`."""
    args = script.Args()
    paper = dict(gamma=0.99, num_envs=128, learning_starts=25_000, buffer_size=1_000_000, learning_rate=0.00025)
    paper |= dict(steps_per_update=32, batch_size=1024, kl_coef=3.0, tau=0.999, total_timesteps=10_000_000)
    paper |= dict(max_episode_frames=108_000, channels=128, hidden=1024, eval_episodes=100)
    assert {name: getattr(args, name) for name in paper} == paper
    games = script.Games(args, np.random.SeedSequence(0).spawn(1))
    group = script.Agent(args, games, torch.device("cpu")).optimizer.param_groups[0]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.999), 1e-4, 0)
    if script is offdae_offpolicy:
        assert (args.latent_size, args.cvae_channels, args.ent_coef, args.decode_every) == (16, 128, 0.0001, 1)
        group = script.Agent(args, games, torch.device("cpu")).cvae_optimizer.param_groups[0]
        assert (float(group["lr"]), group["betas"], group["eps"]) == (pytest.approx(0.00025), (0.5, 0.9), 1e-8)
    game = games.games[0]
    assert (game.sticky_action_prob, game.env.ramping) == (0.0, False) and isinstance(game, minatar.Environment)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
@pytest.mark.parametrize("name", ["offdae_dae", "offdae_offpolicy"])
def test_a_machine_without_a_gpu_is_told_how_long(name, tmp_path):
    command = [sys.executable, str(ROOT / f"{name}.py"), "--env-id", "seaquest", "--n", "32"]
    one_thread = os.environ | dict(OMP_NUM_THREADS="1")
    with subprocess.Popen(command, cwd=tmp_path, env=one_thread, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        ticks = sum(map(int, Path(f"/proc/{process.pid}/stat").read_text().rsplit(")")[1].split()[11:13]))
        seconds = ticks / os.sysconf("SC_CLK_TCK")  # of a core of its own: others may keep the machine busy
        with open(f"/proc/{process.pid}/status") as status:
            peak = next(int(entry.split()[1]) for entry in status if entry.startswith("VmHWM"))
        process.kill()
    assert "hours" in line and "--small" in line
    assert float(line.split(" hours")[0].split()[-1].replace(",", "")) > 1
    assert seconds < 10 and peak < 2e6  # kB
