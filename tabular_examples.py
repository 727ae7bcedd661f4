"""The tabular examples of *Skill or Luck? Return Decomposition via Advantage Functions* (Pan & Schölkopf, ICLR 2024).

    python tabular_examples.py --out figures

draws five pictures and prints a table for each:

    classic.png             MC, Batch TD(0) and DAE on a deterministic MDP            (Figure `classic`)
    classic_stochastic.png  DAE and Off-policy DAE on a stochastic one                (Figure `classic_stoch`)
    counterexample.png      DAE is biased off-policy, and the luck term removes that  (Appendix `app:counter`)
    theorem.png             who recovers V^π from another policy's data, exactly      (Theorem `thm:main`)
    policy.png              what a biased critic costs the policy that it trains      (cf. Figure `results`)

Nothing is trained: every estimate is the solution of a linear system. Labels in the docstrings are the paper's.
"""

import argparse
import sys
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.artist import setp
from matplotlib.figure import Figure

RCOND = 1e-10  # singular values below this fraction of the largest one are zeros that rounding blurred
U, D = 0, 1  # the actions "up" and "down" of the toy MDPs; a state with a single action has only U


# --- MDPs and their exact solutions -----------------------------------------------------------------------------------
class MDP(NamedTuple):
    p: np.ndarray  # [S, A, S] p(s'|s,a); all zero where s has no action a, so a terminal state has none at all
    r: np.ndarray  # [S, A] r(s,a)
    gamma: float
    start: np.ndarray  # [S] p(s_0)


def available(mdp):
    """[S, A] bool: which actions each state has."""
    return mdp.p.sum(axis=-1) > 0


def uniform_policy(mdp):
    actions = available(mdp)
    return actions / np.maximum(actions.sum(axis=-1, keepdims=True), 1)


def exact_solution(mdp, pi):
    """V^π, A^π and B^π(s,a,s') = V^π(s') − E[V^π(s')|s,a] (Eq. `intro_b`), 0 where p(s'|s,a) = 0; also of a batch."""
    p_pi = np.einsum("...sa,...sat->...st", pi, mdp.p)
    V = np.linalg.solve(np.eye(p_pi.shape[-1]) - mdp.gamma * p_pi, (pi * mdp.r).sum(axis=-1)[..., None])[..., 0]
    next_value = np.einsum("...sat,...t->...sa", mdp.p, V)  # nature's value
    A = np.where(available(mdp), mdp.r + mdp.gamma * next_value - V[..., None], 0.0)
    B = np.where(mdp.p > 0, V[..., None, None, :] - next_value[..., None], 0.0)
    return V, A, B


def policy_improvement(mdp, mu, pi):
    """V^π + E_μ[Σ γ^t A^π_t], which is V^μ by the policy improvement lemma (after Eq. `intro_b_rearr`)."""
    V, A, _ = exact_solution(mdp, pi)
    p_mu = np.einsum("sa,sat->st", mu, mdp.p)
    visits = np.linalg.inv(np.eye(len(p_mu)) - mdp.gamma * p_mu)  # [S, S] Σ_t γ^t P(s_t=s' | s_0=s)
    return V + visits @ (mu * A).sum(axis=-1)


# --- Trajectories as regression features ------------------------------------------------------------------------------
class Trajectories(NamedTuple):
    states: np.ndarray  # [N, T+1]; a trajectory that has ended stays in its terminal state
    actions: np.ndarray  # [N, T]; -1 from the end on
    prob: np.ndarray  # [N]


class Features(NamedTuple):
    start: np.ndarray  # [N, S] φ_s = I(s_0=s)
    advantage: np.ndarray  # [N, S, A] φ_sa = Σ γ^t I(s_t=s, a_t=a)
    luck: np.ndarray  # [N, S, A, S] φ_sas' = Σ γ^t I(s_t=s, a_t=a, s_{t+1}=s')
    end: np.ndarray  # [N, S] γ^T I(s_T=s), what the bootstrap multiplies
    returns: np.ndarray  # [N] Σ γ^t r_t


def enumerate_trajectories(mdp, policy, steps):
    """Every trajectory of `steps` transitions (fewer if it ends before) that the policy can produce."""
    step = policy[..., None] * mdp.p  # [S, A, S] P(a, s' | s)
    terminal = ~available(mdp).any(axis=-1)
    states = np.flatnonzero(mdp.start)[:, None]
    actions = np.empty((len(states), 0), dtype=int)
    prob = mdp.start[states[:, 0]]
    for _ in range(steps):
        last = states[:, -1]
        i, a, s = np.nonzero(step[last])
        ended = np.flatnonzero(terminal[last])
        prob = np.concatenate([prob[i] * step[last[i], a, s], prob[ended]])
        a, s = np.concatenate([a, np.full(len(ended), -1)]), np.concatenate([s, last[ended]])
        i = np.concatenate([i, ended])
        states, actions = np.column_stack([states[i], s]), np.column_stack([actions[i], a])
    return Trajectories(states, actions, prob)


