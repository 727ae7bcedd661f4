"""benchmark_report.py on made-up runs whose numbers are known, on broken ones, and on a real one."""

import csv
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, fields

import numpy as np
import pytest
from conftest import ROOT

import benchmark_report as report
import offdae_dae
import offdae_offpolicy
import offdae_tree

LEVELS = {"offdae_uncorrected": 0.1, "offdae_dae": 1.0, "offdae_offpolicy": 1.4, "offdae_tree": 0.6}
SCALE = {"asterix": 150.0, "breakout": 9000.0, "freeway": 55.0, "seaquest": 400.0, "space_invaders": 15000.0}
SMALL = dict(total_timesteps=600_000, batch_size=256, channels=16, hidden=128, eval_episodes=4)
OFF = ("offdae_offpolicy", "asterix", 8)
DAE = ("offdae_dae", "asterix", 8)
TREE = ("offdae_tree", "asterix", 8)


def curve_text(script, total, final, rng, points=500, ended=1.0):
    """A curve.csv like the scripts', with returns that rise to `final`; `ended` is how often an episode ends."""
    losses = importlib.import_module(script).LOGGED
    tags = ["episodic_return", "episodic_length", "episodes", "reward_per_frame", "SPS", "learning_rate"]
    lines = [",".join(["frames", *(f"charts/{tag}" for tag in tags), *(f"losses/{tag}" for tag in losses)])]
    progress = np.arange(1, points + 1) / points
    returns = final * (1 - np.exp(-4 * progress)) * (1 + 0.1 * rng.standard_normal(points))
    episodes = rng.integers(1, 20, points) * (rng.random(points) < ended)
    rates = 0.01 + returns / 1000
    noise = np.abs(rng.standard_normal((points, len(losses)))) + 1e-3
    for i in range(points):
        episode = [repr(float(returns[i])), "123.4567890123"] if episodes[i] else ["", ""]
        charts = [*episode, str(episodes[i]), repr(float(rates[i])), "4321.9", repr(float(2.5e-4 * (1 - progress[i])))]
        logged = [repr(value) for value in noise[i].tolist()] if i > 5 else [""] * len(losses)
        lines.append(",".join([str(round(total * (i + 1) / points)), *charts, *logged]))
    return "\n".join(lines) + "\n"


def describe(script, game, n, seed, sha="a" * 64, minatar="1.0.15", **changes):
    args = asdict(importlib.import_module(script).Args(env_id=game, n=n, seed=seed, exp_name=script))
    versions = dict(python="3.11.7", torch="2.13.0", minatar=minatar, numpy="2.4.6")
    origin = dict(command=f"python {script}.py --env-id {game} --n {n}", script=script, sha256=sha, git_commit="c" * 40)
    return dict(args=args | changes) | origin | dict(versions=versions, device="a GPU")


def write_run(runs, script, game, n, seed, returns, curve=None, name=None, sha="a" * 64, minatar="1.0.15", **changes):
    """A run directory; without returns an unfinished one."""
    described = describe(script, game, n, seed, sha, minatar, **changes)
    ablation = "_no_target" if changes.get("target_network") is False else ""
    directory = runs / (name or f"{game}__{script}{ablation}__n{n}__{seed}")
    directory.mkdir(parents=True)
    (directory / "args.json").write_text(json.dumps(described, indent=2))
    total = described["args"]["total_timesteps"]
    curve = curve or curve_text(script, total, statistics.mean(returns or [1.0]), np.random.default_rng(seed), 60)
    (directory / "curve.csv").write_text(curve)
    if returns is not None:
        returns = [float(value) for value in returns]
        episodes = dict(returns=returns, lengths=[100] * len(returns), truncated=[False] * len(returns))
        score = dict(mean=statistics.mean(returns), stderr=0.0, frames=100 * len(returns), seconds=1.0)
        (directory / "eval.json").write_text(json.dumps(score | episodes, indent=2))
    return directory


def write_grid(runs, games, ns, seeds, points, **changes):
    """All methods and the ablation. A few different curves per cell, for writing 1500 of them takes a while."""
    rng, total = np.random.default_rng(0), changes.get("total_timesteps", 10_000_000)
    methods = [(script, level, {}) for script, level in LEVELS.items()]
    for script, level, change in [*methods, ("offdae_offpolicy", 1.2, dict(target_network=False))]:
        for game in games:
            for n in ns:
                final = SCALE[game] * level * (1 + 0.02 * n)
                ended = 0.3 if game == "breakout" else 1.0
                curves = [curve_text(script, total, final * scale, rng, points, ended) for scale in (0.8, 1.0, 1.3)]
                for seed in seeds:
                    returns = rng.normal(final * rng.normal(1, 0.1), 0.2 * final, changes.get("eval_episodes", 100))
                    write_run(runs, script, game, n, seed, returns, curves[seed % 3], **changes, **change)


def read(runs, mix_versions=False):
    """Groups of the runs in a directory, and what cannot be used."""
    found, unusable = report.read_runs([runs])
    return report.make_groups(found, mix_versions, unusable), unusable


