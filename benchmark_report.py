"""The paper's score table and figures from finished runs of the four scripts, and what is missing or cannot be used.

    python benchmark_report.py --runs runs --out report

- A run counts once it has an eval.json; its score is the mean return of the evaluation's episodes.
- Runs whose settings differ are never averaged. Settings that the methods share (frames, sizes, rates, the version of
  MinAtar) make groups, with tables and figures of their own. A method's own settings (the CVAE's) and the version of
  its script make variants (a), (b), ... with a column each; `--mix-versions` averages over versions, and says so.
- What is compared over several games or n is compared over those that every method has.
- Missing: cells without a run in the grid that the runs of a group span, or in the paper's with `--paper-grid`.
"""

import csv
import json
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import isfinite
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

import numpy as np
import tyro
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from tqdm import tqdm

KINDS = {"deterministic": ("breakout", "space_invaders"), "stochastic": ("asterix", "freeway", "seaquest")}
GAMES = tuple(sorted(sum(KINDS.values(), ())))
METHODS = {  # name: label, colour (Okabe and Ito's), line
    "uncorrected": ("Uncorrected", "#E69F00", ":"),
    "dae": ("DAE", "#0072B2", "-."),
    "offpolicy": ("Off-policy DAE", "#D55E00", "-"),
    "tree": ("Tree Backup", "#009E73", "--"),
    "dae_no_target": ("DAE, no target network", "#56B4E9", (0, (1, 2))),
    "offpolicy_no_target": ("Off-policy DAE, no target network", "#CC79A7", (0, (5, 1, 1, 1))),
}
# Table `tab:score_detail`: mean and standard error over 20 seeds, in the order of METHODS
PAPER_TABLE = """
    asterix         8     4.5   0.2    155.6   5.4    161.5   5.9     44.3   1.1
    asterix        16     2.5   0.1    194.2   4.8    207.0   9.2     39.0   1.4
    asterix        32     2.0   0.1    215.4   8.1    268.9  14.0     39.0   1.3
    breakout        8  5799.9 611.3   9573.0 250.1   9423.3 351.9   9411.4 505.5
    breakout       16  5220.1 448.7   8506.1 476.6   8887.9 429.0  10069.0 288.8
    breakout       32  3179.3 661.8   8119.8 617.5   7372.1 582.0  10139.8 338.1
    freeway         8     5.5   1.8     55.1   0.1     61.9   0.6      2.2   0.4
    freeway        16    16.8   1.3     57.6   0.1     62.3   0.3      4.1   1.0
    freeway        32     8.2   0.8     58.8   0.1     62.9   0.3      5.1   0.8
    seaquest        8    13.5   1.5    413.5  25.1    839.4  48.3    312.3  16.4
    seaquest       16     4.1   0.1    594.3  36.3   1171.6  66.6    286.4  11.6
    seaquest       32     4.0   0.1    821.6  52.5   1225.3  63.7    266.2  19.1
    space_invaders  8  5561.5 452.3  15116.1 377.4  18086.9 419.1  15615.3 563.0
    space_invaders 16  1180.3 145.0  13478.7 391.2  16756.8 460.4  16009.6 508.1
    space_invaders 32   307.7  32.0  12560.4 441.4  14970.3 348.9  17374.2 584.9
"""
PAPER = {
    (method, game, int(n)): (float(mean), float(error))
    for game, n, *numbers in map(str.split, PAPER_TABLE.strip().splitlines())
    for method, mean, error in zip(METHODS, numbers[::2], numbers[1::2], strict=False)
}

# Arguments that change no result; all others are settings. `target_network` is part of the method.
NOT_SETTINGS = "env_id n seed target_network small exp_name runs_dir run_name evaluate resume".split()
NOT_SETTINGS += "checkpoint_interval cuda torch_deterministic compile track wandb_project_name wandb_entity".split()
OWN_SETTINGS = dict(latent_size=16, cvae_channels=128, ent_coef=1e-4, decode_latents=16, bf16=False)
OWN_SETTINGS |= dict(cvae_learning_rate=2.5e-4, decode_every=1)  # of older versions
PAPER_SETTINGS = dict(total_timesteps=10_000_000, num_envs=128, max_episode_frames=108_000, buffer_size=1_000_000)
PAPER_SETTINGS |= dict(batch_size=1024, learning_starts=25_000, steps_per_update=32, learning_rate=2.5e-4, gamma=0.99)
PAPER_SETTINGS |= dict(tau=0.999, kl_coef=3.0, channels=128, hidden=1024, eval_episodes=100) | OWN_SETTINGS
PAPER_SETTINGS |= dict(sticky_action_prob=0.0, difficulty_ramping=False)
PAPER_GRID = [name for name in METHODS if name != "dae_no_target"], GAMES, (8, 16, 32), range(1, 21)