def features(mdp, trajectories):
    """The feature maps of Section `sec:regression`, from which (V, A, B) predict the return linearly."""
    states, actions, _ = trajectories
    N, S, A = len(states), *mdp.r.shape
    luck, returns, row = np.zeros((N, S, A, S)), np.zeros(N), np.arange(N)
    for t in range(actions.shape[1]):
        s, a, s_next = states[:, t], actions[:, t], states[:, t + 1]
        alive = mdp.gamma**t * (a >= 0)
        luck[row, s, a, s_next] += alive
        returns += alive * mdp.r[s, a]
    # The discount after an early end does not matter: the state is terminal, and has no value to bootstrap from.
    end = mdp.gamma ** actions.shape[1] * np.eye(S)[states[:, -1]]
    return Features(np.eye(S)[states[:, 0]], luck.sum(axis=-1), luck, end, returns)


def decomposition_error(mdp, pi, trajectories):
    """Largest |V(s_0) + Σ γ^t (A_t + γ B_t) − (Σ γ^t r_t + γ^T V(s_T))| over trajectories (Eq. `intro_b_rearr`)."""
    V, A, B = exact_solution(mdp, pi)
    phi = features(mdp, trajectories)
    skill, luck = np.tensordot(phi.advantage, A, 2), mdp.gamma * np.tensordot(phi.luck, B, 3)
    return np.abs(phi.start @ V + skill + luck - phi.returns - phi.end @ V).max()


# --- Constrained least squares ----------------------------------------------------------------------------------------
def null_space(C):
    """Orthonormal basis [K, K−rank] of {x: Cx = 0}."""
    _, singular, Vh = np.linalg.svd(C)
    return Vh[(singular > RCOND * singular[0]).sum() :].T


def least_squares(X, y, weight):
    """argmin_x Σ_i weight_i (X_i·x − y_i)², the shortest x if there are several; all may have batch dimensions."""
    root = np.sqrt(weight)[..., None]
    return (np.linalg.pinv(root * X, rcond=RCOND) @ (root * y[..., None]))[..., 0]


class Problem(NamedTuple):
    """Eq. `loss_full`: E[(X·x − y)²] subject to Cx = 0, with x = (V, A, B) laid end to end."""

    X: np.ndarray  # [N, K]
    X_online: np.ndarray  # [N, K] X without the bootstrap: what remains to differentiate if V_target is frozen
    y: np.ndarray  # [N]
    weight: np.ndarray  # [N]
    C: np.ndarray  # [S + S·A, K]
    unknown: np.ndarray  # [S + S·A + S·A·S] bool: the K entries of (V, A, B) that are estimated, the rest being 0


def off_policy_problem(mdp, pi, trajectories, method="Off-policy DAE"):
    """Eq. `loss_full` on these trajectories; DAE is B ≡ 0 and Uncorrected is A ≡ 0, B ≡ 0 (Eq. `hierarchy`)."""
    phi = features(mdp, trajectories)
    S, A = mdp.r.shape
    N, K = len(phi.returns), S + S * A  # K entries of (V, A)
    actions, has_A, has_B = available(mdp), method != "Uncorrected", method == "Off-policy DAE"
    unknown = np.concatenate([actions.any(axis=-1), has_A & actions.ravel(), has_B & (mdp.p > 0).ravel()])
    skill_and_luck = [phi.advantage.reshape(N, -1), mdp.gamma * phi.luck.reshape(N, -1)]
    X, X_online = (np.hstack([start, *skill_and_luck]) for start in (phi.start - phi.end, phi.start))
    C = np.zeros((K, K + S * A * S))
    C[:S, S:K] = (np.eye(S)[..., None] * pi).reshape(S, -1)
    C[S:, K:] = (np.eye(S * A)[..., None] * mdp.p.reshape(S * A, S)).reshape(S * A, -1)
    return Problem(X[:, unknown], X_online[:, unknown], phi.returns, trajectories.prob, C[:, unknown], unknown)


def unpack(mdp, unknown, solution, otherwise):
    """x = (V, A, B) laid end to end, back in its shapes [S], [S, A] and [S, A, S]."""
    S, A = mdp.r.shape
    x = np.full(len(unknown), otherwise)
    x[unknown] = solution
    return x[:S], x[S : S + S * A].reshape(S, A), x[S + S * A :].reshape(S, A, S)


def solve_off_policy(mdp, pi, trajectories, method="Off-policy DAE", target_network=False):
    """(V, A, B) of a method, from trajectories weighted by their probability. Without a target network it minimises Eq.
    `loss_full`, whose V̂(s_{n+1}) is itself an unknown. With one, it is the fixed point of V_target = V̂: the bootstrap
    is evaluated, but the normal equations do not differentiate it."""
    X, X_online, y, weight, C, unknown = off_policy_problem(mdp, pi, trajectories, method)
    basis = null_space(C)
    if target_network:
        left = (X_online @ basis).T * weight
        solution = np.linalg.solve(left @ X @ basis, left @ y)
    else:
        solution = least_squares(X @ basis, y, weight)
    return unpack(mdp, unknown, basis @ solution, 0.0)


