#!/usr/bin/env bash
# The paper's experiment: every method on every game, with every n and seed, on a Slurm cluster or on this machine.
set -euo pipefail

help() {
    cat <<'END'
bash benchmark.sh [--small] [--dry-run] [--help]

Runs the paper's experiment: 4 methods x 5 games x 3 backup lengths x 20 seeds, and Off-policy DAE without target
network.
Where sbatch exists, it submits Slurm job arrays; elsewhere, or if WORKERS is set, it runs on this machine.
Run it again at any time: finished runs are skipped (also those found under results/), queued and running ones left
alone, interrupted ones resumed, failed ones tried again.

  --small     CPU-size runs of a part of the grid; a variable that is set wins over its defaults
  --dry-run   print the commands, write and start nothing

Environment variables, with their defaults (--small's in brackets):
  METHODS       "uncorrected dae tree offpolicy offpolicy_no_target"; the last is the ablation without target network,
                dae_no_target, which the paper does not have, is the same of DAE
  ENVS          "asterix breakout freeway seaquest space_invaders" ["asterix breakout"]
  NS            "8 16 32" ["8 32"]
  SEEDS         "1 2 ... 20" ["1 2 3"]; runs go in the order METHODS, ENVS, NS, SEEDS, the seeds changing fastest
  ARGS          more arguments for every run, such as "--total-timesteps 1000000"
  RUNS          directory of the runs: runs/ beside benchmark.sh; what was printed is in .benchmark/logs there
  SETUP         a line of shell to run first, in each task, such as "source activate offdae"
  RUNS_PER_GPU  1; so many runs share a GPU
On this machine:
  WORKERS       runs at a time: RUNS_PER_GPU for each GPU, 1 if there is none; the cores are divided among them
  GPUS          every GPU there is; 0 for none; more than there are is an error
With Slurm, all but MAX_RUNNING and SIGNAL_SECONDS as sbatch takes them:
  GPUS          1 [0] in each task, or with a type, such as a100:1; a task has RUNS_PER_GPU runs for each of them
  CPUS          CPUs of a task: 2 [1] for each of its runs
  MEM           memory of a task: 8 [4] GB for each of its runs
  TIME          time limit of a task, by default the partition's; a run that needs longer is requeued until finished
  MAX_RUNNING   tasks that may run at once, by default any number
  PARTITION ACCOUNT QOS CONSTRAINT
  SIGNAL_SECONDS  300; so long before the time limit a run writes its checkpoint and its task requeues itself

Exit status: 0 submitted or finished, 1 runs failed or could not be submitted, 2 a setting was refused, 75 interrupted.
END
}

die() { # status, message
    printf 'benchmark.sh: %s\n' "$2" >&2
    exit "$1"
}

# ------------------------------------------------------------------------------------------------------------- one run
FINISHED=0 HELD=3 INTERRUPTED=75 # exit statuses of the training scripts

set_up() { # root
    local setup_status
    cd "$1"
    set +eu # activation scripts use unset variables
    eval "$SETUP"
    setup_status=$?
    set -eu
    cd "$1"
    return "$setup_status"
}

count_gpus() {
    python -c 'import torch; print(torch.cuda.device_count())'
}

wait_for() { # a child: sets `status`; a trap ends `wait` early, so ask again as long as `signals` were caught
    local before=-1
    while [ "$before" -ne "$signals" ]; do
        before=$signals status=0
        wait "$1" || status=$?
    done
}

run_one() { # log, command, GPU or -1: a subshell that passes SIGTERM on and returns the training script's status
    local log=$1 command=$2 gpu=$3 devices pid='' signals=0 status=0 outcome attempt
    trap 'signals=$((signals + 1)); [ -z "$pid" ] || kill -TERM "$pid" 2>/dev/null || true' TERM
    trap '' INT HUP # Ctrl-C and a closed terminal are for benchmark.sh itself, which then sends SIGTERM, once
    if [ "$gpu" -ge 0 ]; then # the GPUs that this process may use can have other numbers, or names
        IFS=, read -r -a devices <<<"${CUDA_VISIBLE_DEVICES-}"
        export CUDA_VISIBLE_DEVICES=${devices[gpu]-$gpu}
    fi
    exec 2>>"$log"
    SECONDS=0
    for attempt in 1 2 3 4 5; do
        printf '== %s, %s: %s\n' "$(date '+%F %T')" "${HOSTNAME:-}" "$command" >>"$log"
        (eval "exec ${SETSID-} $command") >>"$log" 2>&1 </dev/null &
        pid=$!
        [ "$signals" -eq 0 ] || kill -TERM "$pid" 2>/dev/null || true
        wait_for "$pid"
        # The lock of a node that died can outlive it for a minute on a network file system.
        if [ "$status" -ne "$HELD" ] || [ -z "${SLURM_JOB_ID-}" ] || [ "$attempt" -eq 5 ]; then break; fi
        sleep 30 &
        pid=$!
        wait_for "$pid"
        if [ "$signals" -gt 0 ]; then break; fi
    done
    [ "$status" -ne 143 ] || status=$INTERRUPTED # SIGTERM came before the script could catch it: nothing is lost
    case $status in
        "$FINISHED") outcome=finished ;;
        "$HELD") outcome='left alone, another process holds it' ;;
        "$INTERRUPTED") outcome=interrupted ;;
        137) outcome='failed, killed, perhaps for want of memory' ;;
        *) outcome=failed ;;
    esac
    printf '== %s (status %s after %s s)\n' "$outcome" "$status" "$SECONDS" >>"$log"
    return "$status"
}

