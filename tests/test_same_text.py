"""What the scripts have in common is the same text, so that their diff is the difference between the methods."""

import difflib
import re

import pytest
from conftest import ROOT, SCRIPTS

OWN_ARGS = {"offdae_dae": ["target_network"], "offdae_offpolicy": ["target_network"]}
LINES = {"offdae_offpolicy": 690}
LOOP = "    while log.frames < args.total_timesteps and not signals:"


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
        text = without(text, rf"^    {argument}: [^\n]*\n")
    return text


@pytest.mark.parametrize("name", ["offdae_uncorrected", "offdae_tree"])
def test_scripts_differ_in_the_critic_loss_only(name):
    assert common_text(name) == common_text("offdae_dae")


def test_off_policy_dae_only_adds_to_dae():
    """Arguments, the CVAE, luck: three lines of what `offdae_dae.py` does elsewhere change, none is gone."""
    difference = list(
        difflib.ndiff(common_text("offdae_dae").splitlines(), common_text("offdae_offpolicy").splitlines())
    )
    changed = [line for line in difference if line.startswith("- ")]
    expected = ['Output = namedtuple("Output"', "critic = critic_loss(", 'stop(f"{error}; ']
    assert len(changed) == 3 and all(words in line for words, line in zip(expected, changed, strict=True))
    assert len([line for line in difference if line.startswith("+ ")]) > 50


@pytest.mark.parametrize("name", SCRIPTS)
def test_main_is_short(name):
    """At most 45 lines before the loop, and the loop on one screen."""
    lines = source(name).splitlines()
    main, loop, end = (lines.index(line) for line in ("def main():", LOOP, "    if args.checkpoint_interval:"))
    assert loop - main <= 45 and end - loop <= 40


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_is_short_and_imports_nothing_of_ours(name):
    text = source(name)
    assert len(text.splitlines()) <= LINES.get(name, 600)
    assert not re.search(r"^\s*(import|from) (offdae|tabular|tests)", text, re.M)
    assert f"python {name}.py" in text.split('"""')[1]