# --- Figures classic and classic_stoch: on-policy ---------------------------------------------------------------------
def classic_mdp(stochastic=False):
    """Figure `classic`, with the paper's numbers of states (0 is not used) and γ = 1; or Figure `classic_stoch`, where
    from state 4 on nature decides between a reward of 1 (state 5) and of 0 (state 6)."""
    S = 8 if stochastic else 5
    p, r, start = np.zeros((S, 2, S)), np.zeros((S, 2)), np.zeros(S)
    start[1:3] = 0.9, 0.1
    p[1, U, 3] = p[2, U, 3] = p[3, U, 4] = p[3, D, 4] = 1.0
    r[3, U] = 1.0
    if stochastic:
        p[4, U, 5] = p[4, U, 6] = 0.5
        p[5, U, 7] = p[6, U, 7] = r[5, U] = 1.0
    return MDP(p, r, 1.0, start)


def sample_counts(trajectories, seeds, max_size=100, seed=0):
    """[seeds, max_size, N]: how often each trajectory is among the first 1, 2, ..., max_size that a seed draws."""
    N = len(trajectories.prob)
    draws = np.random.default_rng(seed).choice(N, size=(seeds, max_size), p=trajectories.prob)
    return np.eye(N)[draws].cumsum(axis=1)


def classic_estimates(mdp, trajectories, counts):
    """Estimates [..., 2] of V(1) and V(2) by each method, from counts [..., N]. As in Appendix `app:classic`, each
    constraint removes one unknown before the pseudoinverse is taken: A(3,d) = −A(3,u) and, with luck,
    B(4,6) = −B(4,5) p(5|4)/p(6|4). Every other A and B is zero."""
    phi = features(mdp, trajectories)
    start = phi.start[:, 1:3]
    X = np.column_stack([start, phi.advantage[:, 3, U] - phi.advantage[:, 3, D]])
    dae = least_squares(X, phi.returns, counts)[..., :2]
    if len(mdp.r) == 5:
        # 0/0 for a state that no trajectory starts from becomes 0, as the pseudoinverse gives
        mc = counts @ (start * phi.returns[:, None]) / np.maximum(counts @ start, 1)
        td = np.stack([counts @ phi.returns / counts.sum(axis=-1)] * 2, axis=-1)
        return {"MC": mc, "Batch TD(0)": td, "DAE": dae}
    # state 4 is on every trajectory, so one trajectory is enough for its transition frequencies to exist
    to_5, to_6, estimates = phi.luck[:, 4, U, 5], phi.luck[:, 4, U, 6], {"DAE": dae}
    learned = (counts @ to_5 / counts.sum(axis=-1))[..., None]
    for name, p_5 in (("learned p", learned), ("oracle p", np.full_like(learned, mdp.p[4, U, 5]))):
        odds = p_5 / np.where(p_5 < 1, 1 - p_5, 1)
        luck = np.where(p_5 < 1, to_5 - odds * to_6, 0.0)  # p(5|4) = 1 leaves no luck: B(4,5) = 0
        X_luck = np.concatenate([np.broadcast_to(X, (*luck.shape, 3)), luck[..., None]], axis=-1)
        estimates[f"Off-policy DAE ({name})"] = least_squares(X_luck, phi.returns, counts)[..., :2]
    return estimates


# --- Counterexample: off-policy ---------------------------------------------------------------------------------------
def counterexample_mdp():
    """Figure `counter`. State 0 is terminal; state 1 leads to state 2 or to the end, by chance; γ = 1."""
    p, r = np.zeros((3, 2, 3)), np.zeros((3, 2))
    p[1, U, 2] = p[1, U, 0] = 0.5
    p[2, U, 0] = p[2, D, 0] = 1.0
    r[2, U] = 1.0
    return MDP(p, r, 1.0, np.array([0, 1.0, 0]))


def counterexample_grid(grid):
    """Estimates [len(grid), len(grid), 3] of V(1), A(2,u), A(2,d) for each π(u|2) (rows) and μ(u|2) (columns). The
    closed form is the paper's minimiser of the naive DAE loss (Appendix `app:counter`)."""
    mdp, names = counterexample_mdp(), ("truth", "closed form", "DAE", "Off-policy DAE")
    estimates = {name: np.zeros((len(grid), len(grid), 3)) for name in names}
    for (i, pi_u), (j, mu_u) in product(enumerate(grid), enumerate(grid)):
        pi, mu = (np.array([[0, 0], [1, 0], [u, 1 - u]]) for u in (pi_u, mu_u))
        V = pi_u / (1 + pi_u**2 / mu_u + (1 - pi_u) ** 2 / (1 - mu_u))
        closed_form = V, 1 - V - V * pi_u / mu_u, 0 - V - V * (1 - pi_u) / (1 - mu_u)
        trajectories = enumerate_trajectories(mdp, mu, steps=2)
        solutions = [exact_solution(mdp, pi), *(solve_off_policy(mdp, pi, trajectories, name) for name in names[2:])]
        truth, *solved = [(V[1], *A[2]) for V, A, _ in solutions]
        for name, estimate in zip(names, (truth, closed_form, *solved), strict=True):
            estimates[name][i, j] = estimate
    return estimates


