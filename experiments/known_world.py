"""Does luck do what the theorem says, with the whole agent? On worlds whose truth is known, it can be measured.

    python experiments/known_world.py                                    # ten worlds, three seeds, three methods
    python experiments/known_world.py --worlds 12 --seeds 1 --updates 500 --methods dae cvae     # a first look
    python experiments/known_world.py --deterministic                    # the control: there is no luck
    python experiments/known_world.py --behaviour actor                  # data of the policy itself, as in a real run

A world is a random MDP with 4 states and 3 actions that looks like a game: a state is a fixed random board. The agent
is that of the scripts, with their replay, networks, losses and updates; only the games are replaced, and the behaviour:
a fixed policy mu, far from the one that is learned. Three methods: DAE (`dae`), Off-policy DAE that is told chance
(`told`: q is one-hot of s' and p the true law) and Off-policy DAE that learns it (`cvae`). Worlds are the first seeds
on which DAE, solved in closed form, stays 15% or more below the optimum; with `--deterministic` the first in which mu
gets everywhere. What was learned is compared with the exact solution for the learned (EMA) policy. `told` is what the
CVAE can hope for; `rarest` is the share of the data of the rarest (s, a). Runs that are done are kept, not repeated.
"""

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import torch
from matplotlib import pyplot as plt
from torch import nn

matplotlib.use("Agg")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import offdae_dae
import offdae_offpolicy
import tabular_examples as tabular

S, A, GAMMA, N, CHANNELS = 4, 3, 0.9, 2, 4  # states, actions, discount, backup length, channels of a board
CPU, METHODS = torch.device("cpu"), ["dae", "told", "cvae"]
SIZES = dict(n=N, gamma=GAMMA, num_envs=128, buffer_size=200_000, channels=16, hidden=128)
SIZES |= dict(batch_size=128, learning_rate=2e-3, tau=0.95)  # quicker than --small, for simple worlds
CVAE = {name: value for name, value in offdae_offpolicy.SMALL.items() if name not in offdae_dae.SMALL}
CVAE |= dict(cvae_every=1, luck_gradient=True)  # in fewer updates than --small makes, and as in the paper
CVAE_LOSS = offdae_offpolicy.cvae_loss, offdae_offpolicy.CVAE


# ---------------------------------------------------------------------------------------------------------- worlds
class World(NamedTuple):
    mdp: tabular.MDP
    mu: np.ndarray  # [S, A] the behaviour
    boards: np.ndarray  # [S, 10, 10, CHANNELS] bool


def make_world(seed, deterministic):
    rng = np.random.default_rng(seed)
    mdp = tabular.random_mdp(rng, S, A, GAMMA, deterministic)
    mu = tabular.random_distribution(rng, S, A) ** 2
    return World(mdp, mu / mu.sum(1, keepdims=True), rng.random((S, 10, 10, CHANNELS)) < 0.15)


def visits(world):
    """How often the behaviour is in each state, in the long run. [S]"""
    step = np.einsum("sa,sat->st", world.mu, world.mdp.p)
    return np.linalg.matrix_power(0.5 * np.eye(S) + 0.5 * step, 2**20)[0]


def share(mdp, pi):
    """The value of pi: 0 is that of the uniform policy, 1 the optimum."""
    best = tabular.uniform_policy(mdp)
    for _ in range(50):
        best = np.eye(A)[tabular.exact_solution(mdp, best)[1].argmax(1)]
    low, high, value = (mdp.start @ tabular.exact_solution(mdp, x)[0] for x in (tabular.uniform_policy(mdp), best, pi))
    return (value - low) / (high - low)


