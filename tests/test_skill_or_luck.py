"""What an episode owed to skill and what to luck: the sum, the check against copied games, the page in a browser."""

import base64
import copy
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict

import numpy as np
import pytest
import torch
from matplotlib import image

import offdae_dae
import offdae_offpolicy
import skill_or_luck as sol

TINY = dict(channels=4, hidden=8, cvae_channels=4, latent_size=3, gamma=0.9, num_envs=1)


def make_run(directory, script=offdae_offpolicy, **arguments):
    """A finished run of an agent that has learned nothing: networks that differ, a CVAE that has seen a few boards."""
    sizes = dict(channels=4, hidden=8, num_envs=1) if script is offdae_dae else TINY
    args = script.Args(**sizes | arguments)
    torch.manual_seed(3)
    games = script.Games(args, np.random.SeedSequence(0).spawn(8))
    agent = script.Agent(args, games, torch.device("cpu"))
    for parameter in agent.target_network.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    if script is offdae_offpolicy:
        for _ in range(5):
            step = games.step(np.random.default_rng(0).integers(len(games.action_set), size=8))
            boards = (script.unpack(torch.from_numpy(x), games.channels) for x in (step.states, step.next_states))
            s, s_next = boards
            agent.cvae(s, torch.from_numpy(step.actions), s_next)
    directory.mkdir(parents=True)
    networks = {name: part.state_dict() for name, part in vars(agent).items() if name != "optimizer"}
    script.write_atomically(directory / "model.pt", dict(script=script.SCRIPT, args=asdict(args)) | networks)
    (directory / "eval.json").write_text("{}")
    return directory


@pytest.fixture
def call(monkeypatch, capsys):
    """Run the script's `main`, and give back what it printed."""

    def main(*arguments):
        monkeypatch.setattr(sys, "argv", ["skill_or_luck.py", *map(str, arguments)])
        capsys.readouterr()
        sol.main()
        return capsys.readouterr().out

    return main


# ------------------------------------------------------------------------------------------------------- the sum
@pytest.mark.parametrize("last_value", [0.0, 4.0], ids=["terminal", "cut"])
def test_the_parts_add_up_term_by_term(last_value):
    rewards, advantage, luck = np.array([0.0, 1.0, 2.0]), np.array([0.25, -0.5, 1.0]), np.array([-1.0, 0.5, 0.125])
    parts = sol.split(rewards, np.array([1.0, 2.0, 3.0, last_value]), advantage, luck, gamma=0.5)
    errors = [0 + 1 - 1, 1 + 1.5 - 2, 2 + last_value / 2 - 3]
    assert parts.terms.tolist() == [[0.25, -0.5, 1.0], [-1.0, 0.5, 0.125], [0.75, 0.5, errors[2] - 1.125]]
    assert (parts.start, parts.skill, parts.luck) == (1.0, 0.25 - 0.25 + 0.25, -1.0 + 0.25 + 0.03125)
    assert parts.unexplained == 0.75 + 0.25 + (errors[2] - 1.125) / 4
    assert parts.cumulative[:, 0].tolist() == [0, 0, 0] and parts.cumulative[0].tolist() == [0, 0.25, 0.0, 0.25]
    assert parts.tail == last_value / 8
    assert parts.G == 0.5 * 1 + 0.25 * 2 + last_value / 8
    assert parts.start + parts.skill + parts.luck + parts.unexplained == parts.G


def test_moments_are_ranked_without_the_discount():
    terms = np.array([[0.1, -3.0, 5.0, 0.0], [0.5, 0.0, 0.0, -0.5], [9.0, 9.0, 9.0, 9.0]])
    assert sol.moments_of(terms) == [
        ("Most skilful", [2, 0, 3, 1]),
        ("Worst", [1, 3, 0, 2]),
        ("Luckiest", [0, 1, 2, 3]),
        ("Unluckiest", [3, 1, 2, 0]),
    ]


def test_shares_of_variance_add_up_to_one():
    rng = np.random.default_rng(0)
    luck, skill = rng.normal(size=2000), 0.5 * rng.normal(size=2000)
    splits = [sol.Split(1 + a + b, 0, 1.0, a, b, 0.0, None, None) for a, b in zip(skill, luck, strict=True)]
    shares, (low, high) = sol.shares_of_variance(splits, rng)
    assert shares.sum() == pytest.approx(1, abs=1e-12) and shares[0] == shares[3] == 0
    assert shares[2] == pytest.approx(0.8, abs=0.05) and low[2] < 0.8 < high[2] and high[2] - low[2] < 0.1


