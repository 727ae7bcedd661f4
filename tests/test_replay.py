"""Replay driven through `Games` by a scripted game whose states say which game, episode and step they are."""

import math
from collections import Counter, deque

import minatar
import numpy as np
import pytest
import torch
from conftest import CPU, made

GAMES, LIMIT = 4, 20


class ScriptedGame:
    """Episodes of random lengths; the board spells (game, episode, step) in bits, the reward is made of them."""

    made = []

    def __init__(self, *_, **__):
        self.number, self.episode, self.n_channels = len(self.made) % GAMES, -1, 4
        self.made.append(self)
        self.log = {}  # (episode, step) -> (action, reward, terminal)

    def seed(self, seed):
        self.random = np.random.RandomState(seed)

    def reset(self):
        self.episode += 1
        self.step, self.terminal = 0, False
        self.length = int(self.random.randint(1, 31))  # those beyond the time limit never end by themselves

    def minimal_action_set(self):
        return [10, 11, 12]

    def state(self):
        bits = np.zeros(400, dtype=bool)
        for place, number in enumerate((self.number, self.episode, self.step)):
            bits[16 * place : 16 * place + 16] = [number >> bit & 1 for bit in range(16)]
        return bits.reshape(4, 10, 10).transpose(1, 2, 0)

    def act(self, action):
        assert not self.terminal, "a game was stepped after its end"
        key = (self.episode, self.step)
        self.step += 1
        self.terminal = self.step == self.length
        reward = self.number + self.episode / 7 + self.step / 100
        self.log[key] = (action - 10, np.float32(reward), self.terminal)
        return reward, self.terminal


def decode(states):
    """(game, episode, step) of unpacked boards."""
    bits = states.flatten(1)[:, :48].long().view(-1, 3, 16)
    return [tuple(row) for row in (bits * 2 ** torch.arange(16)).sum(2).tolist()]


def play(common, monkeypatch, n, steps, buffer_size=2000, batch_size=64, gamma=0.9):
    """Games and replay after some steps, and the segments that replay should hold, oldest first, kept by hand."""
    monkeypatch.setattr(minatar, "Environment", ScriptedGame)
    ScriptedGame.made.clear()
    sizes = dict(n=n, num_envs=GAMES, max_episode_frames=LIMIT, buffer_size=buffer_size, batch_size=batch_size)
    args, games, _, replay = made(common, steps=0, channels=2, hidden=4, gamma=gamma, **sizes)
    rng, expected, running = np.random.default_rng(0), deque(), [[] for _ in range(GAMES)]
    for _ in range(steps):
        keys = [(game.number, game.episode, game.step) for game in games.games]
        transitions = games.step(rng.integers(3, size=GAMES))
        replay.add(transitions)
        for i, key in enumerate(keys):
            running[i].append(key)
            terminal = games.games[i].log[key[1:]][2]
            assert terminal == transitions.terminal[i]
            assert transitions.truncated[i] == (not terminal and key[2] + 1 == LIMIT)
            if terminal or len(running[i]) == n:
                expected.append((tuple(running[i]), terminal))
            if terminal or len(running[i]) == n or transitions.truncated[i]:
                running[i] = []
        while sum(len(keys) for keys, _ in expected) > buffer_size:
            expected.popleft()
    return args, games, replay, expected


@pytest.mark.parametrize("n", [1, 3, 8, 25])
def test_every_frame_of_many_batches(common, monkeypatch, n):
    args, games, replay, expected = play(common, monkeypatch, n, steps=500)
    segment_of = {key: (keys, terminal) for keys, terminal in expected for key in keys}
    F, K, cut_segments = args.batch_size, math.ceil(args.batch_size / n), 0
    for _ in range(15):
        batch = replay.sample()
        assert batch.states.shape == (F, 4, 10, 10) and batch.end_states.shape == (K, 4, 10, 10)
        frames, ends = decode(batch.states), decode(batch.end_states)
        following = decode(batch.next_states) if hasattr(batch, "next_states") else None
        i = 0
        while i < F:
            keys, terminal = segment_of[frames[i]]
            length = int(batch.remaining[i])
            assert tuple(frames[i : i + length]) == keys[-length:], "out of order, or of another segment"
            if length < len(keys):
                assert i + length == F, "only the last segment may lack its front"
                cut_segments += 1
            for j in range(i, i + length):
                number, episode, step = frames[j]
                action, reward, _ = games.games[number].log[episode, step]
                assert batch.actions[j] == action and batch.rewards[j] == reward
                assert batch.remaining[j] == i + length - j and batch.end_terminal[j] == terminal
                assert following is None or following[j] == (number, episode, step + 1)
                if not terminal:
                    assert ends[batch.end_slot[j]] == (number, episode, keys[-1][2] + 1)
                row = torch.zeros(F)
                row[j : i + length] = 0.9 ** torch.arange(i + length - j)
                torch.testing.assert_close(batch.discounts[j], row)
            i += length
        assert i == F
    assert cut_segments > 0 or n == 1


