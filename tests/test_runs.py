"""Whole runs: what they write, what they repeat, what they refuse."""

import csv
import hashlib
import importlib
import json
import os
import runpy
import shutil
import subprocess
import sys
from types import SimpleNamespace

import minatar
import numpy as np
import pytest
import torch
from conftest import CPU, ROOT, run_main
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import offdae_dae
import offdae_offpolicy

TINY = "--small --total-timesteps 2400 --num-envs 16 --learning-starts 1000 --batch-size 64 --buffer-size 6000 "
TINY += "--learning-rate 1e-3 --tau 0.99 --channels 16 --hidden 128 --steps-per-update 64 --eval-episodes 5 "
TINY = [*TINY.split(), "--max-episode-frames", "300", "--run-name", "tiny"]


def read_curve(directory):
    with open(directory / "curve.csv", newline="") as file:
        return list(csv.DictReader(file))


def tree_of(directory):
    """Every file with its content and time of change."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {path: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in files}


@pytest.fixture(scope="module", params=["offdae_tree", "offdae_offpolicy"])
def alone(request, tmp_path_factory):
    """A run of a script that was copied alone into an empty directory."""
    directory = tmp_path_factory.mktemp(request.param)
    shutil.copy(ROOT / f"{request.param}.py", directory)
    command = [sys.executable, f"{request.param}.py", *TINY]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    return request.param, directory / "runs" / "tiny", result.stdout + result.stderr


def test_files_of_a_run(alone):
    name, directory, printed = alone
    files = {path.name for path in directory.iterdir()}
    events = [file for file in files if file.startswith("events.out.tfevents")]
    assert files - set(events) == {"args.json", "curve.csv", "eval.json", "model.pt"} and len(events) == 1

    described = json.loads((directory / "args.json").read_text())
    assert described["script"] == name and described["command"].startswith(f"python {name}.py --small")
    assert described["sha256"] == hashlib.sha256((ROOT / f"{name}.py").read_bytes()).hexdigest()
    args = described["args"]
    assert (args["num_envs"], args["total_timesteps"], args["channels"], args["tau"]) == (16, 2400, 16, 0.99)
    assert set(described["versions"]) == {"torch", "minatar", "numpy"} and described["python"] and described["device"]

    result = json.loads((directory / "eval.json").read_text())
    assert len(result["returns"]) == len(result["lengths"]) == len(result["truncated"]) == 5
    assert result["frames"] == sum(result["lengths"]) and max(result["lengths"]) <= 300
    assert f"return {result['mean']:.2f} ± {result['stderr']:.2f}" in printed
    method = {"offdae_offpolicy": "Off-policy DAE", "offdae_tree": "Tree Backup"}[name]
    assert printed.startswith(f"{method}, asterix, n 8, seed 1, 21 updates, cpu: runs/tiny\n")
    assert f"python {name}.py --evaluate runs/tiny" in printed and "tensorboard --logdir runs" in printed
    assert ("skill_or_luck.py runs/tiny" in printed) == (name == "offdae_offpolicy")

    model = torch.load(directory / "model.pt", weights_only=True)
    assert model["script"] == name and model["args"] == args
    assert all(value.isfinite().all() for value in model["network"].values())
    assert any((model["network"][key] != model["target_network"][key]).any() for key in model["network"])
    if name == "offdae_offpolicy":
        assert model["cvae"]["encoder.1.0.num_batches_tracked"] == 42, "BatchNorm was not in train mode"


def test_curve_and_tensorboard_hold_the_same_points(alone):
    _, directory, _ = alone
    rows, events = read_curve(directory), EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    assert [int(row["frames"]) for row in rows] == list(range(16, 2401, 16))  # fewer steps than points: one each
    for tag in rows[0].keys() - {"frames"}:
        expected = [(int(row["frames"]), float(row[tag])) for row in rows if row[tag]]
        points = [(event.step, event.value) for event in events.Scalars(tag)]
        assert points == [(frames, pytest.approx(value, rel=1e-6)) for frames, value in expected]
    assert all(bool(row["charts/episodic_return"]) == (int(row["charts/episodes"]) > 0) for row in rows)


def test_evaluate_repeats_the_evaluation_and_changes_nothing(alone, capsys):
    name, directory, _ = alone
    script, place = importlib.import_module(name), directory.parent.parent
    before, score = tree_of(place), json.loads((directory / "eval.json").read_text())
    run_main(script, place, "--evaluate", "runs/tiny")
    assert f"return {score['mean']:.2f} ± {score['stderr']:.2f}, 5 episodes" in capsys.readouterr().out
    run_main(script, place, "--evaluate", "runs/tiny/model.pt", "--eval-episodes", 3, "--seed", 3)
    assert ", 3 episodes" in capsys.readouterr().out
    other = [(offdae_dae, [], f"another version of {name}.py")]
    other += [(script, ["--env-id", "breakout"], "was saved with --env-id asterix, not breakout")]
    for evaluating, arguments, words in other:
        with pytest.raises(SystemExit) as stop:
            run_main(evaluating, place, "--evaluate", "runs/tiny", *arguments)
        assert stop.value.code == 2 and words in capsys.readouterr().err
    assert tree_of(place) == before


BAD = [
    ("--n 0", "--n 0: must be at least 1"),
    ("--n 257 --small --batch-size 256", "--n 257: must be at least 1 and less than 257"),
    ("--n 8 --max-episode-frames 7", "--n 8: must be at least 1 and less than 8"),
    ("--gamma 1", "--gamma 1.0: must be at least 0 and less than 1"),
    ("--gamma nan", "less than 1"),
    ("--tau -1", "--tau -1.0: must be"),
    ("--sticky-action-prob 1.5", "--sticky-action-prob 1.5: must be at least 0 and less than 1"),
    ("--learning-rate 0", "--learning-rate 0.0: must be at least 1e-09"),
    ("--seed -1", "--seed -1: must be at least 0"),
    ("--buffer-size 2047", "--buffer-size 2047: must be at least 2048"),
    ("--evaluate nowhere", "nowhere is missing"),
    ("--run-name there --small", "runs/there exists"),
    ("--run-name ../../x --small", "must be a plain name"),
    ("--exp-name a\x07b --small", "must be a plain name"),
    ("--small --resume", "--resume: needs the --run-name"),
    ("--latent-size 0", "--latent-size 0: must be at least 1"),
    ("--decode-latents 1", "--decode-latents 1: must be at least 2"),
    ("--cvae-channels 0", "--cvae-channels 0: must be at least 1"),
    ("--ent-coef -1", "--ent-coef -1.0: must be at least 1e-09"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=[arguments for arguments, _ in BAD])
def test_bad_input_is_refused_in_one_line(run, tmp_path, capsys, arguments, words):
    (tmp_path / "runs" / "there").mkdir(parents=True)
    with pytest.raises(SystemExit) as stop:
        run(offdae_offpolicy, *arguments.split())
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert words in error and error.count("\n") == 1 and error.startswith("offdae_offpolicy.py: ")
    assert [*tmp_path.rglob("*")] == [tmp_path / "runs", tmp_path / "runs" / "there"]


@pytest.mark.parametrize("arguments", ["--env-id pong", "--enf-id asterix", "stray", "--n eight"])
def test_what_tyro_refuses_has_status_2_and_writes_nothing(run, tmp_path, capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        run(offdae_dae, *arguments.split())
    assert stop.value.code == 2 and arguments.split()[-1] in capsys.readouterr().err and not list(tmp_path.iterdir())


REFUSED = {"long name": "--run-name " + "x" * 300, "a file": "--runs-dir file", "read-only": "--runs-dir /proc/nowhere"}
REFUSED |= {"memory": "--hidden 1000000000000", "wandb": "--track"}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_the_system_refuses_is_one_line_and_status_2(tmp_path, capsys, monkeypatch, reason):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    script = SimpleNamespace(__name__="offdae_dae", main=lambda: runpy.run_path(ROOT / "offdae_dae.py", {}, "__main__"))
    with pytest.raises(SystemExit) as stop:
        run_main(script, tmp_path, *TINY[:-2], *REFUSED[reason].split())
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and error.startswith("offdae_dae.py: ")
    assert not list(tmp_path.glob("runs/*")) and (tmp_path / "file").read_text() == "mine"
    assert ("--batch-size" in error) == (reason == "memory") and ("wandb" in error) == (reason == "wandb")


def test_help_tells_what_the_script_is_and_the_defaults_that_hold(script, run, capsys):
    for small, frames in (([], 10_000_000), (["--small"], script.SMALL["total_timesteps"])):
        with pytest.raises(SystemExit) as stop:
            run(script, *small, "--help")
        printed = " ".join(capsys.readouterr().out.replace("│", "").split())
        assert stop.value.code == 0 and f"python {script.__name__}.py --env-id asterix" in printed
        assert f"(default: {frames})" in printed and "{asterix,breakout,freeway,seaquest,space_invaders}" in printed


def test_a_run_without_updates_says_so_and_track_starts_weights_and_biases(run, capsys, monkeypatch):
    called = {}
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **arguments: called.update(arguments)))
    run(offdae_dae, *TINY, "--total-timesteps", 64, "--eval-episodes", 1, "--track")
    assert "NO (--learning-starts is too late) updates" in capsys.readouterr().out
    assert called.pop("config")["total_timesteps"] == 64
    assert called == dict(name="tiny", id="tiny", resume="allow", sync_tensorboard=True)
    # `fp32_precision` alone would make reading the older flags, as torch.compile does, an error
    assert torch.backends.cuda.matmul.allow_tf32 and torch.get_float32_matmul_precision() == "high"


def test_the_updates_due_are_made(common, run, monkeypatch):
    """16 frames a step and an update per 4: four in each step from 1000 frames on, each with its learning rate; the
    weight of the CVAE's entropy is cooled in the first half of the run, and latents become twins in its middle half."""
    rates, weights, twins = [], [], []

    def update(args, agent, replay, losses):
        rates.append({group["lr"] for group in agent.optimizer.param_groups})
        weights.append(agent.cvae.ent_coef.item() if common is offdae_offpolicy else 0)
        return torch.zeros(len(common.LOGGED))

    monkeypatch.setattr(common, "update", update)
    monkeypatch.setattr(common, "make_twin", lambda agent: twins.append(len(rates)), raising=False)
    run(common, *TINY, "--total-timesteps", 5000, "--steps-per-update", 4, "--eval-episodes", 1)
    steps = [frames for frames in range(1008, 5000, 16) for _ in range(4 if frames > 1008 else 2)]
    assert rates == [{1e-3 * (1 - frames / 5000)} for frames in steps]
    if common is offdae_offpolicy:
        assert weights == pytest.approx([1e-4 * 300 ** max(0, 1 - frames / 2500) for frames in steps], rel=1e-4)
        assert twins == [k for k, frames in enumerate(steps, 1) if k % 20 == 0 and 1250 <= frames < 3750]


