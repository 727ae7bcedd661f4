"""How close the scripts come to what this machine can do: one table of ratios, each measured within one run because
machines are noisy. Median over 5 repeats, and their range.

    python experiments/speed.py
"""

import importlib
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import minatar
import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / part) for part in ("", "tests")]
from conftest import SCRIPTS  # noqa: E402
from test_speed import needed_cvae_flops, needed_flops  # noqa: E402

import offdae_dae  # noqa: E402
import offdae_offpolicy  # noqa: E402

REPEATS = 5
CPU = torch.device("cpu")
START = time.time()


def timed(function, *arguments):
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def counted_flops(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def progress(what):
    print(f"[{time.time() - START:4.0f} s] {what}", file=sys.stderr, flush=True)


def row(what, values, unit="", goal=""):
    """One line of the table: median and range over the repeats."""
    low, middle, high = min(values), float(np.median(values)), max(values)
    digits = 0 if middle >= 100 else 1 if middle >= 10 else 3
    shown = [f"{value:,.{digits}f}{unit}" for value in (middle, low, high)]
    print(f"| {what} | {shown[0]} | {shown[1]} – {shown[2]} | {goal} |", flush=True)


def peak():
    """FLOP per second of float32 matrix multiplication, the best of a few."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    return 2 * 2048**3 / min(timed(torch.mm, a, b) for _ in range(5))


def filled(script, args, frames):
    """An agent, and a replay with that many frames of segments of n transitions with random boards."""
    games = script.Games(args, script.spawn_seeds(args)[2][:1])
    agent, replay = script.Agent(args, games, CPU), script.Replay(args, games.channels, CPU)
    replay.ring = {name: ring.repeat(frames, *[1] * (ring.ndim - 1)) for name, ring in replay.ring.items()}
    for name in ("states", "next_states"):
        replay.ring[name].random_(0, 256)
    count = frames // args.n
    replay.ring["segments"][:count] = torch.stack([torch.arange(count) * args.n, torch.full((count,), args.n)], dim=1)
    replay.lengths = [args.n] * count
    replay.newest, replay.frames, replay.position = count, count * args.n, count * args.n % args.buffer_size
    return games, agent, replay


def without_cvae(args, cvae, batch):
    """In place of `cvae_loss`, to time the actor-critic update of Off-policy DAE alone."""
    q = torch.full((len(batch.actions), args.latent_size), 1 / args.latent_size)
    return torch.zeros(()), q, q, [torch.zeros(())] * 3


def cvae_update(args, agent, batch):
    agent.optimizer.zero_grad()
    offdae_offpolicy.cvae_loss(args, agent.cvae, batch)[0].backward()
    agent.optimizer.step()


def utilisation():
    peaks = [peak() for _ in range(REPEATS)]
    row("peak: float32 matrix multiplication", [value / 1e9 for value in peaks], " GFLOP/s")
    for name in SCRIPTS:
        script = importlib.import_module(name)
        for n in (8, 32):
            progress(f"utilisation, {name}, n = {n}")
            args = script.Args(env_id="seaquest", n=n, buffer_size=20_000)
            games, agent, replay = filled(script, args, 20_000)
            if script is offdae_offpolicy:
                original, script.cvae_loss = script.cvae_loss, without_cvae
            ends = -(-args.batch_size // n)
            needed = needed_flops(args, games.channels, len(games.action_set), args.batch_size, args.batch_size + ends)
            counted = counted_flops(lambda: script.update(args, agent, replay))  # noqa: B023
            shares = []
            for _ in range(REPEATS):
                best = peak()
                shares.append(100 * counted / timed(script.update, args, agent, replay) / max(best, peak()))
            row(f"{name}, n = {n}: actor-critic update, share of the peak", shares, "%", "≥ 65%")
            row(f"{name}, n = {n}: FLOPs counted / needed", [counted / needed], "", "≤ 1.03")
            if script is offdae_offpolicy:
                script.cvae_loss = original
    progress("utilisation, CVAE")
    args = offdae_offpolicy.Args(env_id="seaquest", n=8, batch_size=32, buffer_size=20_000)
    games, agent, replay = filled(offdae_offpolicy, args, 20_000)
    batch = replay.sample()
    counted = counted_flops(lambda: cvae_update(args, agent, batch))
    needed = needed_cvae_flops(args, agent.cvae, games.channels, len(games.action_set), args.batch_size)
    shares = []
    for _ in range(REPEATS):
        best = peak()
        shares.append(100 * counted / timed(cvae_update, args, agent, batch) / max(best, peak()))
    row("CVAE update (32 frames), share of the peak", shares, "%", "≥ 70%")
    row("CVAE: FLOPs counted / needed", [counted / needed], "", "≤ 1.03")


def bare_steps(games, action_set, actions):
    """What MinAtar itself takes: `act` and `state`, and a reset where an episode ends."""
    for step in actions:
        for game, action in zip(games, step, strict=True):
            _, terminal = game.act(action_set[action])
            game.state()
            if terminal:
                game.reset()
                game.state()


def loop_steps(games, replay, actions):
    for step in actions:
        replay.add(games.step(step))


def environments():
    for env_id in offdae_dae.GAMES:
        progress(f"environment loop, {env_id}")
        args = offdae_dae.Args(env_id=env_id, buffer_size=60_000)
        seeds = offdae_dae.spawn_seeds(args)[2]
        games = offdae_dae.Games(args, seeds)
        replay = offdae_dae.Replay(args, games.channels, CPU)
        bare = [minatar.Environment(env_id, sticky_action_prob=0.0, difficulty_ramping=False) for _ in seeds]
        for game, seed in zip(bare, seeds, strict=True):
            game.seed(seed.generate_state(8))
            game.reset()
        rng, ratios, speeds = np.random.default_rng(0), [], []
        for repeat in range(REPEATS + 1):
            loop = alone = 0.0
            for _ in range(10):  # in turns, so that noise meets both
                actions = rng.integers(len(games.action_set), size=(8, args.num_envs))
                alone += timed(bare_steps, bare, games.action_set, actions.tolist())
                loop += timed(loop_steps, games, replay, actions)
            if repeat:  # the first one warms up
                ratios.append(100 * alone / loop)
                speeds.append(80 * args.num_envs / loop)
        row(f"{env_id}: 128-game loop with replay, share of bare `act` + `state`", ratios, "%", "≥ 85%")
        row(f"{env_id}: 128-game loop with replay", speeds, " frames/s")


def iteration(script, args, games, replay, agent, updates):
    """One step of the training loop. Seconds in all, and those outside `act` and the networks' part of the updates."""
    start = time.perf_counter()
    actions = script.act(agent.network, games, CPU)
    outside = 0.0
    for _ in range(updates):
        before = time.perf_counter()
        batch = replay.sample()
        outside += time.perf_counter() - before
        script.update(args, agent, type("Sampled", (), dict(sample=lambda self, batch=batch: batch))())
    before = time.perf_counter()
    replay.add(games.step(actions))
    return time.perf_counter() - start, outside + time.perf_counter() - before


def everything_else():
    for what, sizes, goal, iterations in (
        ("the paper's size", {}, "≤ 5%", 1),
        ("--small", offdae_dae.SMALL, "≤ 30%", 50),
    ):
        progress(f"share outside the networks, {what}")
        args = offdae_dae.Args(**sizes | dict(buffer_size=20_000))
        games = offdae_dae.Games(args, offdae_dae.spawn_seeds(args)[2])
        _, agent, replay = filled(offdae_dae, args, 19_000)
        shares = []
        for _ in range(REPEATS):
            updates = args.num_envs // args.steps_per_update
            pairs = [iteration(offdae_dae, args, games, replay, agent, updates) for _ in range(iterations)]
            total, outside = np.sum(pairs, axis=0)
            shares.append(100 * outside / total)
        row(f"DAE on Asterix, {what}: time outside the networks", shares, "%", goal)


def plain_update(args, agent, boards, segments):
    """What one would write first: padded segments, float boards, the EMA network on all next states too."""
    K = args.batch_size // args.n
    chosen = torch.randint(len(segments["rewards"]), (K,))
    states, next_states = boards["states"][chosen], boards["next_states"][chosen]  # [K, n, C, 10, 10]
    actions, rewards, mask = (segments[name][chosen] for name in ("actions", "rewards", "mask"))
    online = agent.network(states.flatten(0, 1))
    with torch.no_grad():
        target = agent.target_network(states.flatten(0, 1))
        next_value = agent.target_network(next_states.flatten(0, 1)).value.view(K, args.n)
    online = online._replace(advantage=offdae_dae.centred(online.advantage, target.log_policy.exp()))
    advantage = offdae_dae.taken(online.advantage, actions.flatten()).view(K, args.n)
    lengths = mask.sum(1).long()
    carry = next_value[torch.arange(K), lengths - 1] * ~segments["terminal"][chosen]
    errors = []
    for i in reversed(range(args.n)):
        inside = mask[:, i] > 0
        carry = torch.where(inside, rewards[:, i] - advantage[:, i] + args.gamma * carry, carry)
        errors.append(torch.where(inside, online.value.view(K, args.n)[:, i] - carry, 0.0))
    loss = torch.stack(errors).square().sum() / mask.sum() + offdae_dae.actor_loss(args, online, target)[0]
    agent.optimizer.zero_grad()
    loss.backward()
    agent.optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(agent.target_network.parameters(), agent.network.parameters(), strict=True):
            slow.mul_(args.tau).add_(fast, alpha=1 - args.tau)
    return int(mask.sum())


def against_a_plain_loop():
    """Per real frame, on segments of a random policy's Asterix games, of which some are short."""
    for n in (8, 32):
        progress(f"against a plain loop, n = {n}")
        args = offdae_dae.Args(n=n, buffer_size=20_000)
        games = offdae_dae.Games(args, offdae_dae.spawn_seeds(args)[2])
        agent, replay = offdae_dae.Agent(args, games, CPU), offdae_dae.Replay(args, games.channels, CPU)
        rng = np.random.default_rng(0)
        for _ in range(150):
            replay.add(games.step(rng.integers(len(games.action_set), size=args.num_envs)))
        starts, lengths = replay.ring["segments"][replay.oldest : replay.newest].unbind(1)
        where = starts[:, None] + torch.arange(n).clamp(max=n - 1)
        mask = torch.arange(n) < lengths[:, None]
        where = torch.where(mask, where, starts[:, None]) % args.buffer_size
        boards = {
            name: offdae_dae.unpack(replay.ring[name][where.flatten()], games.channels).unflatten(0, where.shape)
            for name in ("states", "next_states")
        }
        segments = {name: replay.ring[name][where] for name in ("actions", "rewards")} | dict(mask=mask.float())
        segments |= dict(actions=segments["actions"].long())
        segments |= dict(terminal=replay.ring["terminal"][(starts + lengths - 1) % args.buffer_size])
        ratios = []
        plain_update(args, agent, boards, segments)
        for _ in range(REPEATS):
            start = time.perf_counter()
            frames = plain_update(args, agent, boards, segments)
            per_frame = (time.perf_counter() - start) / frames
            ratios.append(per_frame / (timed(offdae_dae.update, args, agent, replay) / args.batch_size))
        row(f"DAE on Asterix, n = {n}: speed per real frame, times that of a plain loop", ratios, "", "> 1")


def growth():
    progress("growth of replay")
    args = offdae_dae.Args(env_id="seaquest")
    (_, agent, few), (_, _, many) = filled(offdae_dae, args, 20_000), filled(offdae_dae, args, 1_000_000)
    offdae_dae.update(args, agent, few), offdae_dae.update(args, agent, many)
    ratios = []
    for _ in range(REPEATS):
        ratios.append(timed(offdae_dae.update, args, agent, many) / timed(offdae_dae.update, args, agent, few))
    row("update with 1,000,000 frames in replay / with 20,000", ratios, "", "1")
    size = sum(ring.nbytes for ring in many.ring.values()) / 1e6
    row("full Seaquest replay on the device", [size], " MB", "≤ 300 MB")
    for script in ("offdae_dae", "offdae_offpolicy"):
        for n in (8, 32):
            progress(f"peak memory, {script}, n = {n}")
            code = [sys.executable, __file__, "--peak-memory", script, str(n)]
            size = float(subprocess.run(code, capture_output=True, text=True, check=True).stdout)
            frames = "1024 frames" if script == "offdae_dae" else "32 frames"
            row(f"{script}, n = {n}: memory of the process in an update of {frames}", [size], " MB")


def peak_memory(script, n):
    """Of a process of its own during an update, with the optimiser's state there already."""
    script = importlib.import_module(script)
    args = script.Args(env_id="seaquest", n=n, buffer_size=20_000)
    if script is offdae_offpolicy:
        args = replace(args, batch_size=32)
    _, agent, replay = filled(script, args, 20_000)
    for network in (x for x in vars(agent).values() if isinstance(x, torch.nn.Module)):
        for weight in network.parameters():
            weight.grad = torch.zeros_like(weight)
    for optimizer in (x for x in vars(agent).values() if isinstance(x, torch.optim.Optimizer)):
        optimizer.step()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    script.update(args, agent, replay)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(int(status["VmHWM"].split()[0]) / 1024)


def main():
    if sys.argv[1:2] == ["--peak-memory"]:
        return peak_memory(sys.argv[2], int(sys.argv[3]))
    threads, commit = torch.get_num_threads(), os.popen("git rev-parse --short HEAD").read().strip()
    print(f"torch {torch.__version__}, {threads} threads, {REPEATS} repeats, commit {commit}\n")
    print("| what | median | range | goal |\n|---|---|---|---|")
    utilisation()
    environments()
    everything_else()
    against_a_plain_loop()
    growth()
    progress("done")


if __name__ == "__main__":
    main()
