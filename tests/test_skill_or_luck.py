"""What an episode owed to skill and what to luck: the sum, the check against copied games, the page in a browser."""

import base64
import html
import io
import json
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

import skill_or_luck as sol
from offdae_offpolicy import CVAE, SCRIPT, Agent, Args, Games, Network, pack, unpack

CPU = torch.device("cpu")


def make_run(directory, change=lambda model: None, **arguments):
    """A finished run of an agent that has learned nothing: networks that differ, a CVAE that has seen a few boards."""
    torch.manual_seed(3)
    args = Args(channels=4, hidden=8, cvae_channels=4, latent_size=3, gamma=0.9, num_envs=1, **arguments)
    games = Games(args, np.random.SeedSequence(0).spawn(8))
    agent = Agent(args, games, CPU)
    for parameter in agent.target_network.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    for _ in range(5):
        step = games.step(np.random.default_rng(0).integers(len(games.action_set), size=8))
        s, s_next = (unpack(torch.from_numpy(x), games.channels) for x in (step.states, step.next_states))
        agent.cvae(s, actions := torch.from_numpy(step.actions), s_next)
        agent.cvae.log_prior(s, actions)
    model = {name: part.state_dict() for name, part in vars(agent).items()} | dict(script=SCRIPT, args=asdict(args))
    change(model)
    directory.mkdir(parents=True)
    torch.save(model, directory / "model.pt")
    (directory / "eval.json").write_text(json.dumps(dict(mean=2.5, returns=[2, 3])))
    return directory


def play_and_split(run, episodes, seed=1, max_steps=3000):
    args, agent, _ = sol.load_run(run, CPU)
    return args, sol.play_and_split(sol.Options(seed=seed, max_steps=max_steps), args, agent, CPU, episodes)


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
    last = 2 + last_value / 2 - 3 - 1.125
    assert parts.terms.tolist() == [[0.25, -0.5, 1.0], [-1.0, 0.5, 0.125], [0.75, 0.5, last]]
    assert (parts.start, parts.skill, parts.luck) == (1.0, 0.25 - 0.25 + 0.25, -1.0 + 0.25 + 0.03125)
    assert parts.cumulative[:, 0].tolist() == [0, 0, 0] and parts.cumulative[0].tolist() == [0, 0.25, 0.0, 0.25]
    assert parts.unexplained == 0.75 + 0.25 + last / 4 and parts.G == 0.5 * 1 + 0.25 * 2 + last_value / 8
    assert parts.start + parts.skill + parts.luck + parts.unexplained == parts.G


def test_moments_are_ranked_without_the_discount_and_by_chance_first():
    terms = np.array([[0.1, -3.0, 5.0, 0.0], [0.5, 0.2, 0.0, -0.5], [9.0, 9.0, 9.0, 9.0]])
    moments = dict(sol.moments_of(terms, drew=np.array([False, True, True, False])))
    assert (moments["Most skilful"], moments["Worst"]) == ([2, 0, 3, 1], [1, 3, 0, 2])
    assert (moments["Luckiest"], moments["Unluckiest"]) == ([1, 0, 2, 3], [3, 2, 1, 0])


@pytest.mark.parametrize(("game", "max_steps"), [("asterix", 3000), ("asterix", 8), ("freeway", 300)])
def test_the_networks_are_asked_one_by_one_for_the_same(tmp_path, game, max_steps):
    """V, A and B of the EMA network and of a CVAE in evaluation mode, against sums written out; 300 is two batches."""
    args, results = play_and_split(make_run(tmp_path / "run", env_id=game), 2, seed=5, max_steps=max_steps)
    episode, judged, parts = results[1]
    T, A, C = len(episode.actions), *((3, 7) if game == "freeway" else (5, 4))
    assert episode.terminal == (max_steps == 3000) and T <= max_steps and len(judged.values) == T + 1
    model = torch.load(tmp_path / "run" / "model.pt", weights_only=True)
    network, cvae = Network(args, C, A), CVAE(args, C, A).eval()
    network.load_state_dict(model["target_network"])
    cvae.load_state_dict(model["cvae"])
    boards = unpack(torch.from_numpy(episode.boards), C)
    for t in range(0, T, 7):
        a = int(episode.actions[t])
        with torch.no_grad():
            output = network(boards[t : t + 1])
            asked = boards[t : t + 1], torch.tensor([a])
            log_p, (_, log_q) = cvae.log_prior(*asked), cvae(*asked, boards[t + 1 : t + 2])
        mean = sum(float(output.log_policy[0, b].exp() * output.advantage[0, b]) for b in range(A))
        q, p, head = log_q[0].exp(), log_p[0].exp(), output.luck[0, a]
        luck = sum(float((q[z] - p[z]) * p[z] ** 0.5 * head[z]) for z in range(3))
        assert judged.values[t] == pytest.approx(output.value.item(), abs=1e-5)
        assert parts.terms[0, t] == pytest.approx(float(output.advantage[0, a]) - mean, abs=1e-5)
        assert parts.terms[1, t] == pytest.approx(0.9 * luck, abs=1e-5) and abs(luck) > 1e-6
    assert judged.values[T] == pytest.approx((not episode.terminal) * network(boards[-1:]).value.item(), abs=1e-5)
    assert parts.start + parts.skill + parts.luck + parts.unexplained == pytest.approx(parts.G, abs=1e-12)
    G = sum(0.9**t * reward for t, reward in enumerate(episode.rewards)) + 0.9**T * judged.values[T]
    assert parts.G == pytest.approx(G, abs=1e-12)


