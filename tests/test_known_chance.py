"""The outcomes that experiments/known_chance.py reads off the boards are what the game drew."""

import held_out
import known_chance
import numpy as np
import pytest
import torch

import offdae_offpolicy as script


def drawn(before, after):
    """z from the game's own list of entities, [x, y, from the left, treasure] or None for each row."""
    for row, (old, new) in enumerate(zip(before, after, strict=True)):
        if old is None and new is not None:
            return 2 + 4 * row + 2 * new[2] + new[3]
    return int(any(old and new and old[0] != new[0] for old, new in zip(before, after, strict=True)))


def test_outcomes_are_what_the_game_drew():
    args = script.Args(num_envs=64)
    games, random = script.Games(args, script.spawn_seeds(args)[2]), np.random.default_rng(0)
    seen, expected, laws = [], [], []
    for _ in range(300):
        before = [[entity and list(entity) for entity in game.env.entities] for game in games.games]
        transitions = games.step(random.integers(0, 5, 64))
        going_on = np.flatnonzero(~transitions.terminal)
        boards = [
            script.unpack(torch.from_numpy(x[going_on]), 4) for x in (transitions.states, transitions.next_states)
        ]
        seen += known_chance.outcome(*boards).tolist()
        laws.append(known_chance.law(boards[0]))
        expected += [drawn(before[i], games.games[i].env.entities) for i in going_on]
    assert seen == expected
    counts, law = np.bincount(seen, minlength=34)[2:], torch.cat(laws).mean(0).numpy()
    spawned = counts.sum()
    assert spawned > 1000 and np.abs(counts - spawned * law).max() < 4 * np.sqrt(spawned * law.max())


def test_information():
    assert known_chance.information(torch.eye(2)) == "0.693 of 0.693 nats"
    assert known_chance.information(torch.tensor([[3.0, 1.0, 2.0], [6.0, 2.0, 4.0]])) == "0.000 of 0.637 nats"


NAMES = [("known_chance", 34), ("known_moves", 2), ("known_moves_detached", 2)]


@pytest.mark.parametrize("name, latents", NAMES)
def test_prior_and_gradient(name, latents):
    args = script.Args(exp_name=name, num_envs=32, batch_size=128, channels=4, hidden=8, latent_size=latents)
    games, random = script.Games(args, script.spawn_seeds(args)[2]), np.random.default_rng(0)
    replay = script.Replay(args, games.channels, torch.device("cpu"))
    for _ in range(60):
        replay.add(games.step(random.integers(0, 5, 32)))
    batch = replay.sample()
    prior = known_chance.KnownChance(args, games.channels, 5)
    _, q, p, _ = known_chance.known_chance_loss(args, prior, batch)
    assert q.shape == p.shape == (128, latents) and ((q == 0) | (q == 1)).all()
    torch.testing.assert_close(p.sum(1), torch.ones(128))
    network = (known_chance.DetachedLuck if "detached" in name else script.Network)(args, games.channels, 5)
    script.centred_luck(network(batch.states).luck, batch.actions, q, p).square().sum().backward()
    assert network.luck.weight.grad.abs().sum() > 0
    assert (network.hidden[0].weight.grad is None) == ("detached" in name)


def test_what_is_held_out_is_not_replayed(monkeypatch):
    """Every frame goes to one of the two. Luck in the loss is what makes its two values differ, and nothing else."""
    args = script.Args(exp_name="known_moves", num_envs=16, n=4, batch_size=64, channels=4, hidden=8, latent_size=2)
    games, random = script.Games(args, script.spawn_seeds(args)[2]), np.random.default_rng(0)
    whole, partial = (
        kind(args, games.channels, torch.device("cpu")) for kind in (script.Replay, held_out.PartialReplay)
    )
    for step in range(50):
        transitions = games.step(random.integers(0, 5, 16))
        marked = transitions._replace(rewards=np.arange(16) + 16 * step)
        whole.add(marked)
        partial.add(marked)
    replayed, kept, every = (x.ring["rewards"][: x.frames].long() for x in (partial, partial.held_out, whole))
    assert set((kept % 16).tolist()) == {0, 8} and not set((replayed % 16).tolist()) & {0, 8}
    assert sorted([*replayed.tolist(), *kept.tolist()]) == sorted(every.tolist())

    monkeypatch.setattr(script, "CVAE", known_chance.KnownChance)
    monkeypatch.setattr(script, "cvae_loss", known_chance.known_chance_loss)
    monkeypatch.setattr(held_out, "BATCHES", 1)
    agent, batch = script.Agent(args, games, torch.device("cpu")), partial.sample()
    monkeypatch.setattr(partial, "sample", lambda: batch)
    measured = held_out.critic_losses(args, agent, partial)
    online, target = agent.network(batch.states), agent.target_network(batch.states)
    online = online._replace(advantage=script.centred(online.advantage, target.log_policy.exp()))
    _, q, p, _ = known_chance.known_chance_loss(args, agent.cvae, batch)
    luck = script.centred_luck(online.luck, batch.actions, q, p)
    expected = [script.critic_loss(args, agent, batch, online, target, x).item() for x in (luck, 0 * luck)]
    assert [*measured.values()] == pytest.approx(expected, rel=1e-3) and expected[0] != expected[1]
    args.exp_name = "known_nothing"
    nothing = held_out.critic_losses(args, agent, partial)
    assert nothing["with luck"] == nothing["without luck"] == measured["without luck"]
