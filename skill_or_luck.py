"""Was it skill, or was it luck? Play an episode with an agent of `offdae_offpolicy.py` and split its return.

    G = V(s_0) + sum_t gamma^t A(s_t,a_t) + sum_t gamma^(t+1) B(s_t,a_t,s_(t+1)) + what the networks leave unexplained

The unexplained part of a step is r + gamma V(s') - V(s) - A - gamma B. The episode is played by the EMA policy, which
V, A and B are about. Writes a page that opens from disk, `skill_luck.html`, and `skill_luck.gif`, in place of those of
an earlier call. `--check` measures luck and skill with copies of the game; later calls show what it found.

    python skill_or_luck.py                                    an agent that comes with the repo; or name its game
    python skill_or_luck.py runs/<run name> --episodes 100
    python skill_or_luck.py runs/<run name> --check
"""

import base64
import copy
import html
import json
import signal
import sys
import zlib
from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once and without a traceback

import matplotlib
import numpy as np
import pandas as pd
import torch
import tyro
from matplotlib.figure import Figure
from PIL import Image, ImageColor, ImageDraw, ImageFont
from tqdm import tqdm

import offdae_offpolicy as script
from offdae_offpolicy import BAR, GAMES, Args, Games, centred, centred_luck, pack, unpack, write_atomically

METHOD = "offdae_offpolicy"
HERE = Path(__file__).resolve().parent
AGENTS = HERE / "results" / "agents"  # those that come with the repo
PARTS = ("start", "skill", "luck", "unexplained")
ACTION_NAMES = dict(n="stay", l="left", u="up", r="right", d="down", f="fire")
# any two, and each on BOARD, at least 27 apart in CIELAB for normal, protan, deutan and tritan vision (Machado 2009)
COLOURS = ("#74ffff", "#b90000", "#008b8b", "#ffa200", "#ffffb9", "#a274ff", "#5d2ee8", "#a2b9ff", "#a200a2", "#b9a274")
BOARD = "#15181e"
MOMENTS_LISTED = 5
CHECK_EPISODES = 64
HORIZON_WEIGHT = 0.02  # roll-outs end where gamma^H is this small


@dataclass
class Options:
    run: tyro.conf.Positional[str] = "asterix"  # directory of a finished run, or a game: the agent in results/agents
    seed: int = 1  # seed of the games and of the actions
    episodes: int = 1  # episodes to play; the first is shown, from two on the variance of their returns is split too
    max_steps: int = 3_000  # cut an episode after so many steps; then gamma^T V(s_T) stands for the rest
    out: str = ""  # directory to write to, by default that of the run, or runs/skill_or_luck_<game>
    gif: str = ""  # write the GIF to this file instead
    check: bool = False  # measure luck and skill with copied games, and compare the learned ones with them
    moments: int = 120  # moments that --check measures, of those where the game drew a number and of the rest each
    copies: int = 64  # roll-outs of each kind at such a moment
    cuda: bool = True  # use a GPU if there is one


def refuse(message):
    print(f"{Path(__file__).name}: {message}", file=sys.stderr)
    sys.exit(2)


