"""benchmark.sh: which runs there are, how they are started, stopped, continued and tried again, here and with Slurm."""

import contextlib
import csv
import fcntl
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
VARIABLES = "METHODS ENVS NS SEEDS ARGS RUNS WORKERS RUNS_PER_GPU MAX_RUNNING PARTITION ACCOUNT QOS CONSTRAINT GPUS"
VARIABLES = [*VARIABLES.split(), "CPUS", "MEM", "TIME", "SETUP", "SIGNAL_SECONDS"]


def wait_until(condition, seconds, what):
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline, f"waited {seconds} s in vain until {what}"
        time.sleep(0.1)


@pytest.fixture
def checkout(tmp_path):
    """What benchmark.sh needs of the project, in a directory whose name has spaces."""
    directory = tmp_path / "a check out"
    directory.mkdir()
    for name in ["benchmark.sh", *(f"{script}.py" for script in SCRIPTS)]:
        shutil.copy(ROOT / name, directory)
    return directory


@pytest.fixture
def benchmark(checkout, tmp_path):
    """Start benchmark.sh from another directory with these variables and flags."""
    processes = []

    def start(*flags, path="", **variables):
        ours = [*VARIABLES, "CUDA_VISIBLE_DEVICES"]
        environment = {name: value for name, value in os.environ.items() if name not in ours}
        search = os.pathsep.join(filter(None, [str(path), os.path.dirname(sys.executable), os.environ["PATH"]]))
        environment |= dict(PATH=search, OMP_NUM_THREADS="1") | variables
        command = ["bash", str(checkout / "benchmark.sh"), *flags]
        out = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        # a background job of a shell ignores SIGINT, and so would all that it starts
        out |= dict(start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        processes.append(subprocess.Popen(command, cwd=tmp_path, env=environment, **out))
        return processes[-1]

    def run(*flags, **variables):
        process = start(*flags, **variables)
        out, err = process.communicate(timeout=300)
        return process.returncode, out, err

    run.start = start
    yield run
    for process in processes:  # those of a test that failed
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=60)


@pytest.fixture
def stand_in(tmp_path):
    """Programs of ours under the names of others, which are not to be had here: two GPUs, a cluster."""

    def make(**programs):
        directory = tmp_path / "bin"
        directory.mkdir(exist_ok=True)
        for name, text in programs.items():
            (directory / name).write_text(f"#!/bin/sh\n{text}\n")
            (directory / name).chmod(0o755)
        return directory

    return make


def contents(directory):
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*")}


def result_of(run):
    """All that a run found out: curve, weights and evaluation, without the times it took."""
    with open(run / "curve.csv", newline="") as file:
        rows = [{tag: value for tag, value in row.items() if tag != "charts/SPS"} for row in csv.DictReader(file)]
    model = torch.load(run / "model.pt", weights_only=True)
    networks = [model[part] for part in ("network", "target_network")]
    weights = [(key, value.numpy().tobytes()) for network in networks for key, value in network.items()]
    return rows, weights, json.loads((run / "eval.json").read_text()) | dict(seconds=0)


