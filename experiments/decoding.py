"""Does z learn as much when fewer latents, or fewer frames, are decoded? The CVAE alone, on frames of a trained agent.

    python experiments/decoding.py

Each row is a CVAE of `--small` with its own `--decode-latents` and `--cvae-every`, trained with the script's loss,
cooling and twins on the same frames of Asterix. It prints what z then tells of chance (see known_chance.py) and the
time of an update, as a multiple of the first row's.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from known_chance import LATENTS, QUESTIONS, nats, outcome, script

ROWS = {"exact": (16, 1), "4 latents": (4, 1), "3 latents": (3, 1), "exact, every 7th frame": (16, 7)}
ROWS |= {"4 latents, every 4th frame": (4, 4), "4 latents, every 8th frame": (4, 8)}  # the last is --small
AGENT, CPU = Path(__file__).resolve().parent.parent / "results/agents/asterix/model.pt", torch.device("cpu")


def play(steps):
    """Replay of an agent, without the beginnings of its episodes."""
    model = torch.load(AGENT, weights_only=True)
    args = script.Args(**model["args"])
    games = script.Games(args, np.random.SeedSequence(0).spawn(args.num_envs))
    agent, replay = script.Agent(args, games, CPU), script.Replay(args, games.channels, CPU)
    agent.network.load_state_dict(model["network"])
    for step in range(steps):
        transitions = games.step(script.act(agent.network, games, CPU))
        if step >= steps // 4:
            replay.add(transitions)
    return args, games, replay


def train(args, games, replay, updates):
    """Nats and seconds per update."""
    torch.manual_seed(1)
    agent, seconds = script.Agent(args, games, CPU), []
    for k in range(updates):
        for group in agent.optimizer.param_groups:
            group["lr"] = args.learning_rate * (1 - k / updates)
        agent.cvae.ent_coef.fill_(args.ent_coef * 300 ** max(0, 1 - 2 * k / updates))
        batch, start = replay.sample(), time.process_time()
        agent.optimizer.zero_grad()
        script.cvae_loss(args, agent.cvae, batch)[0].backward()
        agent.optimizer.step()
        seconds.append(time.process_time() - start)
        if (k + 1) % 20 == 0 and 0.25 <= k / updates < 0.75:
            script.make_twin(agent)
    joint = torch.zeros(LATENTS, args.latent_size)
    with torch.no_grad():
        for batch in (replay.sample() for _ in range(200)):
            log_q = agent.cvae(batch.states, batch.actions, batch.next_states)[1]
            joint.index_add_(0, outcome(batch.states, batch.next_states), log_q.exp())
    return nats(joint), np.median(seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=2000)
    updates = parser.parse_args().updates
    torch.set_num_threads(1)
    args, games, replay = play(steps=1600)
    print(f"| | {' | '.join(QUESTIONS)} | time of an update |")
    print("|---|---|---|---|---|")
    first = None
    for name, (args.decode_latents, args.cvae_every) in ROWS.items():
        told, seconds = train(args, games, replay, updates)
        first = first or seconds
        print(f"| {name} | {' | '.join(told)} | {seconds / first:.2f} |", flush=True)


if __name__ == "__main__":
    main()
