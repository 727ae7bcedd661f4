"""Was it skill, or was it luck? Play an episode with an agent of `offdae_offpolicy.py` and split its return.

    G = V(s_0) + sum_t gamma^t A(s_t,a_t) + sum_t gamma^(t+1) B(s_t,a_t,s_(t+1)) + what the networks leave unexplained

The unexplained part of a step is r + gamma V(s') - V(s) - A - gamma B. The episode is played by the EMA policy, which
V, A and B are about. Writes `skill_luck.html`, a page that opens from disk, and `skill_luck.png` into the run's
directory, in place of those of an earlier call. `--check` compares A and B with what roll-outs of copied games say.

    python skill_or_luck.py runs/<run name>
    python skill_or_luck.py runs/<run name> --episodes 100
    python skill_or_luck.py runs/<run name> --check
"""

import base64
import copy
import html
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import torch
import tyro
from tqdm import tqdm

from offdae_offpolicy import BAR, Agent, Args, Games, centred, centred_luck, pack, unpack

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

METHOD = "offdae_offpolicy"
PARTS = ("start", "skill", "luck", "unexplained")
ACTION_NAMES = dict(n="stay", l="left", u="up", r="right", d="down", f="fire")
SKILL, LUCK, UNEXPLAINED, BOARD = "#0072b2", "#d55e00", "#888888", "#15181e"
# any two, and each on BOARD, at least 27 apart in CIELAB for normal, protan, deutan and tritan vision (Machado 2009)
COLOURS = ("#74ffff", "#b90000", "#008b8b", "#ffa200", "#ffffb9", "#a274ff", "#5d2ee8", "#a2b9ff", "#a200a2", "#b9a274")
MOMENTS_LISTED = 5
CHECK_EPISODES = 64
WRAPPER_ONLY = np.random.RandomState(0)  # gets the state that a game's generator has if the game draws nothing
HORIZON_WEIGHT = 0.02  # roll-outs end where gamma^H is this small


@dataclass
class Options:
    run: tyro.conf.Positional[str]
    """directory of a finished run of offdae_offpolicy.py"""
    seed: int = 1
    """seed of the games and of the actions"""
    episodes: int = 1
    """episodes to play; the first is shown, from two on the variance of their returns is split too"""
    max_steps: int = 3_000
    """cut an episode after so many steps; then gamma^T V(s_T) stands for the rest"""
    check: bool = False
    """measure luck and skill with copied games instead, and compare the learned ones with them"""
    moments: int = 120
    """moments that --check measures, of those where the game drew a random number and of the rest each"""
    copies: int = 64
    """roll-outs of each kind at such a moment"""
    cuda: bool = True
    """use a GPU if there is one"""


def refuse(message):
    print(f"{Path(__file__).name}: {message}", file=sys.stderr)
    sys.exit(2)


