"""The paper's score table and figures from the runs of the four scripts, and what is missing or cannot be used.

    python benchmark_report.py --runs runs --out report
    python benchmark_report.py --only env_id=asterix,seaquest n=8 method=dae,offpolicy
    python benchmark_report.py --runs runs/<run name>    # the curves of one run, finished or not

A run counts once it has an eval.json; its score is the mean return of the evaluation's episodes. Runs whose settings
differ are never averaged: a report is about the settings, and of each script the version, that most runs have. The rest
is listed, and `--only` reports it. Methods are compared over the games and n that all of them have.
"""

import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

import numpy as np
import pandas as pd
import tyro
from matplotlib.figure import Figure
from tqdm import tqdm

KINDS = {"deterministic": ("breakout", "space_invaders"), "stochastic": ("asterix", "freeway", "seaquest")}
GAMES = sorted(sum(KINDS.values(), ()))
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
PAPER = pd.read_csv(io.StringIO(PAPER_TABLE), sep=r"\s+", header=None, index_col=[0, 1])
PAPER.columns = pd.MultiIndex.from_product([list(METHODS)[:4], ["paper_mean", "paper_stderr"]])
PAPER = PAPER.stack(0).rename_axis(["env_id", "n", "method"])
PAPER_GRID = GAMES, (8, 16, 32), [*list(METHODS)[:4], "offpolicy_no_target"], range(1, 21)  # in the order of RUN
# Arguments that change no result; all others are settings, and columns of the table of runs like RUN and INFO
NOT_SETTINGS = "target_network small exp_name runs_dir run_name evaluate resume checkpoint_interval cuda compile track"
CELL, RUN = ["env_id", "n"], ["env_id", "n", "method", "seed"]
INFO = "path finished script git_commit torch device command score length minutes final curves".split()
RETURN, REWARD, CRITIC, KL = "charts/episodic_return", "charts/reward_per_frame", "losses/critic", "losses/cvae_kl"
NORMAL, SCORE = "normalised return", "score of the evaluation"
LATE = [REWARD, "losses/advantage_std", "losses/luck_std", KL]  # reported as means over the last tenth of a run
BINS, COLLAPSED = 50, 0.01  # points of a curve; KL(q‖p) in nats
MARK = "<!-- written by benchmark_report.py -->"
SCORES = """mean, stderr: score over seeds and its standard error. iqm: interquartile mean over seeds and its 95%
bootstrap interval, which for two or three seeds reaches from the lowest score to the highest. paper: after 10M frames,
with the paper's settings. Scores on the steep part of a curve exaggerate, hence frames_until_x, the frames until the
return in training is x: median over seeds, inf unless most come so far. x is the median of all methods' returns at the
end of training; x/4 and x/2 show who starts late. length: frames of an evaluation's episode. charts, losses: means over
the last tenth of training."""
CURVES = f"""A point of a curve is the mean over 1/{BINS} of the run; where no episode ended it repeats the one before.
A line begins where all its runs have finished an episode. Shading: standard error over seeds, for fixed games and n."""


@dataclass
class Args:
    runs: tuple[Path, ...] = (Path("runs"),)  # directories of runs, or the directory of one run
    out: Path = Path("report")  # directory of the report and its figures; for one run, that of its name in there
    only: tuple[str, ...] = ()  # runs with these arguments, such as env_id=asterix,seaquest n=8 method=dae
    baseline: Path | None = None  # JSON file of scores to normalise by (default: DAE of these runs, at its smallest n)
    paper_grid: bool = False  # list what is missing from the paper's whole grid, not only from what the runs span
    mix_versions: bool = False  # average over different versions of a script as if they were one


def refuse(message):
    print(f"benchmark_report.py: {message}", file=sys.stderr)
    sys.exit(2)


def check(right, otherwise):
    if not right:
        raise ValueError(otherwise)


# ------------------------------------------------------------------------------------------------------- read runs
def read_args(path, run):
    described = json.loads(path.read_text())
    args, versions = described["args"], described["versions"]
    method = described["script"].removeprefix("offdae_") + "_no_target" * (args.get("target_network") is False)
    numbers = {name: args[name] for name in ("n", "seed", "total_timesteps", "eval_episodes")}
    known = method in METHODS and args["env_id"] in GAMES and all(type(value) is int for value in numbers.values())
    check(known, "not of one of the four scripts and five games")
    settings = {name: str(value) for name, value in args.items() if name not in NOT_SETTINGS.split()} | numbers
    settings |= dict(method=method, sha256=described["sha256"][:10], minatar=versions["minatar"])
    return settings | {name: described.get(name, versions.get(name)) for name in INFO[2:7]}