# ------------------------------------------------------------------------------------------------------- playing
@pytest.mark.parametrize("game", ["asterix", "breakout"])
def test_the_game_is_seen_to_draw(game):
    """Asterix draws when its spawn timer is up, Breakout only at a reset; the wrapper's own number does not count."""
    (env,) = Games(Args(env_id=game), np.random.SeedSequence(1).spawn(1)).games
    seen, expected = [], []
    for t in range(1500):
        expected.append(game == "asterix" and env.env.spawn_timer == 0)
        _, terminal, drew = sol.step(env, t % 2)
        seen.append(drew)
        if terminal:
            env.reset()
    assert seen == expected and any(seen) == (game == "asterix")


def test_an_episode_repeats_whatever_is_played_beside_it(tmp_path):
    args, agent, _ = sol.load_run(make_run(tmp_path / "run"), CPU)
    policy = partial(sol.policy_of, agent.target_network, CPU)
    many = [sol.play(args, policy, seeds, 200)[0] for seeds in sol.episode_seeds(1, 3)]
    again, copies = sol.play(args, policy, sol.episode_seeds(1, 1)[0], 200, copy_before={11, 3})
    assert all(np.array_equal(left, right) for left, right in zip(many[0], again, strict=True))
    assert not np.array_equal(many[0].actions[:20], many[1].actions[:20]) and sorted(copies) == [3, 11]
    for t in range(11, len(again.actions)):
        assert np.array_equal(pack([copies[11].state()])[0], again.boards[t])
        assert sol.step(copies[11], int(again.actions[t]))[0] == again.rewards[t]


# --------------------------------------------------------------------------------------------- exact V, A and B
GAMMA = 0.8
POLICY = np.array([[0.3, 0.7], [0.5, 0.5], [0.9, 0.1], [1.0, 0.0]])
P = np.zeros((4, 2, 4))  # P[s, a, s']: state 3 is terminal, from state 0 nothing is random
P[0, 0, 1] = P[0, 1, 2] = 1
P[1, 0], P[1, 1] = [0.5, 0.2, 0.2, 0.1], [0.0, 0.0, 0.6, 0.4]
P[2, 0], P[2, 1] = [0.7, 0.0, 0.0, 0.3], [0.1, 0.8, 0.1, 0.0]
REWARD = np.arange(32).reshape(4, 2, 4) * 7 % 11 / 5.0
P_POLICY, REWARD_POLICY = np.einsum("sa,sat->st", POLICY, P)[:3, :3], np.einsum("sa,sat,sat->s", POLICY, P, REWARD)[:3]
V = np.append(np.linalg.solve(np.eye(3) - GAMMA * P_POLICY, REWARD_POLICY), 0)
Q = (P * (REWARD + GAMMA * V)).sum(2)
A, B = Q - V[:, None], REWARD + GAMMA * V - Q[:, :, None]  # B with its gamma


class TabularGame:
    """A small MDP with MinAtar's interface, which like MinAtar's wrapper draws one number per call for nothing."""

    def __init__(self, s, seed):
        self.s = s
        self.seed(seed)

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


