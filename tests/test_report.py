"""benchmark_report.py on made-up runs whose numbers are known, on broken ones, and on real ones."""

import importlib
import json
import os
import re
import runpy
import shutil
import statistics
import subprocess
import sys
from itertools import product

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT

import benchmark_report as report
import offdae_dae

LEVELS = dict(uncorrected=0.1, dae=1.0, offpolicy=1.4, tree=0.6, offpolicy_no_target=1.2)
SCALE = dict(asterix=150.0, breakout=9000.0, freeway=55.0, seaquest=400.0, space_invaders=15000.0)
SMALL = dict(total_timesteps=600_000, batch_size=256, channels=16, hidden=128, eval_episodes=4)
TAGS = [report.RETURN, report.REWARD, report.CRITIC, report.KL]


def curve_text(method, returns, rng, total=600_000, ended=1.0, **constant):
    """A curve.csv like the scripts', with these returns at equal distances; `ended` is how often an episode ends."""
    logged, points = importlib.import_module("offdae_" + method.split("_")[0]).LOGGED, len(returns)
    names, episodes = [f"losses/{name}" for name in logged], rng.integers(1, 20, points) * (rng.random(points) < ended)
    curve = pd.DataFrame({"frames": np.round(total * np.arange(1, points + 1) / points).astype(int)})
    curve[report.RETURN], curve["charts/episodes"] = np.where(episodes, returns, np.nan), episodes
    curve[report.REWARD], curve["charts/SPS"] = 0.01 + np.asarray(returns) / 1000, 4321.9
    curve[names] = np.abs(rng.standard_normal((points, len(names)))) + 1e-3
    curve.loc[: points // 20, names] = np.nan  # before the first update
    return curve.assign(**constant).to_csv(index=False)


def write_run(runs, method, seed, returns, game="asterix", n=8, curve=None, name=None, **changes):
    """A run directory; without returns an unfinished one. A number stands for four episodes with this return."""
    script, sha256, minatar = "offdae_" + method.split("_")[0], changes.pop("sha256", "a"), changes.pop("minatar", "1")
    args = vars(importlib.import_module(script).Args(env_id=game, n=n, seed=seed)) | SMALL | changes
    args |= dict(target_network=False) if "_" in method else {}
    described = dict(script=script, args=args, sha256=sha256, versions=dict(torch="2", minatar=minatar))
    directory = runs / (name or f"{game}__{method}__n{n}__{seed}")
    directory.mkdir(parents=True)
    (directory / "args.json").write_text(json.dumps(described, indent=2))
    curve = curve or curve_text(method, np.linspace(0, 10, 60), np.random.default_rng(seed), args["total_timesteps"])
    (directory / "curve.csv").write_text(curve)
    if returns is not None:
        returns = list(map(float, returns)) if isinstance(returns, list) else [float(returns)] * 4
        (directory / "eval.json").write_text(json.dumps(dict(returns=returns, lengths=[100] * len(returns)), indent=2))
    return directory


def write_grid(runs, games, ns, seeds, points=60, **changes):
    """All methods and the ablation. A few different curves per cell, for writing 1500 of them takes a while."""
    rng, settings = np.random.default_rng(0), SMALL | changes
    for (method, level), game, n in product(LEVELS.items(), games, ns):
        final, ended = SCALE[game] * level * (1 + 0.02 * n), 0.3 if game == "breakout" else 1.0
        finals = [np.linspace(0, final * scale, points) * rng.normal(1, 0.1, points) for scale in (0.8, 1.0, 1.3)]
        curves = [curve_text(method, some, rng, settings["total_timesteps"], ended) for some in finals]
        for seed in seeds:
            scores = rng.normal(final * rng.normal(1, 0.1), 0.2 * final, settings["eval_episodes"]).tolist()
            write_run(runs, method, seed, scores, game, n, curves[seed % 3], **changes)


@pytest.fixture
def make(run, tmp_path, monkeypatch, capsys):
    """Make a report of tmp_path/runs: scores.csv, what is printed, and the panels of each figure, without drawing."""

    def make(*arguments, out="report"):
        panels = {}
        monkeypatch.setattr(report, "draw", lambda path, some, row: panels.update({path.stem: some}))
        run(report, *arguments)
        return pd.read_csv(tmp_path / out / "scores.csv"), capsys.readouterr().out, panels

    return make


@pytest.mark.parametrize("sizes", [[8], [3], [1], [2, 3], [4, 4, 4], [1, 5, 2]])
def test_interquartile_mean_against_a_list_that_repeats_values(sizes):
    """With each value repeated so that strata weigh the same and quarters are whole, it is the mean of the middle."""
    rng = np.random.default_rng(len(sizes))
    strata = [rng.normal(10 * i, 3, size) for i, size in enumerate(sizes)]
    repeated = sorted(value for scores in strata for value in scores for _ in range(4 * 60 // len(scores)))
    quarter = len(repeated) // 4
    assert report.iqm_with_interval(strata)[0] == pytest.approx(statistics.mean(repeated[quarter:-quarter]), rel=1e-12)


def test_the_interval_is_that_of_a_bootstrap_within_each_stratum():
    """Against draws made one at a time. Drawn across strata, or of 90%, the interval would be another."""
    rng = np.random.default_rng(5)
    strata, draws = [rng.normal(0, 1, 20), rng.normal(5, 1, 20)], []
    for _ in range(4000):
        values = sorted([*rng.choice(strata[0], 20), *rng.choice(strata[1], 20)])
        draws.append(sum(values[10:30]) / 20)
    cuts, (_, low, high) = statistics.quantiles(draws, n=40), report.iqm_with_interval(strata)
    assert (low, high) == pytest.approx((cuts[0], cuts[-1]), abs=0.15 * statistics.stdev(draws))
    assert report.iqm_with_interval([[1.0, 2.0, 9.0]])[1:] == (1.0, 9.0)  # as the report says of three seeds
    assert np.isnan(report.iqm_with_interval([[1.0], [2.0, 3.0]])[1:]).all()


def test_a_curve_in_equal_parts_against_plain_loops(tmp_path):
    rng = np.random.default_rng(1)
    text = curve_text("offpolicy", rng.normal(50, 5, 100), rng, 1000, ended=0.3).replace("4321.9", "20.0", 50)
    (tmp_path / "curve.csv").write_text(text)
    result = report.read_curves(tmp_path / "curve.csv", dict(total_timesteps=1000, finished=True))
    (header, *lines), parts = (line.split(",") for line in text.splitlines()), [dict.fromkeys(TAGS, np.nan)]
    rows = [dict(zip(header, line, strict=True)) for line in lines]
    for pair in zip(rows[::2], rows[1::2], strict=True):
        parts.append(dict(parts[-1]))
        for tag in TAGS:
            known = [row for row in pair if row[tag]]
            weights = [int(row["charts/episodes"]) if tag == report.RETURN else 1 for row in known]
            if known:
                parts[-1][tag] = np.average([float(row[tag]) for row in known], weights=weights)
    np.testing.assert_allclose(result["curves"][TAGS], [list(part.values()) for part in parts[1:]], rtol=1e-12)
    assert np.isnan(parts[1][report.KL]) and result["minutes"] == pytest.approx((500 / 20 + 500 / 4321.9) / 60)
    assert result[report.KL] == pytest.approx(np.mean([part[report.KL] for part in parts[-5:]]))


def test_mean_curve_weighs_cells_the_same_and_errors_are_over_seeds():
    curves = np.random.default_rng(0).normal(0, 1, (8, report.BINS))
    runs = pd.DataFrame([("asterix", 8)] * 5 + [("seaquest", 8)] * 3, columns=report.CELL)
    mean, error = report.mean_curve(runs.assign(curves=[pd.DataFrame(dict(tag=some)) for some in curves]), "tag")
    np.testing.assert_allclose(mean, (curves[:5].mean(0) + curves[5:].mean(0)) / 2)
    np.testing.assert_allclose(error, np.sqrt(curves[:5].var(0, ddof=1) / 5 + curves[5:].var(0, ddof=1) / 3) / 2)


def test_the_numbers_of_a_report(make, tmp_path):
    """Mean, standard error, seeds, the paper's scores, frames until the median final return, what is missing."""
    rng, expected, rise = np.random.default_rng(3), [], np.arange(1, 51) / 50
    for method, seeds, slope in (("dae", 5, 40.0), ("offpolicy", 1, 20.0), ("tree", 2, 10.0)):
        expected.append([])
        for seed in range(1, seeds + 1):
            returns, final = rng.normal(100, 30, 4).tolist(), slope if seed < 5 else 1.0  # the fifth never comes to x
            write_run(tmp_path / "runs", method, seed, returns, curve=curve_text(method, final * rise, rng))
            expected[-1].append(statistics.mean(returns))
    scores, printed, _ = make()
    assert scores["mean"].tolist() == pytest.approx(list(map(statistics.mean, expected)))
    errors = [statistics.stdev(expected[0]) / 5**0.5, np.nan, statistics.stdev(expected[2]) / 2**0.5]
    assert scores.stderr.tolist() == pytest.approx(errors, nan_ok=True) and scores.seeds.tolist() == [5, 1, 2]
    assert scores.paper_mean.tolist() == [155.6, 161.5, 44.3] and scores.paper_stderr.tolist() == [5.4, 5.9, 1.1]
    assert scores.x.tolist() == [20] * 3 and scores.frames_until_x.tolist() == [300_000, 600_000, np.inf]
    assert scores[["frames_until_x/4", "frames_until_x/2"]].values.tolist() == [[84e3, 156e3], [156e3, 3e5], [3e5, 6e5]]
    assert min(expected[0]) <= scores.iqm_low[0] < scores.iqm[0] < scores.iqm_high[0] <= max(expected[0])
    missing = "Missing:\n\n- offpolicy, asterix n = 8: seeds 2, 3, 4, 5\n- tree, asterix n = 8: seeds 3, 4, 5\n\n"
    runs, text = pd.read_csv(tmp_path / "report" / "runs.csv"), (tmp_path / "report" / "report.md").read_text()
    assert runs.score.tolist() == pytest.approx(sum(expected, [])) and missing in printed and missing in text
    assert np.arange(60) @ report.PAPER.to_numpy() == pytest.approx([9844057.7, 366016.4])  # the paper's whole table


@pytest.mark.parametrize(("name", "value"), [("total_timesteps", 5000), ("new", 1), ("minatar", "2"), ("sha256", "b")])
def test_runs_of_different_settings_are_never_averaged(make, tmp_path, name, value):
    for seed, change in ((1, {}), (2, {name: value}), (3, {})):
        write_run(tmp_path / "runs", "dae", seed, seed, **change)
    write_run(tmp_path / "runs", "offpolicy", 1, 7)
    scores, printed, _ = make()
    assert scores["mean"].tolist() == [2, 7] and scores.seeds.tolist() == [2, 1]
    (left_out,) = re.findall(r"left out.*?```\n(.*?)\n```", printed, re.S)
    assert dict(zip(*map(str.split, left_out.splitlines()), strict=True))[name] == str(value)
    scores, printed, _ = make("--only", f"{name}={value}", "method=dae")
    assert scores["mean"].tolist() == [2] and "1 runs counted" in printed and "left out" not in printed
    scores, printed, _ = make("--mix-versions")
    assert scores.seeds.tolist() == [3 if name == "sha256" else 2, 1] and "versions of a script are averaged" in printed


def test_a_methods_own_settings_do_not_part_it_from_the_others(make, tmp_path):
    """What changes no result parts nothing, and a copy counts once."""
    for seed, coefficient in ((1, 1e-4), (2, 2e-5), (3, 2e-5)):
        write_run(tmp_path / "runs", "offpolicy", seed, seed, ent_coef=coefficient)
    write_run(tmp_path / "runs", "dae", 1, 1)
    same = write_run(tmp_path / "runs", "dae", 2, 2, cuda=False, run_name="x", track=True, small=True, compile=True)
    shutil.copytree(same, tmp_path / "runs" / "the same")
    scores, printed, _ = make()
    assert scores["mean"].tolist() == [1.5, 2.5] and scores.seeds.tolist() == [2, 2]
    assert "- `runs/the same`: another run has the same settings and seed" in printed
    assert make("--only", "ent_coef=0.0001")[0]["mean"].tolist() == [1.5, 1]  # an argument that DAE does not have


def test_methods_are_compared_over_what_all_of_them_have(make, tmp_path):
    """Tree Backup lacks n = 32 on Asterix; the ablation, which lacks all of Seaquest, takes nothing from the others."""
    write_grid(tmp_path / "runs", ["asterix", "seaquest"], [8, 32], [1, 2])
    for path in (*tmp_path.glob("runs/asterix__tree__n32*"), *tmp_path.glob("runs/seaquest__*no_target*")):
        shutil.rmtree(path)
    scores, _, drawn = make()
    ((title, runs, tag),) = drawn["results"]
    assert title == "stochastic games:\nasterix n = 8; seaquest n = 8, 32" and tag == report.NORMAL
    assert sorted(runs.method.unique()) == ["dae", "offpolicy", "tree", "uncorrected"]
    assert [title for title, _, _ in drawn["norm_nstep"]][1] == "n = 32:\nseaquest n = 32"
    baseline = scores[(scores.method == "dae") & (scores.n == 8)].set_index("env_id")["mean"]
    strata = [some.score / baseline[game] - 1 for (game, _), some in runs[runs.method == "tree"].groupby(report.CELL)]
    lines = (tmp_path / "report" / "report.md").read_text().splitlines()
    (row,) = [line.split() for line in lines if line.strip().startswith("stochastic") and "tree" in line]
    assert [float(number) for number in row[-3:]] == pytest.approx(report.iqm_with_interval(strata), rel=0.01)
    assert [set(runs.method) for _, runs, _ in drawn["target_comparison"]] == [{"offpolicy", "offpolicy_no_target"}] * 2
    (tmp_path / "ppo.json").write_text('{"asterix": 10.0}')
    runs = make("--baseline", "ppo.json")[2]["results"][0][1]
    assert set(runs.env_id) == {"asterix"} and runs.normal.tolist() == (runs.score / 10 - 1).tolist()
    assert "results" not in make("--only", "method=tree")[2]  # without a baseline nothing is normalised


BROKEN = {
    "args cut": ("args.json", lambda text: text[:100]),
    "unknown game": ("args.json", lambda text: text.replace("asterix", "pong")),
    "eval NaN": ("eval.json", lambda text: text.replace("1.0", "NaN")),
    "fewer episodes": ("eval.json", lambda text: text.replace('"returns": [\n    1.0,', '"returns": [')),
    "other columns": ("curve.csv", lambda text: text.replace("losses/critic", "loss")),
    "cut in a line": ("curve.csv", lambda text: text[:-30]),
    "curve cut": ("curve.csv", lambda text: "\n".join(text.splitlines()[:60]) + "\n"),
    "curve twice": ("curve.csv", lambda text: text + text.split("\n", 1)[1]),
    "curve NaN": ("curve.csv", lambda text: text.replace("4321.9", "nan", 3)),
}


def test_what_cannot_be_used_is_named_and_the_rest_is_reported(make, tmp_path):
    for name, (file, change) in BROKEN.items():
        path = write_run(tmp_path / "runs", "dae", 7, 1.0, name=name) / file
        path.write_text(change(path.read_text()))
    for seed, returns in ((1, [1, 1, 4, 4]), (2, [2, 2, 4, 4]), (3, None)):
        write_run(tmp_path / "runs", "dae", seed, returns)
    scores, printed, _ = make("--runs", "runs", "runs")
    for name, (file, _) in BROKEN.items():
        assert len(re.findall(f"^- `runs/{name}`: {file}: .+", printed, re.M)) == 1
    assert f"2 runs counted, 1 unfinished, {len(BROKEN)} unusable" in printed and scores["mean"].tolist() == [2.75]


def test_unfinished_missing_and_collapsed_runs_are_named(make, tmp_path):
    (write_run(tmp_path / "runs", "dae", 2, None) / "curve.csv").unlink()  # has just begun
    for game, seed, change in (("asterix", 1, {}), ("asterix", 2, {report.KL: 1e-4}), ("breakout", 3, {report.KL: 0})):
        curve = curve_text("offpolicy", np.linspace(0, 1, 60), np.random.default_rng(0), **change)
        write_run(tmp_path / "runs", "offpolicy", seed, 1.0, game, curve=curve)
    printed = make("--paper-grid")[1]
    assert re.search(r"Posterior collapse.*:\n\n- offpolicy, asterix n = 8: seeds 2\n\nUnfinished", printed)
    assert "Unfinished:\n\n- dae, asterix n = 8: seeds 2\n\nMissing" in printed and "dae_no" not in printed
    seeds = ", ".join(map(str, range(1, 21)))
    assert printed.count(f", asterix, breakout, freeway, seaquest, space_invaders n = 8, 16, 32: seeds {seeds}\n") == 3
    assert f"- dae, asterix n = 8: seeds {seeds.replace('2, ', '', 1)}\n" in printed
    printed = make("--paper-grid", "--only", "n=8", "env_id=asterix", "method=offpolicy")[1]
    assert f"Missing:\n\n- offpolicy, asterix n = 8: seeds {seeds[6:]}\n\n```" in printed


REFUSED = {"--runs nowhere": "no run that can be used", "--out runs": "--out runs: holds files but no earlier report"}
REFUSED |= {"--baseline none.json": "none.json", "--only n=16": "no run has all of this; the runs have {'n': ['8']}"}


@pytest.mark.parametrize("arguments", REFUSED)
def test_bad_input_is_refused_in_one_line(tmp_path, monkeypatch, capsys, arguments):
    write_run(tmp_path / "runs", "dae", 1, 1.0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmark_report.py", *arguments.split()])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(ROOT / "benchmark_report.py"), run_name="__main__")
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("benchmark_report.py: ") and REFUSED[arguments] in error
    assert len(list(tmp_path.iterdir())) == len(list((tmp_path / "runs").iterdir())) == 1  # nothing was written


def test_figures_show_the_means(run, tmp_path, monkeypatch):
    figures = {}
    monkeypatch.setattr(report.Figure, "savefig", lambda fig, path, **_: figures.update({path.stem: fig}))
    write_grid(tmp_path / "runs", ["breakout", "freeway"], [8, 32], [1, 2])
    run(report)
    runs, _ = report.read_runs([tmp_path / "runs"])
    dae = runs[(runs.method == "dae") & (runs.env_id == "freeway")]
    means = [np.mean([curves[report.RETURN] for curves in dae[dae.n == n].curves], axis=0) for n in (8, 32)]
    normalised, plain = figures["results"].axes[1].lines[0], figures["train_curves"].axes[3].lines[0]
    np.testing.assert_allclose(normalised.get_ydata(), np.mean(means, axis=0) / dae.score[dae.n == 8].mean() - 1)
    np.testing.assert_allclose(plain.get_ydata(), means[1])
    critic, dots = figures["target_comparison"].axes[2], figures["score_dist"].axes[1].lines[0]
    assert plain.get_xdata()[-1] == 0.6 and sorted(dots.get_ydata()) == sorted(dae.score)
    assert critic.get_yscale() == "log" and critic.get_title() == "breakout n = 8, 32" and len(critic.lines) == 2


def test_a_real_run_finished_or_not(run, make, tmp_path):
    arguments = "--small --total-timesteps 3000 --num-envs 16 --learning-starts 1000 --batch-size 64 --eval-episodes 3"
    run(offdae_dae, *arguments.split(), "--max-episode-frames", 300, "--run-name", "x")
    run(report)
    evaluation, curve = (tmp_path / "runs" / "x" / name for name in ("eval.json", "curve.csv"))
    score = pd.read_csv(tmp_path / "report" / "scores.csv")["mean"].tolist()
    assert score == pytest.approx([json.loads(evaluation.read_text())["mean"]])
    assert (tmp_path / "report" / "run.png").read_bytes()[:4] == b"\x89PNG"
    evaluation.unlink()
    curve.write_text("".join(curve.read_text().splitlines(True)[:95]))  # of 188 points
    drawn = make("--runs", "runs/x", out="report/x")[2]
    (curves,), tags = drawn["run"][0][1].curves, [tag for _, _, tag in drawn["run"]]
    assert {*TAGS[:3], "losses/advantage_std"} <= set(tags) and list(drawn) == ["run"]
    assert np.isfinite(curves[report.REWARD].iloc[:24]).all() and np.isnan(curves[report.REWARD].iloc[26:]).all()


@pytest.mark.slow
def test_1500_runs_in_under_a_minute(tmp_path):
    """The paper's grid with the ablation, files of real size, cold cache."""
    runs, command = tmp_path / "runs", [sys.executable, ROOT / "benchmark_report.py", "--paper-grid"]
    write_grid(runs, SCALE, (8, 16, 32), range(1, 21), 500, total_timesteps=10_000_000, eval_episodes=100)
    os.sync()
    for path in runs.glob("*/*"):
        with open(path) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = os.times()
    printed = subprocess.run(command, cwd=tmp_path, check=True, stdout=subprocess.PIPE, text=True).stdout
    seconds, cpu = os.times().elapsed - before.elapsed, os.times().children_user - before.children_user
    shutil.rmtree(runs)
    scores = pd.read_csv(tmp_path / "report" / "scores.csv")
    assert len(scores) == 75 and (scores.seeds == 20).all() and "Missing" not in printed
    print(f"{seconds:.1f} s, {cpu:.1f} s of CPU, load {os.getloadavg()[0]:.1f}")
    assert (seconds if os.getloadavg()[0] < os.cpu_count() else cpu) < 60  # others may keep the machine busy


def test_the_committed_study_is_what_its_runs_say(tmp_path):
    """Small files and nothing else, the report that the runs of results/study make, and the table that shows it."""
    results, files = ROOT / "results", {"args.json", "eval.json", "curve.csv"}
    for folder in (results / "study", results / "long", results / "peers"):
        runs = [path for path in folder.iterdir() if path.is_dir() and path.name != "report"]
        assert runs and all({x.name for x in path.iterdir()} == files for path in runs)
    study, readme = results / "study", (results / "README.md").read_text()
    (command,) = re.findall(r"python (benchmark_report.py --runs results/study --out results/study/report.*)", readme)
    command = command.replace("--out results/study/report", f"--out {tmp_path / 'again'}")
    subprocess.run([sys.executable, *command.split()], cwd=ROOT, check=True, capture_output=True)
    for name in ("scores.csv", "runs.csv", "report.md"):
        assert (tmp_path / "again" / name).read_text() == (study / "report" / name).read_text(), f"make {name} anew"
    for (game, n), scores in pd.read_csv(study / "report" / "scores.csv").groupby(["env_id", "n"]):
        (row,) = re.findall(rf"^\| {game.replace('_', ' ').title()}, n = {n} \|(.*)\|.*\|$", readme, re.M)
        means = dict(zip(scores.method, scores["mean"].map("{:.1f}".format), strict=True))
        shown = [cell.strip().split(" ")[0] for cell in row.split("|")]
        assert shown == [means.get(method, "") for method in ("uncorrected", "dae", "offpolicy", "tree")]