@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize("buffer_size", [150, 333])
def test_the_oldest_segments_leave_first(common, monkeypatch, n, buffer_size):
    """After many times round the ring the stored segments are the newest ones that fit, whole and in order."""
    for steps in (10, 600):
        args, games, replay, expected = play(common, monkeypatch, n, steps, buffer_size, batch_size=32)
        assert replay.newest - replay.oldest == len(expected)
        assert replay.frames == sum(len(keys) for keys, _ in expected) <= buffer_size
        for row, (keys, terminal) in zip(range(replay.oldest, replay.newest), expected, strict=True):
            start, length = replay.ring["segments"][row % buffer_size].tolist()
            where = (start + torch.arange(length)) % buffer_size
            states, following = (decode(common.unpack(replay.ring[x][where], 4)) for x in ("states", "next_states"))
            assert tuple(states) == keys and following == [
                (number, episode, step + 1) for number, episode, step in keys
            ]
            assert replay.ring["terminal"][where].tolist() == [False] * (length - 1) + [terminal]
            assert terminal or length == n


def test_segments_are_drawn_uniformly(common, monkeypatch):
    _, _, replay, expected = play(common, monkeypatch, 8, steps=200, buffer_size=300, batch_size=16)
    draws = 1500
    counts = Counter(decode(replay.sample().states)[0] for _ in range(draws))  # F > n: the first one is never cut
    firsts = [keys[0] for keys, _ in expected]
    assert len({len(keys) for keys, _ in expected}) > 1 and set(counts) <= set(firsts)
    mean, freedom = draws / len(firsts), len(firsts) - 1
    chi_squared = sum((counts[first] - mean) ** 2 / mean for first in firsts)
    assert abs(chi_squared - freedom) < 4 * (2 * freedom) ** 0.5


def test_the_ring_grows_with_what_is_stored_and_a_full_one_takes_at_most_300_mb(common, monkeypatch):
    for steps, rows in ((10, 64), (600, 333)):
        _, _, replay, _ = play(common, monkeypatch, 3, steps, buffer_size=333)
        assert {len(ring) for ring in replay.ring.values()} <= {rows, rows // 2} and replay.frames > rows // 2 - 64
    _, _, replay, _ = play(common, monkeypatch, 3, steps=100, batch_size=1024, gamma=1e-3)
    assert replay.sample().discounts.isfinite().all()  # no power of a small gamma overflows
    seaquest = common.Replay(common.Args(n=1), 10, torch.device("meta"))
    assert sum(ring.nbytes for ring in seaquest.ring.values()) * seaquest.capacity <= 300e6  # a row each at first


def test_evaluation_counts_the_first_episode_of_each_game(common, monkeypatch):
    monkeypatch.setattr(minatar, "Environment", ScriptedGame)
    sizes = dict(channels=2, hidden=4, eval_episodes=20, max_episode_frames=LIMIT)
    args, _, agent, _ = made(common, num_envs=1, steps=0, **sizes)
    ScriptedGame.made.clear()
    result, episodes = common.evaluate(args, agent.network, CPU), []
    for game in ScriptedGame.made:
        assert {episode for episode, _ in game.log} == {0}, "a game was played on after its first episode"
        _, rewards, terminal = zip(*game.log.values(), strict=True)
        episodes.append((len(rewards), not terminal[-1], pytest.approx(sum(rewards), rel=1e-5)))
    found = sorted(zip(result["lengths"], result["truncated"], result["returns"], strict=True))
    assert found == sorted(episodes, key=lambda x: (x[0], x[1], x[2].expected)) and len(found) == 20
    assert set(result["truncated"]) == {False, True} and max(result["lengths"]) == LIMIT
    assert result["frames"] == sum(result["lengths"])
    assert result["mean"] == pytest.approx(np.mean(result["returns"]))
    assert result["stderr"] == pytest.approx(np.std(result["returns"], ddof=1) / 20**0.5)