def test_exact_values_leave_nothing_unexplained():
    luck_seen = 0
    for seed in range(20):
        game, rng, trajectory = TabularGame(0, seed), np.random.default_rng(seed), []
        while game.s != 3:
            s, a = game.s, rng.choice(2, p=POLICY[game.s])
            reward, _, drew = sol.step(game, a)
            assert drew == (s != 0)
            trajectory.append((s, a, game.s, reward))
        s, a, s_next, rewards = (np.array(column) for column in zip(*trajectory, strict=True))
        parts = sol.split(rewards, np.append(V[s], V[s_next[-1]]), A[s, a], B[s, a, s_next], GAMMA)
        assert np.abs(parts.terms[2]).max() < 1e-12 and abs(parts.unexplained) < 1e-12
        luck_seen += abs(parts.luck)
    assert luck_seen > 1


@pytest.mark.parametrize(("s", "action"), [*np.ndindex(3, 2)])
def test_roll_outs_of_copies_find_the_exact_luck_and_skill(s, action):
    game, happened, before = (TabularGame(s, 7) for _ in range(3))
    rng, policy = np.random.default_rng(s), lambda states: POLICY[states]
    luck, skill, returns = sol.measure(game, action, policy, GAMMA, 400, 45, rng)
    assert game.s == before.s and game.random.rand() == before.random.rand(), "the game itself was changed"
    happened.act(action)
    for estimate, truth in ((luck, B[s, action, happened.s]), (skill, A[s, action]), (returns, Q[s, action])):
        error = estimate.std() / len(estimate) ** 0.5
        assert abs(estimate.mean() - truth) < 4.5 * error + 1e-3, "1e-3 covers what comes after the horizon"
    if (s, action) == (1, 0):
        assert skill.var() < 1.5 * returns.var(), "shared random numbers cancel"
    assert (luck.std() > 0) == (s > 0), "the same futures cancel exactly where nothing was random"