# --- Theorem: random MDPs, exact expectations -------------------------------------------------------------------------
METHODS = ("Off-policy DAE", "DAE", "Uncorrected")  # with V, A and B; V and A; V alone
SIZES = ((2, 2), (2, 3), (3, 2), (3, 3), (4, 2))  # |S|, |A|
GAMMAS = (0.5, 0.9, 0.99)
BACKUPS = (0, 1, 2, 3)  # n


def random_distribution(rng, *shape):
    """Bounded away from 0: the theorem wants every transition to happen, not to be likely."""
    x = rng.uniform(0.1, 1.0, shape)
    return x / x.sum(axis=-1, keepdims=True)


def random_mdp(rng, S, A, gamma, deterministic=False, terminal=False):
    """Every state can be s_0, except a terminal one; from three states on, each (s,a) misses one successor."""
    p = random_distribution(rng, S, A, S)
    if deterministic:
        p = np.eye(S)[rng.integers(S, size=(S, A))]
    elif S > 2:
        p[np.arange(S)[:, None], np.arange(A), rng.integers(S, size=(S, A))] = 0.0
        p /= p.sum(axis=-1, keepdims=True)
    r, start = rng.normal(size=(S, A)), random_distribution(rng, S)
    if terminal:
        p[-1], r[-1], start[-1] = 0.0, 0.0, 0.0
        start /= start.sum()
    return MDP(p, r, gamma, start)


def theorem_errors(seed=0, repeats=4):
    """{(deterministic, target_network, method, n): [number of MDPs, 3, 2 or 1] largest errors of V, A and B on random
    MDPs, as far as the method has them}; and the largest error of the two identities that hold for any MDP."""
    rng, errors, identities = np.random.default_rng(seed), defaultdict(list), defaultdict(list)
    for deterministic, (S, A), gamma, i in product((False, True), SIZES, GAMMAS, range(repeats)):
        # every other MDP ends in a terminal state, where there are states enough for luck to remain
        mdp = random_mdp(rng, S, A, gamma, deterministic, terminal=S > 2 and i % 2 == 1)
        pi, mu = random_distribution(rng, S, A), random_distribution(rng, S, A)
        truth = exact_solution(mdp, pi)
        identities["policy improvement"].append(np.abs(policy_improvement(mdp, mu, pi) - exact_solution(mdp, mu)[0]))
        for n in BACKUPS:
            trajectories = enumerate_trajectories(mdp, mu, n + 1)
            identities["decomposition"].append(decomposition_error(mdp, pi, trajectories))
            for (i, method), target in product(enumerate(METHODS), (False, True)):
                found = solve_off_policy(mdp, pi, trajectories, method, target)
                error = [np.abs(x - y).max() for x, y in zip(found, truth, strict=True)]
                errors[deterministic, target, method, n].append(error[: 3 - i])
    largest = {name: np.max(np.hstack(gaps)) for name, gaps in identities.items()}
    return {key: np.array(value) for key, value in errors.items()}, largest


def agreement(mdp, mu, pi, n=1):
    """Whether all minimisers of Eq. `loss_full` have the same V, and the same A and B for the actions that π takes."""
    X, _, _, weight, C, unknown = off_policy_problem(mdp, pi, enumerate_trajectories(mdp, mu, n + 1))
    basis = null_space(C)
    free = basis @ null_space(np.linalg.qr(np.sqrt(weight)[:, None] * (X @ basis), mode="r"))
    fixed = np.abs(free).sum(axis=-1) < 1e-8
    V, A, B = unpack(mdp, unknown, fixed, True)
    return bool(V.all()), bool(A[pi > 0].all()), bool(B[pi > 0].all())


def uniqueness_cases(seed=0):
    """{case: agreement on V, A, B}, for the condition on μ in Theorem `thm:main` and remark 2 of `app:proof`."""
    rng = np.random.default_rng(seed)
    mdp = random_mdp(rng, 3, 3, 0.9)
    explores, pi, misses = random_distribution(rng, 3, 3, 3)
    misses[0] = 0.4, 0.6, 0.0
    cases = {
        "μ takes every action": (mdp, explores, pi),
        "μ misses an action that π takes": (mdp, misses, pi),
        "μ misses an action that π never takes": (mdp, misses, misses[:, [1, 0, 2]]),
        "every transition is seen, but not every state as s_0": (classic_mdp(), *[uniform_policy(classic_mdp())] * 2),
    }
    return {name: agreement(*case) for name, case in cases.items()}


# --- Policy optimisation: what the bias of a critic costs -------------------------------------------------------------
POLICY_METHODS = ("Off-policy DAE", "Tree Backup", "DAE", "Uncorrected")
ITERATIONS, FLOOR = 100, 1e-4  # of policy improvement; the smallest probability of an action
SWEEPS = (  # cells (randomness of the worlds, share of μ in the behaviour policy, n transitions per backup)
    [(x, 1.0, 2) for x in (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0)],
    [(0.5, x, 2) for x in (0.0, 0.25, 0.5, 0.75, 1.0)],
    [(0.5, 1.0, n) for n in (1, 2, 3, 4)],
    [(0.0, 1.0, n) for n in (1, 2, 3, 4)],
)


