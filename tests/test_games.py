"""The real MinAtar games, against plain `minatar.Environment`s."""

import minatar
import numpy as np
import pytest
import torch

import offdae_dae


@pytest.fixture
def common():
    return offdae_dae


ALL_GAMES = ["asterix", "breakout", "freeway", "seaquest", "space_invaders"]


def make_games(common, env_id, seed, count=3, **changes):
    args = common.Args(env_id=env_id, seed=seed, num_envs=count, **changes)
    return common.Games(args, common.spawn_seeds(args)[2])


def record(common, games, steps):
    """Everything that a fixed sequence of random actions leads to."""
    rng, trajectory = np.random.default_rng(0), [games.states]
    for _ in range(steps):
        trajectory += games.step(rng.integers(len(games.action_set), size=len(games.games)))
        trajectory.append(games.states)
    return trajectory


def same(left, right):
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("env_id", ALL_GAMES)
def test_seeds_decide_the_trajectory(common, env_id):
    first = record(common, make_games(common, env_id, seed=1), 400)
    assert same(first, record(common, make_games(common, env_id, seed=1), 400))
    assert same(first, record(common, make_games(common, env_id, seed=2), 400)) == (env_id == "space_invaders")


@pytest.mark.parametrize("env_id", ALL_GAMES)
def test_each_game_has_chance_of_its_own(common, env_id):
    """The same actions in all games of one seed; Space Invaders has no chance, not even in its first board."""
    games, boards = make_games(common, env_id, seed=1, count=8), []
    rng = np.random.default_rng(0)
    for _ in range(400):
        games.step(np.full(8, rng.integers(len(games.action_set))))
        boards.append(games.states)
    different = {tuple(board[i].tobytes() for board in boards) for i in range(8)}
    expected = {"space_invaders": [1], "breakout": range(2, 9)}  # Breakout's ball starts on one of two sides
    assert len(different) in expected.get(env_id, [8])


@pytest.mark.parametrize("env_id", ALL_GAMES)
def test_a_recorded_trajectory_is_that_of_plain_minatar(common, env_id):
    """Observations, rewards and ends; Freeway's own end comes at its 2,501st step."""
    steps = 2600 if env_id == "freeway" else 800
    args = common.Args(env_id=env_id, seed=7, num_envs=2)
    games = common.Games(args, common.spawn_seeds(args)[2])
    plain = []
    for seed in common.spawn_seeds(args)[2]:
        game = minatar.Environment(env_id, sticky_action_prob=0.0, difficulty_ramping=False)
        game.seed(seed.generate_state(8))
        game.reset()
        plain.append(game)
    rng, ends, rewarded = np.random.default_rng(1), 0, 0
    for _ in range(steps):
        actions = rng.integers(len(games.action_set), size=2)
        before = [game.state() for game in plain]
        transitions = games.step(actions)
        states = common.unpack(torch.from_numpy(transitions.states), games.channels).bool().numpy()
        next_states = common.unpack(torch.from_numpy(transitions.next_states), games.channels).bool().numpy()
        for i, game in enumerate(plain):
            reward, terminal = game.act(game.minimal_action_set()[actions[i]])
            assert np.array_equal(states[i], before[i].transpose(2, 0, 1))
            assert np.array_equal(next_states[i], game.state().transpose(2, 0, 1))
            assert transitions.rewards[i] == reward and transitions.terminal[i] == terminal
            rewarded += reward > 0
            if terminal:
                ends += 1
                game.reset()
        after = common.unpack(torch.from_numpy(games.states), games.channels).bool().numpy()
        assert all(np.array_equal(after[i], game.state().transpose(2, 0, 1)) for i, game in enumerate(plain))
    assert ends > 0 and len(games.finished) == ends
    assert rewarded > 0 or env_id in ("freeway", "seaquest")


def test_the_time_limit_truncates(common):
    games = make_games(common, "freeway", seed=1, max_episode_frames=20)
    for step in range(1, 61):
        transitions = games.step(np.zeros(3, dtype=np.int64))
        assert not transitions.terminal.any()
        assert transitions.truncated.all() == (step % 20 == 0) == transitions.truncated.any()
    assert [length for _, length, truncated in games.finished if truncated] == [20] * 9


@pytest.mark.parametrize("channels", [4, 6, 7, 10])
def test_packing(common, channels):
    boards = list(np.random.default_rng(0).random((5, 10, 10, channels)) < 0.5)
    packed = common.pack(boards)
    assert packed.shape == (5, -(-channels * 100 // 8)) and packed.dtype == np.uint8
    unpacked = common.unpack(torch.from_numpy(packed), channels)
    assert np.array_equal(unpacked.numpy(), np.stack(boards).transpose(0, 3, 1, 2))