def closed_form_dae(world, steps=100, floor=1e-3):
    """What DAE's policy reaches when its critic, on all segments of up to N steps, is solved exactly in each step."""
    mdp, pi = world.mdp._replace(start=visits(world)), tabular.uniform_policy(world.mdp)
    trajectories = [tabular.enumerate_trajectories(mdp, world.mu, steps) for steps in range(1, N + 1)]
    for _ in range(steps):
        problems = [tabular.off_policy_problem(mdp, pi, x, "DAE") for x in trajectories]
        X, online, y, weight = (np.concatenate(x) for x in list(zip(*problems, strict=True))[:4])
        basis = tabular.null_space(problems[0].C)
        left = (online @ basis).T * weight
        solution = basis @ np.linalg.solve(left @ X @ basis, left @ y)
        advantage = tabular.unpack(mdp, problems[0].unknown, solution, 0.0)[1]
        pi = pi * np.exp(advantage / np.sqrt((pi * advantage**2).sum(1).mean()))
        pi = np.maximum(pi / pi.sum(1, keepdims=True), floor)
        pi /= pi.sum(1, keepdims=True)
    return share(world.mdp, pi)


def choose_worlds(count, deterministic):
    def fits(seed):
        world = make_world(seed, deterministic)
        return visits(world).min() > 0.02 if deterministic else closed_form_dae(world) <= 0.85

    return list(itertools.islice(filter(fits, itertools.count()), count))


class Games:
    """Copies of a world, in the place of the script's `Games`."""

    def __init__(self, world, count, rng):
        self.world, self.rng, self.channels, self.action_set = world, rng, CHANNELS, range(A)
        self.packed = offdae_dae.pack(list(world.boards))
        self.index = rng.integers(S, size=count)

    @property
    def states(self):
        return self.packed[self.index]

    def draw(self, distributions):
        """One draw from each row."""
        return (distributions.cumsum(1) > self.rng.random((len(distributions), 1))).argmax(1)

    def step(self, actions):
        before, never = self.index, np.zeros(len(actions), dtype=bool)
        self.index = self.draw(self.world.mdp.p[before, actions])
        rewards = self.world.mdp.r[before, actions]
        return offdae_dae.Transitions(self.packed[before], actions, rewards, self.states, never, never)


# ------------------------------------------------------------------------------------------------------ z that is told
def told(world):
    """A CVAE, and its loss, that know the world: z is the next state."""
    patterns = torch.from_numpy(world.boards).permute(0, 3, 1, 2).flatten(1).float()
    law = torch.from_numpy(world.mdp.p).float()

    def number(states):
        return (states.flatten(1)[:, None] - patterns).abs().sum(2).argmin(1)

    class Told(nn.Linear):  # with something to optimise
        def __init__(self, *_):
            super().__init__(1, 1)
            self.register_buffer("ent_coef", torch.zeros(()))

        def log_prior(self, states, actions):
            return law[number(states), actions].log()

        def forward(self, states, actions, next_states):
            return None, nn.functional.one_hot(number(next_states), S).float().log()

    def loss(args, cvae, batch):
        log_p, (_, log_q) = cvae.log_prior(batch.states, batch.actions), cvae(*batch[:2], batch.next_states)
        return 0.0 * cvae.weight.sum(), log_q.exp(), log_p.exp(), [torch.zeros(())] * 3

    return loss, Told


# ------------------------------------------------------------------------------------------------------------- a run
def train(world, method, seed, updates, behaviour):
    script = offdae_dae if method == "dae" else offdae_offpolicy
    if method != "dae":
        script.cvae_loss, script.CVAE = told(world) if method == "told" else CVAE_LOSS
    args = script.Args(**SIZES, **{"dae": {}, "told": dict(latent_size=S), "cvae": CVAE}[method], seed=seed)
    torch.manual_seed(seed)
    games = Games(world, args.num_envs, np.random.default_rng(seed))
    replay, agent = script.Replay(args, CHANNELS, CPU), script.Agent(args, games, CPU)
    for k in range(-100, updates):  # first some data
        by_mu = behaviour == "mu"
        replay.add(games.step(games.draw(world.mu[games.index]) if by_mu else script.act(agent.network, games, CPU)))
        if k >= 0:
            for group in agent.optimizer.param_groups:
                group["lr"] = args.learning_rate * (1 - k / updates)
            if method != "dae":
                agent.cvae.ent_coef.fill_(args.ent_coef * 300 ** max(0, 1 - 2 * k / updates))
            script.update(args, agent, replay)
            if method == "cvae" and (k + 1) % 20 == 0 and 0.25 <= k / updates < 0.75:
                script.make_twin(agent)
        if k >= 0 and ((k + 1) % 250 == 0 or k + 1 == updates):
            found = compare(world, args, agent, replay, method)
            found = {name: None if x is None else round(float(x), 4) for name, x in found.items()}
            print(f"  {method}, {k + 1:,} of {updates:,} updates:", json.dumps(found), flush=True)
    return found