def test_calibration_finds_the_slope_that_was_put_in():
    rng = np.random.default_rng(1)
    learned = rng.normal(size=400)
    truth = (0.5 * learned + rng.normal(size=400))[:, None] + 4 * rng.normal(size=(400, 16))  # means: noise variance 1
    row, y = sol.compare(learned, truth, np.ones(400), np.arange(400) // 4, rng), truth.mean(1)
    assert row["correlation"] == pytest.approx(np.corrcoef(learned, y)[0, 1])
    assert row["slope"] == pytest.approx(np.polyfit(learned, y, 1)[0])
    assert row["slope_low"] < 0.5 < row["slope_high"] < row["slope_low"] + 0.4
    assert row["correlation_low"] < row["correlation"] < row["correlation_high"]
    assert row["reliability"] == pytest.approx(1.25 / 2.25, abs=0.08)
    assert -0.15 < row["shuffled_low"] < -0.05 and 0.05 < row["shuffled_high"] < 0.15


def page_data(page):
    return json.loads(re.search(r'type="application/json">(.*?)</script>', page.read_text())[1])


@pytest.mark.parametrize("game", ["asterix", "breakout"])
def test_check_of_a_run_and_what_the_page_says_of_it(tmp_path, call, monkeypatch, game):
    """Every step is sampled, so the learned values are those of the episodes. Breakout never draws."""
    run = make_run(tmp_path / "run", env_id=game)
    monkeypatch.setattr(sol, "CHECK_EPISODES", 2)
    assert "not been measured" in call(run)
    call(run, "--check", "--moments", 10_000, "--copies", 2)
    result, page = json.loads((run / "skill_luck_check.json").read_text()), run / "skill_luck.html"
    rows, results = result["comparisons"], play_and_split(run, 2)[1]
    drew = np.concatenate([episode.drew for episode, _, _ in results])
    assert result["largest_true_luck_without_a_draw"] == 0 and rows["luck_rest"]["std_true"] == 0
    assert result["share_of_steps_that_drew"] == pytest.approx(drew.mean()) and result["steps"] == len(drew)
    assert result["horizon"] == 38 and 0.9**38 <= 0.02 < 0.9**37 and drew.any() == (game == "asterix")
    for part, terms in dict(skill=[0], luck=[1], error=[1, 2]).items():
        learned = np.concatenate([parts.terms[terms].sum(0) for _, _, parts in results])
        for kind, which in dict(drew=drew, rest=~drew, all=drew | ~drew).items():
            if (row := rows.get(f"{part}_{kind}")) or which.any():
                numbers = learned[which].mean(), learned[which].std()
                assert (row["mean_learned"], row["std_learned"]) == pytest.approx(numbers, abs=1e-9)
    said, row = call(run), rows.get("luck_drew", rows["luck_all"])
    assert f"{row['std_true']:.2f} measured" in page_data(page)["checked"] and page_data(page)["checked"] in said
    assert ("correlation" in said) == drew.any() == ("slope" in row)
    measured = np.frombuffer(base64.b64decode(page_data(page)["measured"]), "<f4")
    assert result["shown_steps"] == np.flatnonzero(results[0][0].drew).tolist()
    assert measured[result["shown_steps"]] == pytest.approx(result["shown_luck"])
    assert (np.delete(measured, result["shown_steps"]) == 0).all()
    assert "measured" in call(run, "--seed", 2), "another episode of the same agent, whose steps were not measured"
    assert np.isnan(np.frombuffer(base64.b64decode(page_data(page)["measured"]), "<f4")).all()


# ------------------------------------------------------------------------------------------------ files and words
def test_the_agent_that_comes_with_the_repo(tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sol, "AGENTS", tmp_path / "results" / "agents")
    make_run(sol.AGENTS / "asterix")
    make_run(sol.AGENTS / "freeway", env_id="freeway")
    before, out = sorted(sol.AGENTS.rglob("*")), tmp_path / "runs" / "skill_or_luck_asterix"
    printed = call("--episodes", 6)
    page, data = (out / "skill_luck.html").read_bytes(), page_data(out / "skill_luck.html")
    assert sum(data["parts"][name] for name in sol.PARTS) == pytest.approx(data["parts"]["G"], abs=1e-9)
    assert f"G {data['parts']['G']:.3f} = " in printed and (out / "skill_luck.html").as_uri() in printed
    shares = [float(line.split()[1].rstrip("%")) for line in printed.splitlines() if line.startswith("  ")]
    assert len(shares) == 4 and sum(shares) == pytest.approx(100, abs=0.3)
    call("asterix", "--gif", "a.gif")
    assert (out / "skill_luck.html").read_bytes() == page and len([*out.iterdir()]) == 2
    assert (tmp_path / "a.gif").read_bytes() == (out / "skill_luck.gif").read_bytes()
    assert "2.5 on average over 2 episodes, where it was cut" in call("results/agents/freeway", "--max-steps", 120)
    assert sorted(sol.AGENTS.rglob("*")) == before
    episode, _, parts = play_and_split(sol.AGENTS / "freeway", 1, max_steps=120)[1][0]
    gif = Image.open("runs/skill_or_luck_freeway/skill_luck.gif")
    frames = [(np.array(frame.convert("RGB")), frame.info["duration"]) for frame in ImageSequence.Iterator(gif)]
    assert 6000 <= sum(duration for _, duration in frames) <= 8000 and len(frames) == sol.GIF_STEPS + 1
    first = min(max(0, sol.moments_of(parts.terms, episode.drew)[2][1][0] - 36), 120 - 90)
    for k, (frame, _) in enumerate(frames):
        assert np.array_equal(frame[70:374:32, 36:340:32], sol.picture(episode.boards[first + k], 7))
        die = (frame[80:130, 370:420] == sol.ImageColor.getrgb(sol.PART_INK["luck"])).all(2).any()
        assert die == episode.drew[max(first, first + k - 6) : first + k].any()


REFUSED = {
    "saved by offdae_dae.py, which learns no luck": lambda model: model.update(script="offdae_dae"),
    "cannot be read": lambda model: model.pop("cvae"),
    "not finite": lambda model: model["target_network"]["value.bias"].fill_(float("nan")),
}


@pytest.mark.parametrize("words", [*REFUSED, "no model.pt in", "no eval.json in", "--episodes 0", "--gif a.png"])
def test_what_cannot_be_judged_is_refused_in_one_line(tmp_path, call, capsys, words):
    run = make_run(tmp_path / "run", REFUSED.get(words, lambda model: None))
    if words.startswith("no "):
        (run / words.split()[1]).unlink()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as stop:
        call(run, *(words.split() if words.startswith("--") else []))
    error = capsys.readouterr().err
    assert stop.value.code == 2 and words in error and error.count("\n") == 1
    assert error.startswith("skill_or_luck.py: ") and sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow  # the first line of progress comes after ten seconds
def test_ctrl_c_ends_it_without_a_traceback(tmp_path):
    command = [sys.executable, sol.__file__, str(make_run(tmp_path / "run")), "--check", "--moments", "9999"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        next(line for line in process.stderr if "%|" in line)  # it has begun to play
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == -signal.SIGINT


# -------------------------------------------------------------------------------------------------- in a browser
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = "--headless --no-sandbox --disable-gpu --force-prefers-reduced-motion --virtual-time-budget=60000 --dump-dom"
WATCH = "<script>const errors = []; window.onerror = message => { errors.push(message); };</script>"
WALK = """<script>
const seen = { opened: [t], width: [innerWidth, document.documentElement.scrollWidth], about: $("about").textContent };
const wait = ms => new Promise(done => setTimeout(done, ms)), range = n => [...Array(n).keys()];
const key = name => document.body.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true }));
const pixel = (i, c, k) => [...c.getImageData((i % 10 + .5) * k, (Math.floor(i / 10) + .5) * k, 1, 1).data].slice(0, 3);
HTMLAnchorElement.prototype.click = function () { seen.saved = this.href; };
(async () => {
  const moved = async () => { for (const from = t; t === from; ) await wait(10); return t; };
  seen.opened.push(await moved(), await moved());
  key(" "); const paused = t; await wait(1000); seen.paused = [t === paused, location.hash === `#step=${t}`];
  scrollTo(0, 1e6); seen.far = $("board").getBoundingClientRect().bottom < 0;
  seen.moments = [...document.querySelectorAll("#moments .card")].map(e => {
    e.querySelectorAll("button")[1].click();
    const { top } = $("board").getBoundingClientRect();
    return [t, top >= 0 && top < innerHeight / 2, +document.querySelector(".here").dataset.step]; });
  seen.boards = [0, T >> 1, T].map(step => {
    jump(step); return [step, range(100).map(i => pixel(i, $("board").getContext("2d"), $("board").width / 10))]; });
  seen.end = [$("when"), ...document.querySelectorAll("#terms td.n, #actions td.n")].map(e => e.textContent);
  location.hash = "#step=3"; await wait(100); seen.address = t;
  key("ArrowRight"); key("ArrowRight"); key("ArrowLeft"); seen.keys = [t, location.hash]; $("save").click();
  go(T); $("play").click(); seen.again = await moved();
  seen.parts = ["G", "start", "skill", "luck", "unexplained"].map(part => $("sum-" + part).textContent);
  seen.sums = sums.map(x => x[T]);
  document.documentElement.dataset.seen = JSON.stringify({ ...seen, errors });
})();
</script>"""


@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium: apt-get install chromium")
@pytest.mark.parametrize("width", [1280, 500])
def test_a_walk_through_the_page(tmp_path, call, width):
    """Of a run whose name would be markup if it were not escaped."""
    run = make_run(tmp_path / "<!--<script>&amp;<img src=x onerror=alert(1)>")
    call(run, "--seed", 4, "--out", tmp_path / "out")
    page = tmp_path / "out" / "skill_luck.html"
    data, text = page_data(page), page.read_text()
    assert not re.search("https?:|<[^>]* src=", text), "the page must not ask the network for anything"
    page.write_text(text.replace('<script id="data"', WATCH + '<script id="data"') + WALK)
    command = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={tmp_path}", f"--window-size={width},800", page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    seen = json.loads(html.unescape(re.search('data-seen="(.*?)"', dom)[1]))
    assert seen["errors"] == [] and run.name in seen["about"] and seen["width"][0] == width >= seen["width"][1]
    luckiest = data["moments"][2][1][0]
    assert seen["opened"] == [luckiest, luckiest + 1, luckiest + 2] and seen["paused"] == [True, True]
    assert seen["far"] and seen["moments"] == [[steps[1], True, steps[1]] for _, steps in data["moments"]]
    boards = np.frombuffer(base64.b64decode(data["boards"]), np.uint8).reshape(-1, data["rowBytes"])
    for step, pixels in seen["boards"]:
        assert np.array_equal(np.reshape(pixels, (10, 10, 3)), sol.picture(boards[step], 4))
    assert "The end" in seen["end"][0] and len(seen["end"]) == 1 + 3 + 2 * 5, "the panel is not blank at the end"
    assert (seen["address"], seen["keys"], seen["again"]) == (3, [4, "#step=4"], 0)
    assert [x.replace("−", "-") for x in seen["parts"]] == [f"{data['parts'][part]:.3f}" for part in ("G", *sol.PARTS)]
    assert seen["sums"] == pytest.approx([data["parts"][part] for part in sol.PARTS[1:]], abs=1e-4)
    saved = np.array(Image.open(io.BytesIO(base64.b64decode(seen["saved"].split(",")[1]))).convert("RGB"))
    assert np.array_equal(saved[188:872:72, 76:760:72], sol.picture(boards[4], 4)) and saved[:, 800:].std() > 10