# ----------------------------------------------------------------------------------------------------------- settings
def test_shellcheck_finds_nothing():
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed")
    result = subprocess.run(["shellcheck", ROOT / "benchmark.sh"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_help_names_every_variable(benchmark, checkout):
    before = contents(checkout)
    status, out, _ = benchmark("--help")
    assert status == 0 and not [name for name in VARIABLES if not re.search(rf"\b{name}\b", out)]
    assert contents(checkout) == before


REFUSED = [
    (dict(METHODS="dae sarsa"), "no method sarsa"),
    (dict(ENVS="pong"), "no game pong"),
    (dict(NS="8 zero"), "NS=zero"),
    (dict(NS="0"), "NS=0"),
    (dict(SEEDS="1 -2"), "SEEDS: -2"),
    (dict(SEEDS=""), "no runs"),
    (dict(WORKERS="0"), "WORKERS=0"),
    (dict(WORKERS="many"), "WORKERS=many"),
    (dict(RUNS_PER_GPU="0"), "RUNS_PER_GPU=0"),
    (dict(GPUS="-1"), "GPUS=-1"),
    (dict(ARGS="--seed 3"), "ARGS: --seed"),
    (dict(ARGS="--small --run-name mine"), "ARGS: --run-name"),
    (dict(ARGS="--total-timesteps some"), "--total-timesteps=some"),
]


@pytest.mark.parametrize("variables, words", REFUSED)
def test_refuses_what_cannot_be_right(variables, words, benchmark, checkout):
    before = contents(checkout)
    status, _, err = benchmark(**dict(WORKERS="1") | variables)
    assert status == 2 and words in err and len(err.splitlines()) == 1
    assert contents(checkout) == before


def test_refuses_an_unknown_flag(benchmark):
    status, _, err = benchmark("--smal")
    assert status == 2 and "unknown argument --smal" in err


def test_the_papers_grid(benchmark, checkout, stand_in):
    """1200 runs and 300 of the ablation, on two GPUs that are only said to be there, and nothing is written."""
    before = contents(checkout)
    status, out, err = benchmark("--dry-run", WORKERS="4", path=stand_in(python="echo 2"))
    first, *lines = out.splitlines()
    assert status == 0 and shlex.split(first) == ["cd", str(checkout)] and len(lines) == 1500
    commands = [shlex.split(line)[1:] for line in lines]
    first = "python offdae_uncorrected.py --env-id asterix --n 8 --seed 1"
    assert commands[0] == [*first.split(), "--run-name", "asterix__offdae_uncorrected__n8__1", "--resume"]
    names = [command[command.index("--run-name") + 1] for command in commands]
    assert len(set(names)) == 1500
    for command, name in zip(commands, names, strict=True):
        env_id, exp_name, n, seed = name.split("__")
        ablation = exp_name == "offdae_offpolicy_no_target"
        assert command[:2] == ["python", f"{exp_name.removesuffix('_no_target')}.py"]
        assert command[2:8:2] == ["--env-id", "--n", "--seed"]
        assert command[3:9:2] == [env_id, n[1:], seed]
        assert command[11:] == (["--no-target-network", "--exp-name", exp_name] if ablation else [])
    assert "1500 runs: 1500 to do" in err and "about 10800 GPU-hours" in err and "about 69 GB" in err
    assert contents(checkout) == before


def test_small_grid_and_what_wins_over_it(benchmark, stand_in):
    path = stand_in(python="echo 0")
    status, out, err = benchmark("--dry-run", "--small", WORKERS="2", path=path)
    assert status == 0 and len(out.splitlines()) == 1 + 5 * 2 * 2 * 3 and out.count(" --small\n") == 60
    assert "about 10 hours on one CPU core" in err and "2 at a time" in err and "about 5.2 hours" in err
    assert not [name for name in ("freeway", "--n 16", "--seed 4") if name in out]
    grid = dict(METHODS="dae offpolicy", ENVS="freeway", NS="16", SEEDS="4 5", ARGS="--total-timesteps 300_000")
    status, out, err = benchmark("--dry-run", "--small", **grid, path=path, WORKERS="1")
    assert [line.split("--run-name ")[1] for line in out.splitlines()[1:]] == [
        f"freeway__offdae_{method}__n16__{seed} --resume --small --total-timesteps 300_000"
        for method in ("dae", "offpolicy")
        for seed in (4, 5)
    ]
    assert "about 0.4 hours" in err  # 2 x 2 + 2 x 10 minutes
    status, out, _ = benchmark(
        "--dry-run", METHODS="dae_no_target", ENVS="asterix", NS="8", SEEDS="1", path=path, WORKERS="1"
    )
    (command,) = (line.split("python ")[1] for line in out.splitlines()[1:])
    ablation = "offdae_dae.py --env-id asterix --n 8 --seed 1 --run-name asterix__offdae_dae_no_target__n8__1 --resume"
    assert command == f"{ablation} --no-target-network --exp-name offdae_dae_no_target"


# ------------------------------------------------------------------------------------------------------- this machine
@pytest.mark.slow
def test_interrupted_continued_failed_finished(benchmark, checkout, stand_in):
    """Ctrl-C while one of two runs is under way; then both at once, where one fails; then nothing is left to do."""
    runs, grid = checkout / "runs", dict(METHODS="dae", ENVS="asterix", NS="8", SEEDS="1 2", ARGS=TINY + "8000")
    grid |= dict(SETUP="export SET_UP=$NOT_SET; cd .")
    (runs / f"{DAE}2").mkdir(parents=True)
    (runs / f"{DAE}2" / "checkpoint.pt").write_text("not what a checkpoint looks like")
    logs = {seed: runs / ".benchmark" / "logs" / f"{DAE}{seed}.log" for seed in (1, 2)}
    process = benchmark.start(**grid, WORKERS="1")
    try:
        wait_until((runs / f"{DAE}1" / "checkpoint.pt").exists, 120, "there is a checkpoint")
    finally:
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 75 and not err, err
    assert "0 of 2 finished, 1 running, 0 failed, about 0:00 hours left" in out
    assert "interrupted, 1 runs with a checkpoint: the same command continues where they are" in out
    assert logs[1].read_text().splitlines()[-1].startswith("== interrupted (status 75") and not logs[2].exists()

    status, out, err = benchmark(**grid, WORKERS="2")
    assert status == 1 and not err, err
    assert "2 runs: 2 to do, 2 of them to resume" in out and "0 of 2 finished, 2 running, 0 failed" in out
    assert "1 of 2 finished, 0 running, 1 failed" in out
    assert f"{DAE}2 failed, see {logs[2]}" in out
    assert "missing, damaged" in out.splitlines()[-2] and "== failed (status 2 after" in out.splitlines()[-1]
    assert "continuing from frame" in logs[1].read_text() and (runs / f"{DAE}1" / "eval.json").exists()

    before = contents(checkout)
    grid |= dict(WORKERS="2", path=stand_in(python="echo 0"))  # from here on nothing is to be trained
    status, out, err = benchmark(**grid | dict(SEEDS="1 1"))
    assert status == 0 and not err and "1 runs: 0 to do, 0 of them to resume from a checkpoint; 1 finished" in out
    status, out, err = benchmark("--dry-run", **grid)
    assert status == 0 and "1 failed before and are tried again" in err and "missing, damaged" in err
    assert contents(checkout) == before and len(out.splitlines()) == 3 and "cd ." in out

    kept = checkout / "results" / "cpu study" / "runs" / f"{DAE}1"
    kept.mkdir(parents=True)
    for name in ("args.json", "eval.json"):
        shutil.copy(runs / f"{DAE}1" / name, kept)
    (runs / f"{DAE}1").rename(runs / f"{DAE}3")
    status, out, _ = benchmark(**grid | dict(SEEDS="1 3"))
    assert status == 0 and "0 to do" in out and f"finished, skipped: results/cpu study/runs/{DAE}1" in out
    status, out, err = benchmark("--dry-run", **grid | dict(SEEDS="1", ARGS=TINY + "13000"))
    assert status == 0 and f"of another size, not counted as finished: results/cpu study/runs/{DAE}1" in err
    assert len(out.splitlines()) == 3
    status, _, err = benchmark(**grid | dict(SEEDS="3", ARGS=TINY + "13000"))
    assert status == 2 and "set RUNS to another directory" in err


def test_a_run_that_another_process_writes_is_left_alone(benchmark, checkout, stand_in):
    lock = checkout / "runs" / f"{DAE}1" / "lock"
    lock.parent.mkdir(parents=True)
    grid = dict(METHODS="dae", ENVS="asterix", NS="8", SEEDS="1 2", WORKERS="1", path=stand_in(python="echo 0"))
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _, out, err = benchmark("--dry-run", "--small", **grid)
        assert "1 to do" in err and "1 queued or running, left alone" in err and f"{DAE}1 " not in out
    _, out, err = benchmark("--dry-run", "--small", **grid)
    assert "2 to do" in err and f"{DAE}1 " in out


def test_refused_arguments_and_a_missing_gpu_are_told_at_once(benchmark, checkout, stand_in):
    before = contents(checkout)
    one = dict(METHODS="dae", ENVS="asterix", NS="8", SEEDS="1", CUDA_VISIBLE_DEVICES="", WORKERS="1")
    status, out, err = benchmark("--small", **one, ARGS="--ent-coef 1")
    assert status == 2 and "Unrecognized options: --ent-coef" in err
    status, out, err = benchmark("--small", **one, GPUS="1", path=stand_in(python="echo 0"))
    assert status == 1 and "GPUS=1 was asked for, but torch sees 0 here" in err
    assert contents(checkout) == before


@pytest.mark.slow
def test_paper_size_without_a_gpu_is_warned_about(benchmark):
    one = dict(METHODS="dae", ENVS="asterix", NS="8", SEEDS="1 2", CUDA_VISIBLE_DEVICES="", WORKERS="2")
    status, out, err = benchmark("--dry-run", **one, ARGS="--channels 64")
    assert status == 0 and "WARNING: no GPU" in err and "days or months" in err, err


RUN = """
[ "$1" = -B ] && { echo 2; exit; }
while [ "$1" != --run-name ]; do shift; done
mkdir -p "runs/$2" && sleep 1 && echo "$CUDA_VISIBLE_DEVICES $OMP_NUM_THREADS" >"runs/$2/eval.json"
"""


@pytest.mark.parametrize("visible, devices", [(None, "0101"), ("GPU-a,7,9", ["GPU-a", "7"] * 2)])
def test_workers_are_spread_over_the_gpus(visible, devices, benchmark, checkout, stand_in):
    """Two GPUs that are only said to be there, two runs on each."""
    path = stand_in(python=RUN, sbatch="", scontrol="exit 1")
    grid = dict(METHODS="dae", ENVS="asterix", NS="8", SEEDS="1 2 3 4", WORKERS="4", RUNS_PER_GPU="2")
    status, out, _ = benchmark(**grid, path=path, **({"CUDA_VISIBLE_DEVICES": visible} if visible else {}))
    assert status == 0 and "0 of 4 finished, 4 running" in out and "4 of 4 finished, 0 running, 0 failed" in out
    seen = [(checkout / "runs" / f"{DAE}{seed}" / "eval.json").read_text().split() for seed in (1, 2, 3, 4)]
    assert seen == [[device, "1"] for device in devices]


@pytest.mark.slow
def test_ctrl_c_at_any_moment_reaches_each_run_once(benchmark, stand_in, tmp_path):
    """The terminal signals every process of its group: runs of our own that know how often they were told to stop."""
    text = """[ "$1" = -B ] && { echo 0; exit; }
    trap 'echo told; sleep 0.5; told=$((told + 1)); exit $((74 + told))' INT TERM
    touch "$TMP/started $PPID"
    for tenth in $(seq 900); do sleep 0.1; done"""
    grid = dict(METHODS="dae", ENVS="asterix", NS="8", SEEDS="1 2", WORKERS="2", TMP=str(tmp_path))
    grid["path"] = stand_in(python=text)
    started = [benchmark.start("--small", **grid, RUNS=f"runs{index}") for index in range(6)]
    wait_until(lambda: len(list(tmp_path.glob("started *"))) == 12, 60, "all runs are under way")
    for process in started:
        time.sleep(0.13)
        os.killpg(process.pid, signal.SIGINT)
    for index, process in enumerate(started):
        out, err = process.communicate(timeout=60)
        assert process.returncode == 75 and "interrupted, 2 runs with a checkpoint" in out and not err, out + err
        for log in (tmp_path / f"runs{index}" / ".benchmark" / "logs").iterdir():
            assert log.read_text().count("told") == 1 and "== interrupted (status 75" in log.read_text()


# -------------------------------------------------------------------------------------------------------------- Slurm
CLUSTER = dict(sbatch="exit 9", squeue="true", scontrol="echo MaxArraySize = 4")


def test_sbatch_commands(benchmark, checkout, stand_in):
    """Arrays of at most MaxArraySize tasks, one after another where their number is limited."""
    before = contents(checkout)
    grid = dict(METHODS="dae", ENVS="asterix", NS="8", SEEDS="1 2 3 4 5 6 7 8 9", MAX_RUNNING="3", TIME="1-0", MEM="9G")
    grid |= dict(PARTITION="p", ACCOUNT="a", QOS="q", CONSTRAINT="c|d", SETUP="module load 'x y'; source activate")
    status, out, err = benchmark("--dry-run", **grid, path=stand_in(**CLUSTER))
    arrays = [shlex.split(line) for line in out.splitlines() if line.startswith("sbatch ")]
    assert status == 0 and len(arrays) == 3 and contents(checkout) == before
    for options, expected in zip(arrays, ["--array=0-3%3", "--array=0-3%3", "--array=0-0%3"], strict=True):
        wanted = "--cpus-per-task=2 --mem=9G --gres=gpu:1 --partition=p --account=a --qos=q --constraint=c|d --time=1-0"
        wanted += " --requeue --open-mode=append --signal=B:USR1@300"
        assert {expected, *wanted.split()} <= set(options)
        script, task, root, _, gpus, setup = options[-6:]
        assert [script, task, root] == [str(checkout / "benchmark.sh"), "--task", str(checkout)]
        assert [gpus, setup] == ["1", grid["SETUP"]]
    assert ["--dependency" in " ".join(options) for options in arrays] == [False, True, True]
    assert len({option for options in arrays for option in options if "--job-name" in option}) == 3
    assert "18 GPU-hours" in err

    packed = grid | dict(GPUS="a100:2", RUNS_PER_GPU="2")
    packed = {name: value for name, value in packed.items() if name not in ("MAX_RUNNING", "MEM", "TIME")}
    _, out, _ = benchmark("--dry-run", **packed, path=stand_in(**CLUSTER))
    (options,) = [shlex.split(line) for line in out.splitlines() if line.startswith("sbatch ")]
    assert {"--array=0-2", "--gres=gpu:a100:2", "--cpus-per-task=8", "--mem=32G"} <= set(options)
    tasks = [line.split("\t") for line in out.splitlines() if "\t" in line]
    assert [int(task) for task, _, _ in tasks] == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert [name for _, name, _ in tasks] == [f"{DAE}{seed}" for seed in range(1, 10)]


def test_a_cluster_that_refuses_or_does_not_answer(benchmark, checkout, stand_in):
    one = dict(METHODS="dae", ENVS="asterix", NS="8", SEEDS="1")
    status, _, err = benchmark(**one, path=stand_in(**CLUSTER))
    assert status == 1 and "0 of 1 runs were submitted" in err
    assert not list((checkout / "runs" / ".benchmark").glob("offdae-*")), "what was refused would count as queued"
    status, _, err = benchmark(**one, path=stand_in(**CLUSTER | dict(squeue="exit 1")))
    assert status == 1 and "squeue failed" in err
    status, _, err = benchmark(**one, path=stand_in(**CLUSTER | dict(scontrol="exit 1")))
    assert status == 1 and "set WORKERS" in err


TASK = """
[ "$1" = -c ] && { echo 2; exit; }
while [ "$1" != --seed ]; do shift; done
echo "GPU $CUDA_VISIBLE_DEVICES, $OMP_NUM_THREADS threads, $VENV"
[ "$2" = 4 ] && { echo no luck; exit 1; }
trap 'sleep 0.5; echo checkpoint written; exit 75' TERM
touch "started $2"
i=0
while [ $i -lt ${LENGTH:-50} ]; do sleep 0.1; i=$((i + 1)); done
"""


@pytest.mark.parametrize("number, status", [(None, 1), (signal.SIGTERM, 75), (signal.SIGUSR1, 1)])
def test_a_task_of_four_runs_is_not_requeued_by_mistake(number, status, checkout, stand_in, tmp_path):
    """One run fails at once. SIGTERM is Slurm's or the user's business; a limit without time to train is an error."""
    array = checkout / "runs" / ".benchmark" / "offdae-1"
    logs = array.parent / "logs"
    array.mkdir(parents=True)
    logs.mkdir()
    lines = [f"{seed // 5}\trun{seed}\tpython x.py --seed {seed}\n" for seed in range(1, 6)]
    (array / "tasks").write_text("".join(lines))
    path = stand_in(python=TASK, scontrol=f"touch '{tmp_path}/requeued'")
    slurm = dict(SLURM_ARRAY_TASK_ID="0", SLURM_ARRAY_JOB_ID="1", SLURM_JOB_ID="2", SLURM_CPUS_PER_TASK="9")
    environment = os.environ | slurm | dict(PATH=f"{path}{os.pathsep}{os.environ['PATH']}", CUDA_VISIBLE_DEVICES="4,6")
    environment |= dict(LENGTH="50" if number else "5")
    command = ["bash", checkout / "benchmark.sh", "--task", checkout, array, "2", "VENV=on; export VENV; cd /"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if number:
        wait_until(lambda: len(list(checkout.glob("started *"))) == 3, 30, "three runs train")
        process.send_signal(number)
    out = process.communicate(timeout=30)[0]
    assert process.returncode == status and not (tmp_path / "requeued").exists(), out
    assert "run4 failed, see " in out and "    no luck\n" in out and "run5" not in out
    assert ("the time limit leaves only" in out) == (number == signal.SIGUSR1)
    for seed, device in zip((1, 2, 3, 4), (4, 6, 4, 6), strict=True):
        text = (logs / f"run{seed}.log").read_text()
        assert f"GPU {device}, 2 threads, on\n" in text
        assert f"== {'failed' if seed == 4 else 'interrupted' if number else 'finished'} (status" in text
        assert ("checkpoint written\n== interrupted" in text) == bool(number and seed != 4)
        assert text.endswith("raise TIME\n== failed\n") == (number == signal.SIGUSR1)


def free_port():
    with socket.socket() as file:
        file.bind(("127.0.0.1", 0))
        return file.getsockname()[1]


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A cluster of one node, this machine, with a GPU that is none."""
    programs = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol")
    missing = [program for program in programs if not shutil.which(program)]
    if missing or os.geteuid():
        pytest.skip(f"needs root, and slurm-wlm and munge installed; missing: {missing}")
    for name in ("state", "spool", "munge"):
        (tmp_path / name).mkdir()
    key, host = tmp_path / "munge" / "key", socket.gethostname().split(".")[0]
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    (tmp_path / "gres.conf").write_text(f"NodeName={host} Name=gpu File=/dev/null\n")
    (tmp_path / "slurm.conf").write_text(f"""
ClusterName=offdae
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={free_port()}
SlurmdPort={free_port()}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={tmp_path}/munge/socket,cred_expire=5
StateSaveLocation={tmp_path}/state
SlurmdSpoolDir={tmp_path}/spool
SlurmctldPidFile={tmp_path}/slurmctld.pid
SlurmdPidFile={tmp_path}/slurmd.pid
SlurmctldLogFile={tmp_path}/slurmctld.log
SlurmdLogFile={tmp_path}/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
MaxArraySize=4
KillWait=30
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs=3 RealMemory=64000 Gres=gpu:1
PartitionName=main Nodes={host} Default=YES State=UP
""")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    munge = [f"--{name}-file={tmp_path}/munge/{name}" for name in ("key", "pid", "log", "seed")]
    daemons = []

    def start(*command):
        log = open(tmp_path / f"{command[0]}.out", "w")
        daemons.append(subprocess.Popen(command, stdout=log, stderr=log))

    def ask(*command):
        return subprocess.run(command, capture_output=True, text=True).stdout.split()

    try:
        start("munged", "--foreground", "--force", f"--socket={tmp_path}/munge/socket", *munge)
        wait_until((tmp_path / "munge" / "socket").exists, 20, "munged listens")
        start("slurmctld", "-D")
        start("slurmd", "-D", "-N", host)
        wait_until(lambda: ask("sinfo", "-h", "-o", "%T") == ["idle"], 60, "the node is idle")
        yield ask
    finally:
        if len(daemons) == 3:
            ask("scancel", "--full", "--signal=KILL", *ask("squeue", "-h", "-r", "-o", "%A"))
            ask("scancel", "--partition=main")
            with contextlib.suppress(AssertionError):
                wait_until(lambda: not ask("squeue", "-h"), 60, "no job is left")
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)


@pytest.mark.slow
def test_slurm_runs_that_are_requeued_killed_or_out_of_time_end_as_if_left_alone(slurm, benchmark, checkout, tmp_path):
    runs = checkout / "runs"
    grid = dict(METHODS="dae", ENVS="asterix", NS="8", ARGS=TINY + "12000", GPUS="0")
    all_seeds = dict(SEEDS="1 2 3 4 5 6")

    def writer(seed):
        return int(re.search(r"pid (\d+)", (runs / f"{DAE}{seed}" / "lock").read_text())[1])

    def catch(seed):
        """Stop a run in its middle."""
        wait_until((runs / f"{DAE}{seed}" / "checkpoint.pt").exists, 120, f"run {seed} has a checkpoint")
        os.kill(writer(seed), signal.SIGSTOP)
        assert not (runs / f"{DAE}{seed}" / "eval.json").exists()
        return writer(seed)

    def task_log(seed):
        """The array's job number, the task and its log."""
        for tasks in (runs / ".benchmark").glob("offdae-*/tasks"):
            for line in tasks.read_text().splitlines():
                if line.split("\t")[1] == f"{DAE}{seed}":
                    return tasks.parent / f"{line.split()[0]}.log"

    def submit(**variables):
        status, out, err = benchmark(**grid | variables)
        assert status == 0 and not err, out + err
        return out

    out = submit(SEEDS="6", TIME="1", SIGNAL_SECONDS="10")
    assert "1 runs: 1 to do" in out and "array 1: 1 runs" in out
    out = submit(SEEDS="1 2 3 4 5")
    arrays = re.findall(r"^array (\d+): (\d) runs", out, re.MULTILINE)
    assert [int(count) for _, count in arrays] == [4, 1], "MaxArraySize is 4"
    assert "0 to do" in (out := submit(**all_seeds)) and "6 queued or running, left alone" in out

    # Longer than its time limit: it stands still until it is told to stop.
    slow = catch(6)
    requeued = catch(1)
    os.kill(catch(2), signal.SIGKILL)
    slurm("scontrol", "requeue", f"{arrays[0][0]}_0")
    os.kill(requeued, signal.SIGCONT)
    alone = benchmark.start(**grid | all_seeds, RUNS="left alone", WORKERS="1")

    def told_to_stop():
        pending = re.findall(r"^S..Pnd:\s*(\w+)", open(f"/proc/{slow}/status").read(), re.MULTILINE)
        return any(int(mask, 16) >> (signal.SIGTERM - 1) & 1 for mask in pending)

    wait_until(told_to_stop, 90, "the task is told of its time limit")
    os.kill(slow, signal.SIGCONT)
    wait_until(lambda: not slurm("squeue", "-h"), 180, "the queue is empty")
    assert "interrupted ahead of the time limit" in task_log(6).read_text() and "restart 1" in task_log(6).read_text()
    assert "restart 1" in task_log(1).read_text() and "ahead of the time limit" not in task_log(1).read_text()
    assert "continuing from frame" in (runs / ".benchmark" / "logs" / f"{DAE}1.log").read_text()
    assert "restart" not in task_log(3).read_text().replace("restart 0", "")

    out = submit(SEEDS="7", GPUS="1")
    out = submit(**all_seeds)
    assert "6 runs: 1 to do, 1 of them to resume from a checkpoint; 5 finished" in out
    assert "1 failed before and are tried again" in out and f"{DAE}2 failed, see " in out and "killed" in out
    wait_until(lambda: not slurm("squeue", "-h"), 120, "the queue is empty")
    assert "0 to do" in (out := submit(**all_seeds)) and "6 finished" in out

    gpu_log = (runs / ".benchmark" / "logs" / f"{DAE}7.log").read_text()
    assert "GPUS=1 was asked for, but torch sees 0" in gpu_log and not (runs / f"{DAE}7").exists()

    out, err = alone.communicate(timeout=120)
    assert alone.returncode == 0, out + err
    for seed in range(1, 7):
        name = f"{DAE}{seed}"
        assert result_of(runs / name) == result_of(tmp_path / "left alone" / name), name