def random_worlds(randomness, worlds, seed=0, S=4, A=3, gamma=0.9):
    """MDPs, and a μ for each, stacked along a first dimension. Only p depends on `randomness`, which is 0 where every
    transition is deterministic and 1 where it is uniform. μ is squared so that some actions are rare."""
    rng = np.random.default_rng(seed)
    p = (1 - randomness) * np.eye(S)[rng.integers(S, size=(worlds, S, A))] + randomness / S
    mu = random_distribution(rng, worlds, S, A) ** 2
    mdp = MDP(p, rng.normal(size=(worlds, S, A)), gamma, random_distribution(rng, worlds, S))
    return mdp, mu / mu.sum(axis=-1, keepdims=True)


def onward(mdp, policy):
    """[W, S·A, S·A] γ p(s'|s,a) policy(a'|s'), from (s,a) to the next (s',a')."""
    W, S, A = mdp.r.shape
    return mdp.gamma * np.einsum("wsat,wtb->wsatb", mdp.p, policy).reshape(W, S * A, S * A)


def q_critic(mdp, mu, n, method):
    """A function from π to the V and A of the Q that is its own expected n-step target, with data of μ.

    Uncorrected: Q = E_μ[Σ γ^t r_t + γ^n V(s_n) | s, a]. Tree Backup (Eq. `tree`): 0 = E_μ[Σ γ^t π_1 ... π_t δ_t | s, a]
    with π_t = π(a_t|s_t) and the TD error δ_t = r_t + γ V(s_{t+1}) − Q(s_t, a_t), which Q^π solves.
    """
    one = np.eye(mdp.r[0].size)

    def critic(pi):
        tree = method == "Tree Backup"
        powers = [np.linalg.matrix_power(onward(mdp, mu * pi if tree else mu), t) for t in range(n)]
        left = sum(powers) @ (one - onward(mdp, pi)) if tree else one - powers[-1] @ onward(mdp, pi)
        Q = np.linalg.solve(left, sum(powers) @ mdp.r.reshape(len(mdp.r), -1, 1)).reshape(mdp.r.shape)
        V = (pi * Q).sum(axis=-1)
        return V, Q - V[..., None]

    return critic


def dae_critic(mdp, mu, n, method):
    """A function from π to V and A: the fixed point of `solve_off_policy` with a target network, for many MDPs at once.
    Each feature of DAE is a sum over the steps x_t = (s_t, a_t) of a trajectory, so P(x_t, x_u) is all that its normal
    equations need, and trajectories are not enumerated. Off-policy DAE finds the truth (Theorem `thm:main`)."""
    if method == "Off-policy DAE":
        return lambda pi: exact_solution(mdp, pi)[:2]
    W, S, A = mdp.r.shape
    one, state = np.eye(S * A), np.repeat(np.eye(S), A, axis=0)  # [S·A, S] from (s,a) to s
    steps = [mdp.gamma**t * np.hstack([state * (t == 0), one]) for t in range(n)]  # what x_t adds to the features
    first = (mdp.start[..., None] * mu).reshape(W, 1, S * A)  # P(x_0)
    ahead = [np.linalg.matrix_power(onward(mdp, mu) / mdp.gamma, t) for t in range(n + 1)]  # P(x_t | x_0)
    left, bootstrap = np.zeros((2, W, S + S * A, S + S * A))
    for t in range(n):
        now = (first @ ahead[t]).swapaxes(1, 2)  # P(x_t)
        bootstrap[..., :S] += steps[t].T @ (now * ahead[n - t]) @ (mdp.gamma**n * state)
        for u in range(t, n):
            moment = steps[t].T @ (now * ahead[u - t]) @ steps[u]
            left += moment if t == u else moment + moment.swapaxes(1, 2)
    right = left[..., S:] @ mdp.r.reshape(W, S * A, 1)  # the return is Σ γ^t r(x_t)

    def critic(pi):
        mean = (np.eye(S)[..., None] * pi[:, None]).reshape(W, S, S * A)  # from Q to its mean under π
        basis = np.concatenate([mean, one - state @ mean], axis=1)  # from Q to (V, A), with the constraint met
        equations = basis.swapaxes(1, 2) @ (left - bootstrap) @ basis
        x = (basis @ np.linalg.solve(equations, basis.swapaxes(1, 2) @ right))[..., 0]
        return x[:, :S], x[:, S:].reshape(W, S, A)

    return critic


def optimise_policy(mdp, mu, method, n, mu_share=1.0):
    """π after ITERATIONS improvements by the method's critic, from data of the policy mu_share μ + (1 − mu_share) π."""
    make_critic = dae_critic if method in METHODS[:2] else q_critic
    pi = uniform_policy(mdp)
    for i in range(ITERATIONS):
        if i == 0 or mu_share < 1:
            critic = make_critic(mdp, mu_share * mu + (1 - mu_share) * pi, n, method)
        _, A = critic(pi)
        pi = pi * np.exp(A / A.std(axis=(1, 2), keepdims=True))
        pi = np.maximum(pi / pi.sum(axis=-1, keepdims=True), FLOOR)
        pi /= pi.sum(axis=-1, keepdims=True)
    return pi


