"""Off-policy DAE: regress returns on V, the advantages of all actions and luck, in a simple actor-critic on MinAtar.

One of four scripts for *Skill or Luck? Return Decomposition via Advantage Functions* (Pan & Schölkopf, ICLR 2024) that
differ in `critic_loss`; names such as Eq. `hierarchy` are labels in the paper's source. Off-policy DAE takes the effect
of the agent's actions (skill) and that of chance (luck) out of the return. What chance did is the latent z of a CVAE.

    python offdae_offpolicy.py --env-id asterix --n 8 --small
"""

import copy
import hashlib
import importlib.metadata
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from collections import namedtuple
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # importing MinAtar would swallow a Ctrl-C

import minatar
import numpy as np
import torch
import tyro
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

FILE, METHOD = Path(__file__).resolve(), __doc__.split(":")[0]
SCRIPT, SHA256 = FILE.stem, hashlib.sha256(FILE.read_bytes()).hexdigest()
GAMES = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")
LOG_POINTS, INF = 500, float("inf")
LOGGED = ("critic", "actor", "kl", "entropy", "value", "advantage_std")
LOGGED += ("cvae_reconstruction", "cvae_kl", "posterior_entropy", "luck_std", "luck_mean")
CHARTS = ("episodic_return", "episodic_length", "episodes", "reward_per_frame", "SPS", "learning_rate")
TAGS = [*(f"charts/{name}" for name in CHARTS), *(f"losses/{name}" for name in LOGGED)]
FAILED, REFUSED, LOCKED, INTERRUPTED = 1, 2, 3, 75  # exit statuses; interrupted: --resume continues
BAR = dict(unit_scale=True, miniters=1, delay=1e-3)  # progress: a bar on a terminal, otherwise a line every 10 seconds
BAR |= {} if sys.stderr.isatty() else dict(mininterval=10, bar_format="{percentage:3.0f}%{r_bar}\n")
signals = []  # those that asked the run to stop


# ------------------------------------------------------------------------------------------------------ arguments
@dataclass
class Args:
    env_id: Literal[GAMES] = "asterix"  # the game
    n: int = 8  # backup length, the transitions of a stored segment (the paper: 8, 16 and 32)
    seed: int = 1  # seed of the games, the networks and all sampling
    small: bool = False  # CPU-size defaults: a smaller network, smaller batches, fewer updates
    total_timesteps: int = 10_000_000  # frames of the run, all games together
    num_envs: int = 128  # games played at once
    sticky_action_prob: float = 0.0  # probability that a game repeats the last action (MinAtar's own default: 0.1)
    difficulty_ramping: bool = False  # let the games become harder over time (MinAtar's own default: yes)
    max_episode_frames: int = 108_000  # time limit of an episode, a truncation and not a terminal state
    buffer_size: int = 1_000_000  # frames kept in replay
    batch_size: int = 1024  # frames in the batch of one update
    learning_starts: int = 25_000  # frames played before the first update
    steps_per_update: int = 32  # frames played per update
    learning_rate: float = 2.5e-4  # learning rate at the start, annealed linearly to 0
    gamma: float = 0.99  # discount factor
    tau: float = 0.999  # weight of the past in the exponential moving average (EMA) of the network
    kl_coef: float = 3.0  # weight of KL(policy || EMA policy) in the actor loss
    channels: int = 128  # channels of both convolutions
    hidden: int = 1024  # units of the hidden layer
    eval_episodes: int = 100  # episodes of the evaluation at the end, one per game
    cuda: bool = True  # use a GPU if there is one
    compile: bool = False  # compile the losses; on a GPU with CUDA graphs
    exp_name: str = SCRIPT  # name of the experiment
    runs_dir: str = "runs"  # directory of the runs
    run_name: str = ""  # name of this run's directory there, by default of game, experiment, n, seed and time
    resume: bool = False  # continue the run --run-name with its own arguments; start it if it is new
    checkpoint_interval: float = 1800  # seconds between checkpoints, 0 for none
    evaluate: str = ""  # directory or model of a finished run: play it again, print the score, change nothing
    track: bool = False  # log to Weights & Biases too; WANDB_PROJECT and WANDB_ENTITY say where
    target_network: bool = True  # bootstrap with the EMA network, or with the trained network and its gradient
    latent_size: int = 16  # latents z, the outcomes that chance can have
    decode_latents: int = 16  # latents to decode each frame with, all or the likeliest and one drawn from the rest
    cvae_every: int = 1  # decode every so many frames of a batch; the prior learns from all, luck is asked about all
    cvae_channels: int = 128  # channels of the CVAE, half as many in the first and last block
    luck_gradient: bool = True  # luck's gradient trains the layers that it shares with V and A, or its head alone
    ent_coef: float = 1e-4  # weight of the posterior's entropy, falls from 300 times that in half of the run

    def updates(self, frames):  # due after so many frames, none before the first segments of n transitions are stored
        return max(0, frames - max(self.learning_starts, self.num_envs * self.n)) // self.steps_per_update