def test_the_networks_are_asked_one_by_one_for_the_same(tmp_path):
    """B, A and V of the EMA network and of a CVAE in evaluation mode, against sums written out."""
    args, agent = sol.load_run(make_run(tmp_path / "run"), torch.device("cpu"))
    (episode,) = sol.play(args, agent.target_network, torch.device("cpu"), 1, seed=5, max_steps=300)
    ((judged, values, parts),) = sol.split_episodes(args, agent, torch.device("cpu"), [episode])
    assert episode.terminal and values[-1] == 0 and len(values) == len(episode.actions) + 1 == len(episode.boards)
    model = torch.load(tmp_path / "run" / "model.pt", weights_only=True)
    network, cvae = offdae_offpolicy.Network(args, 4, 5), offdae_offpolicy.CVAE(args, 4, 5)
    network.load_state_dict(model["target_network"])
    cvae.load_state_dict(model["cvae"])
    cvae.eval()
    boards = offdae_offpolicy.unpack(torch.from_numpy(episode.boards), 4)
    for t in range(0, len(episode.actions), 7):
        a = int(episode.actions[t])
        with torch.no_grad():
            output = network(boards[t : t + 1])
            _, log_p, log_q = cvae(boards[t : t + 1], torch.tensor([a]), boards[t + 1 : t + 2])
        policy = output.log_policy[0].exp()
        mean = sum(float(policy[b] * output.advantage[0, b]) for b in range(5))
        luck = sum(float((log_q[0, z].exp() - log_p[0, z].exp()) * output.luck[0, a, z]) for z in range(3))
        assert values[t] == pytest.approx(output.value.item(), abs=1e-5)
        assert parts.terms[0, t] == pytest.approx(float(output.advantage[0, a]) - mean, abs=1e-5)
        assert parts.terms[1, t] == pytest.approx(0.9 * luck, abs=1e-5) and abs(luck) > 1e-6
        assert (judged.policy[t] @ judged.advantage[t]) == pytest.approx(0, abs=1e-6)
    assert parts.start + parts.skill + parts.luck + parts.unexplained == pytest.approx(parts.G, abs=1e-12)
    assert parts.G == pytest.approx(sum(0.9**t * r for t, r in enumerate(episode.rewards)), abs=1e-12)


# ------------------------------------------------------------------------------------------------------- playing
def test_an_action_is_chosen_as_often_as_the_policy_says():
    policy = np.array([[0.2, 0.0, 0.5, 0.3, 0.0]])
    uniforms = (np.arange(1000) + 0.5) / 1000
    assert np.bincount(sol.choose(policy.repeat(1000, 0), uniforms), minlength=5).tolist() == [200, 0, 500, 300, 0]
    assert sol.choose(policy, np.array([0.0])) == 0 and sol.choose(policy, np.array([1 - 2**-53])) == 3
    assert sol.choose(np.array([[0.0, 1.0]]), np.array([0.0])) == 1


@pytest.mark.parametrize("game", ["asterix", "breakout"])
def test_the_game_is_seen_to_draw(game):
    """Asterix draws when its spawn timer is up, Breakout only at a reset; the wrapper's own number does not count."""
    args = offdae_offpolicy.Args(env_id=game)
    (env,) = offdae_offpolicy.Games(args, np.random.SeedSequence(1).spawn(1)).games
    seen, expected = [], []
    for t in range(1500):
        expected.append(game == "asterix" and env.env.spawn_timer == 0)
        _, terminal, drew = sol.step(env, t % 2)
        seen.append(drew)
        if terminal:
            env.reset()
    assert seen == expected and any(seen) == (game == "asterix")


