"""benchmark.sh: which runs there are, how they are started, stopped, continued and tried again, here and with Slurm."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, SCRIPTS

TINY = "--small --num-envs 16 --batch-size 64 --learning-starts 1000 --eval-episodes 5 --max-episode-frames 300"
TINY += " --buffer-size 4000 --checkpoint-interval 0.2 --total-timesteps "
DAE = "asterix__offdae_dae__n8__"
ONE = dict(METHODS="dae", ENVS="asterix", NS="8", SEEDS="1")
VARIABLES = "METHODS ENVS NS SEEDS ARGS RUNS REUSE SETUP WORKERS RUNS_PER_GPU GPUS CPUS MEM TIME SIGNAL_SECONDS"
VARIABLES = [*VARIABLES.split(), "MAX_RUNNING", "PARTITION", "ACCOUNT", "QOS", "CONSTRAINT"]
NO_TORCH = dict(python="exit 1")


def wait_until(condition, seconds, what):
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline, f"waited {seconds} s in vain until {what}"
        time.sleep(0.1)


@pytest.fixture
def benchmark(tmp_path):
    """Run benchmark.sh with these flags, variables and stand-ins for programs; the directories' names have spaces."""
    root, processes = tmp_path / "a check out", []
    (tmp_path / "bin").mkdir()
    root.mkdir()
    for name in ["benchmark.sh", *(f"{script}.py" for script in SCRIPTS)]:
        shutil.copy(ROOT / name, root)

    def start(*flags, programs=(), **variables):
        for name, text in dict(programs).items():
            (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
            (tmp_path / "bin" / name).chmod(0o755)
        path = os.pathsep.join([str(tmp_path / "bin"), os.path.dirname(sys.executable), os.environ["PATH"]])
        environment = dict(
            PATH=path, OMP_NUM_THREADS="1", TMP=str(tmp_path), SLURM_CONF=os.environ.get("SLURM_CONF", "")
        )
        options = dict(
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment | variables
        )
        # a background job of a shell ignores SIGINT, and so would all that it starts
        options |= dict(start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        processes.append(subprocess.Popen(["bash", str(root / "benchmark.sh"), *flags], **options))
        return processes[-1]

    def run(*flags, **variables):
        process = start(*flags, **variables)
        return *process.communicate(timeout=300), process.returncode

    run.start, run.root, run.runs = start, root, root / "runs"
    run.log = lambda seed: (run.runs / ".benchmark" / "logs" / f"{DAE}{seed}.log").read_text()
    yield run
    for process in processes:  # those of a test that failed
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=60)


def contents(directory):
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*")}


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_shellcheck_finds_nothing():
    result = subprocess.run(["shellcheck", ROOT / "benchmark.sh"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_frames_are_those_of_the_scripts(script):
    """Finished runs of another length do not count, so benchmark.sh has to know the defaults."""
    frames = re.findall(r"small=\w+ frames=(\d+)", (ROOT / "benchmark.sh").read_text())
    assert [int(number) for number in frames] == [script.SMALL["total_timesteps"], script.Args().total_timesteps]


def test_help_and_what_is_refused(benchmark):
    before = contents(benchmark.root)
    out, _, status = benchmark("--help")
    assert status == 0 and not [name for name in VARIABLES if not re.search(rf"\b{name}\b", out)]
    assert "--decode-latents 4" in out and out.splitlines()[-1].startswith("Exit status")
    wrong = dict(METHODS="dae sarsa", ENVS="pong", NS="8 zero", SEEDS="1 -2", WORKERS="0", RUNS_PER_GPU="many")
    for name, value in [*wrong.items(), ("NS", "0"), ("ARGS", "--seed 3"), ("ARGS", "--small --run-name=mine")]:
        _, err, status = benchmark(**ONE | dict(WORKERS="1") | {name: value})
        assert status == 2 and name in err and len(err.splitlines()) == 1, (name, value)
    _, err, status = benchmark("--smal")
    assert status == 2 and "--smal: unknown" in err and contents(benchmark.root) == before


def test_the_papers_grid_and_the_small_one(benchmark):
    """1200 runs and 300 of the ablation, without torch and without a GPU, and nothing is written."""
    before = contents(benchmark.root)
    out, err, status = benchmark("--dry-run", WORKERS="4", programs=NO_TORCH)
    first, *commands = [shlex.split(line) for line in out.splitlines()]
    assert status == 0 and first == ["cd", str(benchmark.root)] and len(commands) == 1500
    assert len(set(map(tuple, commands))) == 1500
    for command in commands:
        env_id, exp_name, n, seed = command[command.index("--run-name") + 1].split("__")
        wanted = f"python {exp_name.removesuffix('_no_target')}.py --env-id {env_id} --n {n[1:]} --seed {seed}"
        wanted += f" --run-name {env_id}__{exp_name}__{n}__{seed} --resume"
        assert command == (wanted + f" --no-target-network --exp-name {exp_name}" * ("_no_" in exp_name)).split()
    for words in ("1500 runs: 0 finished, 0 queued, 1500 to do", "about 10800 hours of a GPU", "about 69 GB", "no GPU"):
        assert words in err
    out, err, _ = benchmark("--dry-run", "--small", WORKERS="2", programs=NO_TORCH)
    assert len(out.splitlines()) == 1 + 5 * 2 * 2 * 3 and out.count(" --small") == 60 and "WARNING" not in err
    grid = dict(METHODS="offpolicy dae_no_target", ENVS="freeway", NS="16", SEEDS="4 4 5", WORKERS="1", RUNS="a b")
    out, _, _ = benchmark("--dry-run", "--small", **grid, ARGS="--decode-latents 4")
    commands = [shlex.split(line.split("--run-name ")[1]) for line in out.splitlines()[1:]]
    names = [f"freeway__offdae_{method}__n16__{seed}" for method in ("offpolicy", "dae_no_target") for seed in (4, 5)]
    assert [command[0] for command in commands] == names and "--no-target-network" in commands[2]
    assert commands[0][3].endswith("/a b") and commands[0][4:] == ["--small", "--decode-latents", "4"]
    assert contents(benchmark.root) == before


RUN = """[ "$1" = -c ] && exit
while [ "$1" != --run-name ]; do shift; done
mkdir -p "runs/$2" && echo "$CUDA_VISIBLE_DEVICES $OMP_NUM_THREADS" >>"runs/$2/seen"
trap 'echo told >>"runs/$2/seen"; exit 75' TERM
for tenth in $(seq "$TENTHS"); do sleep 0.1; done
echo '"small": false, "total_timesteps": 10000000,' | tee "runs/$2/args.json" >"runs/$2/eval.json"
"""


def test_spread_over_gpus_stopped_once_and_continued(benchmark):
    """Two GPUs that are only said to be there, two runs on each; the terminal signals every process of its group."""
    grid = ONE | dict(SEEDS="1 2 3 4 5", GPUS="2", RUNS_PER_GPU="2", WORKERS="4")
    grid |= dict(programs={"python": RUN, "nvidia-smi": "seq -f 'GPU %g: it (UUID)' 0 2", "nproc": "echo 9"})
    process = benchmark.start(**grid, TENTHS="900")
    wait_until(lambda: len(list(benchmark.runs.glob("*/seen"))) == 4, 60, "four runs are under way")
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75 and out.count(": interrupted;") == 4 and "continues" in err, out + err
    seen = sorted((benchmark.runs / f"{DAE}{seed}" / "seen").read_text() for seed in (1, 2, 3, 4))
    assert seen == ["0 2\ntold\n"] * 2 + ["1 2\ntold\n"] * 2 and not (benchmark.runs / f"{DAE}5").exists()
    out, err, status = benchmark(**grid, TENTHS="1", CUDA_VISIBLE_DEVICES="GPU-a,7,9")
    assert status == 0 and "4 running, 0 failed" in out and "5 of 5 finished, 0 running, 0 failed" in out, out + err
    assert (benchmark.runs / f"{DAE}5" / "seen").read_text().split()[0] in ("GPU-a", "7")


@pytest.mark.slow
def test_interrupted_continued_failed_finished(benchmark):
    """Ctrl-C while one of two runs is under way; then both at once, where one fails; then nothing is left to do."""
    runs, grid = benchmark.runs, ONE | dict(SEEDS="1 2", ARGS=TINY + "8000", SETUP="export SET_UP=$NOT_SET; cd /")
    (runs / f"{DAE}2").mkdir(parents=True)
    (runs / f"{DAE}2" / "checkpoint.pt").write_text("not what a checkpoint looks like")
    process = benchmark.start(**grid, WORKERS="1")
    wait_until((runs / f"{DAE}1" / "checkpoint.pt").exists, 120, "there is a checkpoint")
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75 and "the same command continues" in err and len(err.splitlines()) == 1, err
    assert f"{DAE}1: running; 0 of 2 finished, 1 running, 0 failed, about 0:0" in out and f"{DAE}2" not in out
    out, err, status = benchmark(**grid, WORKERS="2")
    assert status == 1 and not err and "2 running, 0 failed" in out, out + err
    assert "1 of 2 finished, 0 running, 1 failed" in out and "missing, damaged" in out and "== failed (status 2" in out
    assert "continuing from frame" in benchmark.log(1) and (runs / f"{DAE}1" / "eval.json").exists()
    before, nothing = contents(benchmark.root), grid | dict(WORKERS="2", programs=NO_TORCH)
    _, err, status = benchmark("--dry-run", **nothing)
    assert status == 0 and "failed before" in err and "missing, damaged" in err and "1 to do" in err
    for reuse, count in [({}, 0), (dict(REUSE=str(runs)), 1)]:
        out, err, _ = benchmark("--dry-run", **nothing, RUNS="other", **reuse)
        assert f"2 runs: {count} finished, 0 queued, {2 - count} to do" in err and out.count(f"{DAE}1 ") == 1 - count
    _, err, status = benchmark(**nothing | dict(ARGS=TINY + "13000"))
    assert status == 2 and "choose another RUNS or REUSE" in err and contents(benchmark.root) == before


SBATCH = """echo x >>"$TMP/calls"; printf '%s\\n' "$@" >"$TMP/options$(wc -l <"$TMP/calls")"; echo 7"""
CLUSTER = dict(sbatch=SBATCH, squeue='[ ! -e "$TMP/queue" ] || cat "$TMP/queue"', scontrol="echo 'MaxArraySize = 4'")


def test_arrays_of_tasks_and_none_submitted_twice(benchmark, tmp_path):
    """At most MaxArraySize tasks in an array, one array after another where the number of tasks is limited."""
    grid = ONE | dict(SEEDS="1 2 3 4 5 6 7 8 9", programs=CLUSTER)
    options = dict(TIME="1-0", MEM="9G", PARTITION="p", ACCOUNT="a", QOS="q", CONSTRAINT="c|d", SETUP="module 'x y'")
    out, err, status = benchmark(**grid | options, MAX_RUNNING="3")
    assert status == 0 and not err and "array 7: 4 runs" in out and "array 7: 1 runs" in out, out + err
    arrays = [(tmp_path / f"options{number}").read_text().splitlines() for number in (1, 2, 3)]
    wanted = "--ntasks=1 --cpus-per-task=2 --mem=9G --gres=gpu:1 --partition=p --account=a --qos=q --constraint=c|d"
    wanted += " --time=1-0 --requeue --open-mode=append --signal=USR1@300"
    for array, tasks in zip(arrays, ["0-3", "0-3", "0-0"], strict=True):
        assert {f"--array={tasks}%3", *wanted.split()} <= set(array) and array[-2:] == ["1", options["SETUP"]]
    assert ["--dependency=afterany:7" in array for array in arrays] == [False, True, True]
    jobs = [re.search(r"--job-name=(.*)", "\n".join(array))[1] for array in arrays]
    (tmp_path / "queue").write_text(f"{jobs[0]} 1 7\n{jobs[2]} 0 7\nanother 3 8\n")
    out, err, _ = benchmark(**grid, GPUS="a100:2", RUNS_PER_GPU="2")
    assert "9 runs: 0 finished, 2 queued, 7 to do" in out and "array 7: 7 runs" in out, out + err
    array = (tmp_path / "options4").read_text().splitlines()
    assert {"--array=0-1", "--gres=gpu:a100:2", "--ntasks=4", "--cpus-per-task=2", "--mem=32G"} <= set(array)
    lines = [line.split()[:2] for line in open(array[-3])]
    assert lines == [[task, f"{DAE}{seed}"] for task, seed in zip("0000111", "1345678", strict=True)]
    for broken, words in [("sbatch", "0 of 9 runs"), ("squeue", "squeue failed"), ("scontrol", "set WORKERS")]:
        _, err, status = benchmark(**grid | dict(programs=CLUSTER | {broken: "exit 9"}), RUNS="elsewhere")
        assert status == 1 and words in err


def test_a_task_is_requeued_if_interrupted_and_not_for_ever(benchmark):
    slurm = dict(SLURM_ARRAY_TASK_ID="4", SLURM_ARRAY_JOB_ID="7", SLURM_CPUS_PER_TASK="1", SLURM_JOB_ID="9")
    for status, restarts, requeued in [(75, 99, 1), (3, 0, 1), (75, 100, 0), (1, 0, 0), (0, 0, 0)]:
        programs = dict(srun=f"exit {status}", scontrol='echo "$@"')
        out, _, ended = benchmark("--task", *"abc0", "", **slurm, SLURM_RESTART_COUNT=str(restarts), programs=programs)
        assert (out, ended) == (("requeue 7_4\n", 0) if requeued else ("", min(status, 1)))


CONFIGURATION = """ClusterName=offdae SlurmUser=root SlurmctldHost={host}(127.0.0.1) SlurmctldPort={0} SlurmdPort={1}
AuthType=auth/none CredType=cred/none AuthInfo=cred_expire=5 StateSaveLocation={tmp} SlurmdSpoolDir={tmp}
SlurmctldPidFile={tmp}/slurmctld.pid SlurmdPidFile={tmp}/slurmd.pid SlurmdParameters=config_overrides MaxArraySize=2
ProctrackType=proctrack/linuxproc TaskPlugin=task/none SelectType=select/cons_tres SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none MpiDefault=none KillWait=30 GresTypes=gpu"""
NODE = """\nNodeName={host} NodeAddr=127.0.0.1 CPUs=3 RealMemory=64000 Gres=gpu:1
PartitionName=main Nodes={host} Default=YES State=UP\n"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A cluster of one node, this machine, with a GPU that is none."""
    if os.geteuid() or not all(map(shutil.which, ("slurmctld", "slurmd", "sbatch", "srun"))):
        pytest.skip("needs root, and slurm-wlm installed")
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = one.getsockname()[1], other.getsockname()[1]
    host = socket.gethostname().split(".")[0]
    text = CONFIGURATION.replace(" ", "\n") + NODE
    (tmp_path / "slurm.conf").write_text(text.format(*ports, host=host, tmp=tmp_path))
    (tmp_path / "gres.conf").write_text(f"NodeName={host} Name=gpu File=/dev/null\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))

    def ask(*command):
        return subprocess.run(command, capture_output=True, text=True).stdout.split()

    log = open(tmp_path / "daemons.log", "w")
    daemons = [subprocess.Popen(x, stdout=log, stderr=log) for x in (["slurmctld", "-D"], ["slurmd", "-D", "-N", host])]
    try:
        wait_until(lambda: ask("sinfo", "-h", "-o", "%T") == ["idle"], 60, "the node is idle")
        yield ask
    finally:
        ask("scancel", "--partition=main")
        wait_until(lambda: not ask("squeue", "-h"), 60, "no job is left")
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)


@pytest.mark.slow
def test_slurm_runs_requeued_killed_or_out_of_time_end_as_uninterrupted_ones(slurm, benchmark, tmp_path):
    runs, grid = benchmark.runs, ONE | dict(ARGS=TINY + "12000", GPUS="0", RUNS_PER_GPU="2", SEEDS="1 2 3 4 5")

    def catch(seed):
        wait_until((runs / f"{DAE}{seed}" / "checkpoint.pt").exists, 180, f"run {seed} has a checkpoint")
        pid = int((runs / f"{DAE}{seed}" / "lock").read_text().split()[1])
        os.kill(pid, signal.SIGSTOP)
        assert not (runs / f"{DAE}{seed}" / "eval.json").exists()
        return pid  # of a run that stands still in its middle

    def result_of(run):
        model = torch.load(run / "model.pt", weights_only=True)
        weights = [x.numpy().tobytes() for name in ("network", "target_network") for x in model[name].values()]
        return json.loads((run / "eval.json").read_text()) | dict(seconds=0), weights

    def submit(variables):
        *printed, status = benchmark(**variables)
        assert status == 0, printed
        return "".join(printed)

    start = time.time()
    submit(grid | dict(SEEDS="5", TIME="60", SIGNAL_SECONDS="100", RUNS_PER_GPU="1"))
    catch(5)  # it stands still until Slurm lets it continue to tell it of its time limit
    slurm("scontrol", "update", "JobId=1_0", f"TimeLimit={int(time.time() - start) // 60 + 2}")
    wait_until(lambda: "== interrupted (status 75" in benchmark.log(5), 90, "run 5 is told of it and stops")
    slurm("scontrol", "update", "JobId=1_0", "TimeLimit=60")
    array = re.search(r"^array (\d+): 4 runs", submit(grid | dict(SEEDS="1 2 3 4")), re.MULTILINE)[1]
    assert "5 runs: 0 finished, 5 queued, 0 to do" in submit(grid)
    catch(1)
    os.kill(catch(2), signal.SIGKILL)
    wait_until(lambda: "== failed (status 137" in benchmark.log(2), 30, "the kill is noted")
    slurm("scontrol", "requeue", f"{array}_0")
    os.kill(catch(3), signal.SIGKILL)
    wait_until(lambda: not slurm("squeue", "-h"), 300, "the queue is empty")
    for seed in (1, 2, 5):
        assert "continuing from frame" in benchmark.log(seed) and "== finished" in benchmark.log(seed)
        assert ("== interrupted (status 75" in benchmark.log(seed)) == (seed != 2)
    submit(grid | dict(SEEDS="6", GPUS="1"))
    assert "4 finished, 0 queued, 1 to do" in (out := submit(grid)) and "== failed (status 137" in out, out
    alone = benchmark.start(**grid | dict(SEEDS="1 2 3 5", RUNS="uninterrupted", WORKERS="2"))
    wait_until(lambda: not slurm("squeue", "-h"), 180, "the queue is empty")
    assert "5 finished, 0 queued, 0 to do" in submit(grid)
    assert "torch sees no GPU here: not run on the CPU" in benchmark.log(6) and not (runs / f"{DAE}6").exists()
    out, err = alone.communicate(timeout=300)
    assert alone.returncode == 0, out + err
    for seed in (1, 2, 3, 5):
        assert result_of(runs / f"{DAE}{seed}") == result_of(tmp_path / "uninterrupted" / f"{DAE}{seed}"), seed