COLUMNS = ("frames", "charts/episodic_return", "charts/episodes", "charts/reward_per_frame", "losses/critic")
COLUMNS += ("charts/SPS",)
LATE = ("charts/reward_per_frame", "losses/advantage_std", "losses/luck_std", "losses/cvae_kl")  # those there are
RETURN, REWARD, CRITIC = range(3)
QUANTITIES = ("return of finished episodes", "reward per frame", "critic loss")
BINS = 50  # points of a curve
RESAMPLES = 2000


@dataclass
class Args:
    runs: tuple[Path, ...] = (Path("runs"),)  # directories that hold run directories
    out: Path = Path("report")  # directory for report.md, scores.csv and the figures
    baseline: Path | None = None  # JSON file, a score per game to normalise by (default: the paper's DAE, n = 8)
    paper_grid: bool = False  # list what is missing from the paper's whole grid, not only from what the runs span
    mix_versions: bool = False  # average over different versions of a script as if they were one


def refuse(message):
    print(f"benchmark_report.py: {message}", file=sys.stderr)
    sys.exit(2)


def progress(items, noun):
    """Each item, with a bar that a log gets every ten seconds only."""
    return tqdm(items, unit=f" {noun}", mininterval=0.1 if sys.stderr.isatty() else 10)


# ------------------------------------------------------------------------------------------------------- read runs
class Run(NamedTuple):
    path: str
    method: str
    game: str
    n: int
    seed: int
    common: dict  # the settings that all methods share
    own: dict  # those of the method, and the version of its script
    origin: dict
    returns: list | None = None  # of the evaluation's episodes; None: unfinished
    curve: np.ndarray | None = None  # [RETURN, REWARD or CRITIC; BINS]
    details: dict | None = None  # what DETAIL_NAMES shows


def read_json(path):
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.name} cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is not what it should be")
    return content


def read_run(directory):
    """A run, finished or not. One that cannot be used raises a ValueError that says why."""
    described = read_json(directory / "args.json")
    args, method = described.get("args"), str(described.get("script")).removeprefix("offdae_")
    if method not in METHODS or not isinstance(args, dict):
        raise ValueError("args.json is not of one of the four scripts")
    method += "_no_target" if args.get("target_network") is False else ""
    game, *numbers = (args.get(name) for name in ("env_id", "n", "seed", "total_timesteps", "eval_episodes"))
    if method not in METHODS or game not in GAMES or not all(type(number) is int for number in numbers):
        raise ValueError("args.json lacks a known game, n, seed, total_timesteps or eval_episodes")
    n, seed, total, episodes = numbers
    common = dict(bf16=False) | {name: value for name, value in args.items() if name not in NOT_SETTINGS}
    own = {name: common.pop(name) for name in OWN_SETTINGS if name in common} | dict(version=described.get("sha256"))
    versions = described.get("versions") or {}
    common["version of MinAtar"] = versions.get("minatar")
    script, commit = (str(described.get(name))[:10] for name in ("sha256", "git_commit"))
    origin = {"script": script, "git commit": commit, "torch": versions.get("torch"), "device": described.get("device")}
    origin["command of one"] = described.get("command")
    run = Run(str(directory), method, game, n, seed, common, own, origin)
    if not (directory / "eval.json").exists():
        return run
    evaluation = read_json(directory / "eval.json")
    for name in ("returns", "lengths"):
        values = evaluation.get(name)
        if not isinstance(values, list) or not values or len(values) != episodes:
            raise ValueError(f"eval.json does not have the {episodes} episodes of args.json")
        if not all(type(value) in (int, float) and isfinite(value) for value in values):
            raise ValueError(f"eval.json has {name} that are not finite numbers")
    curve, details = read_curve(directory / "curve.csv", total)
    details["length"] = np.mean(evaluation["lengths"])
    return run._replace(returns=evaluation["returns"], curve=curve, details=details)