def test_an_episode_does_not_depend_on_the_others(tmp_path):
    args, agent = sol.load_run(make_run(tmp_path / "run"), torch.device("cpu"))
    alone, many, other = (
        sol.play(args, agent.target_network, torch.device("cpu"), episodes, seed, 200)
        for episodes, seed in ((1, 1), (4, 1), (1, 2))
    )
    assert all(np.array_equal(left, right) for left, right in zip(alone[0], many[0], strict=True))
    assert not np.array_equal(many[0].actions[:20], many[1].actions[:20])
    assert not np.array_equal(alone[0].actions[:20], other[0].actions[:20])
    replayed = sol.game_at(args, sol.episode_seeds(1, 4)[2], many[2], [3, 0, 11])
    assert sorted(replayed) == [0, 3, 11]
    game = replayed[11]
    for t in range(11, len(many[2].actions)):
        assert np.array_equal(offdae_offpolicy.pack([game.state()])[0], many[2].boards[t])
        assert sol.step(game, int(many[2].actions[t]))[0] == many[2].rewards[t]


# --------------------------------------------------------------------------------------------- exact V, A and B
GAMMA = 0.8
POLICY = np.array([[0.3, 0.7], [0.5, 0.5], [0.9, 0.1], [1.0, 0.0]])
# P[s, a, s']: state 3 is terminal, from state 0 nothing is random
P = np.zeros((4, 2, 4))
P[0, 0, 1] = P[0, 1, 2] = 1
P[1, 0], P[1, 1] = [0.5, 0.2, 0.2, 0.1], [0.0, 0.0, 0.6, 0.4]
P[2, 0], P[2, 1] = [0.7, 0.0, 0.0, 0.3], [0.1, 0.8, 0.1, 0.0]
REWARD = np.arange(32).reshape(4, 2, 4) * 7 % 11 / 5.0


class TabularGame:
    """A small MDP with MinAtar's interface, which like MinAtar's wrapper draws one number per call for nothing."""

    def __init__(self):
        self.random, self.s = np.random.RandomState(0), 0

    def seed(self, seed):
        self.random = np.random.RandomState(seed)

    def state(self):
        return np.array(self.s)

    def minimal_action_set(self):
        return [0, 1]

    def act(self, action):
        self.random.rand()
        outcomes = np.flatnonzero(P[self.s, action])
        after = self.random.choice(4, p=P[self.s, action]) if len(outcomes) > 1 else outcomes[0]
        reward, self.s = REWARD[self.s, action, after], int(after)
        return reward, self.s == 3


@pytest.fixture(scope="module")
def exact():
    """V [S], A [S, A] and gamma B [S, A, S'] of POLICY."""
    P_policy = np.einsum("sa,sat->st", POLICY, P)[:3, :3]
    reward = np.einsum("sa,sat,sat->s", POLICY, P, REWARD)[:3]
    V = np.append(np.linalg.solve(np.eye(3) - GAMMA * P_policy, reward), 0)
    after = REWARD + GAMMA * V
    Q = (P * after).sum(2)
    return V, Q - V[:, None], after - Q[:, :, None]


def test_exact_values_leave_nothing_unexplained(exact):
    V, A, B = exact
    luck_seen = 0
    for seed in range(20):
        game, rng, trajectory, terminal = TabularGame(), np.random.default_rng(seed), [], False
        game.seed(seed)
        while not terminal:
            s, a = game.s, rng.choice(2, p=POLICY[game.s])
            reward, terminal, drew = sol.step(game, a)
            assert drew == (s != 0)
            trajectory.append((s, a, game.s, reward))
        s, a, s_next, rewards = (np.array(column) for column in zip(*trajectory, strict=True))
        parts = sol.split(rewards, np.append(V[s], V[s_next[-1]]), A[s, a], B[s, a, s_next], GAMMA)
        assert np.abs(parts.terms[2]).max() < 1e-12 and abs(parts.unexplained) < 1e-12
        assert parts.start + parts.skill + parts.luck == pytest.approx(parts.G, abs=1e-12)
        luck_seen += abs(parts.luck)
    assert luck_seen > 1


@pytest.mark.parametrize("s", [0, 1, 2])
@pytest.mark.parametrize("action", [0, 1])
def test_roll_outs_of_copies_find_the_exact_luck_and_skill(exact, s, action):
    V, A, B = exact
    game, rng = TabularGame(), np.random.default_rng(s)
    game.s = s
    game.seed(7)
    before = copy.deepcopy(game)
    luck, skill, returns = sol.measure(game, action, lambda states: POLICY[states], GAMMA, 400, 45, rng)
    assert game.s == before.s and game.random.rand() == before.random.rand(), "the game itself was changed"
    happened = TabularGame()
    happened.s = s
    happened.seed(7)
    happened.act(action)
    truths = (luck, B[s, action, happened.s]), (skill, A[s, action]), (returns, V[s] + A[s, action])
    for estimate, truth in truths:
        error = estimate.std() / len(estimate) ** 0.5
        assert abs(estimate.mean() - truth) < 4.5 * error + 1e-3, "1e-3 covers what comes after the horizon"
    if s == 0:
        assert (luck == 0).all(), "the same futures cancel exactly where nothing was random"
    else:
        assert luck.std() > 0


