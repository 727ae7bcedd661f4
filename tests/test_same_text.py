"""What the scripts have in common is the same text, so that their diff is the difference between the methods."""

import difflib
import re

import pytest
from conftest import ROOT, SCRIPTS

SOURCE = {name: (ROOT / f"{name}.py").read_text() for name in SCRIPTS}
LOOP = "    while log.frames < args.total_timesteps and not signals:"


def common_text(name):
    """A script without its docstring, its critic loss and its own argument."""
    text, own = SOURCE[name], [r'\A""".*?"""\n', r"^def critic_loss\(.*?(?=^\S)"]
    if name in ("offdae_dae", "offdae_offpolicy"):
        own.append(r"^    target_network: [^\n]*\n")
    for pattern in own:
        text, count = re.subn(pattern, "", text, flags=re.S | re.M)
        assert count == 1, f"{pattern} found {count} times"
    return text


@pytest.mark.parametrize("name", ["offdae_uncorrected", "offdae_tree"])
def test_scripts_differ_in_the_critic_loss_only(name):
    assert common_text(name) == common_text("offdae_dae")


def test_off_policy_dae_only_adds_to_dae():
    """Arguments, the CVAE, luck: three lines of what `offdae_dae.py` does elsewhere change, none is gone."""
    texts = [common_text(name).splitlines() for name in ("offdae_dae", "offdae_offpolicy")]
    difference = list(difflib.ndiff(*texts))
    changed = [line for line in difference if line.startswith("- ")]
    expected = ['Output = namedtuple("Output"', "critic = critic_loss(", 'stop(f"{error}; ']
    assert len(changed) == 3 and all(words in line for words, line in zip(expected, changed, strict=True))
    assert len([line for line in difference if line.startswith("+ ")]) > 50


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_is_short_and_imports_nothing_of_ours(name):
    """At most 45 lines of `main` before the loop, and the loop on one screen."""
    lines = SOURCE[name].splitlines()
    assert len(lines) <= (720 if name == "offdae_offpolicy" else 600)
    main, loop, end = (lines.index(line) for line in ("def main():", LOOP, "    if args.checkpoint_interval:"))
    assert loop - main <= 45 and end - loop <= 40
    assert not re.search(r"^\s*(import|from) (offdae|tabular|tests)", SOURCE[name], re.M)
    assert f"python {name}.py" in SOURCE[name].split('"""')[1]
