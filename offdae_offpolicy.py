"""Off-policy DAE: regress returns on V, the advantages of all actions and luck, in a simple actor-critic on MinAtar.

One of four scripts for *Skill or Luck? Return Decomposition via Advantage Functions* (Pan & Schölkopf, ICLR 2024).
They differ in `critic_loss`, this one also adds a CVAE; names such as Eq. `hierarchy` are labels in the paper's source.
Off-policy DAE takes the effect of the agent's actions and that of chance out of the return. What chance did is the
discrete latent z of a CVAE trained beside the agent; luck is a function of state, action and z that is 0 on average.

    python offdae_offpolicy.py --env-id asterix --n 8 --small
"""

import copy
import fcntl
import hashlib
import io
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import minatar
import numpy as np
import torch
import tyro
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = Path(__file__).stem
GAMES = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")
LOG_POINTS = 500
DEAD_CVAE = """Warning: the CVAE has seen no chance at work for a fifth of the run, KL(q || p) < 0.01: luck is 0.
On Breakout that is right, its next board is certain. Elsewhere look at losses/latent_usage: near 0 one latent has taken
over, try a larger --ent-coef; otherwise try a larger --cvae-learning-rate or more --cvae-channels."""
FAILED, REFUSED, LOCKED, INTERRUPTED = 1, 2, 3, 75  # exit statuses; interrupted: --resume goes on from the checkpoint


# ------------------------------------------------------------------------------------------------------ arguments
@dataclass
class Args:
    env_id: str = "asterix"  # the game: asterix, breakout, freeway, seaquest or space_invaders
    n: int = 8  # backup length, the transitions of a stored segment (the paper: 8, 16 and 32)
    seed: int = 1  # seed of the games, the networks and all sampling
    small: bool = False  # CPU-size defaults: a smaller network, smaller batches, fewer frames
    total_timesteps: int = 10_000_000  # frames of the run, all games together
    num_envs: int = 128  # games played at once
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
    torch_deterministic: bool = True  # ask cuDNN for deterministic algorithms
    compile: bool = False  # compile the losses; on a GPU with CUDA graphs
    exp_name: str = SCRIPT  # name of the experiment
    run_name: str = ""  # name of the directory in runs/, by default of game, experiment, n, seed and time
    resume: bool = False  # go on from the checkpoint of --run-name, if there is one; start if not
    checkpoint_interval: float = 1800  # seconds between checkpoints, 0 for none
    evaluate: str = ""  # directory of a finished run: play its model again, print the score, change nothing
    track: bool = False  # log to Weights & Biases too
    wandb_project_name: str = "offdae"  # project there
    wandb_entity: str | None = None  # entity (team) there
    target_network: bool = True  # bootstrap with the EMA network, or with the trained network and its gradient
    latent_size: int = 16  # latents z, the outcomes that chance can have
    cvae_channels: int = 128  # channels of the CVAE, half of them next to the boards
    cvae_learning_rate: float = 2.5e-4  # learning rate of the CVAE, constant
    ent_coef: float = 1e-4  # weight of the posterior's entropy in the CVAE loss
    decode_every: int = 1  # decode every k-th frame of a batch; every frame trains the prior and has luck
    bf16: bool = False  # run the CVAE in bfloat16


SMALL = dict(total_timesteps=600_000, batch_size=256, learning_starts=10_000, steps_per_update=64)
SMALL |= dict(learning_rate=1e-3, tau=0.99, channels=16, hidden=128)
SMALL |= dict(latent_size=8, cvae_channels=8, cvae_learning_rate=1e-3, decode_every=7)


def stop(message, status=REFUSED):
    print(f"{SCRIPT}.py: {message}", file=sys.stderr)
    sys.exit(status)


def parse_args():
    """Defaults are the paper's, those of `--small` or those of the run to `--evaluate`; a flag that is typed wins."""
    args, unknown = tyro.cli(Args, return_unknown_args=True)
    if unknown:
        stop(f"unknown argument {unknown[0]}: --help lists those there are")
    if args.evaluate:
        saved = Args(**load(Path(args.evaluate) / "model.pt")["args"])
        args = tyro.cli(Args, default=saved)
        free = ("evaluate", "seed", "eval_episodes", "max_episode_frames", "cuda")
        if args != replace(saved, **{name: getattr(args, name) for name in free}):
            stop("--evaluate goes only with --seed, --eval-episodes, --max-episode-frames and --no-cuda")
    elif args.small:
        args = tyro.cli(Args, default=Args(**SMALL))
    return args


