"""Off-policy DAE on Asterix with chance known: z is read off the boards, where offdae_offpolicy.py has to learn it.

    python experiments/known_chance.py --small --n 8
    python experiments/known_chance.py results/agents/asterix   # what z tells of chance, for a run of any game

It tells whether a result of Off-policy DAE is due to its CVAE or to all the rest. In Asterix things move in every fifth
step, and in every second of those something appears: in a free row, from the left or the right, treasure one time in
three. The boards do not show when. So z is one of: 0 nothing moves, 1 things move, 2 to 33 they do and something
appears (8 rows x 2 sides x enemy or treasure). Which of the three it will be, a small network predicts, since where the
player is gives away something about the time; what appears, and where, follows the game's own law.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import offdae_offpolicy as script

ENEMY, TREASURE = 1, 3  # channels
ROWS = slice(1, 9)
LATENTS = 34
IDLE_WORDS = 2  # MinAtar's wrapper draws one number a step, even without sticky actions
QUESTIONS = "things move", "if so, something appears", "if so, what and where"


def things(states):
    """[F, C, 10, 10] -> enemies and treasures [F, 2, 8 rows, 10]"""
    return states[:, [ENEMY, TREASURE], ROWS]


def outcome(states, next_states):
    """z of each transition. [F]"""
    before, after = things(states), things(next_states)
    was_there, is_there = before.amax((1, 3)) > 0, after.amax((1, 3)) > 0  # [F, 8]
    new = is_there & ~was_there
    moved = (was_there & is_there & (before != after).any(3).any(1)).any(1)
    row = new.float().argmax(1)
    shown = after[torch.arange(len(row)), :, row]  # [F, 2, 10]
    from_left, treasure = shown[:, :, :2].amax((1, 2)), shown[:, 1].amax(1)
    return torch.where(new.any(1), 2 + 4 * row + 2 * from_left + treasure, moved).long()


def law(states):
    """What appears, if something does: one of the free rows, either side, treasure one time in three. [F, 32]"""
    free = 1 - things(states).amax((1, 3))
    one_of_free = free / free.sum(1, keepdim=True).clamp(min=1)
    return (one_of_free[:, :, None] * torch.tensor([2, 1, 2, 1]) / 6).flatten(1)


class KnownChance(nn.Module):
    """log p(nothing moves, things move, something appears | s, a). [F, 3]"""

    def __init__(self, args, channels, num_actions):
        super().__init__()
        convolutions = nn.Conv2d(channels, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten()
        self.network = nn.Sequential(*convolutions, nn.Linear(576, 128), nn.ReLU(), nn.Linear(128, 3 * num_actions))
        self.register_buffer("ent_coef", torch.tensor(args.ent_coef), persistent=False)  # which `main` cools

    def forward(self, states, actions):
        return self.network(states).unflatten(1, (-1, 3))[torch.arange(len(actions)), actions].log_softmax(1)


def known_chance_loss(args, cvae, batch):
    q = nn.functional.one_hot(outcome(batch.states, batch.next_states), LATENTS).float()
    log_coarse = cvae(batch.states, batch.actions)
    coarse_q = torch.cat([q[:, :2], q[:, 2:].sum(1, keepdim=True)], dim=1)
    loss = -(coarse_q * log_coarse).sum(1).mean()
    coarse = log_coarse.detach().exp()
    p = torch.cat([coarse[:, :2], coarse[:, 2:] * law(batch.states)], dim=1)
    kl = -(q * p.clamp(min=1e-10).log()).sum(1).mean()
    return loss, q, p, (torch.zeros(()), kl, torch.zeros(()))


def information(joint):
    """Mutual information of rows and columns, and the entropy of the rows, in nats."""
    joint = joint / joint.sum()
    rows, columns = joint.sum(1, keepdim=True), joint.sum(0, keepdim=True)
    told = torch.special.xlogy(joint, joint / (rows * columns).clamp(min=1e-30)).sum().clamp(min=0)
    return f"{told.item():.3f} of {torch.special.xlogy(rows, rows).sum().abs().item():.3f} nats"


def nats(joint):
    """What z tells of each question, from counts of outcomes and latents [LATENTS, |Z|]."""
    moves, appears = (torch.stack([joint[i], joint[i + 1 :].sum(0)]) for i in (0, 1))
    return [information(x) for x in (moves, appears, joint[2:])]


def words_drawn(games):
    return torch.tensor([game.random.get_state()[2] for game in games.games])


@torch.no_grad()
def what_z_tells(directory, steps=600):
    """How much the latent of a finished run of offdae_offpolicy.py tells of what chance did."""
    model = torch.load(directory / "model.pt", weights_only=True)
    args = script.Args(**model["args"])
    games = script.Games(args, np.random.SeedSequence(args.seed + 1000).spawn(args.num_envs))
    agent = script.Agent(args, games, torch.device("cpu"))
    agent.network.load_state_dict(model["network"])
    agent.cvae.load_state_dict(model["cvae"])
    agent.cvae.eval()
    torch.manual_seed(args.seed)
    joint, of_draws = torch.zeros(LATENTS, args.latent_size), torch.zeros(2, args.latent_size)
    for _ in range(steps):
        before = words_drawn(games)
        played = games.step(script.act(agent.network, games, torch.device("cpu")))
        drew = (words_drawn(games) - before) % 624 != IDLE_WORDS
        boards = [script.unpack(torch.from_numpy(x), games.channels) for x in (played.states, played.next_states)]
        _, log_q = agent.cvae(boards[0], torch.from_numpy(played.actions), boards[1])
        goes_on = torch.from_numpy(~(played.terminal | played.truncated))  # a reset draws numbers, too
        of_draws.index_add_(0, drew.long()[goes_on], log_q.exp()[goes_on])
        if args.env_id == "asterix":
            joint.index_add_(0, outcome(*boards), log_q.exp())
    print(f"the game drew a number: {information(of_draws)}")
    for question, told in zip(QUESTIONS, nats(joint), strict=True) if args.env_id == "asterix" else []:
        print(f"{question}: {told}")


def main():
    if len(sys.argv) == 2 and Path(sys.argv[1]).is_dir():
        return what_z_tells(Path(sys.argv[1]))
    script.SCRIPT, script.CVAE, script.cvae_loss = "known_chance", KnownChance, known_chance_loss
    script.make_twin = lambda agent: None
    sys.argv += ["--env-id", "asterix", "--latent-size", str(LATENTS), "--exp-name", "known_chance"]
    script.main()


if __name__ == "__main__":
    main()