last_lines() { # names of failed runs
    local name shown=0
    for name in "$@"; do
        printf '%s failed, see %s\n' "$name" "$LOGS/$name.log"
        shown=$((shown + 1))
        [ "$shown" -gt 10 ] || { grep -v '^== .*: python ' "$LOGS/$name.log" || true; } | tail -n 6 | sed 's/^/    /'
    done
}

# --------------------------------------------------------------------------------------------- one task of a job array
requeue_or_fail() {
    # A limit that leaves no time to train would requeue for ever.
    [ "$SECONDS" -ge 10 ] || fail_all "the time limit leaves only $SECONDS s to train: raise TIME"
    # Not by SLURM_JOB_ID, which for one of the tasks is the number of the whole array.
    scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" ||
        fail_all "could not requeue: run benchmark.sh again to continue"
    echo "interrupted ahead of the time limit after $SECONDS s, requeued"
}

task() { # root, array's directory, GPUs, SETUP: what sbatch runs
    local root=$1 directory=$2 gpus=${3##*:} found names=() commands=() pids=() signals=0 signal='' status=0
    local task name command index failed=() interrupted=0 outcome=0
    SETUP=$4 LOGS=${directory%/*}/logs
    trap 'signals=$((signals + 1)); signal=USR1; stop_all' USR1
    trap 'signals=$((signals + 1)); signal=TERM; stop_all' TERM
    stop_all() { [ ${#pids[@]} -eq 0 ] || kill -TERM "${pids[@]}" 2>/dev/null || true; }

    while IFS=$'\t' read -r task name command; do
        [ "$task" != "$SLURM_ARRAY_TASK_ID" ] || { names+=("$name") commands+=("$command"); }
    done <"$directory/tasks"
    echo "$(date '+%F %T'), $(hostname), restart ${SLURM_RESTART_COUNT:-0}: ${names[*]}"
    fail_all() { # message
        [ "$signal" != TERM ] || exit "$INTERRUPTED"
        for name in "${names[@]}"; do printf '%s\n== failed\n' "$1" >>"$LOGS/$name.log"; done
        die 1 "$1"
    }
    set_up "$root" || fail_all "SETUP failed on $(hostname): $SETUP"
    if [ "$gpus" -gt 0 ]; then
        found=$(count_gpus) || fail_all "python with torch is needed and not found on $(hostname): set SETUP"
        [ "$found" -ge "$gpus" ] || fail_all "GPUS=$3 was asked for, but torch sees $found on $(hostname): not run on the CPU"
    fi
    OMP_NUM_THREADS=$((${SLURM_CPUS_PER_TASK:-1} / ${#names[@]}))
    [ "$OMP_NUM_THREADS" -ge 1 ] || OMP_NUM_THREADS=1
    export OMP_NUM_THREADS

    for index in "${!names[@]}"; do
        run_one "$LOGS/${names[index]}.log" "${commands[index]}" "$((gpus > 1 ? index % gpus : -1))" &
        pids+=($!)
    done
    [ "$signals" -eq 0 ] || stop_all
    for index in "${!names[@]}"; do
        wait_for "${pids[index]}"
        echo "$(date '+%F %T'), ${names[index]}: status $status"
        case $status in
            "$FINISHED" | "$HELD") ;;
            "$INTERRUPTED" | 143) interrupted=1 ;;
            *) failed+=("${names[index]}") ;;
        esac
    done
    if [ ${#failed[@]} -gt 0 ]; then
        last_lines "${failed[@]}"
        outcome=1
    fi
    # After SIGTERM the task was preempted or requeued, and Slurm starts it again, or cancelled, and nobody should.
    if [ "$interrupted" -eq 1 ]; then
        [ "$signal" = USR1 ] || exit "$INTERRUPTED"
        requeue_or_fail
    fi
    exit "$outcome"
}

if [ "${1-}" = --task ]; then
    shift
    task "$@"
fi

# ------------------------------------------------------------------------------------------------------------ settings
SMALL='' DRY_RUN='' FRAMES=''
for argument in "$@"; do
    case $argument in
        --small) SMALL=1 ;;
        --dry-run) DRY_RUN=1 ;;
        --help | -h)
            help
            exit
            ;;
        *) die 2 "unknown argument $argument: see --help" ;;
    esac
done

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
read -r -d '' -a args <<<"${ARGS-}" || true
[ -z "$SMALL" ] || args=(--small ${args[@]+"${args[@]}"})
for index in ${args[@]+"${!args[@]}"}; do
    case ${args[index]} in
        --small) SMALL=1 ;;
        --total-timesteps) FRAMES=${args[index + 1]-} ;;
        --total-timesteps=*) FRAMES=${args[index]#*=} ;;
        --env-id* | --n | --n=* | --seed* | --run-name* | --runs-dir* | --exp-name* | --resume | --no-target-network | --evaluate*)
            die 2 "ARGS: ${args[index]} is set by benchmark.sh; METHODS, ENVS, NS, SEEDS and RUNS say which runs there are"
            ;;
    esac
done
if [ -n "$SMALL" ]; then
    : "${ENVS=asterix breakout}" "${NS=8 32}" "${SEEDS=1 2 3}"
    PAPER_FRAMES=600000
else
    : "${ENVS=asterix breakout freeway seaquest space_invaders}" "${NS=8 16 32}" "${SEEDS=$(echo {1..20})}"
    PAPER_FRAMES=10000000
fi
: "${METHODS=uncorrected dae tree offpolicy offpolicy_no_target}" "${RUNS=$ROOT/runs}" "${SETUP=}" "${RUNS_PER_GPU=1}"
: "${FRAMES:=$PAPER_FRAMES}" "${SIGNAL_SECONDS=300}"
FRAMES=${FRAMES//_/}
[[ $RUNS == /* ]] || RUNS=$PWD/$RUNS
RUNS=${RUNS%/} LOGS=${RUNS%/}/.benchmark/logs

positive() { # name, value
    [[ $2 =~ ^0*[1-9][0-9]*$ ]] || die 2 "$1=$2: must be a whole number of at least 1"
}
for variable in RUNS_PER_GPU FRAMES SIGNAL_SECONDS ${WORKERS+WORKERS} ${CPUS+CPUS} ${MAX_RUNNING+MAX_RUNNING}; do
    positive "${variable/#FRAMES/ARGS: --total-timesteps}" "${!variable}"
done
[[ ${GPUS-0} =~ ^([A-Za-z][^:]*:)?[0-9]+$ ]] || die 2 "GPUS=$GPUS: must be a number, or a type and a number such as a100:1"

# --------------------------------------------------------------------------------------------------------------- grid
read -r -d '' -a methods <<<"$METHODS" || true
read -r -d '' -a envs <<<"$ENVS" || true
read -r -d '' -a ns <<<"$NS" || true
read -r -d '' -a seeds <<<"$SEEDS" || true
names=()
declare -A command_of seconds_of megabytes_of
for method in ${methods[@]+"${methods[@]}"}; do
    case $method in
        uncorrected | dae | tree) script=offdae_$method flags=() ;;
        offpolicy) script=offdae_offpolicy flags=() ;;
        dae_no_target | offpolicy_no_target)
            script=offdae_${method%_no_target} flags=(--no-target-network --exp-name "offdae_$method")
            ;;
        *)
            die 2 "METHODS: no method $method, choose from uncorrected dae tree offpolicy dae_no_target offpolicy_no_target"
            ;;
    esac
    # Hours at the paper's size are the paper's, on its GPUs; minutes at --small's were measured on one CPU core, as were
    # the sizes of a finished run.
    case $script-${SMALL:+small} in
        offdae_offpolicy-small) seconds=$((20 * 60)) megabytes=2 ;;
        offdae_offpolicy-) seconds=$((15 * 3600)) megabytes=54 ;;
        *-small) seconds=$((4 * 60)) megabytes=1 ;;
        *) seconds=$((2 * 3600)) megabytes=40 ;;
    esac
    seconds=$((seconds * FRAMES / PAPER_FRAMES))
    for env in ${envs[@]+"${envs[@]}"}; do
        [[ $env =~ ^(asterix|breakout|freeway|seaquest|space_invaders)$ ]] ||
            die 2 "ENVS: no game $env, choose from asterix breakout freeway seaquest space_invaders"
        for n in ${ns[@]+"${ns[@]}"}; do
            positive NS "$n"
            for seed in ${seeds[@]+"${seeds[@]}"}; do
                [[ $seed =~ ^[0-9]+$ ]] || die 2 "SEEDS: $seed is not a whole number"
                name=${env}__offdae_${method}__n${n}__$seed
                [ -z "${command_of[$name]-}" ] || continue
                names+=("$name") seconds_of[$name]=$seconds megabytes_of[$name]=$megabytes
                # With the default RUNS no path of this machine enters the run's args.json.
                command=(python "$script.py" --env-id "$env" --n "$n" --seed "$seed" --run-name "$name" --resume)
                [ "$RUNS" = "$ROOT/runs" ] || command+=(--runs-dir "$RUNS")
                command+=(${flags[@]+"${flags[@]}"} ${args[@]+"${args[@]}"})
                printf -v "command_of[$name]" '%q ' "${command[@]}"
                command_of[$name]=${command_of[$name]% }
            done
        done
    done
done
[ ${#names[@]} -gt 0 ] || die 2 "no runs: METHODS, ENVS, NS and SEEDS must each name something"

# --------------------------------------------------------------------------------- what is finished, queued or running
same_size() { # a finished run's directory
    local text=''
    [ ! -f "$1/args.json" ] || read -r -d '' text <"$1/args.json" || true
    [[ $text == *"\"small\": $([ -n "$SMALL" ] && echo true || echo false),"* && $text == *"\"total_timesteps\": $FRAMES,"* ]]
}

declare -A published active
if [ -d "$ROOT/results" ]; then
    while read -r -d '' file; do
        directory=${file%/eval.json}
        published[${directory##*/}]=$directory
    done < <(find "$ROOT/results" -name eval.json -print0)
fi

SLURM=''
if [ -z "${WORKERS-}" ] && command -v sbatch >/dev/null; then
    SLURM=1
    configuration=$(scontrol show config) ||
        die 1 "sbatch is here, but Slurm does not answer: see the error above, or set WORKERS to run on this machine"
    max_array_size=$(sed -n 's/^MaxArraySize *= *//p' <<<"$configuration")
    positive MaxArraySize "$max_array_size"
    # A task of an array has no name of its own: its array's is that of a directory, whose file `tasks` says what it runs.
    queue=$(squeue --all --noheader --array --format='%j %K %F') || die 1 "squeue failed: what is queued is not known"
    declare -A queued array_of
    while read -r job task array; do
        [ -f "$RUNS/.benchmark/$job/tasks" ] || continue
        queued["$job $task"]=1 array_of[$job]=$array
    done <<<"$queue"
    for job in ${array_of[@]+"${!array_of[@]}"}; do
        while IFS=$'\t' read -r task name _; do
            [ -z "${queued["$job $task"]-}" ] || active[$name]=1
        done <"$RUNS/.benchmark/$job/tasks"
    done
fi

held() { # a run's directory: whether a living process on this machine, or on a file system that tells, writes to it
    [ -e "$1/lock" ] && command -v flock >/dev/null && ! flock --shared --nonblock "$1/lock" true
}

todo=() failed_before=() finished=0 in_results=() left_alone=0 resumed=0 other_size=()
for name in "${names[@]}"; do
    if [ -e "$RUNS/$name/eval.json" ]; then
        same_size "$RUNS/$name" || die 2 "$RUNS/$name is finished, but with or without --small or with other --total-timesteps: \
set RUNS to another directory"
        finished=$((finished + 1))
    elif [ -n "${published[$name]-}" ] && same_size "${published[$name]}"; then
        in_results+=("${published[$name]}")
    elif [ -n "${active[$name]-}" ] || held "$RUNS/$name"; then
        left_alone=$((left_alone + 1))
    else
        [ -z "${published[$name]-}" ] || other_size+=("${published[$name]}")
        todo+=("$name")
        [ ! -e "$RUNS/$name/checkpoint.pt" ] || resumed=$((resumed + 1))
        [ ! -e "$LOGS/$name.log" ] || [[ $(tail -n 1 "$LOGS/$name.log") != '== failed'* ]] || failed_before+=("$name")
    fi
done

# ------------------------------------------------------------------------------------------------- what is going to come
say() { # a dry run's standard output is the commands alone
    if [ -n "$DRY_RUN" ]; then echo "$@" >&2; else echo "$@"; fi
}

hours() { # seconds
    awk -v s="$1" 'BEGIN { printf(s < 36000 ? "%.1f" : "%.0f", s / 3600) }'
}

say "${#names[@]} runs: ${#todo[@]} to do, $resumed of them to resume from a checkpoint; $finished finished in $RUNS, \
${#in_results[@]} in results/; $left_alone queued or running, left alone"
if [ ${#in_results[@]} -gt 0 ]; then say "$(printf 'finished, skipped: %s\n' "${in_results[@]/#"$ROOT/"/}")"; fi
if [ ${#other_size[@]} -gt 0 ]; then
    say "$(printf 'of another size, not counted as finished: %s\n' "${other_size[@]/#"$ROOT/"/}")"
fi
if [ ${#failed_before[@]} -gt 0 ]; then
    say "${#failed_before[@]} failed before and are tried again:"
    say "$(last_lines "${failed_before[@]}")"
fi
[ ${#todo[@]} -gt 0 ] || exit 0

seconds=0 megabytes=0
for name in "${todo[@]}"; do
    seconds=$((seconds + ${seconds_of[$name]})) megabytes=$((megabytes + ${megabytes_of[$name]}))
done
if [ -n "$SMALL" ]; then
    say "about $(hours $seconds) hours on one CPU core, at 4 minutes a run (Off-policy DAE 20) for 600,000 frames"
else
    say "about $(hours $seconds) GPU-hours, at the paper's 2 hours a run (Off-policy DAE 15) for 10M frames"
fi
existing=$RUNS
until [ -d "$existing" ]; do existing=$(dirname "$existing"); done
free=$(df -Pk "$existing" | awk 'END { print int($4 / 1000) }')
say "disk: about $(((megabytes + 999) / 1000)) GB once finished, and up to 0.4 GB for each run under way (twice that while it \
writes a checkpoint); $((free / 1000)) GB are free"
[ "$free" -gt "$megabytes" ] || say "WARNING: that will not fit"

# --------------------------------------------------------------------------------------------------------------- Slurm
submit() {
    local gpus per_task per_array submission previous first number=0 directory runs index lines option options id submitted=0
    : "${GPUS=$([ -n "$SMALL" ] && echo 0 || echo 1)}"
    gpus=${GPUS##*:}
    per_task=$((RUNS_PER_GPU * (gpus > 0 ? gpus : 1)))
    per_array=$((max_array_size * per_task))
    if [ -n "$SMALL" ]; then
        : "${CPUS=$per_task}" "${MEM=$((4 * per_task))G}"
    else
        : "${CPUS=$((2 * per_task))}" "${MEM=$((8 * per_task))G}"
    fi
    submission=offdae-$(date +%Y%m%d-%H%M%S)-$$
    previous=$(IFS=: && echo "${array_of[*]-}")
    for ((first = 0; first < ${#todo[@]}; first += per_array)); do
        number=$((number + 1))
        directory=$RUNS/.benchmark/$submission-$number
        runs=("${todo[@]:first:per_array}") lines=''
        for index in "${!runs[@]}"; do
            lines+=$((index / per_task))$'\t'${runs[index]}$'\t'${command_of[${runs[index]}]}$'\n'
        done
        options=(--parsable "--job-name=$submission-$number" --nodes=1 --ntasks=1 "--cpus-per-task=$CPUS" "--mem=$MEM")
        options+=("--array=0-$(((${#runs[@]} - 1) / per_task))${MAX_RUNNING+%$MAX_RUNNING}")
        options+=("--chdir=$directory" --output=%a.log --open-mode=append --requeue "--signal=B:USR1@$SIGNAL_SECONDS")
        [ "$gpus" -eq 0 ] || options+=("--gres=gpu:$GPUS")
        for option in PARTITION ACCOUNT QOS CONSTRAINT TIME; do
            [ -z "${!option-}" ] || options+=("--${option,,}=${!option}")
        done
        # The limit holds for the tasks of one array, so arrays wait for each other.
        [ -z "${MAX_RUNNING-}" ] || [ -z "$previous" ] || options+=("--dependency=afterany:$previous")
        # sbatch keeps a copy of this file, and `tasks` is never written again: both may change or be run while jobs wait.
        options+=("$ROOT/benchmark.sh" --task "$ROOT" "$directory" "$GPUS" "$SETUP")
        if [ -n "$DRY_RUN" ]; then
            printf '%q ' sbatch "${options[@]}"
            printf '\n%s' "$lines"
            previous="<array $number>"
            continue
        fi
        mkdir -p "$LOGS"
        mkdir "$directory"
        printf '%s' "$lines" >"$directory/tasks"
        if ! id=$(sbatch "${options[@]}"); then
            rm "$directory/tasks"
            rmdir "$directory"
            die 1 "sbatch refused, see above: $submitted of ${#todo[@]} runs were submitted. Run the same command again for the \
others, later if the number of jobs is limited, or with fewer SEEDS at a time."
        fi
        previous=${id%%;*} submitted=$((submitted + ${#runs[@]}))
        echo "array $previous: ${#runs[@]} runs, listed with the tasks' logs in $directory"
    done
    [ -n "$DRY_RUN" ] || echo "squeue shows them; run the same command again to see what is finished or failed"
}

if [ -n "$SLURM" ]; then
    submit
    exit
fi

# -------------------------------------------------------------------------------------------------------- this machine
look_around() { # scripts: checks ARGS for each, prints the number of GPUs
    python -B - "$SMALL" "$@" -- ${args[@]+"${args[@]}"} <<'END'
import importlib
import sys

sys.path.insert(0, "")
import torch

scripts, args = sys.argv[2 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :]
print(torch.cuda.device_count())
for name in scripts:
    script = importlib.import_module(name)
    sys.argv = [name, *args]
    script.parse_args()
END
}

run_here() {
    local found gpus threads pids=() running=() began=() fresh=() next=0 slot name script scripts report line
    local signals=0 status failed=() interrupted=0 held=0 shown='' expected=0 took=0
    set_up "$ROOT" || die 1 "SETUP failed: $SETUP"
    scripts=$(for name in "${todo[@]}"; do echo "${command_of[$name]}"; done | sed 's/^python \([a-z_]*\).*/\1/' | sort -u)
    status=0
    # shellcheck disable=SC2086 # one word per script
    report=$(look_around $scripts) || status=$?
    [ "$status" -eq 0 ] || die "$status" "the scripts do not start, see above: check ARGS, or set SETUP to activate an environment"
    found=${report%%$'\n'*} gpus=${GPUS-$found}
    gpus=${gpus##*:}
    [ "$found" -ge "$gpus" ] || die 1 "GPUS=$GPUS was asked for, but torch sees $found here: not run on the CPU"
    [ "$gpus" -gt 0 ] || export CUDA_VISIBLE_DEVICES=
    : "${WORKERS=$((gpus > 0 ? gpus * RUNS_PER_GPU : 1))}"
    threads=$(($(nproc) / WORKERS))
    export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
    if [ -n "$SMALL" ] || [ "$gpus" -gt 0 ]; then
        say "$WORKERS at a time, $OMP_NUM_THREADS CPU threads each: about $(hours $((seconds / WORKERS))) hours"
    else
        say "WARNING: no GPU, and these are not --small runs: each takes days or months on this machine."
    fi
    if [ -n "$DRY_RUN" ]; then
        printf 'cd %q\n' "$ROOT"
        [ -z "$SETUP" ] || echo "$SETUP"
        for name in "${todo[@]}"; do echo "OMP_NUM_THREADS=$OMP_NUM_THREADS ${command_of[$name]}"; done
        return
    fi

    mkdir -p "$LOGS"
    SETSID=$(command -v setsid || true)
    stop_all() {
        signals=$((signals + 1))
        [ ${#pids[@]} -eq 0 ] || kill -TERM "${pids[@]}" 2>/dev/null || true
        echo "interrupted: waiting for ${#pids[@]} runs to write their checkpoints"
    }
    trap stop_all INT TERM HUP

    time_left() {
        local left=0 index rest
        for ((index = next; index < ${#todo[@]}; index++)); do left=$((left + ${seconds_of[${todo[index]}]})); done
        [ "$expected" -eq 0 ] || left=$((left * took / expected))
        for slot in ${pids[@]+"${!pids[@]}"}; do
            rest=${seconds_of[${running[slot]}]}
            [ "$expected" -eq 0 ] || rest=$((rest * took / expected))
            rest=$((rest - SECONDS + began[slot]))
            left=$((left + (rest > 0 ? rest : 0)))
        done
        left=$((left / WORKERS))
        printf -v line '%d:%02d' $((left / 3600)) $((left / 60 % 60))
    }
    show() { # without a subshell, which Ctrl-C would end, and with it all
        time_left
        line="$finished of ${#names[@]} finished, ${#pids[@]} running, ${#failed[@]} failed, about $line hours left"
        if [ -t 1 ]; then
            printf '\r\033[K%s' "$line"
        elif [ "${line%,*}" != "${shown%,*}" ] || [ $((SECONDS % 60)) -eq 0 ]; then
            [ "$line" = "$shown" ] || echo "$line"
        fi
        shown=$line
    }

    finished=$((finished + ${#in_results[@]}))
    while :; do
        for ((slot = 0; slot < WORKERS; slot++)); do
            if [ -n "${pids[slot]-}" ] && ! kill -0 "${pids[slot]}" 2>/dev/null; then
                wait_for "${pids[slot]}"
                case $status in
                    "$FINISHED")
                        finished=$((finished + 1))
                        [ -z "${fresh[slot]}" ] || {
                            expected=$((expected + ${seconds_of[${running[slot]}]})) took=$((took + SECONDS - began[slot]))
                        }
                        ;;
                    "$HELD") held=$((held + 1)) ;;
                    "$INTERRUPTED" | 143) interrupted=$((interrupted + 1)) ;;
                    *) failed+=("${running[slot]}") ;;
                esac
                unset "pids[slot]"
            fi
            if [ -z "${pids[slot]-}" ] && [ "$signals" -eq 0 ] && [ "$next" -lt ${#todo[@]} ]; then
                name=${todo[next]} next=$((next + 1))
                running[slot]=$name began[slot]=$SECONDS fresh[slot]=1
                [ ! -e "$RUNS/$name/checkpoint.pt" ] || fresh[slot]=''
                run_one "$LOGS/$name.log" "${command_of[$name]}" "$((gpus > 1 ? slot % gpus : -1))" &
                pids[slot]=$!
                [ "$signals" -eq 0 ] || kill -TERM $! 2>/dev/null || true
            fi
        done
        show
        [ ${#pids[@]} -gt 0 ] || break
        sleep 0.5 || true
    done
    [ ! -t 1 ] || echo
    if [ ${#failed[@]} -gt 0 ]; then last_lines "${failed[@]}"; fi
    [ "$held" -eq 0 ] || echo "$held left alone: another process has them"
    if [ "$signals" -gt 0 ] || [ "$interrupted" -gt 0 ]; then
        echo "interrupted, $interrupted runs with a checkpoint: the same command continues where they are"
        return "$INTERRUPTED"
    fi
    [ ${#failed[@]} -eq 0 ]
}

run_here