def share_reached(mdp, pi):
    """[W] the value of π from the start states: 0 is that of the uniform policy, 1 that of the optimal one."""
    best = uniform_policy(mdp)
    for _ in range(best[0].size):  # policy iteration
        best = np.eye(best.shape[-1])[exact_solution(mdp, best)[1].argmax(axis=-1)]
    low, value, high = ((mdp.start * exact_solution(mdp, x)[0]).sum(axis=-1) for x in (uniform_policy(mdp), pi, best))
    return (value - low) / (high - low)


def policy_shares(worlds=200):
    """{(randomness, share of μ, n): {method: [worlds] share_reached}}, for the cells of SWEEPS."""
    shares = {cell: {} for cells in SWEEPS for cell in cells}
    for (randomness, mu_share, n), method in product(shares, POLICY_METHODS):
        mdp, mu = random_worlds(randomness, worlds)
        shares[randomness, mu_share, n][method] = share_reached(mdp, optimise_policy(mdp, mu, method, n, mu_share))
    return shares


# --- Tables and figures -----------------------------------------------------------------------------------------------
# Okabe and Ito's colours, which stay apart for colour-blind readers
STYLES = {
    "MC": ("#E69F00", ":"),
    "Batch TD(0)": ("#009E73", "--"),
    "DAE": ("#0072B2", "-"),
    "Off-policy DAE": ("#D55E00", "-"),
    "Off-policy DAE (learned p)": ("#CC79A7", "--"),
    "Off-policy DAE (oracle p)": ("#D55E00", "-."),
    "Uncorrected": ("#E69F00", ":"),
    "Tree Backup": ("#009E73", "--"),
}
FONTS = {"font.size": 15, "legend.fontsize": 14, "axes.titlesize": 15, "lines.linewidth": 2.5}


def save(fig, path, columns):
    fig.legend(*fig.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=columns)
    fig.savefig(path, dpi=100, pil_kwargs={"optimize": True})
    print(f"wrote {path}")


def below_from(low, high):
    """The number of trajectories from which on `low` stays below `high`; None if it is not below at the end."""
    not_below = np.flatnonzero(low > high - 1e-12)  # estimates that are equal differ by rounding
    first = not_below[-1] + 2 if len(not_below) else 1
    return int(first) if first <= len(low) else None


def show_classic(path, seeds, truth, comparisons, stochastic=False):
    mdp = classic_mdp(stochastic)
    trajectories = enumerate_trajectories(mdp, uniform_policy(mdp), steps=4)
    estimates = classic_estimates(mdp, trajectories, sample_counts(trajectories, seeds))
    statistics = {method: (V.mean(axis=0), V.std(axis=0)) for method, V in estimates.items()}
    print(f"\n{path.stem}: mean ± one standard deviation over seeds; the true values are {truth:g}")
    print(f"{'':28}{'trajectories':>12}{'V(1)':>20}{'V(2)':>20}")
    for method, (mean, std) in statistics.items():
        for k in (1, 10, 50, 100):
            cells = "".join(f"{f'{m:.4f} ± {s:.4f}':>20}" for m, s in zip(mean[k - 1], std[k - 1], strict=True))
            print(f"{method if k == 1 else '':28}{k:12}{cells}")
    for low, high in comparisons:
        where = [below_from(*columns) for columns in zip(statistics[low][1].T, statistics[high][1].T, strict=True)]
        where = ", ".join(f"V({i}) {k or 'never'}" for i, k in enumerate(where, start=1))
        print(f"trajectories from which on {low} has a smaller deviation than {high}: {where}")

    fig = Figure(figsize=(9, 4.8), layout="constrained")
    for state, ax in enumerate(fig.subplots(1, 2, sharey=True)):
        for method, (mean, std) in statistics.items():
            color, line = STYLES[method]
            size, middle = np.arange(1, len(mean) + 1), mean[:, state]
            low, high = middle - std[:, state], middle + std[:, state]
            ax.plot(size, middle, line, color=color, label=method)
            ax.fill_between(size, low, high, color=color, alpha=0.15, linewidth=0)
            ax.plot(size, np.column_stack([low, high]), line, color=color, linewidth=1.2)
        ax.axhline(truth, color="black", linestyle=(0, (4, 4)), linewidth=1.2, label="true value")
        ax.set(xlabel="trajectories", title=f"V({state + 1})", xlim=(1, len(mean)), xticks=(1, 25, 50, 75, 100))
    fig.axes[0].set_ylabel("estimate")
    save(fig, path, columns=2 if stochastic else 4)