SMALL = dict(total_timesteps=2_400_000, batch_size=128, learning_starts=10_000, steps_per_update=48)
SMALL |= dict(learning_rate=1e-3, tau=0.99, kl_coef=30.0, channels=16, hidden=128)
SMALL |= dict(cvae_channels=16, cvae_every=8, decode_latents=4, luck_gradient=False)
BOUNDS = dict(gamma=(0, 1), tau=(0, 1), sticky_action_prob=(0, 1), learning_rate=(1e-9, INF))  # others: (1, INF)
BOUNDS |= dict.fromkeys(["seed", "learning_starts", "kl_coef", "checkpoint_interval"], (0, INF))
BOUNDS |= dict(ent_coef=(1e-9, INF), decode_latents=(2, INF))
RESUME_MAY_DIFFER = {"resume", "runs_dir", "run_name", "checkpoint_interval", "cuda", "track"}
EVALUATE_MAY_DIFFER = {"evaluate", "seed", "eval_episodes", "max_episode_frames", "cuda"}


def stop(message, status=REFUSED):
    print(f"{SCRIPT}.py: {message}", file=sys.stderr)
    sys.exit(status)


def parse_args():
    """Defaults are the paper's, those of `--small`, or those saved with the run to resume or evaluate; flags win."""
    args = tyro.cli(Args, default=Args(**SMALL) if "--small" in sys.argv else Args(), description=__doc__)
    path, saved = Path(args.evaluate or Path(args.runs_dir, args.run_name)), {}
    if path.is_dir():
        path /= "model.pt" if args.evaluate or (path / "eval.json").exists() else "checkpoint.pt"
    if args.evaluate or (args.resume and path.is_file()):
        saved = read(path, "cuda" if args.cuda and torch.cuda.is_available() else "cpu")
        args = tyro.cli(Args, default=Args(**saved["args"] | dict(cuda=args.cuda)))
        for name in saved["args"].keys() - (EVALUATE_MAY_DIFFER if args.evaluate else RESUME_MAY_DIFFER):
            if saved["args"][name] != (value := getattr(args, name)):
                stop(f"{path} was saved with --{name.replace('_', '-')} {saved['args'][name]}, not {value}")
    bounds = BOUNDS | dict(n=(1, min(args.batch_size, args.max_episode_frames) + 1))
    bounds |= dict(buffer_size=(args.batch_size + args.num_envs * args.n, INF))
    for name, value in asdict(args).items():
        low, high = bounds.get(name, (1, INF))
        if type(value) in (int, float) and not low <= value < high:
            stop(f"--{name.replace('_', '-')} {value}: must be at least {low} and less than {high}")
    if args.resume and not args.run_name:
        stop("--resume: needs the --run-name of the run to continue")
    args.run_name = args.run_name or f"{args.env_id}__{args.exp_name}__n{args.n}__{args.seed}__{int(time.time())}"
    if Path(args.run_name).is_absolute() or ".." in Path(args.run_name).parts or not args.run_name.isprintable():
        stop(f"--run-name {args.run_name!r}: must be a plain name, --runs-dir says where the runs are")
    return args, saved


# --------------------------------------------------------------------------------------------------- environments
# one step of each game; `next_states` are those before any reset; arrays [N, ...]
Transitions = namedtuple("Transitions", "states actions rewards next_states terminal truncated")


def pack(observations):
    """Boolean observations [10, 10, C] to channel-first bits, 8 in a byte. [N, bytes]"""
    stacked = np.concatenate(observations).reshape(len(observations), 10, 10, -1)
    channel_first = stacked.transpose(0, 3, 1, 2).reshape(len(observations), -1)
    return np.packbits(channel_first, axis=1, bitorder="little")