def parse_options():
    options, unknown = tyro.cli(Options, description=__doc__, return_unknown_args=True)
    if unknown:
        refuse(f"unknown argument {unknown[0]}: see --help")
    for name, least in dict(seed=0, episodes=1, max_steps=1, moments=2, copies=2).items():
        if getattr(options, name) < least:
            refuse(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least {least}")
    return options


def load_run(run, device):
    """Arguments and agent of a finished run, networks in evaluation mode."""
    directory = Path(run)
    if not directory.is_dir():
        refuse(f"{run}: no such directory, name that of a finished run of {METHOD}.py")
    for name in ("model.pt", "eval.json"):
        if not (directory / name).is_file():
            refuse(f"{run}: no {name} there, name the directory of a finished run of {METHOD}.py")
    if not os.access(directory, os.W_OK):
        refuse(f"{run}: cannot write there, and the page has to go there")
    try:
        model = torch.load(directory / "model.pt", map_location="cpu", weights_only=True)
        script = model["script"]
        if script == METHOD:
            args = Args(**model["args"])
            agent = Agent(args, Games(args, np.random.SeedSequence(0).spawn(1)), device)
            agent.target_network.load_state_dict(model["target_network"])
            agent.cvae.load_state_dict(model["cvae"])
    except Exception as error:  # whatever a damaged file makes torch raise
        refuse(f"{run}: model.pt cannot be read ({type(error).__name__}), copy it again or train again")
    if script != METHOD:
        refuse(f"{run}: a run of {script}.py, which learns no luck; name one of {METHOD}.py")
    if not all(x.isfinite().all() for part in ("target_network", "cvae") for x in model[part].values()):
        refuse(f"{run}: its weights are not finite, name a run that did not diverge")
    agent.target_network.eval()
    agent.cvae.eval()
    return args, agent


# ----------------------------------------------------------------------------------------------------------- play
class Episode(NamedTuple):
    """T steps; the board after the last one is kept too."""

    boards: np.ndarray  # [T + 1, bytes] packed
    actions: np.ndarray  # [T]
    rewards: np.ndarray  # [T]
    drew: np.ndarray  # [T] whether the game drew a random number
    terminal: bool  # otherwise it was cut, by --max-steps or by the run's time limit


def choose(policy, uniforms):
    """The action of each row that a uniform number stands for. [N, |A|], [N] -> [N]"""
    return (policy.cumsum(1)[:, :-1] <= uniforms[:, None] * policy.sum(1, keepdims=True)).sum(1)


def policy_of(network, device):
    """The policy as a function of observations. [N, 10, 10, C] -> [N, |A|]"""

    @torch.no_grad()
    def policy(observations):
        boards = torch.from_numpy(observations).to(device).permute(0, 3, 1, 2).to(torch.get_default_dtype())
        return network(boards.contiguous()).log_policy.exp().double().cpu().numpy()

    return policy


def episode_seeds(seed, episodes):
    """Game and action seeds of each episode: those of an episode do not depend on how many are played, and none is a
    seed of training or evaluation."""
    return [child.spawn(2) for child in np.random.SeedSequence((seed, 1)).spawn(episodes)]


def step(game, action):
    """Reward, whether it ended, and whether the game drew a random number besides the one of MinAtar's wrapper, which
    draws once a call even without sticky actions."""
    WRAPPER_ONLY.set_state(game.random.get_state())
    WRAPPER_ONLY.rand()
    reward, terminal = game.act(action)
    (_, key, position, *_), (_, expected_key, expected_position, *_) = (
        generator.get_state() for generator in (game.random, WRAPPER_ONLY)
    )
    return float(reward), bool(terminal), position != expected_position or not np.array_equal(key, expected_key)


def play(args, network, device, episodes, seed, max_steps):
    """Episodes of at most `max_steps`, all games at once, actions sampled from the policy."""
    seeds, policy = episode_seeds(seed, episodes), policy_of(network, device)
    games, rngs = Games(args, [game for game, _ in seeds]), [np.random.default_rng(actions) for _, actions in seeds]
    boards, steps = [[board] for board in games.states], [[] for _ in seeds]
    live, limit = list(range(episodes)), min(max_steps, args.max_episode_frames)
    progress = tqdm(total=limit, unit=" steps", **BAR)
    for _ in range(limit):
        probabilities = policy(np.stack([games.games[i].state() for i in live]))
        actions = choose(probabilities, np.array([rngs[i].random() for i in live])).tolist()
        for i, action in zip(live, actions, strict=True):
            steps[i].append((action, *step(games.games[i], games.action_set[action])))
        for i, board in zip(live, pack([games.games[i].state() for i in live]), strict=True):
            boards[i].append(board)
        live = [i for i in live if not steps[i][-1][2]]
        progress.set_postfix_str(f"{episodes - len(live)} of {episodes} episodes over", refresh=False)
        progress.update()
        if not live:
            break
    progress.close()
    columns = [[np.array(column) for column in zip(*rows, strict=True)] for rows in steps]
    return [
        Episode(np.stack(boards[i]), actions, rewards, drew, bool(terminal[-1]))
        for i, (actions, rewards, terminal, drew) in enumerate(columns)
    ]


# ---------------------------------------------------------------------------------------------------------- judge
class Judgement(NamedTuple):
    """What the networks say about transitions; luck has its gamma."""

    value: np.ndarray  # [T]
    next_value: np.ndarray  # [T] before anything is known of a terminal state
    policy: np.ndarray  # [T, |A|]
    advantage: np.ndarray  # [T, |A|] centred
    luck: np.ndarray  # [T] gamma B(s,a,s')


@torch.no_grad()
def judge(args, agent, device, states, actions, next_states):
    network, cvae = agent.target_network, agent.cvae
    channels, parts, progress = cvae.encoder[0].in_channels, [], tqdm(total=len(actions), unit=" steps", **BAR)
    for start in range(0, len(actions), 256):
        rows = slice(start, start + 256)
        s, s_next = (unpack(torch.from_numpy(x[rows]).to(device), channels) for x in (states, next_states))
        a = torch.from_numpy(actions[rows]).to(device)
        output, (_, log_p, log_q) = network(s), cvae(s, a, s_next)
        policy = output.log_policy.exp()
        luck = args.gamma * centred_luck(output.luck, a, log_q.exp(), log_p.exp())
        columns = output.value, network(s_next).value, policy, centred(output.advantage, policy), luck
        parts.append([column.double().cpu().numpy() for column in columns])
        progress.update(len(a))
    progress.close()
    return Judgement(*(np.concatenate(column) for column in zip(*parts, strict=True)))


class Split(NamedTuple):
    """G, its four parts, which add up to it, and the terms of each step without gamma^t."""

    G: float
    tail: float  # gamma^T V(s_T), 0 after a terminal state
    start: float
    skill: float
    luck: float
    unexplained: float
    terms: np.ndarray  # [3, T] A, gamma B and the unexplained part
    cumulative: np.ndarray  # [3, T + 1] the sums of gamma^t times them over the steps before t


def split(rewards, values, advantage, luck, gamma):
    """[T], [T + 1] with V(s_T) = 0 if that is terminal, [T], [T] gamma B -> Split"""
    errors = rewards + gamma * values[1:] - values[:-1]
    terms = np.stack([advantage, luck, errors - advantage - luck])
    discounts = gamma ** np.arange(len(rewards) + 1)
    cumulative = np.concatenate([np.zeros((3, 1)), (discounts[:-1] * terms).cumsum(1)], axis=1)
    tail = discounts[-1] * values[-1]
    return Split(discounts[:-1] @ rewards + tail, tail, values[0], *cumulative[:, -1], terms, cumulative)


def split_episodes(args, agent, device, episodes):
    """Judgement, V(s_0) .. V(s_T) and Split of each episode."""
    columns = [(episode.boards[:-1], episode.actions, episode.boards[1:]) for episode in episodes]
    judged = judge(args, agent, device, *(np.concatenate(column) for column in zip(*columns, strict=True)))
    ends, result = np.cumsum([len(episode.actions) for episode in episodes]), []
    for episode, end in zip(episodes, ends, strict=True):
        T = len(episode.actions)
        mine = Judgement(*(column[end - T : end] for column in judged))
        values = np.append(mine.value, 0.0 if episode.terminal else mine.next_value[-1])
        advantage = mine.advantage[np.arange(T), episode.actions]
        result.append((mine, values, split(episode.rewards, values, advantage, mine.luck, args.gamma)))
    return result


def shares_of_variance(splits, rng):
    """Cov(G, part) / Var(G) of each part with a 95% interval: Var(G) is the sum of these covariances, so they add up to
    1. A part that works against the others has a negative share. [4], [2, 4]"""
    table = np.array([[x.G, *(getattr(x, part) for part in PARTS)] for x in splits])

    def shares(rows):
        centred_rows = rows - rows.mean(0)
        covariances = centred_rows[:, :1].T @ centred_rows
        return covariances[0, 1:] / covariances[0, 0] if covariances[0, 0] > 0 else np.full(4, np.nan)

    resampled = [shares(table[rng.integers(len(table), size=len(table))]) for _ in range(2000)]
    return shares(table), np.nanquantile(resampled, [0.025, 0.975], axis=0)


def moments_of(terms):
    """Steps with the largest and smallest A and gamma B, without gamma^t: with it they would all be early ones."""
    advantage, luck, _ = terms
    keys = {"Most skilful": -advantage, "Worst": advantage, "Luckiest": -luck, "Unluckiest": luck}
    return [(title, np.argsort(key, kind="stable")[:MOMENTS_LISTED].tolist()) for title, key in keys.items()]


# ---------------------------------------------------------------------------------------------------------- check
def roll_out(games, ended, policy, uniforms, gamma):
    """Discounted rewards of each game under the policy, over as many steps as there are uniform numbers. A game is
    anything with MinAtar's `state`, `act`, `seed` and `minimal_action_set`. [N], [N, H] -> [N]"""
    returns, live, action_set = np.zeros(len(games)), np.flatnonzero(~ended), games[0].minimal_action_set()
    for t in range(uniforms.shape[1]):
        if not len(live):
            break
        actions = choose(policy(np.stack([games[i].state() for i in live])), uniforms[live, t])
        outcomes = [games[i].act(action_set[action]) for i, action in zip(live, actions.tolist(), strict=True)]
        rewards, terminal = (np.array(column) for column in zip(*outcomes, strict=True))
        returns[live] += gamma**t * rewards
        live = live[~terminal.astype(bool)]
    return returns


def measure(game, action, policy, gamma, copies, horizon, rng):
    """Unbiased estimates of gamma B and A of the next step of `game`, and of Q(s,a), up to the horizon. [copies] each

    Three kinds of copies: after the step as it happened, after the same action with fresh randomness, after an action
    of the policy. The futures of the i-th of each kind share their random numbers, so that most of what happens later
    cancels in the differences: r + gamma V(s') - E[r + gamma V(s')] = gamma B, and Q(s,a) - V(s) = A."""
    actions = game.minimal_action_set()
    now, later = rng.integers(2**32, size=(2, copies))
    uniforms = rng.random((copies, 1 + horizon))
    sampled = choose(policy(np.stack([game.state()] * copies)), uniforms[:, 0])
    arms = [(None, i, action) for i in range(copies)] + [(now[i], i, action) for i in range(copies)]
    other = np.flatnonzero(sampled != action)  # the rest would repeat the second arm
    arms += [(now[i], i, sampled[i]) for i in other]
    games, outcomes = [], []
    for seed, i, chosen in arms:
        games.append(copy.deepcopy(game))
        if seed is not None:
            games[-1].seed(seed)
        outcomes.append(games[-1].act(actions[chosen]))
        games[-1].seed(later[i])
    rewards, terminal = (np.array(column) for column in zip(*outcomes, strict=True))
    future = roll_out(games, terminal.astype(bool), policy, uniforms[[i for _, i, _ in arms], 1:], gamma)
    returns = rewards + gamma * future
    happened, again = returns[:copies], returns[copies : 2 * copies]
    by_policy = again.copy()
    by_policy[other] = returns[2 * copies :]
    return happened - again, again - by_policy, again


def statistics(x, y, weights):
    """Correlation, slope of y on x, and both standard deviations. [..., N] each -> 4 x [...]"""
    weights = weights / weights.sum(-1, keepdims=True)
    x, y = (v - (weights * v).sum(-1, keepdims=True) for v in (x, y))
    var_x, var_y, cov = ((weights * product).sum(-1) for product in (x * x, y * y, x * y))
    with np.errstate(divide="ignore", invalid="ignore"):
        return cov / np.sqrt(var_x * var_y), cov / var_x, np.sqrt(var_x), np.sqrt(var_y)


def compare(learned, truth, weights, groups, rng):
    """How well the learned values tell the true ones, the means of the rows of `truth`: correlation, and slope of the
    truth on what was learned, 1 if calibrated, with 95% intervals from resampling whole groups. The reliability of the
    truth is that of its two halves, by Spearman and Brown."""
    y = truth.mean(1)
    correlation, slope, std_learned, std_truth = statistics(learned, y, weights)
    result = dict(moments=len(y), mean_learned=np.average(learned, weights=weights), std_learned=std_learned)
    result |= dict(mean_truth=np.average(y, weights=weights), std_truth=std_truth)
    if std_learned == 0 or std_truth == 0:
        return result
    half = max(0.0, statistics(truth[:, ::2].mean(1), truth[:, 1::2].mean(1), weights)[0])
    reliability = 2 * half / (1 + half)
    names, group = np.unique(groups, return_inverse=True)
    counts = rng.multinomial(len(names), np.full(len(names), 1 / len(names)), size=2000)[:, group]
    counts = counts[counts.sum(1) > 0]
    intervals = np.nanquantile(statistics(learned, y, counts * weights)[:2], [0.025, 0.975], axis=1).T.tolist()
    shuffled = np.tile(learned, (2000, 1))
    for weight in np.unique(weights):  # only among moments that count the same
        shuffled[:, weights == weight] = rng.permuted(shuffled[:, weights == weight], axis=1)
    zero = np.nanquantile(statistics(shuffled, y, weights)[0], [0.025, 0.975]).tolist()
    result |= dict(reliability=reliability, correlation=correlation, correlation_interval=intervals[0])
    result |= dict(correlation_without_noise=correlation / reliability**0.5 if reliability > 0.5 else None)
    return result | dict(shuffled_correlation_interval=zero, slope=slope, slope_interval=intervals[1])


def game_at(args, seeds, episode, steps):
    """Copies of an episode's game before these steps."""
    (game,), wanted, copies = (games := Games(args, seeds[:1])).games, set(steps), {}
    for t, action in enumerate(episode.actions[: max(wanted) + 1].tolist()):
        if t in wanted:
            assert np.array_equal(pack([game.state()])[0], episode.boards[t])
            copies[t] = copy.deepcopy(game)
        game.act(games.action_set[action])
    return copies


def check(options, args, agent, device, directory):
    """Sample moments of played episodes, in random order, and compare what was learned with what copies say."""
    policy, rng = policy_of(agent.target_network, device), np.random.default_rng((options.seed, 2))
    episodes = play(args, agent.target_network, device, CHECK_EPISODES, options.seed, options.max_steps)
    every = np.array([(i, t, drew) for i, episode in enumerate(episodes) for t, drew in enumerate(episode.drew)])
    strata = [rng.permutation(every[every[:, 2] == kind])[: options.moments] for kind in (0, 1)]
    share = np.bincount(every[:, 2], minlength=2) / len(every)
    chosen = rng.permutation(np.concatenate(strata))
    weights = np.array([share[kind] / len(strata[kind]) for _, _, kind in chosen])

    moments = [(episodes[i], t) for i, t, _ in chosen]
    actions, rewards = (np.array([getattr(e, name)[t] for e, t in moments]) for name in ("actions", "rewards"))
    states, next_states = (np.stack([e.boards[t + k] for e, t in moments]) for k in (0, 1))
    goes_on = np.array([not e.terminal or t + 1 < len(e.actions) for e, t in moments])
    judged = judge(args, agent, device, states, actions, next_states)
    learned = dict(luck=judged.luck, skill=judged.advantage[np.arange(len(chosen)), actions])
    learned["error"] = rewards + args.gamma * goes_on * judged.next_value - judged.value - learned["skill"]

    seeds, games = episode_seeds(options.seed, CHECK_EPISODES), {}
    for i in np.unique(chosen[:, 0]):
        copies = game_at(args, seeds[i], episodes[i], chosen[chosen[:, 0] == i, 1].tolist())
        games |= {(i, t): game for t, game in copies.items()}
    horizon = int(np.ceil(np.log(HORIZON_WEIGHT) / np.log(args.gamma))) if args.gamma > 0 else 1
    measured, progress = [], tqdm(total=len(chosen), unit=" moments", **BAR)
    for (i, t, _), action in zip(chosen, actions.tolist(), strict=True):
        measured.append(measure(games[i, t], action, policy, args.gamma, options.copies, horizon, rng))
        progress.update()
    progress.close()
    luck, skill, returns = (np.stack(column) for column in zip(*measured, strict=True))
    truth, drew = dict(luck=luck, skill=skill, error=luck), chosen[:, 2] == 1

    result = dict(run=directory.resolve().name, game=args.env_id, n=args.n, seed=options.seed, copies=options.copies)
    result |= dict(episodes=CHECK_EPISODES, steps=len(every), share_of_steps_that_drew=share[1], horizon=horizon)
    result |= dict(weight_after_horizon=args.gamma**horizon, mean_return=returns.mean())
    result |= dict(largest_true_luck_without_a_draw=np.abs(luck[~drew]).max(initial=0))
    for part in truth:
        for name, which in dict(drew=drew, rest=~drew, all=drew | ~drew).items():
            if which.sum() > 1:
                rows = (column[which] for column in (learned[part], truth[part], weights, chosen[:, 0]))
                result[f"{part}_{name}"] = compare(*rows, rng)
    (directory / "skill_luck_check.json").write_text(json.dumps(result, indent=2, default=float) + "\n")
    plot_check(directory / "skill_luck_check.png", result, learned, truth, drew)
    print_check(result)
    print(f"\n{directory / 'skill_luck_check.png'}, {directory / 'skill_luck_check.json'}")


CHECK_TEXT = """
{run} ({game}, n = {n}): {steps:,} steps of the EMA policy, {share:.1%} of them drew a random number.
{copies} roll-outs of each kind at each moment; what comes after {horizon} steps (weight {after:.3f}) is left out.
Q(s,a) is {q:.2f} on average. Where the game drew nothing its true luck is 0 (the largest measured: {zero:.1g}), and
learned luck is about what the board hides, such as timers, which a copy keeps. `error` is what V itself says of a step,
r + γV(s') - V(s) - A, against γB. Brackets: 95% intervals; parentheses: those of shuffled values; `all`: moments
weighed by how common they are.

               moments  std learned, true  reliability  correlation                       slope of true on learned"""


def print_check(result):
    short = dict(share=result["share_of_steps_that_drew"], after=result["weight_after_horizon"])
    short |= dict(q=result["mean_return"], zero=result["largest_true_luck_without_a_draw"])
    print(CHECK_TEXT.format(**result, **short))
    symbols, kinds = dict(luck="γB", error="error", skill="A"), dict(drew="drew", rest="did not", all="all")
    for part, kind in [(part, kind) for part in symbols for kind in kinds]:
        if row := result.get(f"{part}_{kind}"):
            line = f"{symbols[part]:5} {kinds[kind]:8} {row['moments']:6}"
            line += f"       {row['std_learned']:.3f}, {row['std_truth']:.3f}"
            if "slope" in row:
                names = "correlation_interval", "shuffled_correlation_interval", "slope_interval"
                around, zero, slopes = ("[{:.2f}, {:.2f}]".format(*row[name]) for name in names)
                line += f" {row['reliability']:12.2f} {row['correlation']:9.2f} {around:13} ({zero.strip('[]')})"
                line += f" {row['slope']:7.2f} {slopes}"
            print(line)


# ------------------------------------------------------------------------------------------------------- pictures
def picture(board, channels):
    """A packed board as RGB; of several things in one cell the last channel is seen. [10, 10, 3]"""
    bits = np.unpackbits(board, bitorder="little")[: channels * 100].reshape(channels, 10, 10)
    top = (bits * np.arange(1, channels + 1)[:, None, None]).max(0)
    return np.array([matplotlib.colors.to_rgb(colour) for colour in (BOARD, *COLOURS)])[top]


def plot_episode(path, about, episode, parts):
    """The three curves, and the first of each list of moments before and after the step."""
    figure = plt.figure(figsize=(10, 6), layout="constrained")
    grid = figure.add_gridspec(2, 8, height_ratios=[1.7, 1])
    axes = figure.add_subplot(grid[0, :])
    styles = (SKILL, "-"), (LUCK, "-"), (UNEXPLAINED, "--")
    for curve, name, (colour, dashes) in zip(parts.cumulative, PARTS[1:], styles, strict=True):
        axes.plot(curve, color=colour, label=f"{name} {curve[-1]:+.2f}", lw=1.8, ls=dashes)
    axes.axhline(0, color="black", lw=0.6)
    axes.set(xlabel="step", ylabel="sum so far, discounted", xlim=(0, len(episode.actions)))
    axes.set_title(f"{about['title']}\n{about['equation']}", fontsize=11, loc="left")
    axes.legend(frameon=False, ncols=3)
    axes.spines[["top", "right"]].set_visible(False)
    for k, (title, (t, *_)) in enumerate(about["moments"]):
        colour, symbol = ((SKILL, "A"), (LUCK, "γB"))[k // 2]
        axes.axvline(t, color=colour, lw=0.8, ls=":")
        for j, when in enumerate(("before", "after")):
            board = figure.add_subplot(grid[1, 2 * k + j])
            board.imshow(picture(episode.boards[t + j], len(about["channels"])))
            board.set(xticks=[], yticks=[])
            board.set_xlabel(when, fontsize=8)
            if when == "before":
                what = f"{about['actions'][episode.actions[t]]}, {symbol} = {parts.terms[k // 2, t]:+.2f}"
                board.set_title(f"{title}, step {t}\n{what}", fontsize=9, loc="left", color=colour)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_check(path, result, learned, truth, drew):
    figure, ((luck, error), (skill, rest)) = plt.subplots(2, 2, figsize=(10, 8.4), layout="constrained")
    panels = [(luck, "luck", "drew", drew, "Luck γB where the game drew a number", "learned γB", LUCK)]
    panels += [(error, "error", "drew", drew, "What V says there", "r + γV(s') − V(s) − A", UNEXPLAINED)]
    panels += [(skill, "skill", "all", drew | ~drew, "Skill A, all sampled moments", "learned A", SKILL)]
    for axes, part, kind, which, title, label, colour in panels:
        x, y, row = learned[part][which], truth[part][which], result.get(f"{part}_{kind}", {})
        interval = 1.96 * y.std(1, ddof=1) / y.shape[1] ** 0.5
        axes.errorbar(x, y.mean(1), interval, fmt="o", ms=3.5, lw=0.6, color=colour, ecolor="#bbbbbb", alpha=0.8)
        axes.axline((0, 0), slope=1, color="black", lw=0.8, ls="--")
        axes.set(xlabel=label, ylabel=f"measured {'A' if part == 'skill' else 'γB'}, 95%")
        if "slope" in row:
            axes.axline((row["mean_learned"], row["mean_truth"]), slope=row["slope"], color=colour, lw=1.5)
            title += f"\ncorrelation {row['correlation']:.2f}, slope {row['slope']:.2f}"
        axes.set_title(title, fontsize=11, loc="left")
    rest.hist(learned["luck"][~drew], bins=40, color=LUCK)
    rest.set_title("Luck where the game drew nothing\nmeasured γB is 0", fontsize=11, loc="left")
    rest.set(xlabel="learned γB", ylabel="moments")
    figure.suptitle(f"{result['run']}: {result['game']}, n = {result['n']} (dashed: learned = measured)", fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


# ----------------------------------------------------------------------------------------------------------- page
def encode(array, dtype):
    return base64.b64encode(np.ascontiguousarray(array, dtype=dtype).tobytes()).decode()


def write_page(path, about, args, episode, judged, values, parts):
    """Everything in one file. Text from elsewhere gets into the page as JSON without `<` and as escaped HTML only."""
    data = about | dict(gamma=args.gamma, colours=COLOURS, background=BOARD, rowBytes=episode.boards.shape[1])
    data |= dict(parts={name: getattr(parts, name) for name in ("G", *PARTS)}, boards=encode(episode.boards, "u1"))
    data |= dict(taken=encode(episode.actions, "u1"), drew=encode(episode.drew, "u1"), values=encode(values, "<f4"))
    data |= dict(policy=encode(judged.policy, "<f4"), advantage=encode(judged.advantage, "<f4"))
    data |= dict(luck=encode(judged.luck, "<f4"), rewards=encode(episode.rewards, "<f4"))
    page = PAGE.replace("@TITLE@", html.escape(f"Skill or luck? {about['run']}"))
    path.write_text(page.replace("@DATA@", json.dumps(data).replace("<", "\\u003c")), encoding="utf-8")


PAGE = r"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>@TITLE@</title>
<style>
:root { --bg:#f4f5f8; --card:#fff; --ink:#1b1f27; --soft:#5d6573; --line:#dfe3e9; --skill:#0072b2; --luck:#d55e00;
  --rest:#7a828e; --start:#1b1f27; color-scheme:light dark }
@media (prefers-color-scheme:dark) { :root { --bg:#101318; --card:#191d25; --ink:#eceff4; --soft:#9aa3b2;
  --line:#2c323d; --skill:#56b4e9; --luck:#ff9d4d; --rest:#9aa3b2; --start:#eceff4 } }
* { box-sizing:border-box }
body { margin:0 auto; max-width:1120px; padding:28px 20px 40px; background:var(--bg); color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif; font-variant-numeric:tabular-nums }
h1 { margin:0; font-size:32px; line-height:1.15; letter-spacing:-.02em } h2 { margin:0 0 8px; font-size:15px }
p { margin:0 } .soft { color:var(--soft) } .skill { color:var(--skill) } .luck { color:var(--luck) }
.card { background:var(--card); border:1px solid var(--line); border-radius:12px; padding:16px; min-width:0 }
.row { margin-top:14px } #about { margin:2px 0 12px; overflow-wrap:anywhere }
#sum { display:grid; grid-template-columns:1.2fr repeat(4,1fr); gap:22px; margin:14px 0 }
#sum .card { position:relative; border-top:4px solid var(--c); padding:10px 14px 12px }
#sum .card::before { content:attr(data-sign); position:absolute; left:-17px; top:34px; color:var(--soft) }
#sum b { display:block; font-size:26px; line-height:1.25; color:var(--c); letter-spacing:-.02em }
#sum small { display:block; color:var(--soft); font-size:12px }
#stage { display:grid; grid-template-columns:minmax(0,360px) minmax(0,1fr); gap:14px }
canvas { display:block; width:100% } #board { border-radius:8px; aspect-ratio:1; box-shadow:0 0 0 1px var(--line) }
.key { display:flex; flex-wrap:wrap; gap:2px 14px; font-size:13px } #legend { margin-top:8px; color:var(--soft) }
.key i { display:inline-block; width:10px; height:10px; border-radius:2px; margin-right:5px; border:1px solid #0006 }
#controls { display:flex; align-items:center; gap:8px; margin-top:10px }
button, select { font:inherit; color:inherit; background:var(--bg); border:1px solid var(--line); border-radius:8px;
  padding:6px 8px; cursor:pointer } button:hover { border-color:var(--soft) }
#play { min-width:84px; background:var(--ink); color:var(--card); border-color:var(--ink); font-weight:600 }
#slider { flex:1; min-width:0; accent-color:var(--skill); margin:0 }
#now { display:flex; flex-wrap:wrap; justify-content:space-between; gap:0 14px; font-size:19px; font-weight:600 }
#news { min-height:24px } .die { color:var(--luck); font-weight:600 }
table { border-collapse:collapse; width:100%; margin-top:12px; table-layout:fixed }
td, th { padding:5px 8px 5px 0; text-align:left } th { font-weight:400; font-size:12px; color:var(--soft) }
td:first-child, th:first-child { width:22% } #terms td:first-child { width:34% }
td.n, th.n { text-align:right; width:70px; white-space:nowrap; padding-right:4px }
tr.taken td { font-weight:700 } tr.taken td:first-child::before { content:"▸ " }
.bar { position:relative; height:14px; border-radius:3px; background:var(--bg) }
.bar i { position:absolute; top:0; bottom:0; border-radius:3px; background:var(--c) }
.bar.two::after { content:""; position:absolute; left:50%; top:-2px; bottom:-2px; width:1px; background:var(--soft) }
#chart { height:330px; cursor:crosshair; touch-action:pan-y }
#moments { display:grid; grid-template-columns:repeat(4,minmax(0,1fr)); gap:14px }
#moments button { display:flex; align-items:center; gap:6px; width:100%; margin-top:6px; padding:6px; text-align:left }
#moments button.here { border-color:var(--ink); box-shadow:0 0 0 1px var(--ink) }
#moments canvas { width:46px; height:46px; border-radius:4px; flex:none; box-shadow:0 0 0 1px var(--line) }
#moments span { min-width:0; line-height:1.25; font-size:13px } #moments b { display:block; font-size:16px }
.notes p { margin-top:6px; font-size:14px; color:var(--soft) }
@media (max-width:860px) { #stage { grid-template-columns:minmax(0,1fr) } #sum .card:first-child { grid-column:1/-1 }
  #sum { grid-template-columns:1fr 1fr; gap:10px 22px } #moments { grid-template-columns:repeat(2,minmax(0,1fr)) } }
@media (max-width:520px) { body { padding:16px 14px 28px } .card { padding:12px } #sum { padding-left:6px }
  #chart { height:270px } #moments { grid-template-columns:minmax(0,1fr) } td.n, th.n { width:58px } }
</style>
<body>
<h1>Skill or luck?</h1>
<p id="about" class="soft"></p>
<p id="lead"></p>
<section id="sum" aria-label="The sum"></section>
<section id="stage">
  <div class="card">
    <canvas id="board" role="img" aria-label="The board at this step"></canvas>
    <div id="controls">
      <button id="play">▶ Play</button>
      <input id="slider" type="range" min="0" value="0" aria-label="Step">
      <select id="speed" aria-label="Speed"><option value="2">2/s</option><option value="10" selected>10/s</option>
        <option value="40">40/s</option></select>
    </div>
    <div class="key" id="legend"></div>
  </div>
  <div class="card">
    <div id="now"><span id="when"></span><span id="value"></span></div>
    <p id="news" class="soft"></p>
    <table id="terms"></table>
    <table id="actions"></table>
  </div>
</section>
<section class="card row">
  <h2>What the return owes to what, up to this step</h2>
  <div class="key" id="key"></div>
  <canvas id="chart" role="img" aria-label="Skill, luck and the unexplained part over time"></canvas>
</section>
<section id="moments" class="row" aria-label="Moments"></section>
<section class="card row notes">
  <h2>How to read this</h2>
  <p><b>Skill</b> A(s,a): how much better the action was than what this policy does on average in that position.
    <b>Luck</b> γB(s,a,s′): how much better things turned out than after that action on average. Both are what the
    agent's networks have learned, and so is V. <b>Unexplained</b> is what is missing for r + γV(s′) − V(s) = A + γB to
    hold: 0 in every step if the networks were right. The policy is the moving average π<sub>EMA</sub>, which V, A and B
    are about.</p>
  <p>In the sum, step t counts with weight γ<sup>t</sup>; moments are ranked without it, or they would all be early.
    <span class="die">⚄</span> marks steps in which the game drew a random number; luck elsewhere is about what the
    board hides, such as timers. How much of the learned luck is real, skill_or_luck.py --check measures with copies of
    the game. Keys: ← and → move a step, space plays and pauses.</p>
</section>
<script id="data" type="application/json">@DATA@</script>
<script>
"use strict";
const $ = id => document.getElementById(id), D = JSON.parse($("data").textContent);
const bytes = text => Uint8Array.from(atob(text), c => c.charCodeAt(0));
const floats = text => new Float32Array(bytes(text).buffer);
const boards = bytes(D.boards), taken = bytes(D.taken), drew = bytes(D.drew), T = taken.length, N = D.actions.length;
const V = floats(D.values), R = floats(D.rewards), policy = floats(D.policy), A = floats(D.advantage);
const luck = floats(D.luck), skill = luck.map((_, t) => A[t * N + taken[t]]);
const rest = skill.map((a, t) => R[t] + D.gamma * V[t + 1] - V[t] - a - luck[t]);
const SERIES = [["skill", "Skill", "A", skill], ["luck", "Luck", "γB", luck], ["rest", "Unexplained", "", rest]];
const sums = SERIES.map(x => { let s = 0; return [0, ...Array.from(x[3], (v, t) => s += D.gamma ** t * v)]; });
const plain = (x, digits) => x.toFixed(digits).replace(/^-(?=0\.?0*$)/, "").replace("-", "−");
const sign = (x, digits) => plain(x, digits).replace(/^(?!−)/, "+");
const colour = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name);
const largest = (...xs) => Math.max(1e-9, ...xs.map(x => x.reduce((m, v) => Math.max(m, Math.abs(v)), 0)));
const termScale = largest(skill, luck, rest), actionScale = largest(A), stepScale = largest(skill, luck);
const digits = stepScale < .1 ? 3 : 2;
const LEFT = 44, RIGHT = 12;
let t = 0, timer = null, chart = null;

function add(parent, tag, text = "", cls = "") {
  const e = document.createElement(tag);
  e.textContent = text; e.className = cls; parent.append(e);
  return e;
}
function sized(canvas) {
  const { width, height } = canvas.getBoundingClientRect(), k = devicePixelRatio, c = canvas.getContext("2d");
  canvas.width = Math.round(width * k); canvas.height = Math.round(height * k); c.scale(k, k);
  return [c, width, height];
}
function drawBoard(canvas, t) {
  const [c, w] = sized(canvas), size = w / 10, gap = w > 100 ? 1 : 0;
  c.fillStyle = D.background; c.fillRect(0, 0, w, w); c.fillStyle = "#222730";
  for (let i = 1; gap && i < 10; i++) { c.fillRect(i * size - .5, 0, 1, w); c.fillRect(0, i * size - .5, w, 1); }
  for (let i = 0; i < D.channels.length * 100; i++) {
    if (!(boards[t * D.rowBytes + (i >> 3)] >> (i & 7) & 1)) continue;
    c.fillStyle = D.colours[Math.floor(i / 100)];
    c.fillRect(i % 10 * size + gap, Math.floor(i % 100 / 10) * size + gap, size - 2 * gap, size - 2 * gap);
  }
}
function bar(row, x, most, name, two) {
  const box = add(add(row, "td"), "div", "", two ? "bar two" : "bar"), fill = add(box, "i");
  const part = Math.abs(x) / most * (two ? 50 : 100);
  fill.style.cssText = `--c:var(--${name}); width:${part}%; left:${two ? (x < 0 ? 50 - part : 50) : 0}%`;
}
function drawStep() {
  for (const id of ["terms", "actions", "news"]) $(id).replaceChildren();
  $("value").textContent = `V(s) = ${plain(V[t], 2)}`;
  $("when").textContent = t < T ? `Step ${t} of ${T}` : `${D.terminal ? "The end," : "Cut"} after ${T} steps`;
  if (t === T) {
    $("news").textContent = D.terminal ? "A terminal state is worth 0." : "V(s) stands for all that would follow.";
    return;
  }
  add($("news"), "span", `Action ${D.actions[taken[t]]}, reward ${R[t]}, then V(s′) = ${plain(V[t + 1], 2)}. `);
  if (drew[t]) add($("news"), "span", "⚄ The game drew a number.", "die");
  for (const [name, title, symbol, x] of SERIES) {
    const row = add($("terms"), "tr");
    add(row, "td", `${title} ${symbol}`, name);
    bar(row, x[t], termScale, name, true); add(row, "td", sign(x[t], 3), "n");
  }
  const head = add($("actions"), "tr");
  for (const [title, cls] of [["action"], ["policy"], ["", "n"], ["advantage"], ["", "n"]]) add(head, "th", title, cls);
  D.actions.forEach((name, a) => {
    const row = add($("actions"), "tr", "", a === taken[t] ? "taken" : ""), i = t * N + a;
    add(row, "td", name);
    bar(row, policy[i], 1, "soft", false); add(row, "td", (100 * policy[i]).toFixed(1) + "%", "n");
    bar(row, A[i], actionScale, "skill", true); add(row, "td", sign(A[i], 3), "n");
  });
}
function nice(x) {
  const power = 10 ** Math.floor(Math.log10(x));
  return [1, 2, 5, 10].find(m => m * power >= x) * power;
}
function drawChart() {
  const [c, w, h] = sized($("chart")), wide = w - LEFT - RIGHT, middle = h * .64;
  let low = 0, high = 0;
  for (const sum of sums) for (const v of sum) { low = Math.min(low, v); high = Math.max(high, v); }
  const pad = (high - low || 1) * .06, X = t => LEFT + t / T * wide;
  const Y = v => 6 + (high + pad - v) / (high - low + 2 * pad) * (middle - 12);
  const Z = v => middle + 22 + (1 - v / stepScale) / 2 * (h - middle - 58), bottom = h - 26;
  c.font = "11px system-ui, sans-serif"; c.textBaseline = "middle"; c.textAlign = "right";
  const each = nice((high - low || 1) / 4);
  for (let k = Math.ceil(low / each); k * each <= high; k++) {
    c.fillStyle = colour(k ? "line" : "soft"); c.fillRect(LEFT, Y(k * each), wide, 1);
    c.fillStyle = colour("soft");
    c.fillText(plain(k * each, each < .01 ? 3 : each < .1 ? 2 : 1), LEFT - 6, Y(k * each));
  }
  c.fillRect(LEFT, Z(0), wide, 1);
  for (const v of [-stepScale, stepScale]) c.fillText(sign(v, digits), LEFT - 6, Z(v));
  c.textAlign = "left"; c.fillText("A and γB of each step, not discounted", LEFT + 4, middle + 8);
  c.textAlign = "center";
  const every = Math.max(1, nice(T / (w / 90)));
  for (let k = 0; k <= T; k += every) c.fillText(k, X(k), h - 7);
  c.fillStyle = colour("luck");
  drew.forEach((yes, i) => { if (yes) c.fillRect(X(i + .5) - 1, bottom, 2, 6); });
  const width = Math.max(1, wide / T * .4);
  [[skill, "skill", -width], [luck, "luck", 0]].forEach(([x, name, shift]) => {
    c.fillStyle = colour(name);
    x.forEach((v, i) => c.fillRect(X(i + .5) + shift, Math.min(Z(v), Z(0)), width, Math.abs(Z(v) - Z(0))));
  });
  c.lineWidth = 2; c.lineJoin = "round";
  sums.forEach((sum, k) => {
    c.strokeStyle = colour(SERIES[k][0]); c.setLineDash(k === 2 ? [5, 4] : []); c.beginPath();
    sum.forEach((v, i) => c.lineTo(X(i), Y(v))); c.stroke();
  });
  chart = { image: c.getImageData(0, 0, $("chart").width, $("chart").height), X, Y, bottom };
}
function drawCursor() {
  const c = $("chart").getContext("2d"), { image, X, Y, bottom } = chart;
  c.putImageData(image, 0, 0); c.fillStyle = colour("ink"); c.fillRect(X(t) - .75, 4, 1.5, bottom - 4);
  $("key").replaceChildren();
  SERIES.forEach(([name, title], k) => {
    c.fillStyle = colour(name); c.beginPath(); c.arc(X(t), Y(sums[k][t]), 4.5, 0, 7); c.fill();
    const e = add($("key"), "span");
    add(e, "i").style.background = `var(--${name})`; add(e, "span", `${title} ${sign(sums[k][t], 2)}`);
  });
  add(add($("key"), "span"), "span", "⚄ ticks: the game drew", "soft");
}
function go(step) {
  t = Math.min(T, Math.max(0, step)); $("slider").value = t;
  drawBoard($("board"), t); drawStep(); drawCursor();
  for (const e of document.querySelectorAll("#moments button")) e.classList.toggle("here", +e.dataset.step === t);
}
function play(on) {
  clearInterval(timer); timer = null; $("play").textContent = on ? "❚❚ Pause" : "▶ Play";
  if (!on) return;
  if (t === T) go(0);
  timer = setInterval(() => { go(t + 1); if (t === T) play(false); }, 1000 / $("speed").value);
}
function redraw() {
  drawChart(); go(t);
  for (const e of document.querySelectorAll("#moments canvas")) drawBoard(e, +e.dataset.step);
}
$("about").textContent = D.about; $("lead").textContent = D.lead; $("slider").max = T;
for (const [part, name, title, how, joined] of [["G", "start", "Discounted return G", D.how, ""],
    ["start", "start", "Start", "V(s₀)", "="], ["skill", "skill", "Skill", "Σ γᵗ A", "+"],
    ["luck", "luck", "Luck", "Σ γᵗ⁺¹ B", "+"], ["unexplained", "rest", "Unexplained", "what the networks miss", "+"]]) {
  const card = add($("sum"), "div", "", "card");
  card.style.setProperty("--c", `var(--${name})`); card.dataset.sign = joined;
  add(card, "span", title); add(card, "b", plain(D.parts[part], 3)).id = "sum-" + part; add(card, "small", how);
}
D.channels.forEach((name, k) => {
  const e = add($("legend"), "span");
  add(e, "i").style.background = D.colours[k]; add(e, "span", name);
});
D.moments.forEach(([title, steps], k) => {
  const list = add($("moments"), "div", "", "card"), [name,,, x] = SERIES[k >> 1];
  add(list, "h2", title, name);
  for (const step of steps) {
    const e = add(list, "button");
    e.dataset.step = step; e.onclick = () => { play(false); go(step); };
    for (const s of [step, step + 1]) add(e, "canvas").dataset.step = s;
    const text = add(e, "span", "", "soft");
    add(text, "b", sign(x[step], digits) + (drew[step] ? " ⚄" : ""), name);
    add(text, "span", `step ${step}, ${D.actions[taken[step]]}`);
  }
});
$("slider").oninput = () => { play(false); go(+$("slider").value); };
$("play").onclick = () => play(!timer);
$("speed").onchange = () => play(!!timer);
$("chart").onpointerdown = $("chart").onpointermove = e => {
  if (!e.buttons) return;
  const { left, width } = $("chart").getBoundingClientRect();
  play(false); go(Math.round((e.clientX - left - LEFT) / (width - LEFT - RIGHT) * T));
};
document.onkeydown = e => {
  if (e.target === $("speed") || e.ctrlKey || e.altKey || e.metaKey) return;
  const move = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
  if (move) { e.preventDefault(); play(false); go(t + move); }
  if (e.key === " ") { e.preventDefault(); play(!timer); }
};
window.onresize = redraw; matchMedia("(prefers-color-scheme:dark)").onchange = redraw;
redraw();
</script>
"""


# ----------------------------------------------------------------------------------------------------------- main
def describe(options, args, directory, episode, parts):
    """What the page, the picture and the terminal say in words."""
    games = Games(args, np.random.SeedSequence(0).spawn(1))
    env, run, steps = games.games[0].env, directory.resolve().name, f"{len(episode.actions):,} steps"
    game, score = f"{args.env_id.replace('_', ' ').title()}, n = {args.n}, seed {options.seed}", episode.rewards.sum()
    about = dict(run=run, terminal=episode.terminal, about=f"{run}: {game}", how=f"rewards, γ = {args.gamma:g}")
    about["title"] = f"{run}: {game}, score {score:g} in {'' if episode.terminal else 'the first '}{steps}"
    about["lead"] = f"The agent scored {score:g} in {steps}. Its discounted return is the sum of four parts:"
    if not episode.terminal:
        about["lead"] = f"The agent scored {score:g} in the first {steps}. The episode went on; its rest is not shown, "
        about["lead"] += f"γᵀV(s_T) = {parts.tail:.3f} stands for it. The return is the sum of four parts:"
        about["how"] = f"rewards so far, γ = {args.gamma:g}, and γᵀV(s_T)"
    terms = [f"{'−' if x < 0 else '+'} {part} {abs(x):.3f}" for part in PARTS for x in [getattr(parts, part)]]
    about["equation"] = f"G {parts.G:.3f} = {' '.join(terms).removeprefix('+ ')}"
    about["actions"] = [ACTION_NAMES[env.action_map[action]] for action in games.action_set]
    about["channels"] = [name.replace("_", " ") for name in sorted(env.channels, key=env.channels.get)]
    return about | dict(moments=moments_of(parts.terms))


def summarise(options, episodes, splits):
    returns, cut = np.array([parts.G for parts in splits]), sum(not episode.terminal for episode in episodes)
    print(f"\n{len(splits)} episodes ({cut} cut): G {returns.mean():.3f} on average, std {returns.std():.3f}")
    if returns.std() == 0:
        print("All returns are the same: there is no variance to split.")
        return
    shares, (low, high) = shares_of_variance(splits, np.random.default_rng(options.seed))
    print("Shares of the variance of G between episodes, Cov(G, part) / Var(G), which add up to 1 [95%]:")
    for k, part in enumerate(PARTS):
        print(f"  {part:12} {shares[k]:7.1%}  [{low[k]:.1%}, {high[k]:.1%}]")


def main():
    options = parse_options()
    device = torch.device("cuda" if options.cuda and torch.cuda.is_available() else "cpu")
    args, agent = load_run(options.run, device)
    directory = Path(options.run)
    if options.check:
        check(options, args, agent, device, directory)
        return
    episodes = play(args, agent.target_network, device, options.episodes, options.seed, options.max_steps)
    results = split_episodes(args, agent, device, episodes)
    about = describe(options, args, directory, episodes[0], results[0][2])
    write_page(directory / "skill_luck.html", about, args, episodes[0], *results[0])
    plot_episode(directory / "skill_luck.png", about, episodes[0], results[0][2])
    print(f"{about['title']}\n{about['equation']}")
    if len(episodes) > 1:
        summarise(options, episodes, [parts for _, _, parts in results])
    print(f"\n{directory / 'skill_luck.html'}, {directory / 'skill_luck.png'}")


if __name__ == "__main__":
    main()