def check_args(args):
    """Refuse what cannot run, before anything is written."""
    if args.resume and not args.run_name:
        stop("--resume: needs the --run-name of the run to go on with")
    if args.env_id not in GAMES:
        stop(f"--env-id {args.env_id}: no such game, choose from {', '.join(GAMES)}")
    for field in fields(args):
        flag, value = "--" + field.name.replace("_", "-"), getattr(args, field.name)
        if field.name in ("gamma", "tau") and not 0 <= value < 1:
            stop(f"{flag} {value}: must be at least 0 and less than 1")
        if field.name.endswith(("seed", "starts", "coef", "interval")) and not 0 <= value < float("inf"):
            stop(f"{flag} {value}: must be at least 0 and finite")
        elif field.type is int and value < 1 and field.name not in ("seed", "learning_starts"):
            stop(f"{flag} {value}: must be at least 1")
        elif field.name.endswith("learning_rate") and not 0 < value < float("inf"):
            stop(f"{flag} {value}: must be positive and finite")
    if args.n > min(args.batch_size, args.max_episode_frames):
        stop(f"--n {args.n}: must be at most batch-size {args.batch_size} and max-episode-frames")
    least = args.batch_size + args.num_envs * args.n
    if args.buffer_size < least:
        stop(f"--buffer-size {args.buffer_size}: must be at least batch-size + num-envs * n = {least}")


# --------------------------------------------------------------------------------------------------- environments
def pack(observations):
    """Boolean observations [10, 10, C] to channel-first bits, 8 in a byte. [N, bytes]"""
    stacked = np.concatenate(observations).reshape(len(observations), 10, 10, -1)
    channel_first = stacked.transpose(0, 3, 1, 2).reshape(len(observations), -1)
    return np.packbits(channel_first, axis=1, bitorder="little")