@torch.no_grad()
def compare(world, args, agent, replay, method):
    """What was learned against the exact solution for the learned policy. Averages are over the data in replay."""
    p = world.mdp.p
    replay.batch_size = 2048
    batch = replay.sample()
    replay.batch_size = args.batch_size
    boards = torch.from_numpy(world.boards).permute(0, 3, 1, 2).float()
    seen = (batch.states[:, None] == boards).all(dim=(2, 3, 4)).double().T @ torch.eye(A, dtype=float)[batch.actions]
    weight = (seen / seen.sum()).numpy()  # [S, A]
    output = agent.target_network(boards)
    pi = output.log_policy.exp().double().numpy()
    V, A_hat = output.value.numpy(), output.advantage.numpy()
    A_hat = A_hat - (pi * A_hat).sum(1, keepdims=True)
    true_V, true_A, true_B = tabular.exact_solution(world.mdp, pi)
    std_A = np.sqrt((weight * true_A**2).sum())
    std_V = np.sqrt(np.cov(true_V, aweights=weight.sum(1), ddof=0))
    found = dict(share=share(world.mdp, pi), V_error=rms(V - true_V, weight.sum(1)) / std_V)
    found |= dict(zip(("A_correlation", "A_slope"), line(true_A, A_hat, weight), strict=True))
    if method == "dae":
        return found
    s, a, t = np.nonzero(p)  # q and p of every transition that can happen, with the batch statistics of an update
    states, next_states = torch.cat([boards[s], batch.states]), torch.cat([boards[t], batch.next_states])
    actions = torch.cat([torch.from_numpy(a), batch.actions])
    log_prior, (_, log_posterior) = agent.cvae.log_prior(states, actions), agent.cvae(states, actions, next_states)
    latents = log_prior.shape[1]
    prior, q = np.zeros((S, A, latents)), np.zeros((S, A, S, latents))
    prior[s, a], q[s, a, t] = log_prior[: len(s)].exp().numpy(), log_posterior[: len(s)].exp().numpy()
    mean_q = np.einsum("sat,satz->saz", p, q)
    B = np.einsum("satz,saz->sat", q - prior[:, :, None], np.sqrt(prior) * output.luck.numpy()) * (p > 0)
    told_nats = entropy(mean_q) - (p * entropy(q)).sum(2)
    found |= dict(nats=(weight * told_nats).sum(), nats_of=(weight * entropy(p)).sum())
    found |= dict(zip(("B_correlation", "B_slope"), line(true_B, B, weight[:, :, None] * p), strict=True))
    found |= dict(centring_q=(weight * np.abs(mean_q - prior).sum(2)).sum())
    found |= dict(B_std=rms(B, weight[:, :, None] * p) / std_A, centring_B=rms((p * B).sum(2), weight) / std_A)
    return found


def entropy(x):
    return -(x * np.log(np.maximum(x, 1e-30))).sum(-1)


def rms(x, weight):
    return np.sqrt((weight * x**2).sum() / weight.sum())