def show_counterexample(path, grid, estimates):
    truth, closed_form, dae, off_policy = estimates.values()
    bias = dae - truth
    print("\ncounterexample: estimates of V(1) from data of μ")
    print(f"{'π(u|2)':>8}{'μ(u|2)':>8}{'V^π(1)':>10}{'DAE':>10}{'closed form':>14}{'Off-policy DAE':>16}")
    for pi_u, mu_u in ((0.5, 0.1), (0.5, 0.5), (0.9, 0.1), (0.9, 0.5), (0.9, 0.9)):
        at = np.abs(grid - pi_u).argmin(), np.abs(grid - mu_u).argmin(), 0
        print(f"{pi_u:8.2f}{mu_u:8.2f}{truth[at]:10.4f}{dae[at]:10.4f}{closed_form[at]:14.4f}{off_policy[at]:16.4f}")
    print(f"largest difference over the {len(grid)} x {len(grid)} grid, of V(1), A(2,u) and A(2,d):")
    print(f"  DAE to the closed form      {np.abs(dae - closed_form).max():.1e}")
    print(f"  DAE to the truth            {np.abs(bias).max():.4f} (of V(1) alone {np.abs(bias[..., 0]).max():.4f})")
    print(f"  DAE to the truth, π = μ     {np.abs(bias[np.eye(len(grid), dtype=bool)]).max():.1e}")
    print(f"  Off-policy DAE to the truth {np.abs(off_policy - truth).max():.1e}")

    fig = Figure(figsize=(9, 5), layout="constrained")
    left, right = fig.subplots(1, 2)
    marks = [  # colour stands for π, marks for the method
        (closed_form, {"label": "DAE, closed form"}),
        (dae, {"label": "DAE, numerical minimiser", "marker": "o", "linestyle": "none"}),
        (truth, {"label": "$V^π(1)$", "linestyle": "--", "color": "black", "linewidth": 1.2}),
        (off_policy, {"label": "Off-policy DAE, numerical", "marker": "x", "linestyle": "none", "mew": 1.8}),
    ]
    for pi_u, color in ((0.9, "#0072B2"), (0.5, "#009E73"), (0.2, "#D55E00")):
        i = np.abs(grid - pi_u).argmin()
        for estimate, mark in marks:
            left.plot(grid, estimate[i, :, 0], **{"color": color} | mark | {"label": None})
        left.text(0.68, truth[i, 0, 0] + 0.012, f"π(u|2) = {pi_u}", color=color, ha="center")
    for _, mark in marks:
        left.plot([], [], **{"color": "dimgrey"} | mark)
    left.set(xlabel="μ(u|2)", ylabel="estimate of V(1)", xlim=(0, 1), ylim=(0, 0.52), xticks=(0, 0.5, 1))
    left.set_title("estimates from data of μ")
    image = right.pcolormesh(grid, grid, bias[..., 0], cmap="cividis", shading="nearest")
    right.plot(grid, grid, "--", color="black", linewidth=1.2)
    right.text(0.52, 0.44, "π = μ", rotation=45, ha="center", va="center", rotation_mode="anchor")
    right.set(xlabel="μ(u|2)", ylabel="π(u|2)", xticks=(0.1, 0.5, 0.9), yticks=(0.1, 0.5, 0.9), aspect="equal")
    right.set_title("bias of DAE's V(1)")
    fig.colorbar(image, ax=right, ticks=(0, -0.1, -0.2, -0.3, -0.4), shrink=0.8)
    save(fig, path, columns=2)


def show_theorem(path, errors, identities):
    count = len(errors[False, False, "DAE", 0])
    print(f"\ntheorem: {count} stochastic and {count} deterministic random MDPs, data of μ ≠ π")
    print("largest error of V, and of A and B if the method has them: smallest .. largest over the MDPs")
    print("bootstrap: V̂(s_{n+1}) is an unknown like the others (Eq. loss_full), or a V_target that has converged")
    print(f"{'':15}{'bootstrap':14}{'method':17}" + "".join(f"{f'n = {n}':>20}" for n in BACKUPS))
    for deterministic, target, method in product((False, True), (False, True), METHODS):
        cells = [errors[deterministic, target, method, n].max(axis=1) for n in BACKUPS]
        cells = "".join(f"{f'{e.min():.1e} .. {e.max():.1e}':>20}" for e in cells)
        kind = "deterministic" if deterministic else "stochastic"
        print(f"{kind:15}{'V_target' if target else 'unknown':14}{method:17}{cells}")
    identity = "V(s_0) + Σ γ^t (A_t + γ B_t) = Σ γ^t r_t + γ^T V(s_T) on every trajectory"
    print(f"{identity}: to {identities['decomposition']:.1e}")
    print(f"V^μ = V^π + E_μ[Σ γ^t A^π_t] in every state of every MDP: to {identities['policy improvement']:.1e}")

    fig = Figure(figsize=(9, 7.4), layout="constrained")
    axes = fig.subplots(2, 2, sharex=True, sharey=True)
    for target, deterministic in product((False, True), (False, True)):
        ax = axes[int(target), int(deterministic)]
        for i, method in enumerate(METHODS):
            error = np.array([errors[deterministic, target, method, n][:, 0] for n in BACKUPS])
            spread = np.linspace(-0.1, 0.1, error.shape[1])  # side by side, so that each MDP's dot can be seen
            n = np.array(BACKUPS)[:, None] + 0.27 * (i - 1) + spread
            mark = {"marker": "o^s"[i], "color": STYLES[method][0], "linestyle": "none"}
            ax.plot(n.ravel(), np.maximum(error, 1e-16).ravel(), **mark, markersize=2.5, alpha=0.6)
            ax.plot([], [], **mark, markersize=8, label=method)
        ax.axhline(1e-8, color="black", linestyle="--", linewidth=1.2)
        ax.set(yscale="log", ylim=(1e-17, 1e3), xticks=BACKUPS, yticks=(1e-16, 1e-12, 1e-8, 1e-4, 1))
        bootstrap = "$V_{target}$" if target else "unknown $\\hat{V}$"
        ax.set_title(f"{'deterministic' if deterministic else 'stochastic'} MDPs\nbootstrap: {bootstrap}")
    setp(axes[1], xlabel="n")
    setp(axes[:, 0], ylabel=r"max$_s$ $|\hat{V}(s) - V^π(s)|$")
    save(fig, path, columns=3)