def test_shared_random_numbers_make_differences_precise():
    """Not a matter of taste: apart, the difference has at least the variance of two roll-outs."""
    game = TabularGame()
    game.s = 1
    _, skill, returns = sol.measure(game, 0, lambda states: POLICY[states], GAMMA, 400, 45, np.random.default_rng(0))
    assert skill.var() < 1.5 * returns.var()


def test_roll_outs_are_discounted_and_stop_at_the_end():
    games = [TabularGame() for _ in range(3)]
    for k, game in enumerate(games):
        game.s, game.transitions = k, []
        original = game.act

        def act(action, game=game, original=original):
            game.transitions.append(original(action))
            return game.transitions[-1]

        game.act = act
    uniforms = np.random.default_rng(3).random((3, 6))
    ended = np.array([False, False, True])
    returns = sol.roll_out(games, ended, lambda states: POLICY[states], uniforms, GAMMA)
    for game, value, over in zip(games, returns, ended, strict=True):
        assert len(game.transitions) == (0 if over else 6) or game.transitions[-1][1]
        assert not any(terminal for _, terminal in game.transitions[:-1])
        assert value == pytest.approx(sum(GAMMA**t * reward for t, (reward, _) in enumerate(game.transitions)))


def test_calibration_finds_the_slope_that_was_put_in():
    rng = np.random.default_rng(1)
    learned = rng.normal(size=400)
    signal = 0.5 * learned + rng.normal(size=400)
    truth = signal[:, None] + 4 * rng.normal(size=(400, 16))  # the mean of a row has noise of variance 1
    row = sol.compare(learned, truth, np.ones(400), np.arange(400) // 4, rng)
    y = truth.mean(1)
    assert row["correlation"] == pytest.approx(np.corrcoef(learned, y)[0, 1])
    assert row["slope"] == pytest.approx(np.polyfit(learned, y, 1)[0])
    assert row["slope_interval"][0] < 0.5 < row["slope_interval"][1] and np.ptp(row["slope_interval"]) < 0.4
    assert row["correlation_interval"][0] < row["correlation"] < row["correlation_interval"][1]
    assert row["reliability"] == pytest.approx(1.25 / 2.25, abs=0.08)
    assert row["correlation_without_noise"] == pytest.approx(0.5 / 1.25**0.5, abs=0.12)
    zero = row["shuffled_correlation_interval"]
    assert -0.15 < zero[0] < -0.05 and 0.05 < zero[1] < 0.15
    assert row["std_learned"] == pytest.approx(learned.std()) and row["std_truth"] == pytest.approx(y.std())


def test_weights_count_like_repetitions():
    rng = np.random.default_rng(2)
    learned, truth = rng.normal(size=30), rng.normal(size=(30, 8))
    weights = np.where(np.arange(30) < 10, 3.0, 1.0)
    repeated = np.repeat(np.arange(30), weights.astype(int))
    row = sol.compare(learned, truth, weights, np.arange(30), rng)
    same = sol.compare(learned[repeated], truth[repeated], np.ones(50), repeated, rng)
    for name in ("mean_learned", "std_learned", "mean_truth", "std_truth", "reliability", "correlation", "slope"):
        assert row[name] == pytest.approx(same[name])


def test_truth_without_variance_is_not_correlated():
    row = sol.compare(np.arange(5.0), np.zeros((5, 4)), np.ones(5), np.arange(5), np.random.default_rng(0))
    assert row["std_truth"] == 0 and row["std_learned"] == pytest.approx(2**0.5) and "slope" not in row


def test_check_of_a_run(tmp_path, call, monkeypatch):
    run = make_run(tmp_path / "run")
    monkeypatch.setattr(sol, "CHECK_EPISODES", 4)
    printed = call(run, "--check", "--moments", 6, "--copies", 4)
    result = json.loads((run / "skill_luck_check.json").read_text())
    assert result["largest_true_luck_without_a_draw"] == 0 and "reliability" in printed
    assert result["horizon"] == 38 and 0.9**38 <= 0.02 < 0.9**37
    drew, rest, all_steps = (result[f"luck_{kind}"] for kind in ("drew", "rest", "all"))
    share = result["share_of_steps_that_drew"]
    assert (drew["moments"], rest["moments"], all_steps["moments"]) == (6, 6, 12) and 0.05 < share < 0.11
    assert rest["std_truth"] == 0 and rest["std_learned"] > 0 and drew["std_truth"] > 0
    mean = share * drew["mean_learned"] + (1 - share) * rest["mean_learned"]
    assert all_steps["mean_learned"] == pytest.approx(mean, abs=1e-9), "strata count as often as they occur"
    assert image.imread(run / "skill_luck_check.png").std() > 0.05
    assert not (run / "skill_luck.html").exists()


def test_check_where_nothing_is_random(tmp_path, call, monkeypatch):
    """Breakout never draws. Every step is sampled, so the mean of what V says is that of the episodes."""
    run = make_run(tmp_path / "run", env_id="breakout")
    monkeypatch.setattr(sol, "CHECK_EPISODES", 3)
    call(run, "--check", "--moments", 10_000, "--copies", 2)
    result = json.loads((run / "skill_luck_check.json").read_text())
    assert "luck_drew" not in result and result["share_of_steps_that_drew"] == 0
    assert result["luck_all"]["moments"] == result["steps"] and result["luck_all"]["std_truth"] == 0
    args, agent = sol.load_run(run, torch.device("cpu"))
    episodes = sol.play(args, agent.target_network, torch.device("cpu"), 3, seed=1, max_steps=3000)
    assert all(episode.terminal for episode in episodes)
    splits = [parts for _, _, parts in sol.split_episodes(args, agent, torch.device("cpu"), episodes)]
    for part, terms in dict(skill=[0], luck=[1], error=[1, 2]).items():
        expected = np.concatenate([parts.terms[terms].sum(0) for parts in splits])
        assert result[f"{part}_all"]["mean_learned"] == pytest.approx(expected.mean(), abs=1e-5)
        assert result[f"{part}_all"]["std_learned"] == pytest.approx(expected.std(), abs=1e-5)


# ------------------------------------------------------------------------------------------------ files and words
def page_data(run):
    return json.loads(re.search(r'type="application/json">(.*?)</script>', (run / "skill_luck.html").read_text())[1])


def test_a_call_repeats_and_says_the_sum(tmp_path, call):
    run = make_run(tmp_path / "run")
    printed = call(run, "--episodes", 6)
    page = (run / "skill_luck.html").read_bytes()
    data = page_data(run)
    parts = data["parts"]
    assert sum(parts[name] for name in sol.PARTS) == pytest.approx(parts["G"], abs=1e-9)
    assert f"G {parts['G']:.3f} = " in printed and "6 episodes (0 cut)" in printed
    shares = [float(line.split()[1].rstrip("%")) for line in printed.splitlines() if line.startswith("  ")]
    assert len(shares) == 4 and sum(shares) == pytest.approx(100, abs=0.3)
    assert data["channels"] == ["player", "enemy", "trail", "gold"]
    assert data["actions"] == ["stay", "left", "up", "right", "down"]
    assert image.imread(run / "skill_luck.png").std() > 0.05
    call(run, "--episodes", 6)
    assert (run / "skill_luck.html").read_bytes() == page
    call(run)  # alone in its batches, the episode has other rounding errors and nothing else
    assert page_data(run)["taken"] == data["taken"] and page_data(run)["boards"] == data["boards"]
    call(run, "--seed", 2)
    assert (run / "skill_luck.html").read_bytes() != page


def test_a_cut_episode_says_so_and_still_adds_up(tmp_path, call):
    run = make_run(tmp_path / "run", env_id="freeway")
    printed = call(run, "--max-steps", 7, "--episodes", 2)
    data = page_data(run)
    assert "the first 7 steps" in printed and "2 episodes (2 cut)" in printed
    assert "in the first 7 steps. The episode went on" in data["lead"] and not data["terminal"]
    values = np.frombuffer(base64.b64decode(data["values"]), "<f4")
    rewards = np.frombuffer(base64.b64decode(data["rewards"]), "<f4")
    assert values[-1] != 0 and len(values) == 8
    G = sum(0.9**t * reward for t, reward in enumerate(rewards)) + 0.9**7 * values[-1]
    assert data["parts"]["G"] == pytest.approx(G, abs=1e-5)
    assert sum(data["parts"][name] for name in sol.PARTS) == pytest.approx(data["parts"]["G"], abs=1e-9)


def test_the_time_limit_of_the_run_cuts_too(tmp_path, call):
    run = make_run(tmp_path / "run", env_id="freeway", max_episode_frames=9)
    assert "the first 9 steps" in call(run)


def test_a_long_page_stays_small(tmp_path):
    T, about = 3000, dict(run="a</script><script>alert(1)</script>", moments=[])
    boards = np.zeros((T + 1, 125), np.uint8)
    episode = sol.Episode(boards, np.zeros(T, int), np.zeros(T), np.zeros(T, bool), True)
    judged = sol.Judgement(np.zeros(T), np.zeros(T), np.zeros((T, 6)), np.zeros((T, 6)), np.zeros(T))
    values = np.zeros(T + 1)
    parts = sol.split(np.zeros(T), values, np.zeros(T), np.zeros(T), 0.99)
    sol.write_page(tmp_path / "page.html", about, offdae_offpolicy.Args(), episode, judged, values, parts)
    page = (tmp_path / "page.html").read_text()
    assert len(page) < 1e6 and page.count("<script") == page.count("</script>") == 2
    assert "http" not in page and "src=" not in page, "the page must not ask the network for anything"


def unfinished(directory):
    make_run(directory)
    (directory / "eval.json").unlink()


def corrupted(directory):
    path = make_run(directory) / "model.pt"
    path.write_bytes(path.read_bytes()[:1000])


def empty_model(directory):
    (make_run(directory) / "model.pt").write_bytes(b"")


def without_cvae(directory):
    path = make_run(directory) / "model.pt"
    model = torch.load(path, weights_only=True)
    del model["cvae"]
    torch.save(model, path)


def diverged(directory):
    path = make_run(directory) / "model.pt"
    model = torch.load(path, weights_only=True)
    model["target_network"]["value.bias"].fill_(float("nan"))
    torch.save(model, path)


REFUSED = [
    (lambda directory: None, "no such directory"),
    (lambda directory: directory.mkdir(), "no model.pt there"),
    (unfinished, "no eval.json there"),
    (lambda directory: make_run(directory, offdae_dae), "a run of offdae_dae.py, which learns no luck"),
    (corrupted, "model.pt cannot be read"),
    (empty_model, "model.pt cannot be read"),
    (without_cvae, "model.pt cannot be read"),
    (diverged, "not finite"),
]


@pytest.mark.parametrize(("prepare", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_cannot_be_judged_is_refused_in_one_line(tmp_path, call, capsys, prepare, words):
    prepare(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as stop:
        call(tmp_path / "run")
    error = capsys.readouterr().err
    assert stop.value.code == 2 and words in error and error.count("\n") == 1
    assert error.startswith("skill_or_luck.py: ") and sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("flag", ["--episodes 0", "--max-steps 0", "--copies 1", "--moments 0", "--seed -1", "--sed 1"])
def test_bad_options_are_refused_in_one_line(tmp_path, call, capsys, flag):
    with pytest.raises(SystemExit) as stop:
        call(tmp_path, *flag.split())
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and flag.split()[0] in error


VISION = {  # Machado, Oliveira & Fernandes (2009), severity 1, on linear RGB
    "normal": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


@pytest.mark.parametrize("vision", VISION)
def test_colours_can_be_told_apart(vision):
    colours = [*sol.COLOURS, sol.BOARD]
    rgb = np.array([[int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in colours])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(linear @ np.array(VISION[vision]).T, 0, 1)
    xyz = linear @ np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]).T
    f = np.where(xyz > 0.008856, np.cbrt(xyz / [0.9505, 1, 1.089]), 7.787 * xyz / [0.9505, 1, 1.089] + 16 / 116)
    lab = np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], axis=1)
    distances = np.linalg.norm(lab[:, None] - lab, axis=2)[np.triu_indices(len(lab), 1)]
    assert distances.min() >= 27


def test_the_last_channel_is_seen_in_a_cell():
    board = np.zeros((1, 10, 10, 4), bool)
    board[0, 2, 3, [0, 2]] = board[0, 9, 0, 3] = True
    rgb = sol.picture(offdae_offpolicy.pack(board)[0], 4)
    as_hex = {f"#{''.join(f'{round(255 * x):02x}' for x in rgb[cell])}" for cell in [(2, 3)]}
    assert as_hex == {sol.COLOURS[2]} and (rgb.sum(2) != rgb[0, 0].sum()).sum() == 2


# -------------------------------------------------------------------------------------------------- in a browser
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
QUIET = [*QUIET.split(), "--disable-component-update", "--disable-sync", "--hide-scrollbars"]


class Browser:
    """Chromium driven through DevTools messages on file descriptors 3 and 4, which need no package."""

    def __init__(self, profile):
        read_end, self.write = os.pipe()
        self.read, write_end = os.pipe()

        def connect():
            read_copy, write_copy = os.dup(read_end), os.dup(write_end)
            spare = os.dup(read_copy), os.dup(write_copy)
            os.dup2(spare[0], 3)
            os.dup2(spare[1], 4)

        command = [CHROMIUM, *QUIET, f"--user-data-dir={profile}", "--remote-debugging-pipe"]
        streams = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.process = subprocess.Popen(command, preexec_fn=connect, pass_fds=(3, 4), **streams)
        os.close(read_end)
        os.close(write_end)
        self.messages, self.rest, self.errors, self.session = 0, b"", [], {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = dict(sessionId=self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        self.messages += 1
        message = dict(id=self.messages, method=method, params=parameters) | self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while (answer := self.receive()).get("id") != self.messages:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def receive(self):
        while b"\0" not in self.rest:
            data = os.read(self.read, 1 << 20)
            assert data, "the browser has gone"
            self.rest += data
        message, self.rest = self.rest.split(b"\0", 1)
        message = json.loads(message)
        about = message.get("params", {})
        bad = message.get("method") == "Runtime.exceptionThrown"
        bad |= message.get("method") == "Runtime.consoleAPICalled" and about["type"] in ("error", "assert")
        bad |= message.get("method") == "Log.entryAdded" and about["entry"]["level"] == "error"
        if bad:
            self.errors.append(about)
        return message

    def open(self, path, width, height=800):
        self.errors.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.until("document.readyState === 'complete' && typeof redraw === 'function'")

    def ask(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression, seconds=10):
        end = time.time() + seconds
        while not self.ask(expression):
            assert time.time() < end, expression
            time.sleep(0.02)

    def click(self, selector, across=0.5):
        self.ask(f"document.querySelector('{selector}').scrollIntoView({{block: 'center'}})")
        box = self.ask(f"document.querySelector('{selector}').getBoundingClientRect().toJSON()")
        place = dict(x=box["x"] + across * box["width"], y=box["y"] + box["height"] / 2, button="left", clickCount=1)
        self.call("Input.dispatchMouseEvent", type="mousePressed", buttons=1, **place)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", **place)

    def press(self, key, code):
        self.call(
            "Input.dispatchKeyEvent", type="keyDown", key=key, code=code, **(dict(text=key) if key == " " else {})
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=code)

    def screenshot(self):
        return image.imread(io.BytesIO(base64.b64decode(self.call("Page.captureScreenshot")["data"])))

    def close(self):
        try:
            self.session = {}
            self.call("Browser.close")
            self.process.wait(10)
        finally:
            self.process.kill()
            self.process.wait()
            os.close(self.read)
            os.close(self.write)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not CHROMIUM:
        pytest.skip("there is no Chromium: apt-get install chromium")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Of a run whose name would be markup if it were not escaped."""
    run = make_run(tmp_path_factory.mktemp("runs") / "<!--<script>&amp;<img src=x onerror=alert(1)>")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["skill_or_luck.py", str(run), "--seed", "4"])
        sol.main()
    return run / "skill_luck.html"


BOARD = "document.getElementById('board').toDataURL()"


@pytest.mark.parametrize("width", [1280, 360])
def test_the_page_loads_without_errors_and_fits(browser, page, width):
    browser.open(page, width)
    assert browser.ask("document.documentElement.scrollWidth") <= width
    shot = browser.screenshot()[..., :3]
    colours = np.unique((shot.reshape(-1, 3) * 255).astype(int), axis=0)
    assert shot.shape[1] == width and len(colours) > 50 and shot.std() > 0.1
    data = page_data(page.parent)
    for part in ("G", *sol.PARTS):
        shown = browser.ask(f"document.getElementById('sum-{part}').textContent").replace("−", "-")
        assert shown == f"{data['parts'][part]:.3f}"
    name = page.parent.name
    assert name in browser.ask("document.getElementById('about').textContent") and name in browser.ask("document.title")
    assert browser.ask("document.images.length") == 0 and not browser.errors


def test_numbers_have_a_sign_and_zero_has_no_minus(browser, page):
    browser.open(page, 1280)
    assert browser.ask("[plain(-0.004, 2), plain(-0.006, 2), sign(-0.004, 2), sign(0.1, 2), sign(-10.5, 1)]") == [
        *("0.00", "−0.01", "+0.00", "+0.10", "−10.5")
    ]


def test_the_page_sums_as_the_script_does(browser, page):
    browser.open(page, 1280)
    data = page_data(page.parent)
    for k, part in enumerate(sol.PARTS[1:]):
        assert browser.ask(f"sums[{k}][T]") == pytest.approx(data["parts"][part], abs=1e-4)


def test_the_board_is_drawn_as_it_was(browser, page):
    browser.open(page, 1280)
    data = page_data(page.parent)
    boards = np.frombuffer(base64.b64decode(data["boards"]), np.uint8).reshape(-1, data["rowBytes"])
    for t in (0, len(boards) // 2, len(boards) - 1):
        drawn = browser.ask(
            f"go({t}); [...Array(100).keys()].map(i => {{ const e = document.getElementById('board'), k = e.width / 10;"
            "return [...e.getContext('2d').getImageData((i % 10 + .5) * k, (Math.floor(i / 10) + .5) * k, 1, 1).data]"
            ".slice(0, 3); })"
        )
        assert np.array_equal(np.reshape(drawn, (10, 10, 3)), np.round(255 * sol.picture(boards[t], 4)))
    assert not browser.errors


def test_the_slider_moves_the_board(browser, page):
    browser.open(page, 1280)
    before, chart = browser.ask(BOARD), browser.ask("document.getElementById('chart').toDataURL()")
    browser.click("#slider", across=0.5)
    steps = browser.ask("T")
    assert browser.ask("t") == pytest.approx(steps / 2, abs=2 + 0.02 * steps)
    assert browser.ask(BOARD) != before and browser.ask("document.getElementById('chart').toDataURL()") != chart
    assert browser.ask("document.getElementById('when').textContent") == f"Step {browser.ask('t')} of {steps}"
    assert not browser.errors


@pytest.mark.parametrize("width", [1280, 360])
def test_a_click_on_a_moment_or_on_the_curves_jumps_there(browser, page, width):
    browser.open(page, width)
    for k, (_, steps) in enumerate(page_data(page.parent)["moments"]):
        browser.click(f"#moments > div:nth-child({k + 1}) button:nth-of-type(2)")
        assert browser.ask("t") == steps[1]
        assert browser.ask("+document.querySelector('#moments button.here').dataset.step") == steps[1]
    browser.click("#chart", across=0.999)
    assert browser.ask("t === T") and "The end" in browser.ask("document.getElementById('when').textContent")
    assert not browser.errors


@pytest.mark.parametrize("focus", ["body", "#slider", "#play"])
def test_keys_move_and_play(browser, page, focus):
    """Wherever the focus is, a key acts once."""
    browser.open(page, 1280)
    if focus != "body":
        browser.ask(f"document.querySelector('{focus}').focus()")
    for key, at in [("ArrowLeft", 0), ("ArrowRight", 1), ("ArrowRight", 2), ("ArrowRight", 3), ("ArrowLeft", 2)]:
        browser.press(key, key)
        assert browser.ask("t") == at
    browser.press(" ", "Space")
    browser.until("t >= 4")
    assert "Pause" in browser.ask("document.getElementById('play').textContent")
    browser.press(" ", "Space")
    at = browser.ask("t")
    time.sleep(0.25)
    assert browser.ask("t") == at and "Play" in browser.ask("document.getElementById('play').textContent")
    assert not browser.errors


def test_playing_stops_at_the_end_and_starts_again(browser, page):
    browser.open(page, 1280)
    browser.ask("go(T - 1)")
    browser.click("#play")
    browser.until("t === T && timer === null")
    browser.click("#play")
    browser.until("t > 0 && t < T && timer !== null")
    assert not browser.errors