def read_curve(path, total):
    """The run in BINS equal parts: return per finished episode, reward per frame, critic loss. A part without a value
    repeats the one before it. And minutes of training, and means of LATE over the last tenth of the run."""
    try:
        header, *lines = path.read_text().splitlines()
        names = header.split(",")
        where = [names.index(name) for name in COLUMNS]
    except (OSError, ValueError):
        raise ValueError("curve.csv is missing, empty or not what the scripts write") from None
    if not lines or any(line.count(",") != header.count(",") for line in lines):
        raise ValueError("curve.csv has no lines or incomplete ones")
    if any("nan" in line or "inf" in line for line in lines):
        raise ValueError("curve.csv has values that are NaN or infinite: the run diverged")
    last = max(where) + 1  # most columns come after those that are needed
    try:
        table = [[float(row[i] or "nan") for i in where] for row in (line.split(",", last) for line in lines)]
    except ValueError as error:
        raise ValueError(f"curve.csv cannot be read ({error})") from None
    frames, returns, episodes, reward, critic, speed = np.array(table).T
    span = np.diff(frames, prepend=0)
    if not (span > 0).all() or frames[-1] < total:
        raise ValueError(f"curve.csv does not lead to the run's {total:,} frames")
    part, curve = np.minimum(np.ceil(frames / total * BINS).astype(int), BINS) - 1, []
    for values, weights in ((returns, episodes), (reward, span), (critic, span)):
        known = np.isfinite(values) & (weights > 0)
        sums = np.bincount(part[known], (values * weights)[known], BINS)
        weight = np.bincount(part[known], weights[known], BINS)
        means = np.divide(sums, weight, out=np.full(BINS, np.nan), where=weight > 0)
        curve.append(means[np.maximum.accumulate(np.where(weight > 0, np.arange(BINS), 0))])
    details = {"minutes": (span / np.maximum(speed, 0.05)).sum() / 60}  # curve.csv rounds the speed to tenths
    late = [dict(zip(names, lines[i].split(","), strict=True)) for i in np.flatnonzero(frames > 0.9 * total)]
    for name in LATE:
        values = [float(row[name]) for row in late if row.get(name)]
        details[name] = np.mean(values) if values else np.nan
    return np.stack(curve), details


def read_runs(directories):
    """All runs, sorted by path, and (path, reason) of those that cannot be used."""
    found, runs, unusable = {}, [], []
    for directory in directories:
        if not directory.is_dir():
            refuse(f"--runs {directory}: no such directory")
        found |= {path.resolve(): path for path in directory.iterdir() if path.is_dir()}
    for path in progress(sorted(found.values()), "runs"):
        try:
            if any((path / name).is_file() for name in ("args.json", "curve.csv", "eval.json")):
                runs.append(read_run(path))
        except (OSError, ValueError) as error:
            unusable.append((str(path), str(error)))
    if not runs + unusable:
        refuse(f"--runs {' '.join(map(str, directories))}: no runs there, that is, no */args.json")
    return runs, unusable


# ------------------------------------------------------------------------------------------------------ group runs
class Group(NamedTuple):
    """Runs whose common settings agree. A column is a method, or a variant of one if there are several."""

    common: dict
    columns: dict  # label: (method, own settings)
    cells: dict  # (column, game, n): finished runs, sorted by seed
    unfinished: list


def key(settings):
    return json.dumps(settings, sort_keys=True)


def without_duplicates(runs, unusable):
    """Of runs with the same settings and seed one if they agree, else none: which to believe is not ours to say."""
    same = defaultdict(list)
    for run in runs:
        same[run[1:5], key(run.own)].append(run)
    for several in same.values():
        if all(run.returns == several[0].returns for run in several):
            yield several[0]
        else:
            for run in several:
                others = ", ".join(other.path for other in several if other is not run)
                unusable.append((run.path, f"has the settings and seed of {others} and other scores"))


def script_of(method):
    return method.removesuffix("_no_target")


def make_groups(runs, mix_versions, unusable):
    """Groups, the largest first."""
    by_common, groups = defaultdict(list), []
    for run in runs:
        run = run._replace(own=run.own | dict(version="any")) if mix_versions else run
        by_common[key(run.common)].append(run)
    for _, members in sorted(by_common.items()):
        finished = list(without_duplicates([run for run in members if run.returns], unusable))
        counts, letters = Counter((script_of(run.method), key(run.own)) for run in finished), {}
        for variant in sorted(counts, key=lambda variant: (-counts[variant], variant)):
            several = [other for other in counts if other[0] == variant[0]]
            place = sum(other in letters for other in several)
            letters[variant] = f" ({chr(ord('a') + place)})" if len(several) > 1 else ""
        columns, cells = {}, defaultdict(list)
        for run in sorted(finished, key=lambda run: (run.seed, run.path)):
            label = METHODS[run.method][0] + letters[script_of(run.method), key(run.own)]
            columns[label] = run.method, run.own
            cells[label, run.game, run.n].append(run)
        columns = dict(sorted(columns.items(), key=lambda item: (list(METHODS).index(item[1][0]), item[0])))
        groups.append(Group(members[0].common, columns, cells, [run for run in members if not run.returns]))
    return sorted(groups, key=lambda group: -sum(map(len, group.cells.values())))


def is_papers(settings):
    return all(PAPER_SETTINGS.get(name) == settings[name] for name in settings if not name.startswith("version"))


def spanned(group, index):
    return sorted({cell[index] for cell in group.cells})


def main_columns(group):
    return [column for column, (method, _) in group.columns.items() if method == script_of(method)] or [*group.columns]