def read_curves(path, run):
    """Means over BINS equal parts of the run. A part without a value repeats the one before it."""
    text, total = path.read_text(), run["total_timesteps"]
    curve = pd.read_csv(io.StringIO(text), dtype=float, keep_default_na=False, na_values=[""])
    needed = {"frames", "charts/episodes", "charts/SPS", RETURN, REWARD, CRITIC}
    check(needed <= set(curve) and len(curve) and text[-1] == "\n", "cut short, or not what the scripts write")
    span = curve.frames.diff().fillna(curve.frames)
    check((span > 0).all() and not np.isinf(curve).any(axis=None), "infinite values, or frames that do not rise")
    check(curve.frames.iloc[-1] >= total or not run["finished"], f"does not lead to the run's {total:,} frames")
    part = (-(-curve.frames * BINS // total)).clip(upper=BINS).astype(int)
    gained = (curve[RETURN] * curve["charts/episodes"]).fillna(0)
    curves = curve.assign(gained=gained).groupby(part).mean()
    curves[RETURN] = curves.gained / curves["charts/episodes"]  # per episode; NaN if none ended
    curves = curves.reindex(range(1, part.max() + 1)).ffill()
    late = curves.iloc[-BINS // 10 :].reindex(columns=LATE).mean().to_dict()
    curves, minutes = curves.reindex(range(1, BINS + 1)), (span / curve["charts/SPS"].clip(lower=0.05)).sum() / 60
    return late | dict(curves=curves, minutes=minutes, final=curves[RETURN].iloc[-1])


def read_scores(path, run):
    evaluation, episodes = json.loads(path.read_text()), run["eval_episodes"]
    returns, lengths = (pd.to_numeric(evaluation[name]) for name in ("returns", "lengths"))
    right = len(returns) == len(lengths) == episodes and np.isfinite([*returns, *lengths]).all()
    check(right, f"does not have {episodes} finite returns and lengths")
    return dict(score=np.mean(returns), length=np.mean(lengths))


def read_runs(directories):
    """A row for each run, and {path: reason} of those that cannot be used."""
    found, rows, unusable = {}, [], {}
    for directory in directories:
        for path in [*directory.glob("args.json"), *directory.glob("*/args.json")]:
            found[path.parent.resolve()] = path.parent
    for path in tqdm(sorted(found.values()), unit=" runs", mininterval=0.1 if sys.stderr.isatty() else 10):
        run = dict(path=path, finished=(path / "eval.json").exists(), curves=None) | dict.fromkeys(LATE, np.nan)
        try:
            for name, read in {"args.json": read_args, "curve.csv": read_curves, "eval.json": read_scores}.items():
                if run["finished"] or name == "args.json" or (path / name).exists():
                    run |= read(path / name, run)
            rows.append(run)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            unusable[path] = f"{name}: {type(error).__name__}: {error}"
    if not rows:
        refuse(f"--runs {' '.join(map(str, directories))}: no run that can be used; {'; '.join(unusable.values())}")
    return pd.DataFrame(rows), unusable


# ---------------------------------------------------------------------------------------------------- select runs
def keep(runs, only):
    """The runs with these arguments. One that a method does not have excludes nothing."""
    for name, values in only.items():
        if name in runs:
            known = runs[name].notna().groupby(runs.method).transform("any")
            runs = runs[~known | runs[name].map(str).isin(values)]
    return runs


def same_settings(runs, mix_versions):
    """The runs of the settings that most have, and of each script of its version and own settings that most have; a
    table of the others; and the names of the settings."""
    settings = [name for name in runs if "/" not in name and name not in [*RUN, *INFO]]
    lacking = runs.groupby("script")[settings].count().eq(0).any()
    own = [name for name in settings if lacking[name] or (name == "sha256" and not mix_versions)]
    common = [name for name in settings if name not in [*own, "sha256"]]

    def most(some, names):
        keys = some.groupby(names, dropna=False).ngroup()
        return some[keys == (keys[some.finished] if some.finished.any() else keys).mode()[0]]

    kept = pd.concat(most(some, ["script", *own]) for _, some in most(runs, common).groupby("script"))
    differing = [name for name in settings if runs[name].nunique(dropna=False) > 1]
    others = runs.drop(kept.index).groupby(["method", *differing], dropna=False).size().reset_index(name="runs")
    return kept.sort_values(["finished", *RUN, "path"], ascending=[False] + [True] * 5), others, settings


def normalise(runs, path):
    """Adds the normalised score and curve of each run, NaN in a game without baseline. Returns the baseline's name."""
    dae = runs[(runs.method == "dae") & (runs.n == runs.n[runs.method == "dae"].min())]
    baseline, name = dae.groupby("env_id").score.mean(), f"{len(dae)} runs of DAE at n = {dae.n.min()}"
    if path:
        baseline, name = pd.to_numeric(pd.Series(json.loads(path.read_text())), errors="coerce"), path.name
    scale = runs.env_id.map(baseline[baseline > 0])
    runs["normal"] = runs.score / scale - 1
    for curves, by in zip(runs.curves, scale, strict=True):
        curves[NORMAL] = curves[RETURN] / by - 1
    return name


def comparable(runs):
    """Those of the games and n that every method has."""
    methods = runs.groupby(CELL).method.nunique()
    return runs[pd.MultiIndex.from_frame(runs[CELL]).isin(methods.index[methods == runs.method.nunique()])]


# ----------------------------------------------------------------------------------------------------- statistics
def iqm_with_interval(strata):
    """Interquartile mean over the seeds of all strata, each stratum (game and n) with the same weight, and the 95%
    interval of a bootstrap that draws the seeds of each anew; NaN if one has a single seed."""
    rng, sizes = np.random.default_rng(0), [len(scores) for scores in strata]
    weights = np.concatenate([np.full(size, 1 / size / len(sizes)) for size in sizes])
    rows = [np.vstack([range(size), rng.integers(size, size=(2000, size))]) for size in sizes]  # the first as it is
    values = np.concatenate([np.asarray(scores)[some] for scores, some in zip(strata, rows, strict=True)], axis=1)
    order = values.argsort(axis=1)
    inside = np.diff(np.clip(weights[order].cumsum(axis=1), 0.25, 0.75), prepend=0.25, axis=1)
    iqm, *resampled = 2 * (np.take_along_axis(values, order, axis=1) * inside).sum(axis=1)
    return iqm, *(np.percentile(resampled, [2.5, 97.5]) if min(sizes) > 1 else (np.nan, np.nan))


def mean_curve(runs, tag):
    """Mean over games and n of the mean over seeds, and its standard error with games and n held fixed. [BINS] each"""
    curves = pd.DataFrame([curves[tag].to_numpy() for curves in runs.curves])
    cells = curves.groupby([runs.env_id.to_numpy(), runs.n.to_numpy()])
    error = np.sqrt((cells.sem() ** 2).sum(skipna=False)) / cells.ngroups
    return cells.mean(skipna=False).mean(skipna=False), error


def summarise(runs):
    """The numbers of scores.csv, a row for each game, n and method."""
    at_end = runs.groupby(RUN[:3]).final.mean().groupby("env_id").median()
    runs["x"] = runs.env_id.map(at_end.map(lambda x: float(f"{x:.2g}")))
    until = {"frames_until_x/4": 0.25, "frames_until_x/2": 0.5, "frames_until_x": 1}
    for name, share in until.items():
        reached = [curves[RETURN] >= share * x for curves, x in zip(runs.curves, runs.x, strict=True)]
        runs[name] = runs.total_timesteps / BINS * [part.idxmax() if part.any() else np.inf for part in reached]
    cells = runs.groupby(RUN[:3])
    scores = cells.agg(seeds=("seed", "size"), mean=("score", "mean"), stderr=("score", "sem"))
    scores[["iqm", "iqm_low", "iqm_high"]] = [iqm_with_interval([some.score]) for _, some in cells]
    scores = scores.join(PAPER).join(cells[["x", *until]].median())
    return scores.join(cells[["length", "minutes", *LATE]].mean()).reset_index()


def summarise_normalised(panels):
    """Interquartile means of normalised scores over the games and n of each panel."""
    rows = [
        [title.replace("\n", " "), method, *iqm_with_interval([cell.normal for _, cell in some.groupby(CELL)])]
        for title, runs, _ in panels
        for method, some in runs.groupby("method")
    ]
    return pd.DataFrame(rows, columns=["over", "method", "iqm", "iqm_low", "iqm_high"])


# -------------------------------------------------------------------------------------------------------- figures
def figures_of(runs):
    """{name: (panels, panels in a row)}, a panel being its title, its runs and what of them is drawn."""

    def compared(title, some):
        return f"{title}:\n{fill(describe(comparable(some)), 44)}", comparable(some), NORMAL

    ablation, ns = runs.method.str.endswith("_no_target"), sorted(runs.n.unique())
    main = runs[~ablation]
    normal = main.groupby(CELL).filter(lambda cell: cell.normal.notna().all() and cell.final.notna().all())
    kinds = [(f"{kind} games", normal[normal.env_id.isin(games)]) for kind, games in KINDS.items()]
    kinds = [compared(title, some) for title, some in kinds if len(some)]
    lengths = [compared(f"n = {n}", some) for n, some in normal.groupby("n")]
    both = runs[runs.script.isin(runs.script[ablation]) & runs.env_id.isin(runs.env_id[ablation])]
    pairs = [comparable(some) for _, some in both.groupby("env_id")]
    cells = [(f"{game}, n = {n}", some[some.n == n]) for n in ns for game, some in main.groupby("env_id")]
    return {
        "results": (kinds, len(kinds)),
        "norm_nstep": (lengths, len(lengths)),
        "train_curves": ([(title, some, RETURN) for title, some in cells], main.env_id.nunique()),
        "reward_curves": ([(title, some, REWARD) for title, some in cells], main.env_id.nunique()),
        "target_comparison": ([(describe(some), some, tag) for tag in (RETURN, CRITIC) for some in pairs], len(pairs)),
        "score_dist": ([(game, some, SCORE) for game, some in runs.groupby("env_id")], runs.env_id.nunique()),
    }


def draw(path, panels, row):
    """Means over seeds as curves, or a dot per seed with the interquartile mean and its interval in black."""
    rows, step = -(-len(panels) // row), 1 if panels[0][2] == NORMAL else row  # same scale as the one before, or above
    fig, legend, axes = Figure(figsize=(max(6.4, 3.3 * row), 2.5 * rows + 1), layout="constrained"), {}, []
    for i, (title, runs, tag) in enumerate(panels):
        same = axes[i - step] if i >= step and tag == panels[0][2] else None
        axes.append(ax := fig.add_subplot(rows, row, i + 1, sharey=same))
        for place, (method, some) in enumerate(runs.groupby("method")):
            label, colour, line = METHODS[method]
            if tag == SCORE:
                x = runs.n.rank(method="dense")[some.index] + 0.8 * ((place + 0.5) / runs.method.nunique() - 0.5)
                (legend[label],) = ax.plot(x, some.score, "o", color=colour, alpha=0.6, markersize=4)
                for where, cell in some.score.groupby(x):
                    ax.plot([where + 0.05] * 3, sorted(iqm_with_interval([cell])), "_-k", linewidth=1)
                ax.set_xticks(range(1, runs.n.nunique() + 1), sorted(runs.n.unique()))
                continue
            mean, error = mean_curve(some, tag)
            frames = np.arange(1, BINS + 1) / BINS * some.total_timesteps.iloc[0] / 1e6
            (legend[label],) = ax.plot(frames, mean, color=colour, linestyle=line)
            ax.fill_between(frames, mean - error, mean + error, color=colour, alpha=0.2, linewidth=0)
        if tag == NORMAL:
            legend["baseline"] = ax.axhline(0, color="black", linewidth=1)
        ax.set(ylabel=tag.removeprefix("charts/").replace("_", " "), yscale="log" if tag == CRITIC else "linear")
        ax.set_title(title if len(runs) else f"{title}: no runs", fontsize=9)
    fig.supxlabel("n" if tag == SCORE else "million frames", fontsize="medium")
    fig.legend(legend.values(), legend.keys(), loc="outside upper center", ncols=max(2, row), frameon=False)
    fig.savefig(path, dpi=110)


# --------------------------------------------------------------------------------------------------------- report
def number(value):
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def block(frame):
    """A table that lines up in Markdown and in a terminal."""
    return "```\n" + frame.to_string(index=False, na_rep="–", float_format=number) + "\n```" if len(frame) else ""


def describe(runs):
    """'asterix, freeway n = 8, 32; breakout n = 8'"""
    cells = runs[CELL].drop_duplicates().sort_values(CELL).astype(str).groupby("env_id").n.agg(", ".join)
    return "; ".join(f"{', '.join(games.index)} n = {ns}" for ns, games in cells.groupby(cells, sort=False))


def by_name(runs):
    """'- dae, asterix, freeway n = 8: seeds 1, 2, 3', in few lines"""
    cells = runs.sort_values("seed").astype(dict(seed=str)).groupby(RUN[:3]).seed.agg(", ".join).reset_index()
    groups = cells.groupby(["method", "seed"])
    return "\n".join(f"- {method}, {describe(some)}: seeds {seeds}" for (method, seeds), some in groups)


def main():
    args = tyro.cli(Args, description=__doc__)
    found, unusable = read_runs(args.runs)
    only = {name: values.split(",") for name, _, values in (word.partition("=") for word in args.only)}
    there = {name: sorted(set(found[name].dropna().map(str))) if name in found else [] for name in only}
    chosen = keep(found, only)
    if chosen.empty or not all(set(values) <= set(there[name]) for name, values in only.items()):
        refuse(f"--only {' '.join(args.only)}: no run has all of this; the runs have {there}")
    runs, others, settings = same_settings(chosen, args.mix_versions)
    unusable |= dict.fromkeys(runs.path[runs.duplicated(RUN)], "another run has the same settings and seed")
    runs = runs.drop_duplicates(RUN)
    done = runs[runs.finished].copy()
    grid = PAPER_GRID if args.paper_grid else [runs[name].unique() for name in RUN]
    missing = pd.MultiIndex.from_product(grid, names=RUN).difference(pd.MultiIndex.from_frame(runs[RUN]))
    collapsed = done[(done[KL] < COLLAPSED) & done.env_id.isin(KINDS["stochastic"])]
    lists = {
        "Posterior collapse, KL(q‖p) ≈ 0 in a stochastic game, so that luck is 0": by_name(collapsed),
        "Unfinished": by_name(runs[~runs.finished]),
        "Missing": by_name(keep(missing.to_frame(index=False), only)),
        "Other settings or versions, left out; see them with `--only`": block(others),
        "Unusable": "\n".join(f"- `{path}`: {reason}" for path, reason in unusable.items()),
    }
    text = [f"{len(done)} runs counted, {len(runs) - len(done)} unfinished, {len(unusable)} unusable."]
    text += ["**Different versions of a script are averaged: --mix-versions.**"] * args.mix_versions
    text += [f"{title}:\n\n{content}" for title, content in lists.items() if content]
    details, scores, figures = ["Settings:"], pd.DataFrame(columns=RUN[:3]), {}
    for name in [*settings, "torch", "device"]:
        details[0] += f" {name} {' or '.join(sorted(runs[name].dropna().astype(str).unique()))},"
    if len(done):
        baseline, figures = normalise(done, args.baseline), figures_of(done)
        scores, normal = summarise(done), summarise_normalised(figures["results"][0] + figures["norm_nstep"][0])
        text.append(block(scores.iloc[:, :15]))
        details += [SCORES, block(scores.drop(columns=scores.columns[4:15]))]
        details += [f"Normalised: (score − baseline) / baseline. Baseline: {baseline}.", block(normal), CURVES]
    if len(runs) == 1 and runs.curves.notna().all():
        tags = [tag for tag in runs.curves.iloc[0] if tag.startswith("losses/") or tag in (RETURN, REWARD)]
        figures = {"run": ([(runs.path.iloc[0].name * (tag == RETURN), runs, tag) for tag in tags], 4)}
    figures = {f"{name}.png": figure for name, figure in figures.items() if figure[0]}
    out = args.out / args.runs[0].resolve().name if (args.runs[0] / "args.json").exists() else args.out
    report = out / "report.md"
    if out.exists() and any(out.iterdir()) and not (report.exists() and report.read_text().startswith(MARK)):
        refuse(f"--out {out}: holds files but no earlier report, choose another directory")
    out.mkdir(parents=True, exist_ok=True)
    details += [f"![{name}]({name})" for name in figures]
    report.write_text("\n\n".join([MARK, "# Benchmark report", *text, *details]) + "\n")
    done.drop(columns="curves").to_csv(out / "runs.csv", index=False)
    scores.to_csv(out / "scores.csv", index=False)
    for name, figure in tqdm(figures.items(), unit=" figures"):
        draw(out / name, *figure)
    print("\n\n".join([*text, f"{report}: the report, with {len(figures)} figures"]))


if __name__ == "__main__":
    try:
        main()
    except (OSError, json.JSONDecodeError) as error:
        refuse(error)
