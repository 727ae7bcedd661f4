import importlib
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "experiments")]
SCRIPTS = ["offdae_uncorrected", "offdae_dae", "offdae_offpolicy", "offdae_tree"]
CPU = torch.device("cpu")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long, deselected unless asked for with -m slow")
    if not config.option.markexpr:
        config.option.markexpr = "not slow"


@pytest.fixture(params=SCRIPTS)
def script(request):
    """Each training script in turn, as a module."""
    return importlib.import_module(request.param)


@pytest.fixture(params=["offdae_dae", "offdae_offpolicy"])
def common(request):
    """For what is the same text in the scripts, as tests/test_same_text.py makes sure."""
    return importlib.import_module(request.param)


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def made(script, device=CPU, steps=20, **sizes):
    """Arguments, games, an agent and a replay with frames of random play in it."""
    args = script.Args(**sizes)
    games, rng = script.Games(args, script.spawn_seeds(args)[2]), np.random.default_rng(0)
    replay, agent = script.Replay(args, games.channels, device), script.Agent(args, games, device)
    for _ in range(steps):
        replay.add(games.step(rng.integers(len(games.action_set), size=args.num_envs)))
    return args, games, agent, replay


def run_main(script, directory, *arguments):
    """`main` of a script with these arguments in a directory. Afterwards signals are handled as before."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(directory)
            patch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, arguments)])
            script.main()
    finally:
        getattr(script, "signals", []).clear()
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a script's `main` in an empty directory, which is returned."""
    monkeypatch.chdir(tmp_path)

    def run(script, *arguments):
        run_main(script, tmp_path, *arguments)
        return tmp_path

    return run
