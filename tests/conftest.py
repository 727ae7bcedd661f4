import importlib
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "experiments")]
SCRIPTS = ["offdae_uncorrected", "offdae_dae", "offdae_offpolicy", "offdae_tree"]


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


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a script's `main` with arguments in an empty directory, which is returned."""

    def main(script, *arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, arguments)])
        script.main()
        return tmp_path

    return main
