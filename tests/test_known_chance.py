"""The outcomes that experiments/known_chance.py reads off the boards are what the game drew."""

import re

import known_chance
import numpy as np
import pytest
import torch
from conftest import ROOT, made

import offdae_offpolicy as script


def drawn(before, after):
    """z from the game's own list of entities, [x, y, from the left, treasure] or None for each row."""
    for row, (old, new) in enumerate(zip(before, after, strict=True)):
        if old is None and new is not None:
            return 2 + 4 * row + 2 * new[2] + new[3]
    return int(any(old and new and old[0] != new[0] for old, new in zip(before, after, strict=True)))


def test_outcomes_are_what_the_game_drew():
    _, games, _, _ = made(script, num_envs=64, steps=0, channels=4, hidden=8)
    rng, seen, expected, laws = np.random.default_rng(0), [], [], []
    for _ in range(300):
        words = known_chance.words_drawn(games)
        before = [[entity and list(entity) for entity in game.env.entities] for game in games.games]
        transitions = games.step(rng.integers(0, 5, 64))
        alive = np.flatnonzero(~transitions.terminal)
        boards = [script.unpack(torch.from_numpy(x[alive]), 4) for x in (transitions.states, transitions.next_states)]
        seen += known_chance.outcome(*boards).tolist()
        laws.append(known_chance.law(boards[0]))
        expected += [drawn(before[i], games.games[i].env.entities) for i in alive]
        drew = (known_chance.words_drawn(games) - words)[alive] % 624 != known_chance.IDLE_WORDS
        hidden = [all(before[i]) or transitions.rewards[i] > 0 for i in alive]  # no row was free, or taken at once
        assert ((drew == (torch.tensor(expected[-len(alive) :]) >= 2)) | torch.tensor(hidden)).all()
    assert seen == expected
    counts, law = np.bincount(seen, minlength=34)[2:], torch.cat(laws).mean(0).numpy()
    spawned = counts.sum()
    assert spawned > 1000 and np.abs(counts - spawned * law).max() < 4 * np.sqrt(spawned * law.max())


@pytest.mark.parametrize("game, chance, told", [("asterix", 0.32, 0.2), ("seaquest", 0.23, 0), ("breakout", 0, 0)])
def test_what_z_tells_of_the_agents(capsys, game, chance, told):
    known_chance.what_z_tells(ROOT / "results" / "agents" / game, steps=60)
    lines = re.findall(r"(.*): (.*) of (.*) nats", capsys.readouterr().out)
    assert lines[0][0] == "the game drew a number" and float(lines[0][2]) == pytest.approx(chance, abs=0.05)
    assert told <= float(lines[0][1]) <= float(lines[0][2]) and len(lines) == (4 if game == "asterix" else 1)
