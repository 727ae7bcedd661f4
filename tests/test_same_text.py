"""What the scripts have in common is the same text, so that their diff is the difference between the methods."""

import re

import pytest
from conftest import ROOT, SCRIPTS

OWN_ARGS = {"offdae_dae": ["target_network"]}
LINES = {"offdae_offpolicy": 700}


def source(name):
    return (ROOT / f"{name}.py").read_text()


def without(text, pattern):
    shorter, count = re.subn(pattern, "", text, flags=re.S | re.M)
    assert count == 1, f"{pattern} found {count} times"
    return shorter


def common_text(name):
    """A script without its docstring, its own arguments and its critic loss."""
    text = without(source(name), r'\A""".*?"""\n')
    text = without(text, r"^def critic_loss\(.*?(?=^\S)")
    for argument in OWN_ARGS.get(name, []):
        text = without(text, rf'^    {argument}: [^\n]*\n    """[^\n]*"""\n')
    return text


@pytest.mark.parametrize("name", ["offdae_uncorrected", "offdae_tree"])
def test_scripts_differ_in_the_critic_loss_only(name):
    assert common_text(name) == common_text("offdae_dae")


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_is_short_and_imports_nothing_of_ours(name):
    text = source(name)
    assert len(text.splitlines()) <= LINES.get(name, 620)
    assert not re.search(r"^\s*(import|from) (offdae|tabular|tests)", text, re.M)
    assert f"python {name}.py" in text.split('"""')[1]
