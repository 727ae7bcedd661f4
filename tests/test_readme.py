"""The README is short, its links lead somewhere, and its commands are ones that the scripts understand."""

import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys

import pytest
import tyro
from conftest import ROOT

README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(
    r"(?:python|bash|[A-Z]+=\S+(?: [A-Z]+=\S+| [A-Z]+=\"[^\"]*\")* bash) [\w/]+\.(?:py|sh)[^`\n|#&]*", README
)


def test_length():
    assert len(README.splitlines()) <= 200 and len(README.split()) <= 2000
    prose = [line for line in README.splitlines() if not line.startswith(("|", "<img", "    "))]
    assert max(map(len, prose)) <= 120


@pytest.mark.parametrize("page", ["README.md", "results/README.md", "docs/choices.md", "experiments/README.md"])
def test_links(page):
    text = (ROOT / page).read_text()
    links = re.findall(r"\]\(([^)#]+)", text) + re.findall(r'src="([^"]+)"', text)
    assert all((ROOT / page).parent.joinpath(link).exists() for link in links if "://" not in link), links


def test_there_are_commands_of_every_kind():
    scripts = {"offdae_dae.py", "offdae_offpolicy.py", "skill_or_luck.py", "tabular_examples.py", "benchmark_report.py"}
    assert all(any(script in command for command in COMMANDS) for script in scripts | {"benchmark.sh"})


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_commands_parse(command, monkeypatch):
    class Parsed(BaseException):
        pass

    def and_stop(parse):
        def parse_and_stop(*arguments, **options):
            parse(*arguments, **options)
            raise Parsed

        return parse_and_stop

    words = shlex.split(re.sub(r"<[^>]*>", "x", command))
    if "bash" in words:
        here = dict(os.environ, WORKERS="1")  # no Slurm has to answer
        subprocess.run(["bash", "-c", command + " --dry-run"], cwd=ROOT, env=here, check=True)
        return
    module = importlib.import_module(words[1].removesuffix(".py").removeprefix("experiments/"))
    monkeypatch.setattr(sys, "argv", words[1:])
    if hasattr(module, "tyro"):
        monkeypatch.setattr(tyro, "cli", and_stop(tyro.cli))
    else:
        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", and_stop(argparse.ArgumentParser.parse_args))
    with pytest.raises(Parsed):
        module.main()