def shared_cells(group, columns, games, ns):
    """The cells (game, n) that all these columns have, apart from those with none and from further variants."""
    have = {column: {cell[1:] for cell in group.cells if cell[0] == column} for column in columns}
    wanted = set(product(games, ns))
    first = [have[c] & wanted for c in columns if have[c] & wanted and not re.search(r"\([^a]\)$", c)]
    return sorted(set.intersection(*first)) if first else []


def with_all(group, columns, cells):
    return [column for column in columns if cells and all((column, *cell) in group.cells for cell in cells)]


# ----------------------------------------------------------------------------------------------------- statistics
class Baseline(NamedTuple):
    name: str
    scores: dict


def scores_of(group, column, game, n):
    return np.array([np.mean(run.returns) for run in group.cells.get((column, game, n), [])])


def standard_error(values):
    """Over the first axis; NaN for a single seed."""
    return values.std(axis=0, ddof=1) / len(values) ** 0.5 if len(values) > 1 else values[0] * np.nan


def interquartile_mean(values, weights):
    """The mean of what lies between a quarter and three quarters of the weight. [..., N] -> [...]"""
    order = values.argsort(axis=-1)
    below = (weights / weights.sum())[order].cumsum(axis=-1)
    inside = np.diff(np.clip(below, 0.25, 0.75), prepend=0.25, axis=-1)
    return 2 * (np.take_along_axis(values, order, axis=-1) * inside).sum(axis=-1)


def iqm_with_interval(strata):
    """Interquartile mean over the seeds of all strata, each stratum (game and n) with the same weight, and the 95%
    interval of a bootstrap that draws the seeds of each anew; NaN if one has a single seed."""
    weights = np.concatenate([np.full(len(scores), 1 / len(scores)) for scores in strata])
    estimate = interquartile_mean(np.concatenate(strata), weights)
    if min(map(len, strata)) < 2:
        return estimate, np.nan, np.nan
    rng = np.random.default_rng(0)
    draws = [scores[rng.integers(len(scores), size=(RESAMPLES, len(scores)))] for scores in strata]
    return estimate, *np.percentile(interquartile_mean(np.concatenate(draws, axis=1), weights), [2.5, 97.5])


def mean_curve(group, column, cells, quantity, baseline=None):
    """Mean over cells of the mean over seeds, and its standard error with games and n held fixed. [BINS] each"""
    means, errors = [], []
    for game, n in cells:
        curves = np.stack([run.curve[quantity] for run in group.cells[column, game, n]])
        curves = curves / baseline.scores[game] - 1 if baseline else curves
        means.append(curves.mean(axis=0))
        errors.append(standard_error(curves))
    return np.mean(means, axis=0), np.sqrt(np.square(errors).sum(axis=0)) / len(cells)


# -------------------------------------------------------------------------------------------------------- figures
class Panel(NamedTuple):
    title: str
    columns: list
    cells: list
    quantity: int
    baseline: Baseline | None = None


def compared_panel(group, title, columns, games, ns, quantity, baseline=None):
    """A panel over several games and n, without the cells in which a run never finished an episode in training."""
    cells = shared_cells(group, columns, games, ns)
    shown = with_all(group, columns, cells)
    if quantity == RETURN:
        runs = {cell: [run for column in shown for run in group.cells[(column, *cell)]] for cell in cells}
        cells = [cell for cell in cells if np.isfinite([run.curve[RETURN, -1] for run in runs[cell]]).all()]
    return Panel(f"{title}\n{fill(describe(cells), 42)}".strip(), shown, cells, quantity, baseline)


def figures_of(group, baseline):
    """The rows of panels of each figure of curves."""
    games, ns, columns = spanned(group, 1), spanned(group, 2), main_columns(group)
    compare = partial(compared_panel, group, quantity=RETURN, baseline=baseline)
    kinds = {kind: [game for game in some if game in games] for kind, some in KINDS.items()}
    results = [compare(f"{kind} games", columns, some, ns) for kind, some in kinds.items() if some]
    lengths = [compare(f"n = {n}", columns, games, [n]) for n in ns]
    each = []
    for game in games:
        have = {n: [column for column in columns if (column, game, n) in group.cells] for n in ns}
        each.append([Panel(f"{game}, n = {n}", have[n], [(game, n)], which) for which in (RETURN, REWARD) for n in ns])
    figures = {"results": [results], "norm_nstep": [lengths], "train_curves": each}
    ablated = [script_of(method) for method, _ in group.columns.values() if method != script_of(method)]
    both = [column for column, (method, _) in group.columns.items() if script_of(method) in ablated]
    if both:
        compared = sorted({game for column, game, _ in group.cells if column not in columns}) or games
        rows = [[compared_panel(group, "", both, [game], ns, which) for game in compared] for which in (RETURN, CRITIC)]
        figures["target_comparison"] = rows
    return figures