def unpack(packed, channels):
    """The inverse of `pack`, on the device. [N, bytes] -> [N, C, 10, 10]"""
    bits = (packed[..., None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    return bits.flatten(1)[:, : channels * 100].unflatten(1, (channels, 10, 10)).to(torch.get_default_dtype())


class Transitions(NamedTuple):
    """One step of each game; an observation after a reset is never a next state. [N, ...]"""

    states: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    next_states: np.ndarray
    terminal: np.ndarray
    truncated: np.ndarray


class Games:
    """MinAtar games stepped together. `states` holds the packed observations to act on."""

    def __init__(self, args, seeds):
        self.games = [minatar.Environment(args.env_id, sticky_action_prob=0.0, difficulty_ramping=False) for _ in seeds]
        for game, seed in zip(self.games, seeds, strict=True):
            game.seed(seed.generate_state(8))
            game.reset()  # the constructor's own reset drew from an unseeded generator
        self.channels = self.games[0].n_channels
        self.action_set = self.games[0].minimal_action_set()
        self.max_episode_frames = args.max_episode_frames
        self.states = pack([game.state() for game in self.games])
        self.returns, self.lengths = np.zeros(len(seeds)), np.zeros(len(seeds), dtype=np.int64)
        self.finished = []  # (return, length, truncated) of each episode that ended

    def step(self, actions):
        outcomes, observations = [], []
        for game, action in zip(self.games, actions.tolist(), strict=True):
            outcomes.append(game.act(self.action_set[action]))
            observations.append(game.state())
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
    discounts: torch.Tensor  # [F, F] gamma^(j - i) if frame j >= i is in the same segment, else 0
    end_states: torch.Tensor  # [K, C, 10, 10] s_L of the segments that do not end in a terminal state
    end_slot: torch.Tensor  # [F] where end_states has the s_L of the frame's segment ...
    end_terminal: torch.Tensor  # [F] ... unless that segment ends in a terminal state


class Replay:
    """Segments of n transitions, or fewer up to a terminal state (Alg. `actorcritic`), in a ring of frames on the
    device. A second ring holds start and length of each segment. The oldest segments leave first."""

    def __init__(self, args, channels, device):
        self.args, self.channels, self.device = args, channels, device
        shape, size = (args.num_envs, args.n), (channels * 100 + 7) // 8
        self.staged = np.zeros(args.num_envs, dtype=np.int64)
        self.stage = dict(
            states=np.zeros((*shape, size), dtype=np.uint8),
            next_states=np.zeros((*shape, size), dtype=np.uint8),
            actions=np.zeros(shape, dtype=np.uint8),
            rewards=np.zeros(shape, dtype=np.float32),
            terminal=np.zeros(shape, dtype=bool),
        )
        rings = {name: np.zeros((args.buffer_size, *x.shape[2:]), dtype=x.dtype) for name, x in self.stage.items()}
        self.ring = {name: self.to_device(ring) for name, ring in rings.items()}
        self.host_segments = np.zeros((args.buffer_size, 2), dtype=np.int32)
        self.segments = self.to_device(self.host_segments.copy())
        self.oldest = self.newest = 0  # segments oldest .. newest - 1 are stored
        self.frames = self.position = 0  # frames stored, and where the next one goes

    def to_device(self, array):
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def add(self, transitions):
        """Stage one transition of each game, then store the segments that it completes."""
        for name, stage in self.stage.items():
            stage[np.arange(len(stage)), self.staged] = getattr(transitions, name)
        self.staged += 1
        complete = transitions.terminal | (self.staged == self.args.n)
        if complete.any():
            self.store(complete)
        self.staged[complete | transitions.truncated] = 0

    def store(self, complete):
        capacity, lengths = self.args.buffer_size, self.staged[complete]
        total, space = int(lengths.sum()), capacity - self.position
        while self.frames + total > capacity:
            self.frames -= int(self.host_segments[self.oldest % capacity, 1])
            self.oldest += 1
        game, step = np.nonzero(complete[:, None] & (np.arange(self.args.n) < self.staged[:, None]))
        for name, ring in self.ring.items():
            frames = self.to_device(self.stage[name][game, step])
            ring[self.position : self.position + total] = frames[:space]
            if total > space:
                ring[: total - space] = frames[space:]
        rows = (self.newest + np.arange(len(lengths))) % capacity
        starts = (self.position + lengths.cumsum() - lengths) % capacity
        self.host_segments[rows] = np.stack([starts, lengths], axis=1)
        self.segments[self.to_device(rows)] = self.to_device(self.host_segments[rows])
        self.newest += len(lengths)
        self.frames += total
        self.position = (self.position + total) % capacity

    def sample(self):
        """Choose segments uniformly until F frames are reached; of the last one only the tail is kept."""
        capacity, F, K = self.args.buffer_size, self.args.batch_size, -(-self.args.batch_size // self.args.n)
        chosen = torch.randint(self.oldest, self.newest, (F,), device=self.device) % capacity
        starts, lengths = self.segments[chosen].long().unbind(1)
        ends = lengths.cumsum(0)
        frame = torch.arange(F, device=self.device)
        segment = torch.searchsorted(ends, frame, right=True)  # [F] which of the chosen ones the frame belongs to
        remaining = ends[segment].clamp(max=F) - frame
        after_end = (starts + lengths)[segment]
        where = (after_end - remaining) % capacity
        end_terminal = self.ring["terminal"][(after_end - 1) % capacity]
        bootstraps = ((remaining == 1) & ~end_terminal).long()
        count = bootstraps.cumsum(0)
        end_frame = torch.searchsorted(count, torch.arange(1, K + 1, device=self.device)).clamp(max=F - 1)  # [K]
        steps = frame - frame[:, None]
        same_segment = segment == segment[:, None]
        return Batch(
            states=unpack(self.ring["states"][where], self.channels),
            actions=self.ring["actions"][where].long(),
            rewards=self.ring["rewards"][where],
            next_states=unpack(self.ring["next_states"][where], self.channels),
            remaining=remaining,
            discounts=torch.where(same_segment & (steps >= 0), self.args.gamma ** steps.clamp(min=0), 0.0),
            end_states=unpack(self.ring["next_states"][where[end_frame]], self.channels),
            end_slot=(count - bootstraps).clamp(max=K - 1),
            end_terminal=end_terminal,
        )


# -------------------------------------------------------------------------------------------------------- network
class Output(NamedTuple):
    value: torch.Tensor  # [F]
    advantage: torch.Tensor  # [F, |A|]
    log_policy: torch.Tensor  # [F, |A|]
    luck: torch.Tensor  # [F, |A|, |Z|] g(s,a,z); once centred B(s,a,s') of the transition, [F]


class Network(nn.Module):
    """Figure `ac_net`. The policy head sees detached features: the actor loss trains nothing else."""

    def __init__(self, args, channels, num_actions):
        super().__init__()
        first, second = nn.Conv2d(channels, args.channels, 3), nn.Conv2d(args.channels, args.channels, 3)
        self.convolutions = nn.Sequential(first, nn.ReLU(True), second, nn.ReLU(True), nn.Flatten())
        self.hidden = nn.Sequential(nn.Linear(args.channels * 6 * 6, args.hidden), nn.ReLU(True))
        self.value = nn.Linear(args.hidden, 1)
        self.advantage = nn.Linear(args.hidden, num_actions)
        self.policy = nn.Linear(args.hidden, num_actions)
        self.luck = nn.Linear(args.hidden, num_actions * args.latent_size)

    def forward(self, states):
        features = self.hidden(self.convolutions(states))
        return Output(
            value=self.value(features).squeeze(1),
            advantage=self.advantage(features),
            log_policy=self.policy(features.detach()).log_softmax(1),
            luck=self.luck(features).unflatten(1, (self.policy.out_features, -1)),
        )


class ResidualBlock(nn.Sequential):
    def __init__(self, channels):
        first, second = conv(channels, channels), conv(channels, channels)
        super().__init__(nn.BatchNorm2d(channels), nn.SiLU(), first, nn.BatchNorm2d(channels), nn.SiLU(), second)

    def forward(self, x):
        return x + super().forward(x)


def conv(inputs, outputs, kind=nn.Conv2d):
    return kind(inputs, outputs, 3, padding=1)


class CVAE(nn.Module):
    """Figure `cvae_net`: chance as a latent z with a prior p(z|s,a), a posterior q(z|s,a,s') and a decoder p(s'|s,a,z).
    It shares nothing with the network of the agent, which only ever sees q and p."""

    def __init__(self, args, channels, num_actions):
        super().__init__()
        wide, narrow = args.cvae_channels, -(-args.cvae_channels // 2)

        def blocks_to_latents():
            pooling = nn.AdaptiveAvgPool2d(1), nn.Flatten()
            return ResidualBlock(wide), ResidualBlock(wide), *pooling, nn.Linear(wide, args.latent_size)

        from_board, to_wide = conv(channels, narrow), conv(narrow, wide)
        self.encoder = nn.Sequential(from_board, ResidualBlock(narrow), to_wide, ResidualBlock(wide))
        self.transition = nn.Sequential(conv(wide + num_actions, wide), ResidualBlock(wide), ResidualBlock(wide))
        self.prior = nn.Sequential(*blocks_to_latents())
        self.posterior = nn.Sequential(conv(2 * wide, wide), *blocks_to_latents())
        from_wide, to_board = conv(wide, narrow, nn.ConvTranspose2d), conv(narrow, channels, nn.ConvTranspose2d)
        self.decoder = nn.Sequential(ResidualBlock(wide), from_wide, ResidualBlock(narrow), to_board)
        # small at first: of large vectors one wins before any z has learned what it stands for
        self.latents = nn.Parameter(0.01 * torch.randn(args.latent_size, wide))
        self.register_buffer("one_hot", torch.eye(num_actions), persistent=False)

    def forward(self, states, actions, next_states):
        """h(s,a) [F, channels, 10, 10], log p(z|s,a) and log q(z|s,a,s') [F, |Z|]"""
        encoded, next_encoded = self.encoder(torch.cat([states, next_states])).chunk(2)
        tiled = self.one_hot[actions][:, :, None, None].expand(-1, -1, 10, 10)
        h = self.transition(torch.cat([encoded, tiled], dim=1))
        log_p = self.prior(h.detach()).log_softmax(1)
        log_q = self.posterior(torch.cat([h, next_encoded], dim=1)).log_softmax(1)
        return h, log_p, log_q

    def decode(self, h):
        """Logits of s' for every z, in one batch: BatchNorm would take z out of a batch that has one z only. Shape
        [F, |Z|, C, 10, 10]."""
        return self.decoder((h[:, None] + self.latents[:, :, None, None]).flatten(0, 1)).unflatten(0, (len(h), -1))


class Agent:
    """Networks and optimisers. The target network is the exponential moving average (EMA) of the network."""

    def __init__(self, args, games, device):
        self.network = Network(args, games.channels, len(games.action_set))
        self.network.to(device, memory_format=torch.channels_last)
        self.target_network = copy.deepcopy(self.network).requires_grad_(False)
        self.learning_rate = torch.tensor(args.learning_rate, device=device)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=self.learning_rate, eps=1e-4, fused=True)
        self.cvae = CVAE(args, games.channels, len(games.action_set))
        self.cvae.to(device, memory_format=torch.channels_last)
        constants = dict(lr=args.cvae_learning_rate, betas=(0.5, 0.9), eps=1e-8)
        self.cvae_optimizer = torch.optim.Adam(self.cvae.parameters(), **constants, fused=True)


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
    """B(s,a,s') = E_q[g(s,a,z)] - E_p[g(s,a,z)], 0 on average over s' if p is the average of q. [F, |A|, |Z|] -> [F]"""
    return ((q - p) * luck.take_along_dim(actions[:, None, None], dim=1).squeeze(1)).sum(1)


def critic_loss(args, agent, batch, online, target):
    """Eq. `hierarchy`: V(s_i) -> sum_t gamma^(t-i) (r_t - A_t - gamma B_t) + gamma^(L-i) V_target(s_L), for each i."""
    advantage = taken(online.advantage, batch.actions)
    end_value = bootstrap(agent.target_network if args.target_network else agent.network, batch, args.gamma)
    returns = batch.discounts @ (batch.rewards - advantage - args.gamma * online.luck) + end_value
    return (online.value - returns).square().mean()


def cvae_loss(args, cvae, batch):
    """Eq. `loss_cvae`: KL(q || p) + E_q[-log p(s'|s,a,z)] - ent_coef H(q), the sum over z exact. The KL trains only the
    prior, so it need not be balanced with the rest. Also q, p and what to log."""
    h, log_p, log_q = cvae(batch.states, batch.actions, batch.next_states)
    q, p = log_q.exp(), log_p.exp()
    kl = (q.detach() * (log_q.detach() - log_p)).sum(1).mean()
    entropy = -(q * log_q).sum(1).mean()
    logits = cvae.decode(h[:: args.decode_every])
    boards = batch.next_states[:: args.decode_every, None].expand_as(logits)
    errors = nn.functional.binary_cross_entropy_with_logits(logits, boards, reduction="none").mean((2, 3, 4))
    reconstruction = (q[:: args.decode_every] * errors).sum(1).mean()
    usage = -(q.mean(0) * q.mean(0).clamp(min=1e-10).log()).sum()
    loss = kl + reconstruction - args.ent_coef * entropy
    return loss, q.detach(), p.detach(), (reconstruction, kl, entropy, usage)


def actor_loss(args, online, target):
    """Alg. `actorcritic`: -E_policy[A / std(A)] + kl_coef KL(policy || EMA policy); also that KL and std(A)."""
    policy, advantage = online.log_policy.exp(), online.advantage.detach()
    advantage_std = (target.log_policy.exp() * advantage.square()).sum(1).mean().sqrt()
    kl = (policy * (online.log_policy - target.log_policy)).sum(1).mean()
    skill = (policy * advantage).sum(1).mean() / (advantage_std + 1e-5)
    return -skill + args.kl_coef * kl, kl, advantage_std


LOSSES = ("critic", "actor", "kl", "entropy", "value", "advantage_std")
LOSSES += ("cvae_reconstruction", "cvae_kl", "posterior_entropy", "latent_usage", "luck_std", "luck_mean")


def losses(args, agent, batch):
    """The loss to minimise, and the values of LOSSES to log."""
    online, target = agent.network(batch.states), agent.target_network(batch.states)
    online = online._replace(advantage=centred(online.advantage, target.log_policy.exp()))
    target = target._replace(advantage=centred(target.advantage, target.log_policy.exp()))
    with torch.autocast("cuda" if batch.states.is_cuda else "cpu", torch.bfloat16, enabled=args.bf16):
        cvae, q, p, cvae_logged = cvae_loss(args, agent.cvae, batch)
    online = online._replace(luck=centred_luck(online.luck, batch.actions, q, p))
    critic = critic_loss(args, agent, batch, online, target)
    actor, kl, advantage_std = actor_loss(args, online, target)
    entropy = -(online.log_policy.exp() * online.log_policy).sum(1).mean()
    loss, logged = critic + actor, [critic, actor, kl, entropy, online.value.mean(), advantage_std]
    loss, logged = loss + cvae, [*logged, *cvae_logged, online.luck.std(correction=0), online.luck.mean()]
    return loss, torch.stack(logged).detach()


def update(args, agent, replay, losses=losses):
    """One step of Alg. `actorcritic`. Nothing here waits for the device."""
    loss, logged = losses(args, agent, replay.sample())
    agent.optimizer.zero_grad()
    agent.cvae_optimizer.zero_grad()
    loss.backward()
    agent.optimizer.step()
    agent.cvae_optimizer.step()
    with torch.no_grad():
        torch._foreach_lerp_(list(agent.target_network.parameters()), list(agent.network.parameters()), 1 - args.tau)
    return logged


# ----------------------------------------------------------------------------------------------------- evaluation
@torch.no_grad()
def act(network, games, device, generator=None):
    """Sample an action for each game from the policy. [N]"""
    states = torch.from_numpy(games.states).to(device, non_blocking=True)
    policy = network(unpack(states, games.channels)).log_policy.exp()
    policy = policy.nan_to_num(1.0)  # so that it is `check_finite` that stops the run, and says why
    return torch.multinomial(policy, 1, generator=generator).squeeze(1).cpu().numpy()


class Progress:
    """A bar with the time left, or plain lines if the output is not a terminal."""

    def __init__(self, total, unit, done=0):
        self.bar = tqdm(total=total, initial=done, unit=" " + unit, unit_scale=True, disable=None, dynamic_ncols=True)
        self.total, self.unit, self.first, self.start, self.last = total, unit, done, time.time(), time.time()

    def update(self, done, note):
        self.bar.set_postfix_str(note, refresh=False)
        self.bar.update(done - self.bar.n)
        now = time.time()
        if self.bar.disable and (now - self.last > 10 or done == self.total):
            self.last, minutes = now, (now - self.start) / 60 * (self.total - done) / max(1, done - self.first)
            print(f"{done:,} of {self.total:,} {self.unit}, {note}, about {minutes:.1f} minutes left", flush=True)


def spawn_seeds(args):
    """Independent seeds for torch, for the evaluation and for each game."""
    torch_seed, eval_seed, *game_seeds = np.random.SeedSequence(args.seed).spawn(2 + args.num_envs)
    return int(torch_seed.generate_state(1)[0]), eval_seed, game_seeds


def evaluate(args, network, device):
    """Undiscounted returns of one episode in each of `eval_episodes` games, with seeds of their own. The first episodes
    to finish in a running pool would be the short ones."""
    sampler_seed, *game_seeds = spawn_seeds(args)[1].spawn(1 + args.eval_episodes)
    generator = torch.Generator(device).manual_seed(int(sampler_seed.generate_state(1)[0]))
    games, progress = Games(args, game_seeds), Progress(args.eval_episodes, "episodes")
    start, frames = time.time(), 0
    while games.games:
        frames += len(games.games)
        transitions = games.step(act(network, games, device, generator))
        games.keep(~(transitions.terminal | transitions.truncated))
        progress.update(len(games.finished), f"evaluation, {frames:,} frames")
    progress.bar.close()
    returns, lengths, truncated = zip(*games.finished, strict=True)
    score = dict(mean=np.mean(returns).item(), stderr=np.std(returns).item() / max(1, len(returns) - 1) ** 0.5)
    episodes = dict(returns=returns, lengths=lengths, truncated=truncated)
    return score | dict(frames=frames, seconds=round(time.time() - start, 3)) | episodes


# ---------------------------------------------------------------------------------------------------------- files
def write_whole(path, content):
    """A kill at any instant leaves the old file or the new one, whole; an error leaves the old one."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def save(path, contents):
    """A file for `torch.load`, with a checksum behind."""
    buffer = io.BytesIO()
    torch.save(contents, buffer)
    buffer.write(hashlib.sha256(buffer.getbuffer()).digest())
    write_whole(path, buffer.getbuffer())


def load(path):
    """What `save` wrote, whole and by this script. Loading never runs code from the file."""
    if not path.is_file():
        stop(f"{path}: no such file, name the directory of a finished run")
    content = memoryview(path.read_bytes())
    if hashlib.sha256(content[:-32]).digest() != content[-32:]:
        stop(f"{path}: truncated, damaged or not of this project; it was left alone, restore it or move it away")
    contents = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if contents["script"] != SCRIPT:
        stop(f"{path}: of a run of {contents['script']}.py, use that script")
    return contents


def cvae_is_dead(rows):
    """Whether for a fifth of the run the posterior has known nothing that the prior did not: then luck is 0."""
    recent = [row["losses/cvae_kl"] for row in rows if "losses/cvae_kl" in row][-(LOG_POINTS // 5) :]
    return len(recent) == LOG_POINTS // 5 and max(recent) < 0.01


def save_model(directory, args, agent):
    networks = {name: part.state_dict() for name, part in vars(agent).items() if isinstance(part, nn.Module)}
    save(directory / "model.pt", dict(script=SCRIPT, args=asdict(args)) | networks)


def save_args(directory, args, device):
    """The arguments, and whatever else it takes to repeat the run."""
    here = Path(__file__).resolve()
    git = subprocess.run("git rev-parse --verify HEAD", shell=True, cwd=here.parent, capture_output=True, text=True)
    origin = dict(args=asdict(args), command=shlex.join(["python", *sys.argv]), script=SCRIPT)
    origin |= dict(sha256=hashlib.sha256(here.read_bytes()).hexdigest(), git_commit=git.stdout.strip() or None)
    versions = dict(python=sys.version.split()[0]) | {name: version(name) for name in ("torch", "minatar", "numpy")}
    device_name = torch.cuda.get_device_name() if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    origin |= dict(versions=versions, device=device_name)
    write_whole(directory / "args.json", (json.dumps(origin, indent=2) + "\n").encode())


def save_curve(directory, writer, rows, new_rows):
    charts = "episodic_return", "episodic_length", "episodes", "reward_per_frame", "SPS", "learning_rate"
    tags = [*(f"charts/{name}" for name in charts), *(f"losses/{name}" for name in LOSSES)]
    lines = [",".join(str(row.get(tag, "")) for tag in ["frames", *tags]) for row in rows]
    try:
        write_whole(directory / "curve.csv", "\n".join([",".join(["frames", *tags]), *lines, ""]).encode())
        for row, tag in ((row, tag) for row in new_rows for tag in tags if tag in row):
            writer.add_scalar(tag, row[tag], row["frames"])
    except OSError as error:
        tqdm.write(f"warning: curve not written, it will be with --resume: {error}")


# ----------------------------------------------------------------------------------------------------- checkpoint
def plain(x):
    """The state of x in numbers, strings, lists, dicts and tensors, which load without running code."""
    if isinstance(x, (np.random.RandomState, torch.Generator)):
        x = x.get_state()
    elif hasattr(x, "state_dict"):
        x = x.state_dict()
    elif hasattr(x, "__dict__") and not isinstance(x, torch.Tensor):
        x = {name: value for name, value in vars(x).items() if name not in ("args", "device")}
    if isinstance(x, dict):
        return {name: plain(value) for name, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [plain(value) for value in x]
    return torch.from_numpy(x) if isinstance(x, np.ndarray) else x.item() if isinstance(x, np.generic) else x


def restore(x, saved):
    """The inverse of `plain`. Objects and tensors change in place: what shares a generator goes on sharing it."""
    if isinstance(x, (np.random.RandomState, torch.Generator)):
        x.set_state(saved)
    elif hasattr(x, "load_state_dict"):
        x.load_state_dict(saved)
    elif isinstance(x, torch.Tensor):
        x.copy_(saved)
    elif hasattr(x, "__dict__"):
        vars(x).update({name: restore(vars(x)[name], value) for name, value in saved.items()})
    elif isinstance(x, dict):
        return {name: restore(x[name], value) for name, value in saved.items()}
    elif isinstance(x, list):
        return [restore(old, new) for old, new in zip(x, saved, strict=False)] + saved[len(x) :]
    else:
        return saved.numpy() if isinstance(saved, torch.Tensor) else saved
    return x


def check_finite(directory, agent, log):
    """Stop if a loss since the last point of the curve, or a weight, is not finite."""
    values = {f"losses/{name}": loss for name, loss in zip(LOSSES, log.losses, strict=True)}
    for part in [part for part in vars(agent) if isinstance(getattr(agent, part), nn.Module)]:
        values |= {f"{part}.{name}": weights for name, weights in getattr(agent, part).state_dict().items()}
    bad = [name for name, value in values.items() if not value.isfinite().all()]
    if bad:
        last = directory / "checkpoint.pt" if (directory / "checkpoint.pt").exists() else "none"
        stop(f"{directory}: {bad[0]} is not finite at frame {log.frames:,}; last good checkpoint: {last}", FAILED)


def save_checkpoint(directory, state):
    """Only of a healthy run. A full disk is no reason to stop it."""
    check_finite(directory, state["agent"], state["log"])
    try:
        save(directory / "checkpoint.pt", plain(state))
    except OSError as error:
        tqdm.write(f"warning: no checkpoint at frame {state['log'].frames:,}: {error}")


def check_same_run(path, args, origin):
    """Refuse to go on with other arguments or another version of the script: it would not be the same run."""
    free = ("run_name", "resume", "checkpoint_interval", "cuda", "track", "wandb_project_name", "wandb_entity")
    for name, value in asdict(args).items():
        if name not in free and origin["args"].get(name) != value:
            stop(f"{path}: of a run with {name} {origin['args'].get(name)}, not {value}")
    if origin["sha256"] != hashlib.sha256(Path(__file__).read_bytes()).hexdigest():
        stop(f"{path}: of another version of {SCRIPT}.py (git commit {origin['git_commit']}), go on with that one")


def lock(directory):
    """One writer per run. The kernel frees the lock when the process ends, however it ends."""
    file = open(directory / "lock", "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        stop(f"{directory} is being written by {file.read()}", LOCKED)
    file.truncate(0)
    holder = f"host {socket.gethostname()}, pid {os.getpid()}, job {os.environ.get('SLURM_JOB_ID', 'none')}"
    print(holder, end="", file=file, flush=True)
    return file


def on_signals(handler):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, handler)


# ----------------------------------------------------------------------------------------------------------- main
def updates_due(args, frames):
    return max(0, frames - args.learning_starts) // args.steps_per_update


def estimate_hours(args, device):
    """Time the losses and their gradients on ever larger parts of a batch, and scale the last to the whole run."""
    games = Games(args, spawn_seeds(args)[2])
    replay, agent = Replay(args, games.channels, device), Agent(args, games, device)
    for _ in range(args.n):
        replay.add(games.step(np.zeros(args.num_envs, dtype=np.int64)))
    frames, seconds = 4, 0.0
    while seconds < 0.3 and frames < args.batch_size:
        frames = min(2 * frames, args.batch_size)
        replay.args = replace(args, batch_size=frames)
        for _ in range(2):  # the first time warms up
            start = time.time()
            losses(args, agent, replay.sample())[0].backward()
            seconds = time.time() - start
    return seconds / frames * args.batch_size * updates_due(args, args.total_timesteps) / 3600


def main():
    args = parse_args()
    check_args(args)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch_seed, _, game_seeds = spawn_seeds(args)
    if args.evaluate:
        agent = Agent(args, Games(args, game_seeds[:1]), device)
        agent.network.load_state_dict(load(Path(args.evaluate) / "model.pt")["network"])
        result = evaluate(args, agent.network, device)
        print(f"{args.evaluate}: return {result['mean']:.2f} ± {result['stderr']:.2f}, {args.eval_episodes} episodes")
        return

    run_name = args.run_name or f"{args.env_id}__{args.exp_name}__n{args.n}__{args.seed}__{int(time.time())}"
    directory = Path("runs") / run_name
    if directory.exists() and not args.resume:
        stop(f"{directory} exists: choose another --run-name, or go on with this one by --resume")
    if args.track:
        try:
            import wandb
        except ImportError:
            stop("--track needs Weights & Biases: pip install wandb")

    def interrupted(*_):
        if not args.checkpoint_interval:
            stop(f"{directory}: interrupted, without a checkpoint (--checkpoint-interval 0)", FAILED)
        stop(f"{directory}: interrupted, --run-name {run_name} --resume goes on", INTERRUPTED)

    on_signals(interrupted)
    directory.mkdir(parents=True, exist_ok=args.resume)
    lock_file = lock(directory)
    if not (directory / "args.json").exists():
        save_args(directory, args, device)
    origin = json.loads((directory / "args.json").read_text())
    check_same_run(directory, args, origin)
    checkpoint = directory / "checkpoint.pt"
    if (directory / "eval.json").exists():
        checkpoint.unlink(missing_ok=True)
        os.unlink(lock_file.name)
        print(f"{directory} is finished: return {json.loads((directory / 'eval.json').read_text())['mean']:.2f}")
        return
    if args.track:
        same_run = dict(name=directory.name, id=directory.name, resume="allow", config=asdict(args))
        wandb.init(project=args.wandb_project_name, entity=args.wandb_entity, **same_run, sync_tensorboard=True)
    if device.type == "cpu" and not args.small and not checkpoint.exists():
        hours = estimate_hours(args, device)
        print(f"No GPU: this run would take about {hours:,.1f} hours here. With --small it takes minutes.", flush=True)

    torch.manual_seed(torch_seed)
    games = Games(args, game_seeds)
    replay, agent = Replay(args, games.channels, device), Agent(args, games, device)
    log = SimpleNamespace(frames=0, last_frames=0, seconds=0.0, rewards=0.0, updates=0, rows=[])
    log.losses = torch.zeros(len(LOSSES), device=device)
    random = [torch.default_generator, *torch.cuda.default_generators]
    mode = "reduce-overhead" if device.type == "cuda" else None
    loss_function = torch.compile(losses, fullgraph=True, mode=mode) if args.compile else losses
    state = origin | dict(agent=agent, replay=replay, games=games, log=log, random=random)
    if checkpoint.exists():
        saved = load(checkpoint)
        check_same_run(checkpoint, args, saved)
        restore(state, saved)
        agent.optimizer.param_groups[0]["lr"] = agent.learning_rate  # loading put a copy there
        print(f"{directory}: going on from frame {log.frames:,}", flush=True)
    for events in directory.glob("events.out.tfevents.*"):
        events.unlink()
    writer, progress = SummaryWriter(directory), Progress(args.total_timesteps, "frames", log.frames)
    save_curve(directory, writer, log.rows, log.rows)
    note, caught, last_time, last_checkpoint = "no episode ended", [], time.time() - log.seconds, time.time()
    on_signals(lambda number, _: caught.append(number))

    for frames in range(log.frames + args.num_envs, args.total_timesteps + args.num_envs, args.num_envs):
        # ALGO LOGIC: choose actions
        actions = act(agent.network, games, device)

        # ALGO LOGIC: the updates owed, on data up to the previous step; a GPU runs them while the games are stepped
        agent.learning_rate.fill_(args.learning_rate * (1 - log.frames / args.total_timesteps))
        owed = updates_due(args, log.frames) - updates_due(args, log.frames - args.num_envs)
        for _ in range(owed if replay.frames else 0):
            log.losses += update(args, agent, replay, loss_function)
            log.updates += 1

        # ALGO LOGIC: step the games, store what happened
        transitions = games.step(actions)
        replay.add(transitions)
        log.rewards += transitions.rewards.sum()
        log.frames = frames

        if LOG_POINTS * frames // args.total_timesteps > LOG_POINTS * log.last_frames // args.total_timesteps:
            check_finite(directory, agent, log)
            since = frames - log.last_frames
            speed = since / (time.time() - last_time)
            row = {"charts/episodes": len(games.finished), "charts/reward_per_frame": log.rewards / since}
            row |= {"charts/SPS": round(speed, 1), "charts/learning_rate": agent.learning_rate.item()}
            if games.finished:
                returns, lengths, _ = np.mean(games.finished, axis=0)
                row |= {"charts/episodic_return": returns, "charts/episodic_length": lengths}
                note = f"return {returns:.2f}"
            if log.updates:
                row |= zip([f"losses/{name}" for name in LOSSES], (log.losses / log.updates).tolist(), strict=True)
            log.rows.append(dict(frames=frames) | row)
            save_curve(directory, writer, log.rows, log.rows[-1:])
            if cvae_is_dead(log.rows) and not cvae_is_dead(log.rows[:-1]):
                tqdm.write(DEAD_CVAE)
            progress.update(min(frames, args.total_timesteps), f"{speed:,.0f} frames/s, {note}")
            games.finished.clear()
            log.losses.zero_()
            log.updates, log.rewards, log.last_frames, last_time = 0, 0.0, frames, time.time()

        due = caught or frames >= args.total_timesteps or time.time() - last_checkpoint > args.checkpoint_interval
        if due and args.checkpoint_interval:
            log.seconds = time.time() - last_time
            save_checkpoint(directory, state)
            last_checkpoint = time.time()
        if caught:
            progress.bar.close()
            writer.close()
            interrupted()

    progress.bar.close()
    writer.close()
    on_signals(interrupted)
    save_model(directory, args, agent)
    result = evaluate(args, agent.network, device)
    write_whole(directory / "eval.json", (json.dumps(result, indent=2) + "\n").encode())
    print(f"{directory}: return {result['mean']:.2f} ± {result['stderr']:.2f}, {args.eval_episodes} episodes")
    checkpoint.unlink(missing_ok=True)
    os.unlink(lock_file.name)


if __name__ == "__main__":
    main()