def parse_options():
    """The options, the directory of the agent and that to write to."""
    options = tyro.cli(Options, description=__doc__)
    for name, least in dict(seed=0, episodes=1, max_steps=1, moments=2, copies=2).items():
        if getattr(options, name) < least:
            refuse(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least {least}")
    if options.gif and not (options.gif.endswith(".gif") and Path(options.gif).parent.is_dir()):
        refuse(f"--gif {options.gif}: must be a name that ends in .gif in a directory that exists")
    directory = AGENTS / options.run if options.run in GAMES else Path(options.run)
    bundled = directory.resolve().parent == AGENTS  # results/ is not written to unless --out asks for it
    out = Path(options.out or (f"runs/skill_or_luck_{directory.name}" if bundled else directory))
    for name in ("model.pt", "eval.json"):
        if not (directory / name).is_file():
            there = ", ".join(sorted(path.parent.name for path in AGENTS.glob("*/model.pt"))) or "none"
            refuse(f"no {name} in {directory}: name a finished run, or a game of results/agents ({there})")
    return options, directory, out


def load_run(directory, device):
    """Arguments, agent and evaluation of a finished run."""
    try:
        evaluated = json.loads((directory / "eval.json").read_text())
        model = torch.load(directory / "model.pt", map_location="cpu", weights_only=True)
        if model["script"] != METHOD:
            refuse(f"{directory} was saved by {model['script']}.py, which learns no luck: name a run of {METHOD}.py")
        args = Args(**model["args"])
        games = Games(args, np.random.SeedSequence(0).spawn(1))
        made = [kind(args, games.channels, len(games.action_set)).to(device) for kind in (script.Network, script.CVAE)]
        agent = namedtuple("Agent", "target_network cvae")(*made)  # without optimisers, which take seconds to import
        agent.target_network.load_state_dict(model["target_network"])
        agent.cvae.load_state_dict(model["cvae"])
    except Exception as error:  # whatever a damaged file makes torch raise
        refuse(f"{directory}: model.pt or eval.json cannot be read ({type(error).__name__}), copy it or train again")
    if not all(x.isfinite().all() for part in ("target_network", "cvae") for x in model[part].values()):
        refuse(f"{directory}: its weights are not finite, name a run that did not diverge")
    agent.cvae.eval()  # BatchNorm with its running statistics
    return args, agent, evaluated


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


@torch.no_grad()
def policy_of(network, device, observations):
    """[N, 10, 10, C] -> [N, |A|]"""
    boards = torch.from_numpy(observations).to(device).permute(0, 3, 1, 2).to(torch.get_default_dtype())
    return network(boards.contiguous()).log_policy.exp().double().cpu().numpy()


def episode_seeds(seed, episodes):
    """Game and action seeds of each episode: those of an episode do not depend on how many are played, and none is a
    seed of training or evaluation."""
    return [child.spawn(2) for child in np.random.SeedSequence((seed, 1)).spawn(episodes)]


def step(game, action):
    """Reward, whether it ended, and whether the game drew a random number besides the one of MinAtar's wrapper, which
    draws once a call even without sticky actions."""
    before = game.random.get_state()[2]
    reward, terminal = game.act(action)
    return float(reward), bool(terminal), (game.random.get_state()[2] - before) % 624 != 2  # words of the generator


def play(args, policy, seeds, max_steps, copy_before=()):
    """An episode of at most `max_steps`, alone in its batches, so that it never depends on other episodes. Also copies
    of its game before some steps."""
    games, rng, steps, copies = Games(args, seeds[:1]), np.random.default_rng(seeds[1]), [], {}
    game, boards = games.games[0], [games.games[0].state()]
    for t in range(min(max_steps, args.max_episode_frames)):
        if t in copy_before:
            copies[t] = copy.deepcopy(game)
        action = choose(policy(boards[-1][None]), rng.random(1)).item()
        steps.append((action, *step(game, games.action_set[action])))
        boards.append(game.state())
        if steps[-1][2]:
            break
    actions, rewards, terminal, drew = (np.array(column) for column in zip(*steps, strict=True))
    return Episode(pack(boards), actions, rewards, drew, bool(terminal[-1])), copies


# ---------------------------------------------------------------------------------------------------------- judge
# What the networks say about an episode: V(s_0) .. V(s_T), 0 if s_T is terminal, and for each step [T, |A|] the policy
# and the centred advantages, [T] gamma B(s,a,s')
Judgement = namedtuple("Judgement", "values policy advantage luck")


@torch.no_grad()
def judge(args, agent, device, episode):
    network, cvae, parts, T = agent.target_network, agent.cvae, [], len(episode.actions)
    for start in range(0, T, 256):
        boards = torch.from_numpy(episode.boards[start : start + 257]).to(device)
        boards, a = unpack(boards, cvae.encoder[0].in_channels), torch.from_numpy(episode.actions[start : start + 256])
        s, s_next, a = boards[:-1], boards[1:], a.to(device)
        output, log_p, (_, log_q) = network(s), cvae.log_prior(s, a), cvae(s, a, s_next)
        policy = output.log_policy.exp()
        luck = args.gamma * centred_luck(output.luck, a, log_q.exp(), log_p.exp())
        columns = output.value, policy, centred(output.advantage, policy), luck
        parts.append([column.double().cpu().numpy() for column in columns])
    last = 0.0 if episode.terminal else network(boards[-1:]).value.item()
    value, policy, advantage, luck = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Judgement(np.append(value, last), policy, advantage, luck)


class Split(NamedTuple):
    """G, its four parts, which add up to it, and the terms of each step without gamma^t."""

    G: float  # with gamma^T V(s_T) for the rest of an episode that was cut
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
    G = discounts[:-1] @ rewards + discounts[-1] * values[-1]
    return Split(G, values[0], *cumulative[:, -1], terms, cumulative)


def play_and_split(options, args, agent, device, episodes):
    """Episode, Judgement and Split of each."""
    policy, results = partial(policy_of, agent.target_network, device), []
    for seeds in tqdm(episode_seeds(options.seed, episodes), unit=" episodes", disable=episodes == 1, **BAR):
        episode, _ = play(args, policy, seeds, options.max_steps)
        judged = judge(args, agent, device, episode)
        advantage = judged.advantage[np.arange(len(episode.actions)), episode.actions]
        parts = split(episode.rewards, judged.values, advantage, judged.luck, args.gamma)
        results.append((episode, judged, parts))
    return results


def shares_of_variance(splits, rng):
    """Cov(G, part) / Var(G) of each part with a 95% interval: Var(G) is the sum of these covariances, so they add up to
    1. A part that works against the others has a negative share. [4], [2, 4]"""
    table = np.array([[x.G, *(getattr(x, part) for part in PARTS)] for x in splits])

    def shares(rows):
        covariances = np.cov(rows.T)[0]
        return covariances[1:] / covariances[0] if covariances[0] > 0 else np.full(4, np.nan)

    resampled = [shares(table[rng.integers(len(table), size=len(table))]) for _ in range(2000)]
    return shares(table), np.nanquantile(resampled, [0.025, 0.975], axis=0)


def moments_of(terms, drew):
    """Steps with the largest and smallest A and gamma B, without gamma^t: with it they would all be early ones. Luck
    comes first where the game drew a number: elsewhere there is no true luck."""
    advantage, luck, _ = terms
    keys = {"Most skilful": (-advantage,), "Worst": (advantage,)}
    keys |= {"Luckiest": (-luck, ~drew | (luck <= 0)), "Unluckiest": (luck, ~drew | (luck >= 0))}
    return [(title, np.lexsort(key)[:MOMENTS_LISTED].tolist()) for title, key in keys.items()]


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
    uniforms = uniforms[[i for _, i, _ in arms], 1:]
    returns = rewards + gamma * roll_out(games, terminal.astype(bool), policy, uniforms, gamma)
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
    correlation, slope, std_learned, std_true = statistics(learned, y, weights)
    result = dict(moments=len(y), mean_learned=np.average(learned, weights=weights), std_learned=std_learned)
    result |= dict(mean_true=np.average(y, weights=weights), std_true=std_true)
    if std_learned == 0 or std_true == 0:
        return result
    half = max(0.0, statistics(truth[:, ::2].mean(1), truth[:, 1::2].mean(1), weights)[0])
    names, group = np.unique(groups, return_inverse=True)
    counts = rng.multinomial(len(names), np.full(len(names), 1 / len(names)), size=2000)[:, group]
    resampled = statistics(learned, y, counts[counts.sum(1) > 0] * weights)
    shuffled = np.tile(learned, (2000, 1))
    for weight in np.unique(weights):  # only among moments that count the same
        shuffled[:, weights == weight] = rng.permuted(shuffled[:, weights == weight], axis=1)
    result |= dict(reliability=2 * half / (1 + half), correlation=correlation, slope=slope)
    rows = dict(correlation=resampled[0], shuffled=statistics(shuffled, y, weights)[0], slope=resampled[1])
    for name, row in rows.items():
        result[f"{name}_low"], result[f"{name}_high"] = np.nanquantile(row, [0.025, 0.975]).tolist()
    return result


def check(options, args, agent, device, directory):
    """Sample moments of played episodes, in random order, and compare what was learned with what copies say. Luck is
    also measured in the episode that the page shows, wherever the game drew a number: elsewhere it is 0."""
    policy, rng = partial(policy_of, agent.target_network, device), np.random.default_rng((options.seed, 2))
    episodes, _, splits = zip(*play_and_split(options, args, agent, device, CHECK_EPISODES), strict=True)
    every = np.array([(i, t, drew) for i, episode in enumerate(episodes) for t, drew in enumerate(episode.drew)])
    strata = [rng.permutation(every[every[:, 2] == kind])[: options.moments] for kind in (0, 1)]
    share = np.bincount(every[:, 2], minlength=2) / len(every)
    sample = rng.permutation(np.concatenate(strata))
    shown = every[(every[:, 0] == 0) & (every[:, 2] == 1)][: options.moments]
    horizon = int(np.ceil(np.log(HORIZON_WEIGHT) / np.log(args.gamma))) if args.gamma > 0 else 1

    chosen, measured, copies = np.concatenate([sample, shown]), [], {}
    for i in np.unique(chosen[:, 0]):
        seeds, steps = episode_seeds(options.seed, CHECK_EPISODES)[i], chosen[chosen[:, 0] == i, 1]
        again, copies[i] = play(args, policy, seeds, options.max_steps, copy_before=set(steps.tolist()))
        assert np.array_equal(again.boards, episodes[i].boards), "the same seeds led to another episode"
    for i, t, _ in tqdm(chosen, unit=" moments", **BAR):
        measured.append(measure(copies[i][t], episodes[i].actions[t], policy, args.gamma, options.copies, horizon, rng))
    luck, skill, returns = (np.stack(column) for column in zip(*measured, strict=True))

    size, drew = len(sample), sample[:, 2] == 1
    weights = np.array([share[kind] / len(strata[kind]) for kind in sample[:, 2]])
    learned = dict(zip(PARTS[1:], np.array([splits[i].terms[:, t] for i, t, _ in sample]).T, strict=True))
    learned["error"] = learned["luck"] + learned.pop("unexplained")  # r + gamma V(s') - V(s) - A
    truth = dict(luck=luck[:size], error=luck[:size], skill=skill[:size])
    result = dict(run=directory.resolve().name, game=args.env_id, n=args.n, seed=options.seed, copies=options.copies)
    result |= dict(episodes=CHECK_EPISODES, steps=len(every), share_of_steps_that_drew=share[1], horizon=horizon)
    result |= dict(weight_after_horizon=args.gamma**horizon, mean_return=returns[:size].mean())
    result |= dict(largest_true_luck_without_a_draw=np.abs(luck[:size][~drew]).max(initial=0), comparisons={})
    for part in truth:
        for name, which in dict(drew=drew, rest=~drew, all=drew | ~drew).items():
            if which.sum() > 1:
                columns = (column[which] for column in (learned[part], truth[part], weights, sample[:, 0]))
                result["comparisons"][f"{part}_{name}"] = compare(*columns, rng)
    result |= dict(model=zlib.crc32((directory / "model.pt").read_bytes()), shown_boards=zlib.crc32(episodes[0].boards))
    result |= dict(shown_steps=shown[:, 1].tolist(), shown_luck=luck[size:].mean(1).tolist())
    return result, learned, truth, drew


def read_check(out, directory, episode):
    """What an earlier --check found about this model, or {}, and the measured luck of each step of this episode, NaN
    where it is not known. [T]"""
    measured, model = np.full(len(episode.actions), np.nan), zlib.crc32((directory / "model.pt").read_bytes())
    for path in (out / "skill_luck_check.json", directory / "skill_luck_check.json"):
        result = json.loads(path.read_text()) if path.is_file() else {}
        if result.get("model") == model:
            if result["shown_boards"] == zlib.crc32(episode.boards):
                measured[~episode.drew] = 0
                measured[result["shown_steps"]] = result["shown_luck"]
            return result, measured
    return {}, measured


CHECK_TEXT = """
{run} ({game}, n = {n}): {steps:,} steps of the EMA policy, in {share_of_steps_that_drew:.1%} the game drew a number.
{copies} roll-outs of each kind at each moment, {horizon} steps long (weight of the rest {weight_after_horizon:.3f}).
`luck` is γB, `skill` A, `error` what V says, r + γV(s') - V(s) - A, against the true γB. `drew`: where the game drew;
`rest`: where it did not, and true luck is 0 (the largest measured: {largest_true_luck_without_a_draw:.1g}) as a copy
keeps what the board hides, such as timers; `all`: weighed by how common they are. `low`, `high`: 95% intervals.
"""


def show_check(path, result, learned, truth, drew):
    """Print the comparisons, and draw three of them."""
    print(CHECK_TEXT.format(**result))
    print(pd.DataFrame(result["comparisons"]).to_string(float_format="{:.3g}".format, na_rep=""))
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    panels = [("luck_drew", "Luck where the game drew a number", "learned γB", "#d55e00")]
    panels += [("error_drew", "What V says there", "r + γV(s') − V(s) − A", "#888888")]
    panels += [("skill_all", "Skill, all sampled moments", "learned A", "#0072b2")]
    for ax, (name, title, label, colour) in zip(figure.subplots(1, 3), panels, strict=True):
        part, row = name.split("_")[0], result["comparisons"].get(name, {})
        x, y = (values[part][drew if name.endswith("drew") else slice(None)] for values in (learned, truth))
        interval = 1.96 * y.std(1, ddof=1) / y.shape[1] ** 0.5
        ax.errorbar(x, y.mean(1), interval, fmt="o", ms=3.5, lw=0.6, color=colour, ecolor="#bbbbbb", alpha=0.8)
        ax.axline((0, 0), slope=1, color="black", lw=0.8, ls="--")
        if "slope" in row:
            ax.axline((row["mean_learned"], row["mean_true"]), slope=row["slope"], color=colour, lw=1.5)
            title += f"\ncorrelation {row['correlation']:.2f}, slope {row['slope']:.2f}"
        ax.set(title=title, xlabel=label, ylabel=f"measured {'A' if part == 'skill' else 'γB'}, 95%")
    figure.suptitle(f"{result['run']}: {result['game']}, n = {result['n']} (dashed: learned = measured)")
    figure.savefig(path, dpi=110)


# ------------------------------------------------------------------------------------------------------------ GIF
GIF_STEPS, GIF_TIME, GIF_LAST = 90, 6300, 1300  # steps, milliseconds for them, and for the last frame
CARD, INK, SOFT, LINE = "#262b36", "#eceff4", "#a3acba", "#4a5262"
PART_INK = dict(skill="#56b4e9", luck="#ff9d4d", unexplained=SOFT)


def picture(board, channels):
    """A packed board as RGB; of several things in one cell the last channel is seen. [10, 10, 3]"""
    bits = np.unpackbits(board, bitorder="little")[: channels * 100].reshape(channels, 10, 10)
    top = (bits * np.arange(1, channels + 1)[:, None, None]).max(0)
    return np.array([ImageColor.getrgb(colour) for colour in (BOARD, *COLOURS)], np.uint8)[top]


def write_gif(path, args, about, episode, judged, parts, measured):
    """Steps around the luckiest moment: the board, a die where the game drew, and the parts of the return from the
    first of these steps as they add up. Drawn twice as large as it is saved, for smooth edges."""
    first = max(0, min(about["moments"][2][1][0] - GIF_STEPS * 2 // 5, len(episode.actions) - GIF_STEPS))
    rows = slice(first, first + GIF_STEPS)
    values = judged.values[first : first + GIF_STEPS + 1]
    sums = split(episode.rewards[rows], values, *parts.terms[:2, rows], args.gamma).cumulative
    expected, count, height = values[0] + sums.sum(0), sums.shape[1], np.ptp(sums) + 1e-6
    x, y = np.linspace(752, 1400, count), 648 - (sums - sums.min()) / height * 332
    file = Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")
    fonts = {size: ImageFont.truetype(file, size) for size in (26, 28, 48, 108)}
    card, *inks = map(ImageColor.getrgb, (CARD, INK, LINE, *PART_INK.values(), BOARD, *COLOURS))
    palette = Image.new("P", (1, 1))
    palette.putpalette(np.concatenate([np.linspace(card, ink, 8) for ink in inks]).astype(np.uint8).tobytes())

    def frame(k):
        image = Image.new("RGB", (1440, 800), CARD)
        draw, t = ImageDraw.Draw(image), first + k

        def write(x, y, text, size, ink, anchor="ls"):
            draw.text((x, y), text.replace("-0.00", "+0.00").replace("-", "−"), ink, fonts[size], anchor)

        board = Image.fromarray(picture(episode.boards[t], len(about["channels"])))
        image.paste(board.resize((640, 640), Image.Resampling.NEAREST), (40, 108))
        for edge in range(0, 641, 64):
            draw.line((40 + edge, 108, 40 + edge, 748), CARD, 3)
            draw.line((40, 108 + edge, 680, 108 + edge), CARD, 3)
        write(40, 76, about["game"], 48, INK)
        write(680, 76, f"step {t}, score {episode.rewards[:t].sum():g}", 28, SOFT, "rs")
        drew = first + np.flatnonzero(episode.drew[first:t])
        if len(drew) and drew[-1] >= t - 6:
            known = f", measured {measured[drew[-1]]:+.2f}" if np.isfinite(measured[drew[-1]]) else ""
            write(744, 248, "⚄", 108, PART_INK["luck"])
            write(856, 204, "The game drew a number", 28, PART_INK["luck"])
            write(856, 244, f"luck of this step {parts.terms[1, drew[-1]]:+.2f}{known}", 26, SOFT)
        write(720, 680, "⚄", 26, PART_INK["luck"])
        for i in drew - first:
            draw.rectangle((x[i] - 2, 664, x[i] + 2, 678), PART_INK["luck"])
        draw.line((752, y[0, 0], 1400, y[0, 0]), LINE, 2)  # the sums start at 0
        for j, (part, ink) in reversed(list(enumerate(PART_INK.items()))):
            write(752 + 224 * j, 68, part.capitalize(), 28, ink)
            write(752 + 224 * j, 124, f"{sums[j, k]:+.2f}", 48, ink)
            draw.line(list(zip(x[: k + 1], y[j, : k + 1], strict=True)), ink, 4, "curve")
            draw.circle((x[k], y[j, k]), 8, ink)
        write(752, 716, f"Expected at step {first}: {expected[0]:.2f}. Now: {expected[k]:.2f}.", 28, INK)
        write(752, 748, "The difference is skill + luck + unexplained.", 26, SOFT)
        return image.reduce(2).quantize(palette=palette, dither=Image.Dither.NONE)

    frames = [frame(k) for k in range(count)]
    durations = [max(20, round(GIF_TIME / count, -1))] * (count - 1) + [GIF_LAST]
    partial = path.with_name(path.name + ".tmp")
    frames[0].save(partial, "GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0)
    partial.replace(path)


# ----------------------------------------------------------------------------------------------------------- page
def write_page(path, args, about, episode, judged, parts, measured):
    """Everything in one file. Text from elsewhere gets into the page as JSON without `<` and as escaped HTML only."""
    data = about | dict(gamma=args.gamma, colours=COLOURS, background=BOARD, rowBytes=episode.boards.shape[1])
    data["parts"] = {name: getattr(parts, name) for name in ("G", *PARTS)}
    arrays = dict(boards=episode.boards, taken=episode.actions, drew=episode.drew)
    numbers = judged._asdict() | dict(rewards=episode.rewards, measured=measured)
    for columns, dtype in ((arrays, "u1"), (numbers, "<f4")):
        data |= {name: base64.b64encode(np.ascontiguousarray(x, dtype)).decode() for name, x in columns.items()}
    page = (HERE / "skill_or_luck.html").read_text(encoding="utf-8")
    page = page.replace("@TITLE@", html.escape(f"Skill or luck? {about['run']}"))
    write_atomically(path, page.replace("@DATA@", json.dumps(data).replace("<", "\\u003c")))


# ----------------------------------------------------------------------------------------------------------- main
def describe(options, args, directory, evaluated, episode, parts, checked):
    """What the page, the GIF and the terminal say in words."""
    games = Games(args, np.random.SeedSequence(0).spawn(1))
    game, run = games.games[0].env, directory.resolve().name
    about = dict(run=run, game=args.env_id.replace("_", " ").title(), terminal=episode.terminal)
    about["about"] = f"{about['game']}, {METHOD}.py, n = {args.n}, {run}, the first episode of seed {options.seed}"
    about["lead"] = f"The agent scored {episode.rewards.sum():g} in {len(episode.actions):,} steps"
    if "mean" in evaluated:
        about["lead"] += f", and {evaluated['mean']:.1f} on average over {len(evaluated['returns'])} episodes"
    about["lead"] += "." if episode.terminal else ", where it was cut: γᵀV(s_T) stands for the rest."
    terms = [f"{'−' if x < 0 else '+'} {part} {abs(x):.3f}" for part in PARTS for x in [getattr(parts, part)]]
    about["equation"] = f"G {parts.G:.3f} = {' '.join(terms).removeprefix('+ ')}"
    about["actions"] = [ACTION_NAMES[game.action_map[action]] for action in games.action_set]
    about["channels"] = [name.replace("_", " ") for name in sorted(game.channels, key=game.channels.get)]
    about["moments"] = moments_of(parts.terms, episode.drew)
    about["checked"] = f"Whether this luck is real has not been measured: python skill_or_luck.py {options.run} --check"
    if checked:
        row = checked["comparisons"].get("luck_drew", checked["comparisons"]["luck_all"])
        text = "Is the luck real? Measured with copies of the game at {moments} moments: "
        text += "std {std_true:.2f} measured, {std_learned:.2f} learned"
        if "slope" in row:
            text += (
                ", correlation {correlation:.2f} [{correlation_low:.2f}, {correlation_high:.2f}] (1: all real, 0: none)"
            )
        about["checked"] = text.format(**row).replace("-", "−") + "."
    return about


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
    options, directory, out = parse_options()
    device = torch.device("cuda" if options.cuda and torch.cuda.is_available() else "cpu")
    args, agent, evaluated = load_run(directory, device)
    out.mkdir(parents=True, exist_ok=True)
    if options.check:
        result, *samples = check(options, args, agent, device, directory)
        write_atomically(out / "skill_luck_check.json", json.dumps(result, indent=2, default=float) + "\n")
        show_check(out / "skill_luck_check.png", result, *samples)
        print(f"\n{out / 'skill_luck_check.png'}, {out / 'skill_luck_check.json'}; the page shows it from now on")
        return
    results = play_and_split(options, args, agent, device, options.episodes)
    episode, judged, parts = results[0]
    checked, measured = read_check(out, directory, episode)
    about = describe(options, args, directory, evaluated, episode, parts, checked)
    page, gif = out / "skill_luck.html", Path(options.gif or out / "skill_luck.gif")
    for write, path in ((write_page, page), (write_gif, gif)):
        write(path, args, about, episode, judged, parts, measured)
    print(f"{about['about']}\n{about['lead']}\n{about['equation']}\n{about['checked']}")
    if len(results) > 1:
        summarise(options, [row[0] for row in results], [row[2] for row in results])
    print(f"\nGIF: {gif}\nPage, open it in a browser: {page.resolve().as_uri()}")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:  # a full disk, or a directory that cannot be written to
        refuse(f"{error}: choose another directory with --out")
