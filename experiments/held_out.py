"""Does luck explain returns, or has it memorised those in replay? Off-policy DAE with every eighth game kept out
of replay; at the end the critic loss on frames that were replayed and on those that never were, with and without luck.

    python experiments/held_out.py --small --n 32 --exp-name known_moves

Luck that explains lowers the loss on both. What it lowers on replayed frames alone was memorised. Names of
known_chance.py (Asterix) say what z tells; with another one, or none, this is offdae_offpolicy.py and its CVAE.
The four losses are printed and in the run's held_out.json.
"""

import json
import sys
from pathlib import Path
from unittest.mock import patch

import known_chance
import numpy as np
import torch
from known_chance import script

EVERY = 8
BATCHES = 200
Replay, evaluate, Agent = script.Replay, script.evaluate, script.Agent
made = {}


class PartialReplay(Replay):
    """Replay without every eighth game; the segments of these are in `held_out`."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.held_out = Replay(*arguments)
        self.held_out.stage, self.held_out.staged = self.stage, self.staged
        made["replay"] = self

    def store(self, complete):
        held_out = complete & (np.arange(len(complete)) % EVERY == 0)
        if held_out.any():
            self.held_out.store(held_out)
        if (complete & ~held_out).any():
            super().store(complete & ~held_out)


def no_luck(luck, actions, q, p):
    return torch.zeros(len(actions))


@torch.no_grad()
def critic_losses(args, agent, replay):
    """With luck and without, on the same frames."""
    sums = np.zeros(2)
    for _ in range(BATCHES):
        batch = replay.sample()
        with_luck = script.compute_losses(args, agent, batch)[1][0].item()
        with patch.object(script, "centred_luck", no_luck):
            sums += with_luck, script.compute_losses(args, agent, batch)[1][0].item()
    return dict(zip(("with luck", "without luck"), (sums / BATCHES).round(4).tolist(), strict=True))


def remembered_agent(*arguments):
    made["agent"] = Agent(*arguments)
    return made["agent"]


def evaluate_and_measure(args, network, device):
    agent, replay = made["agent"], made["replay"]
    measured = {"replayed": critic_losses(args, agent, replay), "held out": critic_losses(args, agent, replay.held_out)}
    (Path(args.runs_dir, args.run_name) / "held_out.json").write_text(json.dumps(measured, indent=2) + "\n")
    print(f"critic loss: {measured}")
    return evaluate(args, network, device)


if __name__ == "__main__":
    script.Replay, script.Agent, script.evaluate = PartialReplay, remembered_agent, evaluate_and_measure
    sys.argv += ["--checkpoint-interval", "0"]
    known_chance.main() if known_chance.NAMES & set(sys.argv) else script.main()
