"""The real MinAtar games, against plain `minatar.Environment`s."""

import minatar
import numpy as np
import pytest
import torch

import offdae_dae as script


def record(env_id, seed):
    """Everything that a fixed sequence of random actions, the same in eight games, leads to."""
    args = script.Args(env_id=env_id, seed=seed, num_envs=8)
    games, rng = script.Games(args, script.spawn_seeds(args)[2]), np.random.default_rng(0)
    trajectory = [games.states]
    for _ in range(400):
        trajectory += [*games.step(np.full(8, rng.integers(len(games.action_set)))), games.states]
    return trajectory


@pytest.mark.parametrize("env_id", script.GAMES)
def test_seeds_decide_the_trajectory_and_each_game_has_chance_of_its_own(env_id):
    """Space Invaders has no chance, not even in its first board."""
    first, again, other = (record(env_id, seed) for seed in (1, 1, 2))
    same = [all(np.array_equal(a, b) for a, b in zip(first, x, strict=True)) for x in (again, other)]
    assert same == [True, env_id == "space_invaders"]
    different = {tuple(array[i].tobytes() for array in first) for i in range(8)}
    expected = {"space_invaders": [1], "breakout": range(2, 9)}  # Breakout's ball starts on one of two sides
    assert len(different) in expected.get(env_id, [8])


@pytest.mark.parametrize("env_id", script.GAMES)
def test_a_recorded_trajectory_is_that_of_plain_minatar(env_id):
    """Observations, rewards and ends; Freeway's own end comes at its 2,501st step."""
    args = script.Args(env_id=env_id, seed=7, num_envs=2)
    seeds = script.spawn_seeds(args)[2]
    games, plain = script.Games(args, seeds), []
    for seed in seeds:
        game = minatar.Environment(env_id, sticky_action_prob=0.0, difficulty_ramping=False)
        game.seed(seed.generate_state(8))
        game.reset()
        plain.append(game)

    def same(packed, boards):
        unpacked = script.unpack(torch.from_numpy(packed), games.channels).bool().numpy()
        return all(np.array_equal(x, board.transpose(2, 0, 1)) for x, board in zip(unpacked, boards, strict=True))

    assert games.states.shape == (2, -(-100 * games.channels // 8)) and games.states.dtype == np.uint8
    rng, ends, rewarded = np.random.default_rng(1), 0, 0
    for _ in range(2600 if env_id == "freeway" else 800):
        actions = rng.integers(len(games.action_set), size=2)
        before = [game.state() for game in plain]
        transitions = games.step(actions)
        results = [game.act(game.minimal_action_set()[a]) for game, a in zip(plain, actions, strict=True)]
        assert same(transitions.states, before) and same(transitions.next_states, [game.state() for game in plain])
        assert list(zip(transitions.rewards, transitions.terminal, strict=True)) == results
        for game, (reward, terminal) in zip(plain, results, strict=True):
            rewarded += reward > 0
            ends += terminal
            if terminal:
                game.reset()
        assert same(games.states, [game.state() for game in plain])
    assert ends > 0 and len(games.finished) == ends
    assert rewarded > 0 or env_id in ("freeway", "seaquest")
