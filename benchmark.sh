#!/usr/bin/env bash
# bash benchmark.sh [--small] [--dry-run] [--help]
# The paper's experiment: 4 methods x 5 games x 3 backup lengths x 20 seeds, and Off-policy DAE without target network.
# Where sbatch exists it submits Slurm job arrays; elsewhere, or if WORKERS is set, it runs on this machine. The same
# command again skips finished runs, leaves queued ones alone, resumes interrupted ones, tries failed ones again.
#   --small       CPU-size runs of a part of the grid; a variable that is set wins over its defaults
#   --dry-run     print the commands, then what they take; write and start nothing
# Environment variables, with their defaults (--small's in brackets):
#   METHODS       "uncorrected dae tree offpolicy offpolicy_no_target"; dae_no_target, not in the paper, works too
#   ENVS NS       "asterix breakout freeway seaquest space_invaders" ["asterix breakout"], "8 16 32" ["8 32"]
#   SEEDS         "1 2 ... 20" ["1 2 3"]; runs go in the order METHODS, ENVS, NS, SEEDS, the seeds changing fastest
#   ARGS          more arguments for every run, such as "--total-timesteps 1000000"; with METHODS=offpolicy,
#                 "--decode-latents 4" halves an update: 3.1 instead of 6.4 TFLOP; with "--cvae-every 4" 1.6
#   RUNS          directory of the runs: runs/ beside benchmark.sh; what they printed is in .benchmark/logs there
#   REUSE         another directory whose finished runs count, such as results/study; by default none
#   SETUP         a line of shell to run before each run, such as "source activate offdae"
#   WORKERS       runs at a time on this machine: RUNS_PER_GPU (1) for each GPU, 1 without GPU; they share the cores
#   GPUS          here those in CUDA_VISIBLE_DEVICES or nvidia-smi; of a Slurm task 1 [0], or with a type: a100:1
#   CPUS MEM      of a Slurm task: 2 [1] and 8G [4G] for each of its runs, of which each GPU has RUNS_PER_GPU
#   TIME          of a Slurm task; SIGNAL_SECONDS (300) before its end the runs write checkpoints and are requeued
#   MAX_RUNNING   Slurm tasks at a time: any number; PARTITION ACCOUNT QOS CONSTRAINT are as for sbatch
# Exit status: 0 submitted or finished, 1 failed or could not be submitted, 2 a setting was refused, 75 interrupted.
# shellcheck disable=SC2016 # what is in single quotes is for Python and the shells that srun and xargs start
set -feuo pipefail # f: lists are words, never file names

die() { printf 'benchmark.sh: %s\n' "$2" >&2 && exit "$1"; } # status, message

