"""Whole runs: what they write, what they repeat, what they refuse."""

import csv
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import minatar
import numpy as np
import pytest
import torch
from conftest import ROOT, SCRIPTS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import offdae_dae
import offdae_offpolicy

TINY = "--small --total-timesteps 4000 --num-envs 16 --learning-starts 1000 --batch-size 64 --buffer-size 6000 "
TINY += "--steps-per-update 64 --eval-episodes 5 --max-episode-frames 300 --run-name tiny"
TINY = TINY.split()


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
    assert (args["num_envs"], args["total_timesteps"], args["channels"], args["tau"]) == (16, 4000, 16, 0.99)
    assert set(described["versions"]) == {"torch", "minatar", "numpy"} and described["python"] and described["device"]

    result = json.loads((directory / "eval.json").read_text())
    assert len(result["returns"]) == len(result["lengths"]) == len(result["truncated"]) == 5
    assert result["frames"] == sum(result["lengths"]) and max(result["lengths"]) <= 300
    assert f"return {result['mean']:.2f} ± {result['stderr']:.2f}" in printed
    method = dict(zip(SCRIPTS, ("Uncorrected", "DAE", "Off-policy DAE", "Tree Backup"), strict=True))[name]
    assert printed.startswith(f"{method}, asterix, n 8, seed 1, 46 updates, cpu: runs/tiny\n")
    assert f"python {name}.py --evaluate runs/tiny" in printed and "tensorboard --logdir runs" in printed
    assert ("skill_or_luck.py runs/tiny" in printed) == (name == "offdae_offpolicy")

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
    assert f"return {score['mean']:.2f} ± {score['stderr']:.2f}, 5 episodes" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--evaluate", "runs/tiny/model.pt", "--eval-episodes", "3"])
    importlib.import_module(name).main()
    assert ", 3 episodes" in capsys.readouterr().out
    assert tree_of(directory.parent.parent) == before


def test_evaluate_refuses_another_scripts_run(alone, run, capsys):
    name, directory, _ = alone
    if name == "offdae_dae":
        run(offdae_dae, "--evaluate", directory, "--seed", 3, "--eval-episodes", 2)
        assert "2 episodes" in capsys.readouterr().out
        arguments, words = (
            ["--evaluate", directory, "--env-id", "breakout"],
            "was saved with --env-id asterix, not break",
        )
    else:
        arguments, words = ["--evaluate", directory], f"another version of {name}.py"
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
    ("--n 0", "--n 0: must be at least 1"),
    ("--n -3", "--n -3: must be at least 1"),
    ("--n 1025", "--n 1025: must be at least 1 and less than 1025"),
    ("--n 257 --small", "--n 257: must be at least 1 and less than 257"),
    ("--n 8 --max-episode-frames 7", "--n 8: must be at least 1 and less than 8"),
    ("--gamma 1", "--gamma 1.0: must be at least 0 and less than 1"),
    ("--gamma nan", "less than 1"),
    ("--tau -1", "--tau -1.0: must be"),
    ("--sticky-action-prob 1.5", "--sticky-action-prob 1.5: must be at least 0 and less than 1"),
    ("--channels 0", "--channels 0: must be at least 1"),
    ("--batch-size 7", "--n 8: must be at least 1 and less than 8"),
    ("--total-timesteps 0", "--total-timesteps 0"),
    ("--eval-episodes 0", "--eval-episodes 0"),
    ("--learning-rate 0", "--learning-rate 0.0: must be at least 1e-09"),
    ("--learning-starts -1", "--learning-starts -1: must be at least 0"),
    ("--seed -1", "--seed -1: must be at least 0"),
    ("--buffer-size 2047", "--buffer-size 2047: must be at least 2048"),
    ("--evaluate nowhere", "nowhere is missing"),
    ("--run-name there --small", "runs/there exists"),
    ("--run-name ../../x --small", "must be a plain name"),
    ("--run-name /tmp/x --small", "must be a plain name"),
    ("--exp-name a\x07b --small", "must be a plain name"),
    ("--small --resume", "--resume: needs the --run-name"),
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