def line(truth, learned, weight):
    """Correlation, and the slope of what was learned on the truth; none if the truth is constant."""
    covariance = np.cov(truth.ravel(), learned.ravel(), aweights=weight.ravel(), ddof=0)
    (x, xy), (_, y) = covariance
    return (xy / np.sqrt(x * max(y, 1e-30)), xy / x) if x > 1e-12 else (None, None)


# ------------------------------------------------------------------------------------------------------------- report
def table(runs):
    columns = list(dict.fromkeys(name for run in runs for name in run))
    shown = [["" if run.get(name) is None else str(run[name]) for name in columns] for run in runs]
    return "\n".join("| " + " | ".join(row) + " |" for row in [columns, ["---"] * len(columns), *shown]) + "\n"


def draw(runs, path):
    """Each world a row: what the policies reach, how right luck is, and how much of chance z tells; a dot is a seed."""
    panels = {
        "value of the policy": (lambda run: run["share"], (-0.2, 1.1), "0: uniform, 1: optimal"),
        "luck, learned against true": (lambda run: run.get("B_correlation"), (0, 1.1), "correlation"),
        "what z tells of chance": (
            lambda run: run["nats"] / run["nats_of"] if run.get("nats_of") else None,
            (0, 1.1),
            "",
        ),
    }
    names = dict(dae="DAE", cvae="Off-policy DAE, luck learned", told="Off-policy DAE, luck told")
    panels = {title: panel for title, panel in panels.items() if any(panel[0](run) is not None for run in runs)}
    worlds = sorted({run["world"] for run in runs})
    size = (3.7 * len(panels), 0.9 + 0.32 * len(worlds))  # without chance there is only the first panel
    figure, axes = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axis, (title, (value, limits, label)) in zip(axes[0], panels.items(), strict=True):
        for shift, (method, name) in zip((0.22, 0, -0.22), names.items(), strict=True):
            dots = [(value(run), worlds.index(run["world"]) + shift) for run in runs if run["method"] == method]
            dots = np.array([dot for dot in dots if dot[0] is not None]).reshape(-1, 2)
            axis.plot(*dots.T, "o", markersize=5, label=name if len(dots) else None)
        axis.axvline(1, color="gray", linewidth=0.8, zorder=0)
        axis.set(title=title, xlim=limits, xlabel=label)
    axes[0, 0].set_yticks(range(len(worlds)), [f"world {world}" for world in worlds])
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(panels), frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", help="their seeds, by default ten as said above")
    for name, default in dict(seeds=3, updates=1000).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--behaviour", default="mu", choices=["mu", "actor"])
    parser.add_argument("--out", type=Path, default=Path("results/known_world"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    kind = "deterministic" if options.deterministic else "stochastic"
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{kind}_{options.behaviour}_{options.updates}.json"
    runs = json.loads(path.read_text()) if path.exists() else []
    worlds = options.worlds or choose_worlds(10, options.deterministic)
    wanted = [*itertools.product(range(1, options.seeds + 1), worlds, options.methods)]
    todo = [key for key in wanted if key not in {(run["seed"], run["world"], run["method"]) for run in runs}]
    print(f"{kind} worlds {worlds}: {len(wanted)} runs, {len(todo)} to do", flush=True)
    for seed, number, method in todo:
        start, world = time.time(), make_world(number, options.deterministic)
        run = dict(world=number, seed=seed, method=method, rarest=round((visits(world) * world.mu.min(1)).min(), 4))
        run |= dict(closed_form_dae=None if options.deterministic else round(closed_form_dae(world), 3))
        run |= train(world, method, seed, options.updates, options.behaviour)
        runs.append(run | dict(minutes=round((time.time() - start) / 60, 1)))
        offdae_dae.write_atomically(path, json.dumps(runs, indent=1) + "\n")
        offdae_dae.write_atomically(path.with_suffix(".md"), table(runs))
        draw(runs, path.with_suffix(".png"))
        print(json.dumps(runs[-1]), flush=True)
    print(table([run for run in runs if (run["seed"], run["world"], run["method"]) in wanted]))


if __name__ == "__main__":
    main()