def show_policy(path, shares):
    worlds = len(shares[SWEEPS[0][0]]["DAE"])
    print(f"\npolicy: {ITERATIONS} improvements by each critic, on the same {worlds} random worlds in every row")
    print("value of π, 0 for the uniform and 1 for the optimal policy: mean, worst, and worlds that fail (below 0.99)")
    print(f"{'randomness':>10}{'share of μ':>12}{'n':>4}" + "".join(f"{method:>22}" for method in POLICY_METHODS))
    for randomness, mu_share, n in sum(SWEEPS, start=[]):
        row = [shares[randomness, mu_share, n][method] for method in POLICY_METHODS]
        row = "".join(f"{f'{x.mean():.3f} {x.min():6.2f} {np.mean(x < 0.99):4.0%}':>22}" for x in row)
        print(f"{randomness:10.2f}{mu_share:12.2f}{n:4}{row}")

    fig = Figure(figsize=(13, 7.6), layout="constrained")
    axes = fig.subplots(2, 3, sharex="col", sharey="row")
    for i, (top, bottom) in enumerate(axes.T):
        x = [cell[i] for cell in SWEEPS[i]]  # the coordinate that this sweep varies
        for method, marker, size in zip(POLICY_METHODS, "oD^s", (11, 5, 8, 7), strict=True):
            color, line = STYLES[method]
            style = {"color": color, "linestyle": line, "marker": marker, "markersize": size}
            reached = np.array([shares[cell][method] for cell in SWEEPS[i]])
            top.plot(x, reached.mean(axis=1), **style, label=method)
            top.fill_between(x, *np.quantile(reached, (0.1, 0.9), axis=1), color=color, alpha=0.15, linewidth=0)
            bottom.plot(x, 100 * (reached < 0.99).mean(axis=1), **style)
    axes[0, 0].set(title="how random the world is\n(data from μ, n = 2)")
    axes[0, 1].set(title="how far the data is from the policy\n(randomness 0.5, n = 2)")
    axes[0, 2].set(title="how long the backup is\n(randomness 0.5, data from μ)")
    axes[1, 0].set(xlabel="0: deterministic,\n1: every next state is equally likely")
    axes[1, 1].set(xlabel="0: the policy's own data,\n1: that of another policy μ")
    axes[1, 2].set(xlabel="n", xticks=(1, 2, 3, 4))
    axes[0, 0].set_ylabel("share of the possible\nimprovement reached\n(band: 80% of the worlds)")
    axes[1, 0].set_ylabel("worlds that fail (%):\nless than 99% reached")
    save(fig, path, columns=4)


def main(argv=None):
    parser = argparse.ArgumentParser(description="Draw and print the tabular examples of the paper.")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="where the figures go (default: figures)")
    parser.add_argument("--seeds", type=int, default=1000, help="datasets behind each mean (default: 1000)")
    args = parser.parse_args(argv)
    if args.seeds < 1:
        parser.error(f"--seeds {args.seeds}: at least one dataset is needed")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {args.out}: cannot be made a directory ({error.strerror})")

    with matplotlib.rc_context(FONTS):
        comparisons = [("Batch TD(0)", "MC"), ("DAE", "Batch TD(0)")]
        show_classic(args.out / "classic.png", args.seeds, 0.5, comparisons)
        comparisons = [("Off-policy DAE (learned p)", "DAE"), ("Off-policy DAE (oracle p)", "DAE")]
        show_classic(args.out / "classic_stochastic.png", args.seeds, 1.0, comparisons, stochastic=True)
        grid = np.linspace(0.05, 0.95, 19)
        show_counterexample(args.out / "counterexample.png", grid, counterexample_grid(grid))
        print("\nsolving the random MDPs of the theorem ...", flush=True)
        show_theorem(args.out / "theorem.png", *theorem_errors())
        print("\nuniqueness: do all minimisers agree on V, and on A and B of the actions that π takes?")
        for case, agree in uniqueness_cases().items():
            answers = [f"{x} {'yes' if agreed else 'no':3}" for x, agreed in zip("VAB", agree, strict=True)]
            print(f"  {case:56}" + "   ".join(answers))
        print("\noptimising the policies of random worlds ...", flush=True)
        show_policy(args.out / "policy.png", policy_shares())


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