def table_rows(text, *starts):
    """The entries of the Markdown rows whose first entries are these."""
    rows = [[entry.strip() for entry in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [row for row in rows if row[: len(starts)] == list(starts)]


def scores_csv(directory):
    with open(directory / "scores.csv", newline="") as file:
        return list(csv.DictReader(file))


# ---------------------------------------------------------------------------------------------------- the paper's data
@pytest.mark.parametrize(
    ("method", "game", "n", "score"),
    [
        ("uncorrected", "asterix", 8, (4.5, 0.2)),
        ("tree", "asterix", 16, (39.0, 1.4)),
        ("offpolicy", "asterix", 32, (268.9, 14.0)),
        ("dae", "breakout", 8, (9573.0, 250.1)),
        ("tree", "breakout", 32, (10139.8, 338.1)),
        ("uncorrected", "freeway", 16, (16.8, 1.3)),
        ("offpolicy", "freeway", 8, (61.9, 0.6)),
        ("dae", "seaquest", 32, (821.6, 52.5)),
        ("offpolicy", "seaquest", 16, (1171.6, 66.6)),
        ("uncorrected", "space_invaders", 32, (307.7, 32.0)),
        ("dae", "space_invaders", 16, (13478.7, 391.2)),
        ("offpolicy", "space_invaders", 8, (18086.9, 419.1)),
        ("tree", "space_invaders", 32, (17374.2, 584.9)),
    ],
)
def test_the_papers_scores(method, game, n, score):
    """Table `tab:score_detail`."""
    assert report.PAPER[method, game, n] == score


def test_the_papers_table_is_whole():
    methods = ["uncorrected", "dae", "offpolicy", "tree"]
    assert set(report.PAPER) == {(method, game, n) for method in methods for game in SCALE for n in (8, 16, 32)}
    assert sum(score for score, _ in report.PAPER.values()) == pytest.approx(250406.1)
    assert sum(error for _, error in report.PAPER.values()) == pytest.approx(10685.5)


def test_every_argument_of_the_scripts_is_a_setting_or_not(script):
    """A new argument has to be put somewhere; the paper's settings are the defaults."""
    settings = {field.name: field.default for field in fields(script.Args) if field.name not in report.NOT_SETTINGS}
    assert settings.items() <= report.PAPER_SETTINGS.items()
    own = {field.name for field in fields(script.Args)} - {field.name for field in fields(offdae_tree.Args)}
    assert own - {"target_network"} == (
        set(report.OWN_SETTINGS) - {"cvae_learning_rate", "decode_every"} if script is offdae_offpolicy else set()
    )


# ---------------------------------------------------------------------------------------------------------- statistics
@pytest.mark.parametrize("sizes", [[8], [3], [1], [2, 3], [4, 4, 4], [1, 5, 2]])
def test_interquartile_mean_against_a_list_that_repeats_values(sizes):
    """With each value repeated so that strata weigh the same and quarters are whole, it is the mean of the middle."""
    rng = np.random.default_rng(len(sizes))
    strata = [rng.normal(10 * i, 3, size) for i, size in enumerate(sizes)]
    repeated = sorted(value for scores in strata for value in scores for _ in range(4 * 60 // len(scores)))
    quarter = len(repeated) // 4
    expected = statistics.mean(repeated[quarter:-quarter])
    assert report.iqm_with_interval(strata)[0] == pytest.approx(expected, rel=1e-12)


def test_the_interval_is_that_of_a_bootstrap_within_each_stratum():
    """Against draws made one at a time. Drawn across strata, or of 90%, the interval would be another."""
    rng = np.random.default_rng(5)
    strata = [rng.normal(0, 1, 20), rng.normal(5, 1, 20)]
    draws = []
    for _ in range(10_000):
        values = sorted([*rng.choice(strata[0], 20), *rng.choice(strata[1], 20)])
        draws.append(sum(values[10:30]) / 20)
    cuts = statistics.quantiles(draws, n=40)
    estimate, low, high = report.iqm_with_interval(strata)
    assert low < estimate < high
    assert (low, high) == pytest.approx((cuts[0], cuts[-1]), abs=0.15 * statistics.stdev(draws))
    assert report.iqm_with_interval(strata) == (estimate, low, high)


def test_a_curve_in_equal_parts_against_plain_loops(tmp_path):
    text = curve_text("offdae_dae", 1000, 50.0, np.random.default_rng(1), points=70, ended=0.3)
    (tmp_path / "curve.csv").write_text(text)
    curve, _ = report.read_curve(tmp_path / "curve.csv", 1000)
    sums, before, last = np.zeros((3, report.BINS)), 0, [np.nan] * 3
    weights = np.zeros((3, report.BINS))
    for row in csv.DictReader(text.splitlines()):
        frames = int(row["frames"])
        part = next(part for part in range(report.BINS) if frames <= (part + 1) * 1000 / report.BINS)
        episodes, span = float(row["charts/episodes"]), frames - before
        tags = [("charts/episodic_return", episodes), ("charts/reward_per_frame", span), ("losses/critic", span)]
        for i, (tag, weight) in enumerate(tags):
            if row[tag]:
                sums[i, part] += float(row[tag]) * weight
                weights[i, part] += weight
        before = frames
    for part in range(report.BINS):
        last = [sums[i, part] / weights[i, part] if weights[i, part] else last[i] for i in range(3)]
        np.testing.assert_allclose(curve[:, part], last, rtol=1e-12)
    assert np.isnan(curve[report.CRITIC, 0]) and np.isfinite(curve[report.REWARD]).all()


@pytest.mark.parametrize("script", ["offdae_dae", "offdae_offpolicy"])
def test_details_against_plain_loops(tmp_path, script):
    text = curve_text(script, 1000, 50.0, np.random.default_rng(1), points=70).replace("4321.9", "20.0", 35)
    (tmp_path / "curve.csv").write_text(text)
    _, details = report.read_curve(tmp_path / "curve.csv", 1000)
    seconds, before, late = 0.0, 0, {name: [] for name in report.LATE}
    for row in csv.DictReader(text.splitlines()):
        seconds += (int(row["frames"]) - before) / float(row["charts/SPS"])
        before = int(row["frames"])
        for name in late:
            if before > 900 and name in row:
                late[name].append(float(row[name]))
    assert details.pop("minutes") == pytest.approx(seconds / 60) and 500 / 20 < seconds < 500 / 20 + 1
    means = {name: statistics.mean(values) if values else np.nan for name, values in late.items()}
    assert details == pytest.approx(means, nan_ok=True)
    assert np.isfinite(details["losses/luck_std"]) == (script == "offdae_offpolicy")


def test_details_are_ranges_over_seeds(run, tmp_path):
    """And a run that never learned or that a computer took ages for is no reason to fail."""
    for seed, speed in ((1, "1000.0"), (2, "2000.0"), (3, "500.0")):
        curve = curve_text("offdae_dae", 600_000, 1.0, np.random.default_rng(seed), 60).replace("4321.9", speed)
        write_run(tmp_path / "runs", *DAE, seed, [1.0] * 4, curve, **SMALL)
    curve = curve_text("offdae_offpolicy", 600_000, 1.0, np.random.default_rng(0), 6).replace("4321.9", "0.0")
    write_run(tmp_path / "runs", *OFF, 1, [1.0] * 4, curve, **SMALL)
    run(report)
    text = (tmp_path / "report" / "report.md").read_text()
    (dae,), (off,) = (table_rows(text, "asterix", "8", name) for name in ("DAE", "Off-policy DAE"))
    assert [dae[3], dae[5], *dae[7:]] == ["100", "5 – 20", "–", "–"]
    (group,), _ = read(tmp_path / "runs")
    stds = sorted(run.details["losses/advantage_std"] for run in group.cells["DAE", "asterix", 8])
    assert [float(end) for end in dae[6].split(" – ")] == pytest.approx([stds[0], stds[-1]], rel=0.06)
    assert [off[3], *off[5:]] == ["100", "200000", "–", "–", "–"]


def test_mean_curve_weighs_cells_the_same_and_errors_are_over_seeds(tmp_path):
    write_grid(tmp_path, ["asterix", "seaquest"], [8], [1, 2, 3], 60, **SMALL)
    for seed in (4, 5):
        write_run(tmp_path, *DAE, seed, [1, 2, 3, 4], **SMALL)
    (group,), _ = read(tmp_path)
    curves = [
        np.array([run.curve[report.RETURN] for run in group.cells["DAE", game, 8]]) / scale - 1
        for game, scale in (("asterix", 10.0), ("seaquest", 20.0))
    ]
    assert [len(curve) for curve in curves] == [5, 3]
    baseline = report.Baseline("ours", {"asterix": 10.0, "seaquest": 20.0})
    cells = [("asterix", 8), ("seaquest", 8)]
    mean, error = report.mean_curve(group, "DAE", cells, report.RETURN, baseline)
    np.testing.assert_allclose(mean, (curves[0].mean(0) + curves[1].mean(0)) / 2)
    variances = [curve.var(0, ddof=1) / len(curve) for curve in curves]
    np.testing.assert_allclose(error, np.sqrt(variances[0] + variances[1]) / 2)


# ------------------------------------------------------------------------------------------------- groups and variants
CHANGES = [
    dict(total_timesteps=500_000),
    dict(batch_size=512),
    dict(tau=0.98),
    dict(eval_episodes=3),
    dict(something_new=1),
    dict(minatar="1.0.10"),
]


@pytest.mark.parametrize("change", CHANGES, ids=[next(iter(change)) for change in CHANGES])
def test_runs_of_different_settings_are_in_different_groups(tmp_path, change):
    write_run(tmp_path, *DAE, 1, [1, 2, 3, 4], **SMALL)
    write_run(tmp_path, *DAE, 2, [5, 6, 7, 8][: change.get("eval_episodes", 4)], **SMALL | change)
    write_run(tmp_path, *TREE, 1, [1, 2, 3, 4], **SMALL)
    groups, unusable = read(tmp_path)
    assert [len(group.cells["DAE", "asterix", 8]) for group in groups] == [1, 1] and not unusable
    name = "version of MinAtar" if "minatar" in change else next(iter(change))
    assert report.differing([group.common for group in groups]) == [name]
    assert "Tree Backup" in groups[0].columns and "Tree Backup" not in groups[1].columns


@pytest.mark.parametrize("change", [dict(ent_coef=2e-5), dict(sha="b" * 64), dict(bf16=True)], ids=str)
def test_a_methods_own_settings_and_versions_make_columns(tmp_path, change):
    for seed, some in ((1, {}), (2, change), (3, {})):
        write_run(tmp_path, *OFF, seed, [seed] * 4, **SMALL | some)
    write_run(tmp_path, *OFF, 2, [9] * 4, **SMALL | change, target_network=False)
    write_run(tmp_path, *DAE, 1, [1] * 4, **SMALL)
    (group,), _ = read(tmp_path)
    names = ["DAE", "Off-policy DAE (a)", "Off-policy DAE (b)", "Off-policy DAE, no target network (b)"]
    assert list(group.columns) == names
    scores = {column: report.scores_of(group, column, "asterix", 8).tolist() for column in names}
    assert [scores[name] for name in names] == [[1], [1, 3], [2], [9]] or "sha" in change
    assert sorted(scores[names[1]] + scores[names[2]]) == [1, 2, 3]
    text = report.table(report.settings_table([group]))
    assert all(str(value)[:10] in text for value in change.values())


def test_versions_are_averaged_only_if_asked(tmp_path):
    for seed, sha in ((1, "a"), (2, "b"), (3, "b")):
        write_run(tmp_path, *DAE, seed, [seed] * 4, sha=sha * 64, **SMALL)
    (group,), _ = read(tmp_path)
    assert report.scores_of(group, "DAE (a)", "asterix", 8).tolist() == [2, 3]
    (group,), _ = read(tmp_path, mix_versions=True)
    assert report.scores_of(group, "DAE", "asterix", 8).tolist() == [1, 2, 3]
    (row,) = report.settings_table([group])[1:]
    assert "aaaaaaaaaa, bbbbbbbbbb" in row


def test_what_changes_no_result_makes_no_group(tmp_path):
    write_run(tmp_path, *DAE, 1, [1] * 4, **SMALL)
    others = dict(cuda=False, exp_name="mine", run_name="x", track=True, wandb_entity="us", small=True, resume=True)
    write_run(tmp_path, *DAE, 2, [2] * 4, **SMALL, **others, checkpoint_interval=5, compile=True)
    (group,), _ = read(tmp_path)
    assert report.scores_of(group, "DAE", "asterix", 8).tolist() == [1, 2]


def test_of_duplicates_one_counts_if_they_agree_and_none_if_not(tmp_path):
    write_run(tmp_path, *DAE, 1, [1, 2, 3, 4], **SMALL)
    write_run(tmp_path, *DAE, 1, [1, 2, 3, 4], name="copy", **SMALL)
    write_run(tmp_path, *DAE, 2, [5, 6, 7, 8], name="one", **SMALL)
    write_run(tmp_path, *DAE, 2, [5, 6, 7, 9], name="other", **SMALL)
    write_run(tmp_path, *DAE, 3, [0, 0, 0, 4], **SMALL)
    (group,), unusable = read(tmp_path)
    assert report.scores_of(group, "DAE", "asterix", 8).tolist() == [2.5, 1.0]
    assert [path.rsplit("/")[-1] for path, _ in unusable] == ["one", "other"]
    assert f"seed of {tmp_path / 'other'}" in unusable[0][1] and f"seed of {tmp_path / 'one'}" in unusable[1][1]


def test_methods_are_compared_over_what_all_of_them_have(tmp_path):
    """Tree Backup lacks n = 32 on Asterix; the ablation, which lacks all of Seaquest, takes nothing from the others."""
    write_grid(tmp_path, ["asterix", "seaquest"], [8, 32], [1, 2], 60, **SMALL)
    for seed in (1, 2):
        shutil.rmtree(tmp_path / f"asterix__offdae_tree__n32__{seed}")
        for n in (8, 32):
            shutil.rmtree(tmp_path / f"seaquest__offdae_offpolicy_no_target__n{n}__{seed}")
    (group,), _ = read(tmp_path)
    baseline = report.read_baseline(None, [])
    figures = report.figures_of(group, baseline)
    (panel,) = figures["results"][0]
    assert panel.cells == [("asterix", 8), ("seaquest", 8), ("seaquest", 32)]
    assert panel.columns == ["Uncorrected", "DAE", "Off-policy DAE", "Tree Backup"]
    assert [panel.cells for panel in figures["norm_nstep"][0]] == [
        [("asterix", 8), ("seaquest", 8)],
        [("seaquest", 32)],
    ]
    with_and_without = [panel.columns for panel in figures["target_comparison"][0]]
    assert with_and_without == [["Off-policy DAE", "Off-policy DAE, no target network"]]
    rows = report.aggregate_table(group, baseline)
    (row,) = [row for row in rows if row[1] == "asterix n = 8; seaquest n = 8, 32"]
    strata = [
        report.scores_of(group, "DAE", *cell) / (155.6 if cell[0] == "asterix" else 413.5) for cell in panel.cells
    ]
    assert row[3] == report.with_interval(*report.iqm_with_interval([scores - 1 for scores in strata]))
    assert row[-1] == "–" and {row[1] for row in rows[1:]} >= {"asterix, seaquest n = 8", "seaquest n = 32"}


# ------------------------------------------------------------------------------------------------------- whole reports
def test_the_tables_of_a_report(run, tmp_path, capsys):
    """Mean, standard error, number of seeds and the paper's scores, for runs of the paper's size."""
    rng, expected = np.random.default_rng(3), {}
    for script, seeds, change in (
        ("offdae_dae", 5, {}),
        ("offdae_offpolicy", 1, dict(ent_coef=0.5)),
        ("offdae_tree", 2, {}),
    ):
        evaluations = [rng.normal(100, 30, 100).tolist() for _ in range(seeds)]
        for seed, returns in enumerate(evaluations, 1):
            write_run(tmp_path / "runs", script, "asterix", 8, seed, returns, **change)
        expected[script] = [statistics.mean(returns) for returns in evaluations]
    run(report)
    text, printed = (tmp_path / "report" / "report.md").read_text(), capsys.readouterr().out
    (ours,) = table_rows(text, "asterix", "8", "mean ± s.e. (seeds)")
    errors = {name: statistics.stdev(some) / len(some) ** 0.5 for name, some in expected.items() if len(some) > 1}
    dae, off, tree = (statistics.mean(means) for means in expected.values())
    assert ours[3:] == [
        f"{dae:.1f} ± {errors['offdae_dae']:.1f} (5)",
        f"{off:.1f} (1)",
        f"{tree:.1f} ± {errors['offdae_tree']:.1f} (2)",
    ]
    (papers,) = table_rows(text, "", "", "paper's mean ± s.e.")
    assert papers[3:] == ["155.6 ± 5.4", "", "44.3 ± 1.1"]  # an Off-policy DAE with another ent_coef is not the paper's
    assert all(table_rows(printed, *row) for row in (ours, papers))
    rows = {row["method"]: row for row in scores_csv(tmp_path / "report")}
    assert float(rows["dae"]["mean"]) == pytest.approx(dae) and rows["dae"]["seeds"] == "1-5"
    assert float(rows["tree"]["stderr"]) == pytest.approx(errors["offdae_tree"]) and rows["offpolicy"]["stderr"] == ""
    assert (rows["dae"]["paper_mean"], rows["offpolicy"]["paper_mean"]) == ("155.6", "")
    low, iqm, high = (float(rows["dae"][name]) for name in ("iqm_low", "iqm", "iqm_high"))
    assert min(expected["offdae_dae"]) <= low < iqm < high <= max(expected["offdae_dae"])
    assert "- Off-policy DAE, asterix n = 8: seeds 2-5" in text and "- Tree Backup, asterix n = 8: seeds 3-5" in text


@pytest.mark.parametrize("change", [dict(total_timesteps=9_000_000), dict(hidden=512), dict(max_episode_frames=1000)])
def test_the_papers_scores_stand_only_beside_runs_of_the_papers_settings(tmp_path, change):
    write_run(tmp_path, *DAE, 1, [1.0] * 100, **change)
    (group,), _ = read(tmp_path)
    rows, lines = report.score_table(group, 1)
    assert not any("paper" in str(row[2]) for row in rows) and lines[0][-2:] == ["", ""]


BROKEN = {
    "args cut": ("args.json", lambda text: text[:100], "args.json cannot be read"),
    "args of others": ("args.json", lambda text: '{"learning_rate": 1}', "not of one of the four scripts"),
    "args a list": ("args.json", lambda text: "[]", "args.json is not what it should be"),
    "unknown game": ("args.json", lambda text: text.replace("asterix", "pong"), "lacks a known game"),
    "no args": ("args.json", None, "args.json cannot be read"),
    "eval cut": ("eval.json", lambda text: text[:60], "eval.json cannot be read"),
    "eval empty": ("eval.json", lambda text: "", "eval.json cannot be read"),
    "eval NaN": ("eval.json", lambda text: text.replace("1.0", "NaN"), "not finite numbers"),
    "length NaN": ("eval.json", lambda text: text.replace("100,", "NaN,"), "lengths that are not finite"),
    "eval bytes": ("eval.json", lambda text: "\udcff", "eval.json cannot be read"),
    "fewer episodes": (
        "eval.json",
        lambda text: text.replace('"returns": [\n    1.0,', '"returns": ['),
        "the 4 episodes",
    ),
    "no curve": ("curve.csv", None, "curve.csv is missing, empty"),
    "curve empty": ("curve.csv", lambda text: "", "curve.csv is missing, empty"),
    "curve a header": ("curve.csv", lambda text: text.splitlines()[0] + "\n", "no lines"),
    "curve other columns": (
        "curve.csv",
        lambda text: text.replace("losses/critic", "loss"),
        "not what the scripts write",
    ),
    "curve cut in a line": ("curve.csv", lambda text: text[:-30], "incomplete"),
    "curve cut": (
        "curve.csv",
        lambda text: "\n".join(text.splitlines()[:30]),
        "does not lead to the run's 600,000 frames",
    ),
    "curve twice": ("curve.csv", lambda text: text + text.split("\n", 1)[1], "does not lead to"),
    "curve NaN": ("curve.csv", lambda text: text.replace("4321.9", "nan", 3), "the run diverged"),
    "curve words": ("curve.csv", lambda text: text.replace("\n20000,", "\nfew,"), "curve.csv cannot be read"),
}


def test_what_cannot_be_used_is_named_and_the_rest_is_reported(run, tmp_path, capsys):
    for name, (file, change, _) in BROKEN.items():
        path = write_run(tmp_path / "runs", *DAE, 7, [1.0] * 4, name=name, **SMALL) / file
        if change is None:
            path.unlink()
        else:
            path.write_text(change(path.read_text()), errors="surrogateescape")
    for seed in (1, 2):
        write_run(tmp_path / "runs", *DAE, seed, [seed, seed, 4, 4], **SMALL)
    write_run(tmp_path / "runs", *DAE, 3, None, **SMALL)
    shutil.copytree(tmp_path / "runs" / "asterix__offdae_dae__n8__2", tmp_path / "results" / "the same")
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "notes" / "todo.txt").write_text("not a run")
    run(report, "--runs", "runs", "results", "runs")
    text, printed = (tmp_path / "report" / "report.md").read_text(), capsys.readouterr().out
    for name, (_, _, words) in BROKEN.items():
        (line,) = [line for line in text.splitlines() if line.startswith(f"- `runs/{name}`: ")]
        assert words in line and line in printed
    assert (
        f"2 runs counted, 1 unfinished, {len(BROKEN)} unusable, 1 copies of others." in printed and "notes" not in text
    )
    assert table_rows(printed, "asterix", "8")[0][3] == "2.75 ± 0.25 (2)"


def test_unfinished_and_missing_runs_are_named_in_few_lines(run, tmp_path, capsys):
    for seed in (1, 3, 10, 2):
        write_run(tmp_path / "runs", *OFF, seed, None if seed > 1 else [1.0] * 100)
    write_run(tmp_path / "runs", *DAE, 2, [1.0] * 100)
    run(report, "--paper-grid")
    printed = capsys.readouterr().out
    assert "- `runs/asterix__offdae_offpolicy__n8__{2,3,10}`: no eval.json yet" in printed
    lines = printed[printed.index("Missing") :].split("\n\n")[1].splitlines()
    everything = "asterix, breakout, freeway, seaquest, space_invaders n = 8, 16, 32: seeds 1-20"
    assert {f"- {name}, {everything}" for name in ("Uncorrected", "Tree Backup")} <= set(lines)
    assert (
        "- Off-policy DAE, asterix n = 8: seeds 4-9, 11-20" in lines and "- DAE, asterix n = 8: seeds 1, 3-20" in lines
    )
    assert len(lines) == 3 + 2 * 2 and not any("DAE, no target" in line for line in lines if "Off" not in line)
    run(report)
    printed = capsys.readouterr().out
    assert "- DAE, asterix n = 8: seeds 1, 3, 10" in printed and "Tree" not in printed


def test_nothing_finished_is_a_report_too(run, tmp_path, capsys):
    write_run(tmp_path / "runs", *DAE, 1, None)
    run(report)
    assert "0 runs counted, 1 unfinished" in capsys.readouterr().out
    assert "asterix__offdae_dae__n8__1" in (tmp_path / "report" / "report.md").read_text()
    assert {path.name for path in (tmp_path / "report").iterdir()} == {"report.md", "scores.csv"}


def test_a_report_is_reproducible_and_leaves_other_files_alone(run, tmp_path, capsys):
    runs, out = tmp_path / "runs", tmp_path / "report"
    write_run(runs, *DAE, 1, [1, 2, 3, 4], **SMALL)
    write_run(runs, *TREE, 1, [1, 2, 3, 4], **SMALL | dict(tau=0.5))
    out.mkdir()
    (out / "thesis.md").write_text("years of work")
    run(report)
    first = {path.name: path.read_bytes() for path in out.iterdir()}
    kinds = ["results", "norm_nstep", "train_curves", "score_dist"]
    assert set(first) == {"thesis.md", "report.md", "scores.csv"} | {
        f"group{i}_{kind}.png" for i in (1, 2) for kind in kinds
    }
    run(report)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == first
    assert "2 groups of runs differ in tau: reported apart" in (out / "report.md").read_text()

    shutil.rmtree(runs / "asterix__offdae_tree__n8__1")  # one group now: its figures have other names
    run(report)
    assert {path.name for path in out.iterdir()} == {"thesis.md", "report.md", "scores.csv"} | {
        f"{k}.png" for k in kinds
    }
    assert (out / "thesis.md").read_text() == "years of work"

    for name in ("scores.csv", "report.md", "results.png"):
        other = tmp_path / f"holds {name}"
        other.mkdir()
        (other / name).write_text("mine")
        with pytest.raises(SystemExit) as stop:
            run(report, "--out", other)
        error = capsys.readouterr().err.splitlines()[-1]
        assert stop.value.code == 2 and f"has a {name} that no earlier report wrote" in error
        assert [path.read_text() for path in other.iterdir()] == ["mine"]


def test_another_baseline(run, tmp_path):
    for seed in (1, 2):
        write_run(tmp_path / "runs", *DAE, seed, [30.0] * 4, **SMALL)
    (tmp_path / "ppo.json").write_text('{"asterix": 10.0}')
    run(report, "--baseline", "ppo.json")
    text = (tmp_path / "report" / "report.md").read_text()
    assert "Baseline: the scores in ppo.json." in text
    assert table_rows(text, "stochastic", "asterix n = 8")[0][2] == "2.00 [2.00, 2.00]"
    (group,), _ = read(tmp_path / "runs")
    assert report.aggregate_table(group, report.read_baseline(None, []))[1][2].startswith(f"{30 / 155.6 - 1:.2f} [")


REFUSED = [
    ("--runs nowhere", "--runs nowhere: no such directory"),
    ("--runs empty", "--runs empty: no runs there"),
    ("--rnus runs", "unknown argument --rnus"),
    ("--baseline none.json", "--baseline none.json: none.json cannot be read"),
    ("--baseline zero.json", "needs a positive score for asterix"),
    ("--baseline other.json", "needs a positive score for asterix"),
    ("--out file", "--out file: cannot be used"),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED, ids=[arguments for arguments, _ in REFUSED])
def test_bad_input_is_refused_in_one_line(tmp_path, run, capsys, arguments, words):
    write_run(tmp_path / "runs", *DAE, 1, [1.0] * 4, **SMALL)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "zero.json").write_text('{"asterix": 0}')
    (tmp_path / "other.json").write_text('{"breakout": 1.0}')
    with pytest.raises(SystemExit) as stop:
        run(report, *arguments.split())
    error = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2 and error.startswith("benchmark_report.py: ") and words in error
    assert not (tmp_path / "report").exists()


# ------------------------------------------------------------------------------------------------------------- figures
@pytest.fixture
def figures(monkeypatch):
    """The figures by file name, as they are when they are saved."""
    saved = {}
    monkeypatch.setattr(report.Figure, "savefig", lambda fig, path, **_: saved.update({path.name: fig}))
    return saved


def words(ax):
    return " ".join(text.get_text() for text in ax.texts).replace("\n", " ")


def curves(ax):
    return {line.get_label(): line for line in ax.lines}


def test_figures_show_the_means_and_say_why_a_panel_is_empty(run, tmp_path, figures):
    """Tree Backup lacks Breakout, and the runs of Freeway never finish an episode in training."""
    runs = tmp_path / "runs"
    write_grid(runs, ["breakout"], [8, 32], [1, 2], 60, **SMALL)
    for seed in (1, 2):
        for script in LEVELS:
            silent = curve_text(script, 600_000, 1.0, np.random.default_rng(seed), 60, ended=0.0)
            write_run(runs, script, "freeway", 8, seed, [seed] * 4, silent, **SMALL)
        for n in (8, 32):
            shutil.rmtree(runs / f"breakout__offdae_tree__n{n}__{seed}")
    run(report)
    (group,), _ = read(runs)

    deterministic, stochastic = figures["results.png"].axes
    assert words(stochastic) == "a run here never finished an episode in training" and not stochastic.lines
    drawn = curves(deterministic)
    baseline = "baseline: the paper's DAE scores at n = 8"
    assert list(drawn) == ["Uncorrected", "DAE", "Off-policy DAE", baseline]
    means = [np.mean([run.curve[report.RETURN] for run in group.cells["DAE", "breakout", n]], axis=0) for n in (8, 32)]
    np.testing.assert_allclose(drawn["DAE"].get_ydata(), np.mean(means, axis=0) / 9573.0 - 1)
    assert drawn["DAE"].get_xdata()[-1] == 600_000 and deterministic.get_title().endswith("breakout n = 8, 32")
    assert "(return − baseline) / baseline" in deterministic.get_ylabel() and deterministic.get_xlabel() == "frames"
    assert "Seeds: 2 per method, game and n; shading: 1 standard error" in figures["results.png"].get_supxlabel()
    assert baseline in [text.get_text() for text in figures["results.png"].legends[0].get_texts()]

    breakout, freeway = figures["train_curves.png"].axes[:4], figures["train_curves.png"].axes[4:]
    assert words(freeway[0]) == "a run here never finished an episode in training"
    assert words(freeway[1]) == words(freeway[3]) == "no finished run"
    assert list(curves(freeway[2])) == ["Uncorrected", "DAE", "Off-policy DAE", "Tree Backup"]
    assert list(curves(breakout[0])) == list(curves(breakout[3])) == ["Uncorrected", "DAE", "Off-policy DAE"]
    assert breakout[0].get_ylim() == breakout[1].get_ylim() != breakout[2].get_ylim()
    rewards = [run.curve[report.REWARD] for run in group.cells["DAE", "breakout", 32]]
    np.testing.assert_allclose(curves(breakout[3])["DAE"].get_ydata(), np.mean(rewards, axis=0))

    returns, losses = figures["target_comparison.png"].axes  # Freeway was not run without target network
    both = ["Off-policy DAE", "Off-policy DAE, no target network"]
    assert list(curves(returns)) == list(curves(losses)) == both and losses.get_yscale() == "log"
    critic = [run.curve[report.CRITIC] for n in (8, 32) for run in group.cells[both[1], "breakout", n]]
    np.testing.assert_allclose(curves(losses)[both[1]].get_ydata(), np.mean(critic, axis=0))

    dots = figures["score_dist.png"].axes[1]
    assert words(dots) == "no run" and dots.get_title() == "freeway"
    np.testing.assert_array_equal(curves(dots)["Tree Backup"].get_ydata(), [])  # the last drawn, n = 32
    assert {tuple(line.get_ydata()) for line in dots.lines if line.get_label() == "Tree Backup"} == {(), (1.0, 2.0)}

    colours = {}
    for figure in figures.values():
        for ax in figure.axes:
            for label, line in curves(ax).items():
                if not label.startswith(("_", "baseline")):
                    assert colours.setdefault(label, line.get_color()) == line.get_color()
    assert len(colours) == len(set(colours.values())) == 5


def test_a_game_without_a_finished_episode_is_left_out_of_normalised_curves(tmp_path):
    for script in ("offdae_dae", "offdae_tree"):
        silent = curve_text(
            script, 600_000, 1.0, np.random.default_rng(0), 60, ended=0.0 if script == "offdae_dae" else 1.0
        )
        write_run(tmp_path, script, "freeway", 8, 1, [1.0] * 4, silent, **SMALL)
        write_run(tmp_path, script, "asterix", 8, 1, [1.0] * 4, **SMALL)
    (group,), _ = read(tmp_path)
    ((panel,),) = report.figures_of(group, report.read_baseline(None, []))["results"]
    assert panel.cells == [("asterix", 8)] and panel.columns == ["DAE", "Tree Backup"]
    assert panel.title == "stochastic games\nasterix n = 8"


def test_variants_share_a_colour_and_differ_in_their_markers(run, tmp_path, figures):
    for seed, sha in ((1, "a"), (2, "b")):
        write_run(tmp_path / "runs", *DAE, seed, [1.0] * 4, sha=sha * 64, **SMALL)
    write_run(tmp_path / "runs", *TREE, 1, [1.0] * 4, **SMALL)
    run(report)
    assert "Variants (a), (b), ..." in (tmp_path / "report" / "report.md").read_text()
    for name in ("results.png", "score_dist.png"):
        drawn = curves(figures[name].axes[0])
        first, second, tree = (drawn[label] for label in ("DAE (a)", "DAE (b)", "Tree Backup"))
        assert first.get_color() == second.get_color() != tree.get_color()
        assert first.get_marker() != second.get_marker()


def test_methods_without_a_common_cell_are_not_compared(run, tmp_path, figures):
    write_run(tmp_path / "runs", "offdae_dae", "asterix", 8, 1, [1.0] * 4, **SMALL)
    write_run(tmp_path / "runs", "offdae_tree", "asterix", 32, 1, [1.0] * 4, **SMALL)
    run(report)
    assert words(figures["results.png"].axes[0]) == "no game and n that every method has"
    assert "none for 1" in figures["train_curves.png"].get_supxlabel()


# ------------------------------------------------------------------------------------------------------- real and many
def test_a_real_run_is_read(run, tmp_path, capsys):
    arguments = "--small --total-timesteps 3000 --num-envs 16 --learning-starts 1000 --batch-size 64 --eval-episodes 3"
    run(offdae_dae, *arguments.split(), "--max-episode-frames", 300)
    run(report)
    (path,) = (tmp_path / "runs").iterdir()
    (row,) = scores_csv(tmp_path / "report")
    assert float(row["mean"]) == pytest.approx(json.loads((path / "eval.json").read_text())["mean"])
    text = (tmp_path / "report" / "report.md").read_text()
    assert (
        "1 runs counted, 0 unfinished, 0 unusable, 0 copies of others." in text
        and f"`python offdae_dae.py {arguments}" in text
    )
    assert "total_timesteps 3000 (not the paper's settings)" in text
    for picture in (tmp_path / "report").glob("*.png"):
        assert picture.read_bytes()[:4] == b"\x89PNG" and f"({picture.name})" in text


def forget_cached_pages(directory):
    """Takes the files out of the page cache, as far as the file system has one to take them out of."""
    os.sync()
    for path in directory.glob("*/*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


@pytest.mark.slow
def test_1500_runs_in_under_a_minute(tmp_path):
    """The paper's grid with the ablation, files of real size, cold cache."""
    runs = tmp_path / "runs"
    write_grid(runs, SCALE, (8, 16, 32), range(1, 21), 500)
    size = sum(path.stat().st_size for path in runs.glob("*/*"))
    forget_cached_pages(runs)
    start, before = time.time(), os.times()
    command = [sys.executable, str(ROOT / "benchmark_report.py"), "--paper-grid"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    seconds, cpu = time.time() - start, os.times().children_user - before.children_user
    shutil.rmtree(runs)
    assert result.returncode == 0, result.stderr
    assert (
        "1500 runs counted, 0 unfinished, 0 unusable, 0 copies of others." in result.stdout
        and "No run is missing." in result.stdout
    )
    assert "1500/1500" in result.stderr and size > 150e6
    rows = scores_csv(tmp_path / "report")
    assert len(rows) == 75 and all(row["seeds"] == "1-20" for row in rows)
    assert sum(row["paper_mean"] != "" for row in rows) == 60
    print(f"{size / 1e6:.0f} MB: {seconds:.1f} s, {cpu:.1f} s of CPU, load {os.getloadavg()[0]:.1f}")
    assert seconds < 60


def test_the_committed_study_is_what_its_runs_say(tmp_path):
    """results/small: the small files of each run and nothing else, and a report that is made of exactly these."""
    study = ROOT / "results" / "small"
    runs = [path for path in study.iterdir() if path.is_dir() and path.name != "report"]
    assert runs and all({x.name for x in path.iterdir()} == {"args.json", "eval.json", "curve.csv"} for path in runs)
    arguments = "benchmark_report.py", "--runs", "results/small", "--baseline", "results/small/baseline.json", "--out"
    subprocess.run([sys.executable, *arguments, tmp_path / "again"], cwd=ROOT, check=True, capture_output=True)
    for name in ("scores.csv", "report.md"):
        assert (tmp_path / "again" / name).read_text() == (study / "report" / name).read_text(), f"make {name} anew"