def describe(cells):
    """'asterix, freeway n = 8, 32; breakout n = 8'"""
    by_game, by_ns = defaultdict(list), defaultdict(list)
    for game, n in sorted(cells):
        by_game[game].append(n)
    for game, ns in by_game.items():
        by_ns[", ".join(map(str, ns))].append(game)
    return "; ".join(f"{', '.join(games)} n = {ns}" for ns, games in by_ns.items())


def draw_curves(path, group, rows):
    """Rows of panels. One without curves gets words, so that it is not taken for a fault."""
    fig = Figure(figsize=(max(6.4, 3.3 * len(rows[0])), 2.6 * len(rows) + 1.6), layout="constrained")
    frames, counts = np.arange(1, BINS + 1) / BINS * group.common["total_timesteps"], set()
    for axes, row in zip(fig.subplots(len(rows), len(rows[0]), squeeze=False), rows, strict=True):
        alike = defaultdict(list)
        for i, (ax, panel) in enumerate(zip(axes, row, strict=True)):
            for column in panel.columns if panel.cells else []:
                if draw_curve(ax, frames, group, column, panel):
                    counts |= {len(group.cells[(column, *cell)]) for cell in panel.cells}
            ax.set_title(panel.title, fontsize=9)
            if i == 0 or panel.quantity != row[i - 1].quantity:
                ax.set_ylabel(QUANTITIES[panel.quantity] + ",\n(return − baseline) / baseline" * bool(panel.baseline))
            if row is rows[-1]:
                ax.set_xlabel("frames")
            if not ax.lines:
                ax.text(0.5, 0.5, why_empty(panel), ha="center", va="center", transform=ax.transAxes, color="0.4")
                ax.set(xticks=[], yticks=[])
                continue
            if panel.baseline:
                ax.axhline(0, color="black", linewidth=1, label=f"baseline: {panel.baseline.name}")
            ax.set(xlim=(0, frames[-1]), yscale="log" if panel.quantity == CRITIC else "linear")
            ax.xaxis.set_major_formatter(EngFormatter(sep=""))
            alike[panel.quantity, str({game for game, _ in panel.cells})].append(ax)
        for several in alike.values():
            low, high = zip(*(ax.get_ylim() for ax in several), strict=True)
            for ax in several:
                ax.set_ylim(min(low), max(high))
                ax.tick_params(labelleft=ax is several[0], labelbottom=row is rows[-1])
    seeds = f"{min(counts)} to {max(counts)} seeds" if len(counts) > 1 else f"Seeds: {max(counts, default=0)}"
    finish(fig, path, f"{seeds} per method, game and n; shading: 1 standard error over seeds (none for 1).")


def why_empty(panel):
    if not panel.columns:
        return "no finished run" if panel.cells else "no game and n\nthat every method has"
    return "a run here never finished\nan episode in training" if panel.quantity == RETURN else "no update was made"


def marker_of(column, otherwise):
    """Variants of a method share its colour and differ in their markers."""
    return "osD^v<>P"[(ord(column[-2]) - ord("a")) % 8] if column.endswith(")") else otherwise


def draw_curve(ax, frames, group, column, panel):
    mean, error = mean_curve(group, column, panel.cells, panel.quantity, panel.baseline)
    if np.isfinite(mean).any():
        _, colour, line = METHODS[group.columns[column][0]]
        style = dict(color=colour, linestyle=line, marker=marker_of(column, None), markevery=5, markersize=4)
        ax.fill_between(frames, mean - error, mean + error, color=colour, alpha=0.2, linewidth=0)
        return ax.plot(frames, mean, **style, label=column)


def draw_scores(path, group):
    """A dot per seed, and the interquartile mean with its interval."""
    games, ns, columns = spanned(group, 1), spanned(group, 2), list(group.columns)
    fig = Figure(figsize=(max(6.4, 3.6 * len(games)), 4.8), layout="constrained")
    for ax, game in zip(fig.subplots(1, len(games), squeeze=False)[0], games, strict=True):
        for i, n in enumerate(ns):
            for j, column in enumerate(columns):
                x, width = i + 0.8 * ((j + 0.5) / len(columns) - 0.5), 0.3 / len(columns)
                scores = scores_of(group, column, game, n)
                spread = x + width * np.linspace(-1, 1, len(scores)) * (len(scores) > 1)
                style = dict(color=METHODS[group.columns[column][0]][1], marker=marker_of(column, "o"), alpha=0.6)
                ax.plot(spread, scores, linestyle="", markersize=4, markeredgewidth=0, label=column, **style)
                if len(scores) > 1:
                    estimate, low, high = iqm_with_interval([scores])
                    ax.plot([x - width, x + width], [estimate, estimate], color="black", linewidth=1.5)
                    ax.plot([x, x], [low, high], color="black", linewidth=1)
            if (game, n) not in {cell[1:] for cell in group.cells}:
                ax.text(i, 0.5, "no run", transform=ax.get_xaxis_transform(), ha="center", color="0.4")
        ax.set(title=game, xlabel="n", xticks=range(len(ns)), xticklabels=ns, xlim=(-0.6, len(ns) - 0.4))
    fig.axes[0].set_ylabel("score of the evaluation")
    finish(fig, path, "A dot per seed; black: interquartile mean and its 95% bootstrap interval (none for 1 seed).")