run() { # slot, name and command: one run in a shell of its own, which prints what becomes of it
    local name=${2%% *} command=${2#* } devices status outcomes=([0]=finished [3]=locked [75]=interrupted)
    local see_gpu='import torch; torch.cuda.is_available() or exit("torch sees no GPU here: not run on the CPU")'
    trap : TERM USR1 # they are for Python, which writes its checkpoint
    IFS=, read -r -a devices <<<"${CUDA_VISIBLE_DEVICES-}"
    [ ${#devices[@]} -eq 0 ] || export CUDA_VISIBLE_DEVICES=${devices[$1 % ${#devices[@]}]}
    echo "running $name"
    exec 3>&1 >>"$LOGS/$name.log" 2>&1 </dev/null
    echo "== $(date '+%F %T'), $(hostname): $command"
    eval "$SETUP" && cd "$ROOT" && { [ "$GPUS" = 0 ] || python -c "$see_gpu"; } && eval "$command" 3>&-
    status=$?
    [[ $status != 138 && $status != 143 ]] || status=75 # the signal came before Python could catch it: nothing is lost
    echo "== ${outcomes[status]-failed} (status $status after $SECONDS s)"
    echo "${outcomes[status]-failed} $name" >&3
    exit $((status > 75 ? 1 : status)) # srun returns the highest status, and 75 must win
}
export -f run

if [ "${1-}" = --task ]; then # what sbatch runs, from its own copy of this file
    export ROOT=$2 LOGS=$3 COMMANDS=$4 GPUS=$5 SETUP=$6 OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
    # SIGUSR1, ahead of the time limit, reaches Python and not this shell; SIGTERM, when Slurm ends the job, ends it.
    srun --export=ALL --kill-on-bad-exit=0 --wait=0 --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c '
        line=$(sed -n "s/^$SLURM_ARRAY_TASK_ID //p" "$COMMANDS" | sed -n "$((SLURM_PROCID + 1))p")
        [ -z "$line" ] || run "$SLURM_PROCID" "$line"' && exit || status=$?
    [[ $status = 75 || $status = 3 ]] || exit "$status" # 3: the lock of a dead node, which lives on for a minute
    [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ] || die 1 "100 restarts, not requeued: raise TIME, run benchmark.sh again"
    exec scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
fi

[[ " $* " != *' --help '* ]] || exec sed -n '2,/^# Exit/s/^# \?//p' "$0"
[[ " $* " =~ ^(\ --small|\ --dry-run|\ )*$ ]] || die 2 "$*: unknown, see --help"
[[ $* = *--small* ]] && ARGS=" --small ${ARGS-} " || ARGS=" ${ARGS-} "
methods='uncorrected dae tree offpolicy offpolicy_no_target' games='asterix breakout freeway seaquest space_invaders'
# Estimates: seconds of a run and of one of Off-policy DAE (paper's GPU, or one CPU core), and MB that they leave.
if [[ $ARGS = *' --small '* ]]; then
    small=true frames=2400000 seconds=(330 2100) megabytes=(1 2) cpus=1 memory=4 gpus=0 unit='CPU core'
    : "${ENVS=asterix breakout}" "${NS=8 32}" "${SEEDS=1 2 3}"
else
    small=false frames=10000000 seconds=(7200 54000) megabytes=(40 54) cpus=2 memory=8 gpus=1 unit=GPU
    : "${ENVS=$games}" "${NS=8 16 32}" "${SEEDS=$(echo {1..20})}"
fi
: "${METHODS=$methods}" "${RUNS_PER_GPU=1}" "${SIGNAL_SECONDS=300}" "${SETUP=}"
[[ "${WORKERS-1} $RUNS_PER_GPU" =~ ^[1-9][0-9]*\ [1-9][0-9]*$ ]] || die 2 "WORKERS and RUNS_PER_GPU: at least 1"
[[ ! $ARGS =~ \ --(env-id|n|seed|run-name|runs-dir|exp-name|resume|no-target-network|evaluate)[\ =] ]] ||
    die 2 "ARGS: --${BASH_REMATCH[1]} is set by METHODS, ENVS, NS, SEEDS and RUNS"
[[ ! $ARGS =~ \ --total-timesteps[\ =]([0-9_]+) ]] || total=${BASH_REMATCH[1]//_/}
ROOT=$(cd "$(dirname "$0")" && pwd)
RUNS=$(realpath -m "${RUNS-$ROOT/runs}")
if [ -z "${WORKERS-}" ] && command -v sbatch >/dev/null; then
    max_tasks=$(scontrol show config | grep -oP '^MaxArraySize *= *\K[1-9]\d*') ||
        die 1 "Slurm does not answer, or has no job arrays: set WORKERS to run on this machine"
    queue=$(squeue --me --noheader --array --format='%j %K %F') || die 1 "squeue failed: what is queued is not known"
    queued=$(while read -r job task _; do grep -s "^$task " "$RUNS/.benchmark/$job/commands"; done <<<"$queue") || true
    earlier=$(sed -n 's/^offdae-.* //p' <<<"$queue" | sort -u | paste -sd:)
else
    IFS=, read -r -a devices <<<"${CUDA_VISIBLE_DEVICES-$(nvidia-smi -L 2>&- | grep -oP '^GPU \K\d+' | paste -sd,)}"
    gpus=${#devices[@]}
fi
export ROOT SETUP LOGS=$RUNS/.benchmark/logs GPUS=${GPUS-$gpus}
gpus=${GPUS##*:}
: "${WORKERS=$((RUNS_PER_GPU * (gpus > 0 ? gpus : 1)))}" # with Slurm, the runs of a task

declare -A cost=() count=([finished]=0 [running]=0 [failed]=0 [interrupted]=0 [locked]=0)
todo=() runs=0 work=0 disk=0 half=0
for method in $METHODS; do for env in $ENVS; do for n in $NS; do for seed in $SEEDS; do
    name=${env}__offdae_${method}__n${n}__$seed flags=() kind=0 runs=$((runs + 1))
    [[ " $games " = *" $env "* && " $methods dae_no_target " = *" $method "* && $n-$seed =~ ^[1-9][0-9]*-[0-9]+$ ]] ||
        die 2 "no run $name: METHODS from $methods dae_no_target; ENVS from $games; NS and SEEDS are whole numbers"
    for directory in "$RUNS/$name" "${REUSE-$RUNS}/$name"; do
        [ -e "$directory/eval.json" ] || continue
        [[ $(<"$directory/args.json") = *"\"small\": $small,"*"\"total_timesteps\": ${total-$frames},"* ]] ||
            die 2 "$directory has other --small or --total-timesteps: choose another RUNS or REUSE"
        count[finished]=$((count[finished] + 1))
        continue 2
    done
    [[ -z ${cost[$name]-} && ${queued-} != *" $name "* ]] || continue
    [[ $method != offpolicy* ]] || kind=1
    [[ $method != *_no_target ]] || flags=(--no-target-network --exp-name "offdae_$method")
    [ "$RUNS" = "$ROOT/runs" ] || flags+=(--runs-dir "$RUNS") # by default args.json names no path of this machine
    printf -v command '%q ' python "offdae_${method%_no_target}.py" --env-id "$env" --n "$n" --seed "$seed" \
        --run-name "$name" --resume "${flags[@]}"
    todo+=("$name $command${ARGS# }") cost[$name]=$((seconds[kind] * ${total-$frames} / frames))
    work=$((work + cost[$name])) disk=$((disk + megabytes[kind])) log=$LOGS/$name.log
    [[ ! -e $log || $(tail -n 1 "$log") != '== failed'* ]] || echo "failed before: $(tail -n 2 "$log") $log" >&2
done; done; done; done

[[ $* != *--dry-run* ]] || { printf '%s\n' "cd ${ROOT@Q}" "${todo[@]#* }" && exec >&2; }
echo "$runs runs: ${count[finished]} finished, $((runs - count[finished] - ${#todo[@]})) queued, ${#todo[@]} to do"
echo "about $((work / 3600)) hours of a $unit: $((seconds[0] / 60)) minutes a run, Off-policy DAE $((seconds[1] / 60))"
echo "disk: about $((disk / 1000 + 1)) GB once finished, and up to 0.4 GB for each run under way"
[[ $small = true || $gpus -gt 0 ]] || echo "WARNING: no GPU, and not --small: each run takes days or months"
[[ $* != *--dry-run* && ${#todo[@]} -gt 0 ]] || exit 0
mkdir -p "$LOGS"

if [ -n "${queue+Slurm}" ]; then
    : "${CPUS=$((cpus * WORKERS))}" "${MEM=$((memory * WORKERS))G}"
    options=(--parsable --requeue --nodes=1 --ntasks="$WORKERS" --cpus-per-task=$((CPUS / WORKERS)) --mem="$MEM"
        --signal="USR1@$SIGNAL_SECONDS" ${TIME:+--time="$TIME"} ${QOS:+--qos="$QOS"} ${ACCOUNT:+--account="$ACCOUNT"}
        ${PARTITION:+--partition="$PARTITION"} ${CONSTRAINT:+--constraint="$CONSTRAINT"})
    [ "$gpus" -eq 0 ] || options+=(--gres="gpu:$GPUS")
    for ((first = 0; first < ${#todo[@]}; first += max_tasks * WORKERS)); do
        directory=$RUNS/.benchmark/offdae-$(date +%Y%m%d-%H%M%S)-$$-$first
        mkdir "$directory"
        lines=("${todo[@]:first:max_tasks * WORKERS}")
        for index in "${!lines[@]}"; do echo "$((index / WORKERS)) ${lines[index]}"; done >"$directory/commands"
        # MAX_RUNNING counts the tasks of one array, so arrays wait for each other.
        array=$(sbatch "${options[@]}" --job-name="${directory##*/}" --chdir="$directory" --output=%a.log \
            --open-mode=append --array="0-$(((${#lines[@]} - 1) / WORKERS))${MAX_RUNNING:+%$MAX_RUNNING}" \
            ${MAX_RUNNING:+${earlier:+--dependency="afterany:$earlier"}} \
            "$ROOT/benchmark.sh" --task "$ROOT" "$LOGS" "$directory/commands" "$GPUS" "$SETUP") ||
            die 1 "sbatch refused, see above: $first of ${#todo[@]} runs submitted; the same command submits the others"
        earlier=${array%%;*}
        echo "array $earlier: ${#lines[@]} runs; logs of its tasks in $directory"
    done
    exit
fi

CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${devices[*]:0:gpus}")
export CUDA_VISIBLE_DEVICES OMP_NUM_THREADS=$((WORKERS < $(nproc) ? $(nproc) / WORKERS : 1))
# In a session of their own the runs get no Ctrl-C but one SIGTERM, of which xargs dies, so that it starts no other.
exec {events}< <(exec setsid xargs -a <(printf '%s\n' "${todo[@]}") -d '\n' -P "$WORKERS" --process-slot-var=SLOT \
    -I LINE bash -c 'run "$SLOT" "$1"' bash LINE)
group=$! left=$((work / WORKERS))
trap 'stopped=1 && kill -TERM -- "-$group" && echo "waiting for checkpoints" || true' INT TERM HUP
while read -r -u "$events" outcome name; do
    count[$outcome]=$((count[$outcome] + 1)) half=$((half + cost[$name] / 2)) # once at the start, once at the end
    [ "$outcome" = running ] || count[running]=$((count[running] - 1)) left=$(((work - half) * SECONDS / (half + 1)))
    printf '%(%T)T %s: %s; %d of %d finished, %d running, %d failed, about %d:%02d hours left\n' -1 "$name" "$outcome" \
        "${count[finished]}" "$runs" "${count[running]}" "${count[failed]}" $((left / 3600)) $((left / 60 % 60))
    [ "$outcome" != failed ] || tail -n 2 "$LOGS/$name.log" || true
done
[[ -z ${stopped-} && ${count[interrupted]} = 0 ]] || die 75 "interrupted: the same command continues"
[ "${count[failed]}" -eq 0 ]