def unpack(packed, channels):
    """The inverse of `pack`, on the device. [N, bytes] -> [N, C, 10, 10]"""
    bits = (packed[..., None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    return bits.flatten(1)[:, : channels * 100].unflatten(1, (channels, 10, 10)).to(torch.get_default_dtype())


class Games:
    """MinAtar games stepped together. `states` holds the packed observations to act on."""

    def __init__(self, args, seeds):
        self.games = [minatar.Environment(args.env_id, args.sticky_action_prob, args.difficulty_ramping) for _ in seeds]
        for game, seed in zip(self.games, seeds, strict=True):
            game.seed(seed.generate_state(8))
            game.reset()  # the constructor's own reset drew from an unseeded generator
        self.channels, self.action_set = self.games[0].n_channels, self.games[0].minimal_action_set()
        self.max_episode_frames = args.max_episode_frames
        self.states = pack([game.state() for game in self.games])
        self.returns, self.lengths = np.zeros(len(seeds)), np.zeros(len(seeds), dtype=np.int64)
        self.finished = []  # (return, length, truncated) of each episode that ended

    def step(self, actions):
        outcomes = [game.act(self.action_set[a]) for game, a in zip(self.games, actions.tolist(), strict=True)]
        observations = [game.state() for game in self.games]
        rewards, terminal = (np.array(column) for column in zip(*outcomes, strict=True))
        self.returns += rewards
        self.lengths += 1
        truncated = ~terminal & (self.lengths >= self.max_episode_frames)
        ended = np.flatnonzero(terminal | truncated)
        for i in ended:
            self.finished.append((float(self.returns[i]), int(self.lengths[i]), bool(truncated[i])))
            self.returns[i] = self.lengths[i] = 0
            self.games[i].reset()
            observations.append(self.games[i].state())
        packed = pack(observations)
        next_states, after_reset = packed[: len(self.games)], packed[len(self.games) :]
        transitions = Transitions(self.states, actions, rewards, next_states, terminal, truncated)
        self.states = next_states.copy()
        self.states[ended] = after_reset
        return transitions

    def keep(self, which):
        self.games = [game for game, kept in zip(self.games, which, strict=True) if kept]
        self.states, self.returns, self.lengths = self.states[which], self.returns[which], self.lengths[which]


# --------------------------------------------------------------------------------------------------------- replay
class Batch(NamedTuple):
    """Segments laid end to end: exactly F real frames. At most K = ceil(F / n) segments need a bootstrap."""

    states: torch.Tensor  # [F, C, 10, 10]
    actions: torch.Tensor  # [F]
    rewards: torch.Tensor  # [F]
    next_states: torch.Tensor  # [F, C, 10, 10]
    remaining: torch.Tensor  # [F] L - i, the steps to the end of frame i's segment: 1 at its last frame
    discounts: torch.Tensor  # [F, F] gamma^(j - i) in a segment, else 0: `discounts @ x` sums x to the segment's end
    end_states: torch.Tensor  # [K, C, 10, 10] s_L of the segments that do not end in a terminal state
    end_slot: torch.Tensor  # [F] where end_states has the s_L of the frame's segment ...
    end_terminal: torch.Tensor  # [F] ... unless that segment ends in a terminal state


class Replay:
    """Segments of n transitions, or fewer up to a terminal state (Alg. `actorcritic`), laid end to end in a ring of
    frames on the device that grows up to `buffer_size`. The oldest segments leave first."""

    def __init__(self, args, channels, device):
        self.n, self.batch_size, self.capacity, self.gamma = args.n, args.batch_size, args.buffer_size, args.gamma
        self.channels, size = channels, (channels * 100 + 7) // 8
        frame = dict(states=("u1", size), next_states=("u1", size), actions=("u1",), rewards=("f4",), terminal=("?",))
        self.stage = {name: np.zeros((args.num_envs, args.n, *shape), dtype) for name, (dtype, *shape) in frame.items()}
        self.staged = np.zeros(args.num_envs, dtype=np.int64)
        frame["segments"] = ("i8", 2)  # start and length; segments oldest .. newest - 1 are stored
        rings = {name: np.zeros((1, *shape), dtype) for name, (dtype, *shape) in frame.items()}
        self.ring = {name: torch.from_numpy(ring).to(device) for name, ring in rings.items()}
        self.lengths = []  # of all segments so far
        self.oldest = self.newest = self.frames = self.position = 0  # frames stored, and where the next one goes

    def to_device(self, array):
        return torch.from_numpy(array).to(self.ring["segments"].device, non_blocking=True)

    def add(self, transitions):
        """Stage one transition of each game, then store the segments that it completes."""
        for name, stage in self.stage.items():
            stage[np.arange(len(stage)), self.staged] = getattr(transitions, name)
        self.staged += 1
        complete = transitions.terminal | (self.staged == self.n)
        if complete.any():
            self.store(complete)
        self.staged[complete | transitions.truncated] = 0

    def store(self, complete):
        lengths, capacity = self.staged[complete], self.capacity
        total = int(lengths.sum())
        while self.frames + total > capacity:
            self.frames -= self.lengths[self.oldest]
            self.oldest += 1
        while len(self.ring["terminal"]) < min(self.position + total, capacity):
            self.ring = {name: torch.cat([ring, ring[: capacity - len(ring)]]) for name, ring in self.ring.items()}
        game, step = np.nonzero(complete[:, None] & (np.arange(self.n) < self.staged[:, None]))
        where = self.to_device((self.position + np.arange(total)) % capacity)
        for name, stage in self.stage.items():
            self.ring[name][where] = self.to_device(stage[game, step])
        rows = self.to_device((self.newest + np.arange(len(lengths))) % capacity)
        starts = (self.position + lengths.cumsum() - lengths) % capacity
        self.ring["segments"][rows] = self.to_device(np.stack([starts, lengths], axis=1))
        self.lengths += lengths.tolist()
        self.newest += len(lengths)
        self.frames += total
        self.position = (self.position + total) % capacity

    def sample(self):
        """Choose segments uniformly until F frames are reached; of the last one only the tail is kept."""
        capacity, F, K = self.capacity, self.batch_size, -(-self.batch_size // self.n)
        frame = torch.arange(F, device=self.ring["segments"].device)
        chosen = torch.randint(self.oldest, self.newest, (F,), device=frame.device) % capacity
        starts, lengths = self.ring["segments"][chosen].unbind(1)
        ends = lengths.cumsum(0)
        segment = torch.searchsorted(ends, frame, right=True)  # [F] which of the chosen ones the frame belongs to
        remaining = ends[segment].clamp(max=F) - frame
        after_end = (starts + lengths)[segment]
        where = (after_end - remaining) % capacity
        end_terminal = self.ring["terminal"][(after_end - 1) % capacity]
        bootstraps = ((remaining == 1) & ~end_terminal).long()
        count = bootstraps.cumsum(0)
        end_frame = torch.searchsorted(count, torch.arange(1, K + 1, device=frame.device)).clamp(max=F - 1)  # [K]
        steps, same_segment = frame - frame[:, None], segment == segment[:, None]
        return Batch(
            states=unpack(self.ring["states"][where], self.channels),
            actions=self.ring["actions"][where].long(),
            rewards=self.ring["rewards"][where],
            next_states=unpack(self.ring["next_states"][where], self.channels),
            remaining=remaining,
            discounts=torch.where(same_segment & (steps >= 0), self.gamma ** steps.clamp(min=0), 0.0),
            end_states=unpack(self.ring["next_states"][where[end_frame]], self.channels),
            end_slot=(count - bootstraps).clamp(max=K - 1),
            end_terminal=end_terminal,
        )


# -------------------------------------------------------------------------------------------------------- network
Output = namedtuple("Output", "value advantage log_policy luck")  # [F], [F, |A|], [F, |A|], [F, |A|, |Z|]


class Network(nn.Module):
    """Figure `ac_net`. The policy head sees detached features: the actor loss trains nothing else."""

    def __init__(self, args, channels, num_actions):
        super().__init__()
        first, second = nn.Conv2d(channels, args.channels, 3), nn.Conv2d(args.channels, args.channels, 3)
        self.convolutions = nn.Sequential(first, nn.ReLU(True), second, nn.ReLU(True), nn.Flatten())
        self.hidden = nn.Sequential(nn.Linear(args.channels * 6 * 6, args.hidden), nn.ReLU(True))
        self.value = nn.Linear(args.hidden, 1)
        self.advantage, self.policy = nn.Linear(args.hidden, num_actions), nn.Linear(args.hidden, num_actions)
        self.luck = nn.Linear(args.hidden, num_actions * args.latent_size)  # g(s,a,z)
        self.luck_gradient, self.luck_shape = args.luck_gradient, (num_actions, args.latent_size)

    def forward(self, states):
        features = self.hidden(self.convolutions(states))
        return Output(
            value=self.value(features).squeeze(1),
            advantage=self.advantage(features),
            log_policy=self.policy(features.detach()).log_softmax(1),
            luck=self.luck(features if self.luck_gradient else features.detach()).unflatten(1, self.luck_shape),
        )


def conv(inputs, outputs, kind=nn.Conv2d):
    return kind(inputs, outputs, 3, padding=1)


class ResidualBlock(nn.Sequential):
    def __init__(self, channels):
        first, second = conv(channels, channels), conv(channels, channels)
        super().__init__(nn.BatchNorm2d(channels), nn.SiLU(), first, nn.BatchNorm2d(channels), nn.SiLU(), second)

    def forward(self, x):
        return x + super().forward(x)


class CVAE(nn.Module):
    """Figure `cvae_net`: posterior q(z|s,a,s'), decoder p(s'|s,a,z), prior p(z|s,a) of (s,a), which h may forget."""

    def __init__(self, args, channels, num_actions):
        super().__init__()
        wide, half = args.cvae_channels, -(-args.cvae_channels // 2)
        self.encoder = nn.Sequential(conv(channels, half), ResidualBlock(half), conv(half, wide), ResidualBlock(wide))
        self.transition = nn.Sequential(conv(wide + num_actions, wide), ResidualBlock(wide), ResidualBlock(wide))
        self.prior = nn.Sequential(conv(channels + num_actions, wide), ResidualBlock(wide), ResidualBlock(wide))
        self.posterior = nn.Sequential(conv(2 * wide, wide), ResidualBlock(wide), ResidualBlock(wide))
        self.to_p, self.to_q = nn.Linear(wide, args.latent_size), nn.Linear(wide, args.latent_size)
        first, second = conv(wide, half, nn.ConvTranspose2d), conv(half, channels, nn.ConvTranspose2d)
        self.decoder = nn.Sequential(ResidualBlock(wide), first, ResidualBlock(half), second)
        self.latents = nn.Parameter(torch.randn(args.latent_size, wide))
        self.register_buffer("actions", torch.eye(num_actions)[:, :, None, None].repeat(1, 1, 10, 10), persistent=False)
        self.register_buffer("ent_coef", torch.tensor(args.ent_coef), persistent=False)
        self.register_buffer("missed", torch.zeros(args.latent_size))  # lately: -log(1 - q), large if only this z fits
        self.register_buffer("unexplained", torch.zeros(args.latent_size))  # lately: q times the frame's error

    def log_prior(self, states, actions):
        """log p(z|s,a) [F, |Z|]"""
        return self.to_p(self.prior(torch.cat([states, self.actions[actions]], dim=1)).mean((2, 3))).log_softmax(1)

    def forward(self, states, actions, next_states):
        """h(s,a) [F, channels, 10, 10] and log q(z|s,a,s') [F, |Z|]"""
        encoded, next_encoded = self.encoder(torch.cat([states, next_states])).chunk(2)
        h = self.transition(torch.cat([encoded, self.actions[actions]], dim=1))
        return h, self.to_q(self.posterior(torch.cat([h, next_encoded], dim=1)).mean((2, 3))).log_softmax(1)

    def errors(self, h, z, next_states):
        """-log p(s'|s,a,z) per pixel for each z [F, k], in one batch: BatchNorm would subtract a z that is alone."""
        logits = self.decoder((h[:, None] + self.latents[z][..., None, None]).flatten(0, 1)).unflatten(0, z.shape)
        return (nn.functional.softplus(logits) - next_states[:, None] * logits).mean((2, 3, 4))


class Agent:
    """Networks and optimisers. The target network is the exponential moving average (EMA) of the network."""

    def __init__(self, args, games, device):
        self.network = Network(args, games.channels, len(games.action_set))
        self.network.to(device, memory_format=torch.channels_last)
        self.target_network = copy.deepcopy(self.network).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=args.learning_rate, eps=1e-4, fused=True)
        self.cvae = CVAE(args, games.channels, len(games.action_set)).to(device, memory_format=torch.channels_last)
        self.optimizer.add_param_group(dict(params=self.cvae.parameters(), betas=(0.5, 0.9), eps=1e-8))


# --------------------------------------------------------------------------------------------------------- losses
def centred(advantage, policy):
    """Subtract the mean under the policy: the constraint on A of Eq. `loss_full`. [F, |A|]"""
    return advantage - (policy * advantage).sum(1, keepdim=True)


def taken(per_action, actions):
    """The entry of the action that was taken. [F, |A|] -> [F]"""
    return per_action.gather(1, actions[:, None]).squeeze(1)


def bootstrap(network, batch, gamma):
    """gamma^(L-i) V(s_L), and 0 after a terminal state. [F]"""
    end_value = network(batch.end_states).value[batch.end_slot]
    return torch.where(batch.end_terminal, 0.0, gamma**batch.remaining * end_value)


def centred_luck(luck, actions, q, p):
    """B(s,a,s') = E_q[g(s,a,z)] - E_p[g(s,a,z)], 0 on average over s' if p is the average of q. [F, |A|, |Z|] -> [F]
    g = sqrt(p) luck: otherwise Adam makes a z that never occurs, q = 0 and p small, a second, uncentred advantage."""
    return ((q - p) * p.sqrt() * luck.take_along_dim(actions[:, None, None], dim=1).squeeze(1)).sum(1)


def critic_loss(args, agent, batch, online, target, luck):
    """Eq. `hierarchy`: V(s_i) -> sum_t gamma^(t-i) (r_t - A_t - gamma B_t) + gamma^(L-i) V_target(s_L), for each i."""
    advantage = taken(online.advantage, batch.actions)
    end_value = bootstrap(agent.target_network if args.target_network else agent.network, batch, args.gamma)
    returns = batch.discounts @ (batch.rewards - advantage - args.gamma * luck) + end_value
    return (online.value - returns).square().mean()


def expected_error(log_q, k, errors):
    """Sum over z of q(z) e(z) from the k - 1 likeliest z and one drawn from the rest in proportion to q, which gets the
    weight of all the rest. Value and gradient are right on average over the draw, and exact for k >= |Z|. [F]
    Also the errors of the chosen z and log q of these alone. [F, k]"""
    likeliest = log_q.topk(min(k, log_q.shape[1]) - 1).indices
    rest = log_q.detach().scatter(1, likeliest, -torch.inf)
    drawn = (rest - torch.empty_like(rest).exponential_().log()).argmax(1, keepdim=True)
    chosen = torch.cat([likeliest, drawn], dim=1)  # [F, k]
    errors, log_q = errors(chosen), log_q.gather(1, chosen)
    top = log_q.detach()[:, :-1].exp()
    weights = torch.cat([top, 1 - top.sum(1, keepdim=True)], dim=1) * (log_q - log_q.detach()).exp()
    baseline = errors.detach()[:, :1]  # less noise, and no change on average: the gradients of q sum to 0
    return (weights * (errors - baseline)).sum(1) + baseline[:, 0], errors.detach(), log_q.log_softmax(1)


def cvae_loss(args, cvae, batch):
    """Eq. `loss_cvae`: KL(q || p), for the prior only, + E_q[-log p(s'|s,a,z)] - ent_coef H(q); q, p and what to log.
    The best q is softmax(-errors / ent_coef): cooled slowly, each outcome gets its own z; cold at once, some share. A
    cross entropy pulls q there too: when q is sure, its gradients of the other terms are gone."""
    frames, every = (batch.states, batch.actions, batch.next_states), args.cvae_every
    h, log_q = cvae(*(trained := [x[::every] for x in frames]))
    entropy = -(log_q.exp() * log_q).sum(1).mean()
    error, errors, log_chosen = expected_error(log_q, args.decode_latents, lambda z: cvae.errors(h, z, trained[2]))
    cross_entropy = -((-errors / cvae.ent_coef).softmax(1) * log_chosen).sum(1).mean()
    with torch.no_grad():
        cvae.missed.lerp_(-(1 - log_q.exp()).clamp(min=1e-7).log().mean(0), 0.05)
        cvae.unexplained.lerp_(error @ log_q.exp() / len(error), 0.05)
        log_q = cvae(*frames)[1] if every > 1 else log_q.detach()
    log_p = cvae.log_prior(batch.states, batch.actions)  # fitted to the q that luck uses, else luck takes from V
    kl = (log_q.exp() * (log_q - log_p)).sum(1).mean()
    loss = kl + error.mean() - cvae.ent_coef * entropy + 0.1 * cross_entropy
    return loss, log_q.exp(), log_p.detach().exp(), (error.mean(), kl, entropy)


@torch.no_grad()
def make_twin(agent):
    """The z that is missed least becomes, but for a little noise, that with most left to explain, and both share its
    frames. Entropy alone would let nearly all z say what is frequent, and none would come back for what is rare."""
    cvae, most = agent.cvae, agent.cvae.unexplained.argmax(0, keepdim=True)
    least = (cvae.unexplained + cvae.ent_coef * cvae.missed).argmin(0, keepdim=True)
    cvae.latents[least] = cvae.latents[most] + 0.1 * torch.randn_like(cvae.latents[most])
    for head in (cvae.to_p, cvae.to_q):
        head.bias[most] -= np.log(2)
        head.weight[least], head.bias[least] = head.weight[most], head.bias[most]
    for parameter in agent.network.luck.parameters():
        luck = parameter.unflatten(0, (-1, len(cvae.latents)))
        luck[:, least] = luck[:, most]


def actor_loss(args, online, target):
    """Alg. `actorcritic`: -E_policy[A / std(A)] + kl_coef KL(policy || EMA policy); also that KL and std(A)."""
    policy, advantage = online.log_policy.exp(), online.advantage.detach()
    advantage_std = (target.log_policy.exp() * advantage.square()).sum(1).mean().sqrt()
    kl = (policy * (online.log_policy - target.log_policy)).sum(1).mean()
    skill = (policy * advantage).sum(1).mean() / (advantage_std + 1e-5)
    return -skill + args.kl_coef * kl, kl, advantage_std


def compute_losses(args, agent, batch):
    """The loss to minimise, and the values of LOGGED."""
    online, target = agent.network(batch.states), agent.target_network(batch.states)
    online = online._replace(advantage=centred(online.advantage, target.log_policy.exp()))
    target = target._replace(advantage=centred(target.advantage, target.log_policy.exp()))
    cvae, q, p, cvae_logged = cvae_loss(args, agent.cvae, batch)
    luck = centred_luck(online.luck, batch.actions, q, p)
    critic = critic_loss(args, agent, batch, online, target, luck)
    actor, kl, advantage_std = actor_loss(args, online, target)
    entropy = -(online.log_policy.exp() * online.log_policy).sum(1).mean()
    loss, logged = critic + actor, [critic, actor, kl, entropy, online.value.mean(), advantage_std]
    loss, logged = loss + cvae, [*logged, *cvae_logged, luck.std(correction=0), luck.mean()]
    return loss, torch.stack(logged).detach()


def update(args, agent, replay, compute_losses=compute_losses):
    """One step of Alg. `actorcritic`. No GPU synchronisation."""
    loss, logged = compute_losses(args, agent, replay.sample())
    agent.optimizer.zero_grad()
    loss.backward()
    agent.optimizer.step()
    with torch.no_grad():
        torch._foreach_lerp_(list(agent.target_network.parameters()), list(agent.network.parameters()), 1 - args.tau)
    return logged


# ----------------------------------------------------------------------------------------------------- evaluation
@torch.no_grad()
def act(network, games, device, generator=None):
    """Sample an action for each game from the policy. [N]"""
    states = torch.from_numpy(games.states).to(device, non_blocking=True)
    policy = network(unpack(states, games.channels)).log_policy.exp().nan_to_num(1.0)  # of NaN: the run will stop
    return torch.multinomial(policy, 1, generator=generator).squeeze(1).cpu().numpy()


def spawn_seeds(args):
    """Independent seeds for torch, for the evaluation and for each game."""
    torch_seed, eval_seed, *game_seeds = np.random.SeedSequence(args.seed).spawn(2 + args.num_envs)
    return int(torch_seed.generate_state(1)[0]), eval_seed, game_seeds


def evaluate(args, network, device):
    """Undiscounted returns of one episode in each of `eval_episodes` games: the first to finish would be short ones."""
    sampler_seed, *game_seeds = spawn_seeds(args)[1].spawn(1 + args.eval_episodes)
    generator = torch.Generator(device).manual_seed(int(sampler_seed.generate_state(1)[0]))
    games, start, frames = Games(args, game_seeds), time.time(), 0
    with tqdm(total=args.eval_episodes, unit=" episodes", **BAR) as bar:
        while games.games and not signals:
            frames += len(games.games)
            transitions = games.step(act(network, games, device, generator))
            games.keep(~(transitions.terminal | transitions.truncated))
            bar.set_postfix_str(f"evaluation, {frames:,} frames", refresh=False)
            bar.update(len(games.finished) - bar.n)
    if signals:
        return None
    returns, lengths, truncated = zip(*games.finished, strict=True)
    score = dict(mean=np.mean(returns).item(), stderr=np.std(returns).item() / max(1, len(returns) - 1) ** 0.5)
    print(f"return {score['mean']:.2f} ± {score['stderr']:.2f}, {args.eval_episodes} episodes", flush=True)
    score |= dict(frames=frames, seconds=time.time() - start)
    return score | dict(returns=returns, lengths=lengths, truncated=truncated)


# ---------------------------------------------------------------------------------------------------------- files
def write_atomically(path, content):
    """Text, or a dict for `torch.load`. A kill or an error leaves the old file or the new one, whole."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file) if isinstance(content, dict) else file.write(content.encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except RuntimeError as error:  # torch.save hides the system's error behind one of its own
        raise error.__context__ or error from None
    finally:
        temporary.unlink(missing_ok=True)


def read(path, device):
    """A model or checkpoint of this script. No code in it is run: only these classes can be in a file."""
    classes = [np.ndarray, np.dtype, *(type(np.dtype(kind)) for kind in "?BIlfd"), minatar.Environment]
    classes += [np._core.multiarray._reconstruct, np._core.multiarray.scalar, np.random.MT19937, np.random.RandomState]
    classes += [np.random._pickle.__randomstate_ctor, np.random._pickle.__bit_generator_ctor]
    classes += [importlib.import_module(f"minatar.environments.{game}").Env for game in GAMES]
    try:
        with torch.serialization.safe_globals(classes):
            saved = torch.load(path, map_location=device, weights_only=True)
        script, fits = saved["script"], saved["args"].keys() <= asdict(Args()).keys()
        intact = zipfile.ZipFile(path).testzip() is None  # the checksums are right
    except Exception as error:  # a damaged file can make the readers raise anything
        stop(f"{path} is missing, damaged or not of this project ({type(error).__name__}); nothing was changed")
    if not (intact and fits and script == SCRIPT and saved.get("sha256", SHA256) == SHA256):
        stop(f"{path} is damaged, or was saved by another version of {script}.py; nothing was changed")
    return saved


def open_run(args, device, identity, new):
    """The directory of the run with its args.json, and a lock for one writer at a time."""
    fcntl = importlib.import_module("fcntl")  # not on Windows, which is not supported
    directory = Path(args.runs_dir, args.run_name)
    if directory.exists() and not args.resume:
        stop(f"{directory} exists: choose another --run-name, or continue it with --resume")
    if (directory / "eval.json").exists():
        stop(f"{directory} is finished: return {json.loads((directory / 'eval.json').read_text())['mean']:.2f}", 0)
    directory.mkdir(parents=True, exist_ok=True)
    lock = open(directory / "lock", "a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel frees it when the process ends, however it ends
    except BlockingIOError:
        stop(f"{directory} is being written by {(directory / 'lock').read_text()}", LOCKED)
    (directory / "lock").write_text(f"pid {os.getpid()} on {os.uname().nodename}")
    if new:
        git = subprocess.run("git rev-parse HEAD", shell=True, cwd=FILE.parent, capture_output=True, text=True)
        versions = {name: importlib.metadata.version(name) for name in ("torch", "minatar", "numpy")}
        name = torch.cuda.get_device_name() if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
        described = identity | dict(sha256=SHA256, git_commit=git.stdout.strip(), device=name, versions=versions)
        described |= dict(python=sys.version.split()[0], command=shlex.join(["python", *sys.argv]))
        write_atomically(directory / "args.json", json.dumps(described, indent=2) + "\n")
    return directory, lock


def add_point(directory, writer, bar, agent, games, log):
    """A point of the curve: means since the last one, for curve.csv and TensorBoard."""
    totals, rate = (log.frames, log.updates, log.rewards, len(games.finished)), agent.optimizer.param_groups[0]["lr"]
    frames, updates, rewards, episodes = (now - last for now, last in zip(totals, log.totals, strict=True))
    returns, lengths, _ = np.mean(games.finished[-episodes:], axis=0) if episodes else ("", "", "")
    speed = (log.frames - max(log.totals[0], log.started_at)) / (time.time() - log.time)
    losses = (log.sums / updates).tolist() if updates else [""] * len(LOGGED)
    if updates and not np.isfinite(losses).all():
        stop(f"{directory}: not finite at frame {log.frames:,}: {dict(zip(LOGGED, losses, strict=True))}", FAILED)
    point = [returns, lengths, episodes, rewards / frames, round(speed, 1), rate, *losses]
    log.curve.append(",".join(map(str, [log.frames, *point])))
    log.totals, log.time = totals, time.time()
    log.sums.zero_()
    recent = np.mean([episode[0] for episode in games.finished[-100:]] or np.nan)
    bar.set_postfix_str(f"return {recent:.2f}" if log.updates else "not learning yet", refresh=False)
    try:
        write_atomically(directory / "curve.csv", "\n".join([",".join(["frames", *TAGS]), *log.curve, ""]))
        for tag, value in ((tag, value) for tag, value in zip(TAGS, point, strict=True) if value != ""):
            writer.add_scalar(tag, value, log.frames)
    except OSError as error:
        tqdm.write(f"warning: curve not written at frame {log.frames:,}: {error}")


def save_checkpoint(directory, identity, parts):
    """Only of a healthy run. A full disk is no reason to stop it."""
    if not all(x.isfinite().all() for part in parts.values() if isinstance(part, nn.Module) for x in part.parameters()):
        stop(f"{directory}: weights not finite at frame {parts['log'].frames:,}, try a smaller --learning-rate", FAILED)
    saved = {name: part.state_dict() if hasattr(part, "state_dict") else vars(part) for name, part in parts.items()}
    random = torch.get_rng_state(), torch.cuda.get_rng_state_all()
    try:
        write_atomically(directory / "checkpoint.pt", identity | saved | dict(random=random, sha256=SHA256))
    except OSError as error:
        tqdm.write(f"warning: no checkpoint at frame {parts['log'].frames:,}: {error}")


# ----------------------------------------------------------------------------------------------------------- main
def catch_signal(number, _):
    """The loops look for it; another Ctrl-C quits at once. Nothing is written into a pipe: its reader may be gone."""
    signals.append(number)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.write(2, b"\nFinishing this step, then a checkpoint. Ctrl-C quits now.\n") if sys.stderr.isatty() else None


def main():
    args, saved = parse_args()
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.deterministic = True
    torch.set_float32_matmul_precision("high")
    torch_seed, _, game_seeds = spawn_seeds(args)
    torch.manual_seed(torch_seed)
    games = Games(args, game_seeds)
    replay, agent = Replay(args, games.channels, device), Agent(args, games, device)
    if args.evaluate:
        agent.network.load_state_dict(saved["network"])
        return evaluate(args, agent.network, device)
    wandb = importlib.import_module("wandb") if args.track else None
    for number in (signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGUSR1", signal.SIGINT)):  # not on Windows
        signal.signal(number, catch_signal)
    identity = dict(script=SCRIPT, args=asdict(args))
    directory, lock = open_run(args, device, identity, new=not saved)
    log = SimpleNamespace(frames=0, updates=0, rewards=0.0, totals=(0, 0, 0, 0), actions=None, curve=[])
    log.sums = torch.zeros(len(LOGGED), device=device)
    parts = vars(agent) | dict(replay=replay, games=games, log=log)
    if saved:
        for name, part in parts.items():
            part.load_state_dict(saved[name]) if hasattr(part, "state_dict") else vars(part).update(saved[name])
        torch.set_rng_state(saved["random"][0].cpu())
        torch.cuda.set_rng_state_all([state.cpu() for state in saved["random"][1][: torch.cuda.device_count()]])
        print(f"continuing from frame {log.frames:,}", flush=True)
    where = device.type if args.small or device.type == "cuda" else "cpu (days or months; minutes with --small)"
    updates = args.updates(args.total_timesteps) or "NO (--learning-starts is too late)"
    print(f"{METHOD}, {args.env_id}, n {args.n}, seed {args.seed}, {updates} updates, {where}: {directory}", flush=True)
    if args.track:
        wandb.init(id=directory.name, name=directory.name, resume="allow", config=asdict(args), sync_tensorboard=True)
    writer = SummaryWriter(directory, purge_step=log.frames + 1)  # points after the checkpoint will come again
    losses = torch.compile(compute_losses, fullgraph=True, mode="reduce-overhead") if args.compile else compute_losses
    bar = tqdm(total=args.total_timesteps, initial=log.frames, unit=" frames", **BAR)
    log.time, log.started_at, last_checkpoint = time.time(), log.frames, 0.0  # the first at once, for --resume

    while log.frames < args.total_timesteps and not signals:
        # ALGO LOGIC: choose actions
        if log.actions is None:
            log.actions = act(agent.network, games, device)

        # ALGO LOGIC: the updates due, on data up to the previous step; a GPU runs them while the games are stepped
        for group in agent.optimizer.param_groups:
            group["lr"] = args.learning_rate * (1 - log.frames / args.total_timesteps)
        agent.cvae.ent_coef.fill_(args.ent_coef * 300 ** max(0, 1 - 2 * log.frames / args.total_timesteps))
        while log.updates < args.updates(log.frames) and not signals:
            log.sums += update(args, agent, replay, losses)
            log.updates += 1
            if log.updates % 20 == 0 and 0.25 <= log.frames / args.total_timesteps < 0.75:
                make_twin(agent)
        if log.updates < args.updates(log.frames):
            break  # a signal came: --resume makes the other updates, then this step

        # ALGO LOGIC: step the games, store what happened
        transitions = games.step(log.actions)
        replay.add(transitions)
        log.rewards += transitions.rewards.sum()
        log.frames, log.actions = log.frames + args.num_envs, None
        bar.update(args.num_envs)
        if LOG_POINTS * log.frames // args.total_timesteps > LOG_POINTS * log.totals[0] // args.total_timesteps:
            add_point(directory, writer, bar, agent, games, log)
        if args.checkpoint_interval and time.time() - last_checkpoint > args.checkpoint_interval:
            save_checkpoint(directory, identity, parts)
            last_checkpoint = time.time()

    if args.checkpoint_interval:
        save_checkpoint(directory, identity, parts)
    bar.close()
    result = evaluate(args, agent.network, device)
    again = f"continue with: python {SCRIPT}.py --runs-dir {args.runs_dir} --run-name {args.run_name} --resume"
    if signals:
        resumable = (directory / "checkpoint.pt").exists()
        stop(f"interrupted, {again if resumable else 'without a checkpoint'}", INTERRUPTED if resumable else FAILED)
    networks = {name: part.state_dict() for name, part in vars(agent).items() if isinstance(part, nn.Module)}
    try:
        write_atomically(directory / "model.pt", identity | networks)
        write_atomically(directory / "eval.json", json.dumps(result, indent=2) + "\n")
    except OSError as error:
        stop(f"{directory}: model and score not saved, {error}; with more room {again}", FAILED)
    (directory / "checkpoint.pt").unlink(missing_ok=True)
    os.unlink(lock.name)
    writer.add_scalar("charts/eval_return", result["mean"], log.frames)
    writer.close()
    print(f"Next: tensorboard --logdir {args.runs_dir}, or python {SCRIPT}.py --evaluate {directory}")
    print(f"Skill or luck? python skill_or_luck.py {directory}")


if __name__ == "__main__":
    try:
        main()
    except (OSError, ImportError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        stop(f"{error}; try --decode-latents 4, --cvae-every 4, a smaller batch" if "allocate" in str(error) else error)