def finish(fig, path, note):
    entries = {}
    for ax in fig.axes:
        entries |= {label: handle for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    fig.supxlabel(note, fontsize=9, color="0.3")
    columns = max(1, int(fig.get_figwidth() / (0.7 + 0.07 * max(map(len, entries), default=0))))  # inches
    fig.legend(entries.values(), entries.keys(), loc="outside upper center", ncols=columns, frameon=False)
    fig.savefig(path, dpi=110)


# --------------------------------------------------------------------------------------------------------- report
def table(rows):
    """Markdown whose columns line up in a terminal, too."""
    rows = [[str(entry) for entry in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def with_error(mean, error):
    digits = 2 if abs(mean) < 10 else 1
    return f"{mean:.{digits}f}" + ("" if np.isnan(error) else f" ± {error:.{digits}f}")


def with_interval(estimate, low, high):
    digits = 2 if abs(estimate) < 10 else 1
    return f"{estimate:.{digits}f}" + ("" if np.isnan(low) else f" [{low:.{digits}f}, {high:.{digits}f}]")


def ranges(numbers):
    """'1-3, 7'"""
    found = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in found)


def by_name(notes):
    """A line for each note and each set of names that differ in the seed at their end alone."""
    seeds = defaultdict(list)
    for path, note in notes:
        stem, seed = re.fullmatch(r"(.*__n\d+__(?=\d+$)|.*)(\d*)", path).groups()
        seeds[stem, note].append(seed)
    which = {name: ",".join(sorted(some, key=lambda seed: (len(seed), seed))) for name, some in seeds.items()}
    return [f"- `{stem}{f'{{{some}}}' if ',' in some else some}`: {note}" for (stem, note), some in which.items()]


def score_table(group, name):
    """Rows of the score table and of scores.csv."""
    rows, lines = [["game", "n", "", *group.columns]], []
    for game, n in sorted({cell[1:] for cell in group.cells}):
        entries = []
        for column, (method, own) in group.columns.items():
            scores = scores_of(group, column, game, n)
            paper = PAPER.get((method, game, n)) if is_papers(group.common | own) else None
            entries.append(["–", "–", "{:.1f} ± {:.1f}".format(*paper) if paper else ""])
            if len(scores):
                numbers = scores.mean(), standard_error(scores), *iqm_with_interval([scores])
                entries[-1][:2] = f"{with_error(*numbers[:2])} ({len(scores)})", with_interval(*numbers[2:])
                seeds = ranges(run.seed for run in group.cells[column, game, n])
                numbers = ["" if np.isnan(number) else float(number) for number in numbers]
                lines.append([name, game, n, method, column, len(scores), seeds, *numbers, *(paper or ("", ""))])
        means, iqms, papers = zip(*entries, strict=True)
        rows += [[game, n, "mean ± s.e. (seeds)", *means], ["", "", "IQM [95% interval]", *iqms]]
        rows += [["", "", "paper's mean ± s.e.", *papers]] if any(papers) else []
    return rows, lines


def detail_table(group):
    """The range over seeds of each entry of DETAIL_NAMES."""
    rows = [["game", "n", "method", *DETAIL_NAMES.values()]]
    for game, n in sorted({cell[1:] for cell in group.cells}):
        for column in with_all(group, group.columns, [(game, n)]):
            runs = group.cells[column, game, n]
            values = [sorted(run.details.get(name, np.nan) for run in runs) for name in DETAIL_NAMES]
            ends = [
                [f"{value:#.2g}" if value < 1 else f"{value:.0f}" for value in (some[0], some[-1])] for some in values
            ]
            spans = [low if low == high else f"{low} – {high}" for low, high in ends]
            rows.append([game, n, column, *(span.replace("nan", "–") for span in spans)])
    return rows


def aggregate_table(group, baseline):
    """Interquartile means of normalised scores over games and n."""
    rows, ns = {}, spanned(group, 2)
    for kind, games in (KINDS | {"all": GAMES}).items():
        for some in [[n] for n in ns] + [ns]:
            cells = shared_cells(group, main_columns(group), games, some)
            entries = {column: "–" for column in group.columns}
            for column in with_all(group, group.columns, cells):
                strata = [scores_of(group, column, game, n) / baseline.scores[game] - 1 for game, n in cells]
                entries[column] = with_interval(*iqm_with_interval(strata))
            rows.setdefault(describe(cells), [kind, describe(cells), *entries.values()])
    rows.pop("", None)
    return [["games", "over", *group.columns], *rows.values()]


def missing(group, paper_grid):
    """What the grid asks for and neither a finished nor an unfinished run has."""
    have = {run[1:5] for run in sum(group.cells.values(), group.unfinished)}
    grid = [sorted({run[i] for run in have}) for i in range(4)]
    methods, games, ns, seeds = PAPER_GRID if paper_grid else grid
    for method in sorted(methods, key=list(METHODS).index):
        cells = defaultdict(list)
        for game, n in product(games, ns):
            cells[ranges(seed for seed in seeds if (method, game, n, seed) not in have)].append((game, n))
        for which in sorted(filter(None, cells)):
            yield f"- {METHODS[method][0]}, {describe(cells[which])}: seeds {which}"


def differing(settings):
    names = sorted({name for some in settings for name in some})
    return [name for name in names if len({key(some.get(name)) for some in settings}) > 1]


def settings_table(groups):
    """The settings in which groups and variants differ, and where their runs come from."""
    own = [own for group in groups for method, own in group.columns.values() if script_of(method) == "offpolicy"]
    names = [*differing([group.common for group in groups]), *(name for name in differing(own) if name != "version")]
    rows, origins = [], ("script", "git commit", "torch", "device")
    for i, group in enumerate(groups, 1):
        for column, (_, own) in group.columns.items():
            runs = [run for cell in group.cells if cell[0] == column for run in group.cells[cell]]
            settings = [(group.common | own).get(name, "") for name in names]
            origin = [", ".join(sorted({str(run.origin[name]) for run in runs})) for name in origins]
            rows.append([i, column, len(runs), *settings, *origin, f"`{runs[0].origin['command of one']}`"])
    return [["group", "method", "runs", *names, *origins, "command of one"], *rows]


CAPTIONS = {
    "results": "Normalised return in training, over deterministic and over stochastic games (Figure `results`)",
    "norm_nstep": "Normalised return in training, for each backup length (Figure `norm_nstep`)",
    "train_curves": "Each game; reward per frame also sees episodes that never end (Figure `train_curves_env`)",
    "target_comparison": "With and without target network (Figure `target_comparison`)",
    "score_dist": "Scores of the evaluations (Figure `score_dist_env`)",
}
SCORES = """Scores: mean over seeds of the mean return of the evaluation, its standard error and the number of seeds;
interquartile mean (IQM) over seeds and its 95% bootstrap interval. A single seed has neither error nor interval."""
AGGREGATES = """Interquartile mean of normalised scores, (score − baseline) / baseline, over the games and n named,
which are those of all methods, and 95% interval of a bootstrap stratified by game and n. Baseline: """
CURVES = f"""A point of a curve is the mean over 1/{BINS} of the run. Where no episode ended it repeats the one before.
A line begins where each of its runs has finished an episode. Shading is the standard error over seeds, with games and n
held fixed; each game and n has the same weight."""


DETAIL_NAMES = {
    "length": "frames of an episode",
    "charts/reward_per_frame": "reward per frame",
    "minutes": "minutes of training",
    "losses/advantage_std": "std of advantage",
    "losses/luck_std": "std of luck",
    "losses/cvae_kl": "KL(q‖p)",
}
DETAILS = """Lowest and highest of the seeds: the mean length of the evaluation's episodes, the time that training took,
and means over the last tenth of training of the reward, of what advantage and luck amount to (in reward) and of what
the CVAE knows (in nats). With KL(q‖p) = 0 luck is 0: right for a deterministic game, posterior collapse in another."""


def read_baseline(path, games):
    if path is None:
        return Baseline("the paper's DAE scores at n = 8", {game: PAPER["dae", game, 8][0] for game in GAMES})
    try:
        scores = read_json(path)
    except ValueError as error:
        refuse(f"--baseline {path}: {error}")
    for game in games:
        if type(scores.get(game)) not in (int, float) or not 0 < scores[game] < float("inf"):
            refuse(f'--baseline {path}: needs a positive score for {game}, such as {{"{game}": 10.0}}')
    return Baseline(f"the scores in {path.name}", scores)


MARK = "<!-- written by benchmark_report.py with"


def claim(out, names):
    """Replace what an earlier report wrote, remove what this one no longer has, touch nothing else."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        first = (out / "report.md").read_text().split("\n")[0] if (out / "report.md").exists() else ""
    except (OSError, ValueError) as error:
        refuse(f"--out {out}: cannot be used ({error})")
    earlier = {"report.md", *re.findall(r"\w+\.(?:png|csv)", first)} if first.startswith(MARK) else set()
    for name in names:
        if (out / name).exists() and name not in earlier:
            refuse(f"--out {out}: has a {name} that no earlier report wrote, choose another directory")
    for name in earlier - set(names):
        (out / name).unlink(missing_ok=True)


def group_sections(group, i, prefix, apart, baseline, paper_grid):
    """The parts of report.md about a group, those that are also printed, the lines of scores.csv, and the figures."""
    papers = "the paper's settings" if is_papers(group.common) else "not the paper's settings"
    title = f"## Group {i}: " + ", ".join(f"{name} {group.common.get(name)}" for name in apart) + f" ({papers})"
    settings = ", ".join(f"{name} {value}" for name, value in sorted(group.common.items()))
    text, printed, lines, drawings = [title, f"All settings: {settings}."], [title], [], {}
    if group.columns:
        rows, lines = score_table(group, i)
        text += [SCORES, table(rows), AGGREGATES + baseline.name + ".", table(aggregate_table(group, baseline))]
        text += [DETAILS, table(detail_table(group))]
        printed.append(table(rows))
        figures = {kind: partial(draw_curves, rows=rows) for kind, rows in figures_of(group, baseline).items()}
        for kind, draw in (figures | {"score_dist": draw_scores}).items():
            drawings[f"{prefix}{kind}.png"] = partial(draw, group=group)
            text.append(f"![{CAPTIONS[kind]}]({prefix}{kind}.png)\n\n*{CAPTIONS[kind]}*")
        text.append(CURVES)
    unfinished = by_name((run.path, "no eval.json yet") for run in group.unfinished)
    absent = list(missing(group, paper_grid))
    gaps = ["Unfinished:\n\n" + "\n".join(unfinished)] if unfinished else []
    gaps.append("Missing:\n\n" + "\n".join(absent) if absent else "No run is missing.")
    return text + gaps, printed + gaps, lines, drawings


def main():
    args, unknown = tyro.cli(Args, return_unknown_args=True)
    if unknown:
        refuse(f"unknown argument {unknown[0]}: see --help")
    runs, unusable = read_runs(args.runs)
    baseline = read_baseline(args.baseline, sorted({run.game for run in runs}))
    found = len(runs) + len(unusable)
    groups = make_groups(runs, args.mix_versions, unusable)
    apart = differing([group.common for group in groups])

    sections, printed, lines, drawings = [], [], [], {}
    for i, group in enumerate(groups, 1):
        prefix, names = (f"group{i}_", apart) if len(groups) > 1 else ("", ["total_timesteps"])
        text, shown, rows, figures = group_sections(group, i, prefix, names, baseline, args.paper_grid)
        sections += text
        printed += shown
        lines += rows
        drawings |= figures

    counted = sum(len(cell) for group in groups for cell in group.cells.values())
    unfinished = sum(len(group.unfinished) for group in groups)
    copies = found - counted - unfinished - len(unusable)
    summary = [f"{counted} runs counted, {unfinished} unfinished, {len(unusable)} unusable, {copies} copies of others."]
    if len(groups) > 1:
        apart = ", ".join(apart)
        summary.append(f"**{len(groups)} groups of runs differ in {apart}: reported apart, never averaged.**")
    if any(column.endswith(")") for group in groups for column in group.columns):
        summary.append("**Variants (a), (b), ... of a method differ in its own settings or its script: not averaged.**")
    if args.mix_versions:
        summary.append("**--mix-versions: runs of different versions of a script ARE averaged here.**")
    if unusable:
        summary.append("Unusable, counted nowhere:\n\n" + "\n".join(by_name(sorted(unusable))))
    names = ["report.md", "scores.csv", *drawings]
    claim(args.out, names)
    origins = "Where the runs come from, and the settings in which they differ:\n\n" + table(settings_table(groups))
    text = [f"{MARK} {' '.join(names[1:])} -->", "# Benchmark report", *summary, origins, *sections]
    (args.out / "report.md").write_text("\n\n".join(text) + "\n")
    with open(args.out / "scores.csv", "w", newline="") as file:
        header = "group game n method column runs seeds mean stderr iqm iqm_low iqm_high paper_mean paper_stderr"
        csv.writer(file).writerows([header.split(), *lines])
    for name, draw in progress(list(drawings.items()), "figures"):
        draw(args.out / name)
    print("\n\n".join([*printed, *summary, f"{args.out / 'report.md'}: the report, with {len(drawings)} figures"]))


if __name__ == "__main__":
    main()