def test_defaults_are_the_papers(script, monkeypatch):
    """Table `hyp`. With --small those in SMALL, but a flag that is typed wins."""
    monkeypatch.setattr(sys, "argv", ["script", "--small", "--learning-rate", "2.5e-4", "--batch-size", "1024"])
    args, saved = script.parse_args()
    assert (args.learning_rate, args.batch_size, args.hidden, saved) == (2.5e-4, 1024, script.SMALL["hidden"], {})
    args = script.Args()
    paper = dict(gamma=0.99, num_envs=128, learning_starts=25_000, buffer_size=1_000_000, learning_rate=0.00025)
    paper |= dict(steps_per_update=32, batch_size=1024, kl_coef=3.0, tau=0.999, total_timesteps=10_000_000)
    paper |= dict(max_episode_frames=108_000, channels=128, hidden=1024, eval_episodes=100)
    if script is offdae_offpolicy:
        paper |= dict(latent_size=16, cvae_channels=128, ent_coef=0.0001, decode_latents=16, cvae_every=1)
        paper |= dict(luck_gradient=True)
    assert {name: getattr(args, name) for name in paper} == paper
    games = script.Games(args, np.random.SeedSequence(0).spawn(1))
    groups = script.Agent(args, games, CPU).optimizer.param_groups
    settings = [(group["lr"], group["betas"], group["eps"], group["weight_decay"]) for group in groups]
    expected = [(0.00025, (0.9, 0.999), 1e-4, 0), (0.00025, (0.5, 0.9), 1e-8, 0)]
    assert settings == expected[: 2 if script is offdae_offpolicy else 1]
    harder = script.Games(
        script.Args(sticky_action_prob=0.1, difficulty_ramping=True), np.random.SeedSequence(0).spawn(1)
    )
    for game, expected in ((games.games[0], (0.0, False)), (harder.games[0], (0.1, True))):
        assert (game.sticky_action_prob, game.env.ramping) == expected and isinstance(game, minatar.Environment)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_a_machine_without_a_gpu_is_told(run, capsys, monkeypatch):
    monkeypatch.setattr(offdae_offpolicy, "SummaryWriter", lambda *_, **__: sys.exit("far enough"))
    with pytest.raises(SystemExit, match="far enough"):
        run(offdae_offpolicy, "--env-id", "seaquest", "--n", 32)
    line = capsys.readouterr().out
    assert line.startswith("Off-policy DAE, seaquest, n 32, seed 1, 311718 updates, cpu (days or months; minutes with")