@pytest.mark.parametrize("arguments", ["--env-id pong", "--enf-id asterix", "stray", "--n eight"])
def test_what_tyro_refuses_has_status_2_and_writes_nothing(run, tmp_path, capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        run(offdae_dae, *arguments.split())
    assert stop.value.code == 2 and arguments.split()[-1] in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_help_tells_what_the_script_is_and_the_defaults_that_hold(script, run, capsys):
    for small, frames in (([], 10_000_000), (["--small"], script.SMALL["total_timesteps"])):
        with pytest.raises(SystemExit) as stop:
            run(script, *small, "--help")
        printed = " ".join(capsys.readouterr().out.replace("│", "").split())
        assert stop.value.code == 0 and f"python {script.__name__}.py --env-id asterix" in printed
        assert f"(default: {frames})" in printed and "{asterix,breakout,freeway,seaquest,space_invaders}" in printed


PLACES = ["--run-name " + "x" * 300, "--runs-dir file", "--runs-dir /proc/nowhere", "--hidden 1000000000000"]


@pytest.mark.parametrize("arguments", PLACES, ids=["long name", "a file", "read-only", "memory"])
def test_what_the_system_refuses_is_one_line_and_status_2(tmp_path, arguments):
    (tmp_path / "file").write_text("mine")
    command = [sys.executable, str(ROOT / "offdae_dae.py"), *TINY[:-2], *arguments.split()]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("offdae_dae.py: ") and not list(tmp_path.glob("runs/*"))
    assert ("--batch-size" in result.stderr) == ("hidden" in arguments)


@pytest.mark.parametrize("flag", ["latent-size 0", "decode-latents 1", "cvae-channels 0", "ent-coef -1"])
def test_bad_sizes_of_the_cvae_are_refused(run, tmp_path, capsys, flag):
    with pytest.raises(SystemExit) as stop:
        run(offdae_offpolicy, *f"--{flag}".split())
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and flag.split()[0] in error and not list(tmp_path.iterdir())


def test_precision_is_set_for_old_and_new_readers(run):
    """`fp32_precision` alone would make reading the older flags, as torch.compile does, an error."""
    run(offdae_dae, *TINY, "--total-timesteps", 64, "--eval-episodes", 1)
    assert torch.backends.cuda.matmul.allow_tf32 and torch.get_float32_matmul_precision() == "high"


def test_a_run_without_updates_says_so(run, capsys):
    run(offdae_dae, *TINY, "--total-timesteps", 64, "--eval-episodes", 1)
    assert "NO (--learning-starts is too late) updates" in capsys.readouterr().out


def test_sticky_actions_and_ramping_reach_the_games(script):
    args = script.Args(sticky_action_prob=0.1, difficulty_ramping=True, num_envs=2)
    game = script.Games(args, script.spawn_seeds(args)[2]).games[0]
    assert (game.sticky_action_prob, game.env.ramping) == (0.1, True)


def test_the_updates_due_are_made(common, run, monkeypatch):
    """16 frames a step and an update per 4: four in each step from 1000 frames on, each with its learning rate."""
    rates = []

    def update(args, agent, replay, losses):
        rates.append({group["lr"] for group in agent.optimizer.param_groups})
        return torch.zeros(len(common.LOGGED))

    monkeypatch.setattr(common, "update", update)
    run(common, *TINY, "--total-timesteps", 2000, "--steps-per-update", 4, "--eval-episodes", 1)
    steps = [frames for frames in range(1008, 2000, 16) for _ in range(4 if frames > 1008 else 2)]
    assert rates == [{1e-3 * (1 - frames / 2000)} for frames in steps]


def test_the_entropy_weight_is_cooled(run, monkeypatch):
    """From 300 times `ent_coef` to `ent_coef`."""
    seen, update = [], offdae_offpolicy.update
    monkeypatch.setattr(offdae_offpolicy, "update", lambda *x: seen.append(x[1].cvae.ent_coef.item()) or update(*x))
    run(offdae_offpolicy, *TINY, "--total-timesteps", 2000, "--eval-episodes", 1, "--learning-starts", 200)
    frames = [frames for frames in range(0, 2000, 16) for _ in range((frames - 200) // 64 - (frames - 216) // 64)]
    frames = [x for x in frames if x >= 264]
    assert seen == pytest.approx([1e-4 * 300 ** (1 - x / 2000) for x in frames], rel=1e-4) and seen[0] > 30 * seen[-1]


def test_track_starts_weights_and_biases(run, tmp_path, monkeypatch):
    called = {}
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **arguments: called.update(arguments)))
    run(offdae_dae, *TINY, "--total-timesteps", 64, "--track")
    assert called.pop("config")["total_timesteps"] == 64
    assert called == dict(name="tiny", id="tiny", resume="allow", sync_tensorboard=True)


def test_track_without_wandb_is_one_line(tmp_path):
    code = "import runpy, sys; sys.modules['wandb'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    code = code.replace("runpy.run", "sys.argv[0:1] = []; runpy.run").replace("sys.argv[1],", "sys.argv[0],")
    command = [sys.executable, "-c", code, str(ROOT / "offdae_dae.py"), "--small", "--track"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and "wandb" in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_typed_flag_wins_over_small(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script", "--small", "--learning-rate", "2.5e-4", "--batch-size", "1024"])
    args, saved = script.parse_args()
    assert saved == {}
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
        assert (args.latent_size, args.cvae_channels, args.ent_coef, args.decode_latents) == (16, 128, 0.0001, 16)
        group = script.Agent(args, games, torch.device("cpu")).optimizer.param_groups[1]
        assert (group["lr"], group["betas"], group["eps"]) == (0.00025, (0.5, 0.9), 1e-8)
    game = games.games[0]
    assert (game.sticky_action_prob, game.env.ramping) == (0.0, False) and isinstance(game, minatar.Environment)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_a_machine_without_a_gpu_is_told(tmp_path):
    command = [sys.executable, str(ROOT / "offdae_offpolicy.py"), "--env-id", "seaquest", "--n", "32"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        process.kill()
    assert line.startswith("Off-policy DAE, seaquest, n 32, seed 1, 311718 updates, cpu (days or months; minutes with")
