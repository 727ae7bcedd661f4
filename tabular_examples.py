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
import time
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
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
    """V^π, A^π and B^π(s,a,s') = V^π(s') − E[V^π(s')|s,a] (Eq. `intro_b`); B is 0 where p(s'|s,a) = 0.

    All of them may carry leading batch dimensions.
    """
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
    skill = np.tensordot(phi.advantage, A, 2)
    luck = mdp.gamma * np.tensordot(phi.luck, B, 3)
    return np.abs(phi.start @ V + skill + luck - phi.returns - phi.end @ V).max()


# --- Constrained least squares ----------------------------------------------------------------------------------------


def null_space(C):
    """Orthonormal basis [..., K, K−rank] of {x: Cx = 0}; a batch of matrices has to have one rank in common."""
    _, singular, Vh = np.linalg.svd(C, full_matrices=True)
    rank = np.unique((singular > RCOND * singular[..., :1]).sum(axis=-1))
    if len(rank) != 1:
        raise ValueError(f"the constraints of a batch have different ranks: {rank.tolist()}")
    return np.swapaxes(Vh[..., rank[0] :, :], -1, -2)


def least_squares(X, y, weight):
    """argmin_x Σ_i weight_i (X_i·x − y_i)², the shortest x if there are several; all may have batch dimensions."""
    root = np.sqrt(weight)[..., None]
    return (np.linalg.pinv(root * X, rcond=RCOND) @ (root * y[..., None]))[..., 0]


def constrained_least_squares(X, y, weight, C):
    """The same subject to Cx = 0.

    Coordinates along an orthonormal basis of the constraints' null space have the length of x itself, so the
    pseudoinverse picks the same x whatever the basis.
    """
    basis = null_space(C)
    return (basis @ least_squares(X @ basis, y, weight)[..., None])[..., 0]


def free_directions(X, weight, C):
    """Orthonormal basis of the directions in which a minimiser can move without leaving the minimum."""
    basis = null_space(C)
    return basis @ null_space(np.linalg.qr(np.sqrt(weight)[:, None] * (X @ basis), mode="r"))


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
    N = len(phi.returns)
    in_A, in_B = {"Off-policy DAE": (True, True), "DAE": (True, False), "Uncorrected": (False, False)}[method]
    actions = available(mdp)
    unknown = np.concatenate([actions.any(axis=-1), in_A & actions.ravel(), in_B & (mdp.p > 0).ravel()])
    skill_and_luck = [phi.advantage.reshape(N, -1), mdp.gamma * phi.luck.reshape(N, -1)]
    X = np.hstack([phi.start - phi.end, *skill_and_luck])
    X_online = np.hstack([phi.start, *skill_and_luck])
    C = np.zeros((S + S * A, S + S * A + S * A * S))
    for s in range(S):
        C[s, S + s * A : S + (s + 1) * A] = pi[s]
    for i, p in enumerate(mdp.p.reshape(S * A, S)):
        C[S + i, S + S * A + i * S : S + S * A + (i + 1) * S] = p
    return Problem(X[:, unknown], X_online[:, unknown], phi.returns, trajectories.prob, C[:, unknown], unknown)


def unpack(mdp, unknown, solution, otherwise):
    """x = (V, A, B) laid end to end, back in its shapes [S], [S, A] and [S, A, S]."""
    S, A = mdp.r.shape
    x = np.full(len(unknown), otherwise)
    x[unknown] = solution
    return x[:S], x[S : S + S * A].reshape(S, A), x[S + S * A :].reshape(S, A, S)


def solve_off_policy(mdp, pi, trajectories, method="Off-policy DAE", target_network=False):
    """(V, A, B) of a method, from trajectories weighted by their probability.

    Without a target network it is the minimiser of Eq. `loss_full`, whose V̂(s_{n+1}) is itself an unknown. With one, it
    is the fixed point of V_target = V̂: the bootstrap is evaluated, but the normal equations do not differentiate it.
    """
    X, X_online, y, weight, C, unknown = off_policy_problem(mdp, pi, trajectories, method)
    if target_network:
        basis = null_space(C)
        left = (X_online @ basis).T * weight
        solution = basis @ np.linalg.solve(left @ X @ basis, left @ y)
    else:
        solution = constrained_least_squares(X, y, weight, C)
    return unpack(mdp, unknown, solution, 0.0)


def determined(mdp, pi, trajectories):
    """Which entries of (V, A, B) are the same in every minimiser of Eq. `loss_full`, as three arrays of bool."""
    X, _, _, weight, C, unknown = off_policy_problem(mdp, pi, trajectories)
    fixed = np.abs(free_directions(X, weight, C)).sum(axis=-1) < 1e-8
    return unpack(mdp, unknown, fixed, True)


# --- Figure classic: a deterministic MDP, on-policy -------------------------------------------------------------------


def classic_mdp():
    """Figure `classic`. States keep the paper's numbers (0 is not used); γ = 1."""
    p, r = np.zeros((5, 2, 5)), np.zeros((5, 2))
    p[1, U, 3] = p[2, U, 3] = p[3, U, 4] = p[3, D, 4] = 1.0
    r[3, U] = 1.0
    return MDP(p, r, 1.0, np.array([0, 0.9, 0.1, 0, 0]))


def sample_counts(trajectories, seeds, max_size=100, seed=0):
    """[seeds, max_size, N]: how often each trajectory is among the first 1, 2, ..., max_size that a seed draws."""
    N = len(trajectories.prob)
    draws = np.random.default_rng(seed).choice(N, size=(seeds, max_size), p=trajectories.prob)
    return np.eye(N)[draws].cumsum(axis=1)


def classic_counts(trajectories, counts):
    """n_{1,u}, n_{1,d}, n_{2,u}, n_{2,d} of Appendix `app:classic`."""
    start, action = trajectories.states[:, 0], trajectories.actions[:, 1]
    return [counts[..., (start == i) & (action == a)].sum(axis=-1) for i in (1, 2) for a in (U, D)]


def classic_estimates(n_1u, n_1d, n_2u, n_2d):
    """Estimates [..., 2] of V(1) and V(2) by each method, with the formulas of Appendix `app:classic`."""
    n_1, n_2 = n_1u + n_1d, n_2u + n_2d
    # 0/0 for a state that no trajectory starts from becomes 0, as the pseudoinverse gives
    mc = np.stack([n_1u / np.maximum(n_1, 1), n_2u / np.maximum(n_2, 1)], axis=-1)
    td = np.stack([(n_1u + n_2u) / (n_1 + n_2)] * 2, axis=-1)
    zero = np.zeros_like(n_1)
    matrix = np.stack([n_1u - n_1d, n_1, zero, n_2u - n_2d, zero, n_2, n_1u + n_2u, n_1u, n_2u], axis=-1)
    right = np.stack([n_1u, n_2u, n_1u + n_2u], axis=-1)[..., None]
    solution = np.linalg.pinv(matrix.reshape(*n_1.shape, 3, 3), rcond=RCOND) @ right  # A(3,u), V(1), V(2)
    return {"MC": mc, "Batch TD(0)": td, "DAE": solution[..., 1:, 0]}


# --- Figure classic_stoch: luck after skill, on-policy ----------------------------------------------------------------


def classic_stoch_mdp():
    """Figure `classic_stoch`: from state 4 on, nature decides between a reward of 1 (state 5) and of 0 (state 6)."""
    p, r = np.zeros((8, 2, 8)), np.zeros((8, 2))
    p[1, U, 3] = p[2, U, 3] = p[3, U, 4] = p[3, D, 4] = 1.0
    p[4, U, 5] = p[4, U, 6] = 0.5
    p[5, U, 7] = p[6, U, 7] = 1.0
    r[3, U] = r[5, U] = 1.0
    return MDP(p, r, 1.0, np.array([0, 0.9, 0.1, 0, 0, 0, 0, 0]))


def classic_stoch_estimates(mdp, trajectories, counts):
    """Estimates [..., 2] of V(1) and V(2) by DAE and Off-policy DAE from counts [..., N] of the N trajectories.

    As in Appendix `app:classic`, each constraint removes one unknown before the pseudoinverse is taken:
    A(3,d) = −A(3,u) and B(4,6) = −B(4,5) p(5|4)/p(6|4). V(1), V(2), A(3,u) and B(4,5) remain: every other A and B is
    zero, and no trajectory starts elsewhere. Features carry no discount here, as γ = 1.
    """
    phi = features(mdp, trajectories)
    X = np.column_stack([phi.start[:, 1:3], phi.advantage[:, 3, U] - phi.advantage[:, 3, D]])
    estimates = {"DAE": least_squares(X, phi.returns, counts)[..., :2]}
    # state 4 is on every trajectory, so one trajectory is enough for its transition frequencies to exist
    to_5, to_6 = phi.luck[:, 4, U, 5], phi.luck[:, 4, U, 6]
    learned, oracle = (counts @ to_5 / counts.sum(axis=-1))[..., None], np.full((*counts.shape[:-1], 1), mdp.p[4, U, 5])
    for name, p_5 in (("learned p", learned), ("oracle p", oracle)):
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


def counterexample_policy(u):
    return np.array([[0, 0], [1, 0], [u, 1 - u]])


def counterexample_closed_form(pi_u, mu_u):
    """The paper's minimiser of the naive DAE loss: V*(1), A*(2,u), A*(2,d) (Appendix `app:counter`)."""
    pi_d, mu_d = 1 - pi_u, 1 - mu_u
    V = pi_u / (1 + pi_u**2 / mu_u + pi_d**2 / mu_d)
    return V, 1 - V - V * pi_u / mu_u, 0 - V - V * pi_d / mu_d


def counterexample_grid(grid):
    """Estimates [len(grid), len(grid), 3] of V(1), A(2,u), A(2,d) for each π(u|2) (rows) and μ(u|2) (columns)."""
    mdp = counterexample_mdp()
    names = ("truth", "closed form", "DAE", "Off-policy DAE")
    estimates = {name: np.zeros((len(grid), len(grid), 3)) for name in names}
    for j, mu_u in enumerate(grid):
        trajectories = enumerate_trajectories(mdp, counterexample_policy(mu_u), steps=2)
        for i, pi_u in enumerate(grid):
            pi = counterexample_policy(pi_u)
            V, A, _ = exact_solution(mdp, pi)
            estimates["truth"][i, j] = V[1], *A[2]
            estimates["closed form"][i, j] = counterexample_closed_form(pi_u, mu_u)
            for method in ("DAE", "Off-policy DAE"):
                V, A, _ = solve_off_policy(mdp, pi, trajectories, method)
                estimates[method][i, j] = V[1], *A[2]
    return estimates


# --- Theorem: random MDPs, exact expectations -------------------------------------------------------------------------

METHODS = ("Off-policy DAE", "DAE", "Uncorrected")
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
    """Largest absolute errors of V, A and B on random MDPs, for each method, backup length n and kind of bootstrap.

    Returns {(deterministic, target_network, method, n): [number of MDPs, 3]}, where the errors of DAE's absent B and
    Uncorrected's absent A and B are left as nan; and the largest error of the two identities that hold for any MDP.
    """
    rng = np.random.default_rng(seed)
    errors, identities = {}, {"decomposition": 0.0, "policy improvement": 0.0}
    cases = [(d, S, A, g, i) for d in (False, True) for S, A in SIZES for g in GAMMAS for i in range(repeats)]
    for deterministic, S, A, gamma, i in cases:
        # every other MDP ends in a terminal state, where there are states enough for luck to remain
        mdp = random_mdp(rng, S, A, gamma, deterministic, terminal=S > 2 and i % 2 == 1)
        pi, mu = random_distribution(rng, S, A), random_distribution(rng, S, A)
        truth = exact_solution(mdp, pi)
        gap = np.abs(policy_improvement(mdp, mu, pi) - exact_solution(mdp, mu)[0]).max()
        identities["policy improvement"] = max(identities["policy improvement"], gap)
        for n in BACKUPS:
            trajectories = enumerate_trajectories(mdp, mu, n + 1)
            gap = decomposition_error(mdp, pi, trajectories)
            identities["decomposition"] = max(identities["decomposition"], gap)
            for method in METHODS:
                for target in (False, True):
                    found = solve_off_policy(mdp, pi, trajectories, method, target)
                    error = [np.abs(x - y).max() for x, y in zip(found, truth, strict=True)]
                    absent = {"Off-policy DAE": 0, "DAE": 1, "Uncorrected": 2}[method]
                    error[3 - absent :] = [np.nan] * absent
                    errors.setdefault((deterministic, target, method, n), []).append(error)
    return {key: np.array(value) for key, value in errors.items()}, identities


def agreement(mdp, mu, pi, n=1):
    """Whether all minimisers have the same V, and the same A and B for the actions that π takes."""
    V, A, B = determined(mdp, pi, enumerate_trajectories(mdp, mu, n + 1))
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


def q_critic(mdp, mu, n, method):
    """A function from π to the V and A of the Q that is its own expected n-step target, with data of μ.

    Uncorrected: Q = E_μ[Σ γ^t r_t + γ^n V(s_n) | s, a]. Tree Backup (Eq. `tree`): 0 = E_μ[Σ γ^t π_1 ... π_t δ_t | s, a]
    with π_t = π(a_t|s_t) and the TD error δ_t = r_t + γ V(s_{t+1}) − Q(s_t, a_t), which Q^π solves.
    """
    W, S, A = mdp.r.shape

    def onward(weight):  # [W, S·A, S·A] from (s,a) to the next (s',a')
        return mdp.gamma * np.einsum("wsat,wtb->wsatb", mdp.p, weight).reshape(W, S * A, S * A)

    def critic(pi):
        tree = method == "Tree Backup"
        powers = [np.linalg.matrix_power(onward(mu * pi if tree else mu), t) for t in range(n)]
        left = sum(powers) @ (np.eye(S * A) - onward(pi)) if tree else np.eye(S * A) - powers[-1] @ onward(pi)
        Q = np.linalg.solve(left, sum(powers) @ mdp.r.reshape(W, S * A, 1)).reshape(W, S, A)
        V = (pi * Q).sum(axis=-1)
        return V, Q - V[..., None]

    return critic


def transition_moments(mdp, mu, n):
    """[W, n·T, n·T]: P(x_t = i, x_u = j) for all pairs of the n transitions x = (s,a,s') of a trajectory, T = S·A·S.

    These replace the enumeration of trajectories: every feature is a sum over transitions, and a regression needs no
    more of its features than their second moments.
    """
    W, S, A = mdp.r.shape
    T = S * A * S
    step = mu[..., None] * mdp.p  # P(a, s' | s)
    ahead = [np.einsum("st,wtau->wstau", np.eye(S), step).reshape(W, S, T)]  # P(x_t | s_0), here for t = 0
    for _ in range(1, n):
        ahead.append(step.sum(axis=2) @ ahead[-1])
    moments = np.zeros((W, n, T, n, T))
    for t in range(n):
        now = (mdp.start[:, None] @ ahead[t])[:, 0, :, None]  # P(x_t)
        moments[:, t, :, t] = now * np.eye(T)
        for u in range(t + 1, n):
            joint = now * np.tile(ahead[u - t - 1], (1, S * A, 1))  # x_u depends on x_t through s', its last index
            moments[:, t, :, u], moments[:, u, :, t] = joint, joint.swapaxes(1, 2)
    return moments.reshape(W, n * T, n * T)


def centring(policy):
    """[W, X·Y, X·(Y−1)], the matrix of f(x,y) − Σ_y policy(y|x) f(x,y); f is 0 at the likeliest y, and so unique."""
    W, X, Y = policy.shape
    others = policy.argsort(axis=-1)[:, :, None, :-1]
    block = np.take_along_axis(np.eye(Y) - policy[:, :, None], others, axis=-1)
    return np.einsum("xk,wxyz->wxykz", np.eye(X), block).reshape(W, X * Y, X * (Y - 1))


def dae_critic(mdp, mu, n, method):
    """A function from π to V and A: the fixed point of `solve_off_policy` with a target network, for many MDPs at once.

    What depends on the data alone is computed before π is known.
    """
    W, S, A = mdp.r.shape
    K, T = S + S * A, S * A * S  # entries of (V, A), and of B
    s, a, s_next = np.indices((S, A, S)).reshape(3, T)
    X_step = np.hstack([np.zeros((T, S)), np.eye(S * A)[s * A + a], mdp.gamma * np.eye(T)])
    if method == "DAE":
        X_step = X_step[:, :K]
    discount = mdp.gamma ** np.arange(n)
    X_online, y = np.kron(discount[:, None], X_step), np.kron(discount, mdp.r[:, s, a])
    X_online[:T, :S] = np.eye(S)[s]
    X = X_online.copy()
    X[-T:, :S] -= mdp.gamma**n * np.eye(S)[s_next]
    weighted = X_online.T @ transition_moments(mdp, mu, n)
    left = weighted @ X
    system = np.concatenate([left[..., :K], weighted @ y[..., None]], axis=-1)  # [W, K (+ T), K+1] the normal equations
    if method == "Off-policy DAE":  # B's constraint does not depend on π: B is eliminated once, in terms of V and A
        centre = centring(mdp.p.reshape(W, S * A, S))
        of_B = centre.swapaxes(1, 2) @ left[:, K:, K:] @ centre
        never = of_B.diagonal(axis1=1, axis2=2) == 0  # transitions that do not happen
        of_B += never[..., None] * np.eye(never.shape[1])
        B = centre @ np.linalg.solve(of_B, centre.swapaxes(1, 2) @ system[:, K:])
        system = system[:, :K] - left[:, :K, K:] @ B

    def critic(pi):
        basis = np.zeros((W, K, S * A))
        basis[:, :S, :S], basis[:, S:, S:] = np.eye(S), centring(pi)
        equations = basis.swapaxes(1, 2) @ system
        x = basis @ np.linalg.solve(equations[..., :K] @ basis, equations[..., K:])
        return x[:, :S, 0], x[:, S:, 0].reshape(W, S, A)

    return critic


def optimise_policy(mdp, mu, method, n, mu_share=1.0):
    """π after ITERATIONS improvements by the method's critic, from data of the policy mu_share μ + (1 − mu_share) π."""
    make_critic = dae_critic if method in ("DAE", "Off-policy DAE") else q_critic
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
    start = time.monotonic()
    for done, ((randomness, mu_share, n), reached) in enumerate(shares.items(), start=1):
        mdp, mu = random_worlds(randomness, worlds)
        for method in POLICY_METHODS:
            reached[method] = share_reached(mdp, optimise_policy(mdp, mu, method, n, mu_share))
        left = (time.monotonic() - start) * (len(shares) - done) / done
        print(f"\r{done} of {len(shares)} cells, {left:3.0f} s left", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return shares


# --- Tables -----------------------------------------------------------------------------------------------------------


def below_from(low, high):
    """The number of trajectories from which on `low` stays below `high`; None if it is not below at the end."""
    not_below = np.flatnonzero(low > high - 1e-12)  # estimates that are equal differ by rounding
    first = not_below[-1] + 2 if len(not_below) else 1
    return int(first) if first <= len(low) else None


def print_estimates(title, estimates, truth):
    print(f"\n{title}: mean ± one standard deviation over seeds; the true values are {truth:g}")
    print(f"{'':28}{'trajectories':>12}{'V(1)':>20}{'V(2)':>20}")
    for method, V in estimates.items():
        for k in (1, 10, 50, 100):
            mean, std = V[:, k - 1].mean(axis=0), V[:, k - 1].std(axis=0)
            cells = "".join(f"{f'{m:.4f} ± {s:.4f}':>20}" for m, s in zip(mean, std, strict=True))
            print(f"{method if k == 1 else '':28}{k:12}{cells}")


def print_crossing(estimates, low, high):
    a, b = estimates[low].std(axis=0), estimates[high].std(axis=0)
    where = [f"V({i + 1}) {below_from(a[:, i], b[:, i]) or 'never'}" for i in range(2)]
    print(f"trajectories from which on {low} has a smaller deviation than {high}: {', '.join(where)}")


def print_counterexample(grid, estimates):
    V = {name: x[..., 0] for name, x in estimates.items()}
    print("\ncounterexample: estimates of V(1) from data of μ")
    print(f"{'π(u|2)':>8}{'μ(u|2)':>8}{'V^π(1)':>10}{'DAE':>10}{'closed form':>14}{'Off-policy DAE':>16}")
    for pi_u, mu_u in ((0.5, 0.1), (0.5, 0.5), (0.9, 0.1), (0.9, 0.5), (0.9, 0.9)):
        i, j = np.abs(grid - pi_u).argmin(), np.abs(grid - mu_u).argmin()
        row = V["truth"][i, j], V["DAE"][i, j], V["closed form"][i, j], V["Off-policy DAE"][i, j]
        print(f"{grid[i]:8.2f}{grid[j]:8.2f}{row[0]:10.4f}{row[1]:10.4f}{row[2]:14.4f}{row[3]:16.4f}")
    gap = {name: np.abs(x - estimates["truth"]) for name, x in estimates.items()}
    print(f"largest difference over the {len(grid)} x {len(grid)} grid, of V(1), A(2,u) and A(2,d):")
    print(f"  DAE to the closed form      {np.abs(estimates['DAE'] - estimates['closed form']).max():.1e}")
    print(f"  DAE to the truth            {gap['DAE'].max():.4f} (of V(1) alone {gap['DAE'][..., 0].max():.4f})")
    print(f"  DAE to the truth, π = μ     {gap['DAE'][np.eye(len(grid), dtype=bool)].max():.1e}")
    print(f"  Off-policy DAE to the truth {gap['Off-policy DAE'].max():.1e}")


def print_theorem(errors, identities):
    count = len(errors[False, False, "DAE", 0])
    print(f"\ntheorem: {count} stochastic and {count} deterministic random MDPs, data of μ ≠ π")
    print("largest error of V, and of A and B if the method has them: smallest .. largest over the MDPs")
    print("bootstrap: V̂(s_{n+1}) is an unknown like the others (Eq. loss_full), or a V_target that has converged")
    print(f"{'':15}{'bootstrap':14}{'method':17}" + "".join(f"{f'n = {n}':>20}" for n in BACKUPS))
    for deterministic in (False, True):
        for target in (False, True):
            for method in METHODS:
                kind = "deterministic" if deterministic else "stochastic"
                cells = [np.nanmax(errors[deterministic, target, method, n], axis=1) for n in BACKUPS]
                cells = "".join(f"{f'{e.min():.1e} .. {e.max():.1e}':>20}" for e in cells)
                print(f"{kind:15}{'V_target' if target else 'unknown':14}{method:17}{cells}")
    decomposition, improvement = identities["decomposition"], identities["policy improvement"]
    print(f"V(s_0) + Σ γ^t (A_t + γ B_t) = Σ γ^t r_t + γ^T V(s_T) on every trajectory: to {decomposition:.1e}")
    print(f"V^μ = V^π + E_μ[Σ γ^t A^π_t] in every state of every MDP: to {improvement:.1e}")


def print_uniqueness(cases):
    print("\nuniqueness: do all minimisers agree on V, and on A and B of the actions that π takes?")
    for name, agree in cases.items():
        print(f"  {name:56}" + "   ".join(f"{x} {'yes' if a else 'no':3}" for x, a in zip("VAB", agree, strict=True)))


def print_policy(shares):
    worlds = len(shares[SWEEPS[0][0]]["DAE"])
    print(f"\npolicy: {ITERATIONS} improvements by each critic, on the same {worlds} random worlds in every row")
    print("value of π, 0 for the uniform and 1 for the optimal policy: mean, worst, and worlds that fail (below 0.99)")
    print(f"{'randomness':>10}{'share of μ':>12}{'n':>4}" + "".join(f"{method:>22}" for method in POLICY_METHODS))
    for randomness, mu_share, n in sum(SWEEPS, start=[]):
        row = [shares[randomness, mu_share, n][method] for method in POLICY_METHODS]
        row = "".join(f"{f'{x.mean():.3f} {x.min():6.2f} {np.mean(x < 0.99):4.0%}':>22}" for x in row)
        print(f"{randomness:10.2f}{mu_share:12.2f}{n:4}{row}")


# --- Figures ----------------------------------------------------------------------------------------------------------

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


def save(fig, path):
    fig.savefig(path, dpi=100, pil_kwargs={"optimize": True})
    print(f"wrote {path}")


def draw_estimates(path, estimates, truth):
    fig = Figure(figsize=(9, 4.8), layout="constrained")
    for state, ax in enumerate(fig.subplots(1, 2, sharey=True)):
        for method, V in estimates.items():
            color, line = STYLES[method]
            mean, std = V[..., state].mean(axis=0), V[..., state].std(axis=0)
            size = np.arange(1, len(mean) + 1)
            ax.plot(size, mean, line, color=color, label=method)
            ax.fill_between(size, mean - std, mean + std, color=color, alpha=0.15, linewidth=0)
            for edge in (mean - std, mean + std):
                ax.plot(size, edge, line, color=color, linewidth=1.2)
        ax.axhline(truth, color="black", linestyle=(0, (4, 4)), linewidth=1.2, label="true value")
        ax.set(xlabel="trajectories", title=f"V({state + 1})", xlim=(1, len(mean)), xticks=(1, 25, 50, 75, 100))
    fig.axes[0].set_ylabel("estimate")
    handles, labels = fig.axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=2 if max(map(len, labels)) > 12 else 4)
    save(fig, path)


def draw_counterexample(path, grid, estimates):
    V = {name: x[..., 0] for name, x in estimates.items()}
    fig = Figure(figsize=(9, 5), layout="constrained")
    left, right = fig.subplots(1, 2)
    for pi_u, color in ((0.9, "#0072B2"), (0.5, "#009E73"), (0.2, "#D55E00")):
        i = np.abs(grid - pi_u).argmin()
        left.plot(grid, V["closed form"][i], color=color)
        left.plot(grid, V["DAE"][i], "o", color=color, markersize=6)
        left.plot(grid, V["truth"][i], "--", color="black", linewidth=1.2)
        left.plot(grid, V["Off-policy DAE"][i], "x", color=color, markersize=6, markeredgewidth=1.8)
        left.text(0.68, V["truth"][i, 0] + 0.012, f"π(u|2) = {pi_u}", color=color, ha="center")
    # grey entries for the legend: colour stands for π, marks for the method
    grey = {"color": "dimgrey"}
    left.plot([], [], **grey, label="DAE, closed form")
    left.plot([], [], "o", **grey, markersize=6, label="DAE, numerical minimiser")
    left.plot([], [], "--", color="black", linewidth=1.2, label="$V^π(1)$")
    left.plot([], [], "x", **grey, markersize=6, markeredgewidth=1.8, label="Off-policy DAE, numerical")
    left.set(xlabel="μ(u|2)", ylabel="estimate of V(1)", xlim=(0, 1), ylim=(0, 0.52), xticks=(0, 0.5, 1))
    left.set_title("estimates from data of μ")
    image = right.pcolormesh(grid, grid, V["DAE"] - V["truth"], cmap="cividis", shading="nearest")
    right.plot(grid, grid, "--", color="black", linewidth=1.2)
    right.text(0.52, 0.44, "π = μ", rotation=45, ha="center", va="center", rotation_mode="anchor")
    right.set(
        xlabel="μ(u|2)", ylabel="π(u|2)", title="bias of DAE's V(1)", xticks=(0.1, 0.5, 0.9), yticks=(0.1, 0.5, 0.9)
    )
    right.set_aspect("equal")
    fig.colorbar(image, ax=right, ticks=(0, -0.1, -0.2, -0.3, -0.4), shrink=0.8)
    fig.legend(loc="outside lower center", ncols=2)
    save(fig, path)


def draw_theorem(path, errors):
    fig = Figure(figsize=(9, 7.4), layout="constrained")
    axes = fig.subplots(2, 2, sharex=True, sharey=True)
    for target, deterministic in np.ndindex(2, 2):
        ax = axes[target, deterministic]
        for i, method in enumerate(METHODS):
            error = np.array([errors[bool(deterministic), bool(target), method, n][:, 0] for n in BACKUPS])
            spread = np.linspace(-0.1, 0.1, error.shape[1])  # side by side, so that each MDP's dot can be seen
            n = np.array(BACKUPS)[:, None] + 0.27 * (i - 1) + spread
            mark = {"marker": "o^s"[i], "color": STYLES[method][0], "linestyle": "none"}
            ax.plot(n.ravel(), np.maximum(error, 1e-16).ravel(), **mark, markersize=2.5, alpha=0.6)
            ax.plot([], [], **mark, markersize=8, label=method)
        ax.axhline(1e-8, color="black", linestyle="--", linewidth=1.2)
        ax.set(yscale="log", ylim=(1e-17, 1e3), xticks=BACKUPS, yticks=(1e-16, 1e-12, 1e-8, 1e-4, 1))
        kind = "deterministic MDPs" if deterministic else "stochastic MDPs"
        ax.set_title(f"{kind}\n" + ("bootstrap: $V_{target}$" if target else "bootstrap: unknown $\\hat{V}$"))
    for ax in axes[1]:
        ax.set_xlabel("n")
    for ax in axes[:, 0]:
        ax.set_ylabel(r"max$_s$ $|\hat{V}(s) - V^π(s)|$")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    save(fig, path)


def draw_policy(path, shares):
    fig = Figure(figsize=(13, 7.6), layout="constrained")
    axes = fig.subplots(2, 3, sharex="col", sharey="row")
    for i, (top, bottom) in enumerate(axes.T):
        x = [cell[i] for cell in SWEEPS[i]]  # the coordinate that this sweep varies
        for method, marker, size in zip(POLICY_METHODS, "oD^s", (11, 5, 8, 7), strict=True):
            style = {"color": STYLES[method][0], "linestyle": STYLES[method][1], "marker": marker, "markersize": size}
            reached = np.array([shares[cell][method] for cell in SWEEPS[i]])
            top.plot(x, reached.mean(axis=1), **style, label=method)
            top.fill_between(
                x, *np.quantile(reached, (0.1, 0.9), axis=1), color=style["color"], alpha=0.15, linewidth=0
            )
            bottom.plot(x, 100 * (reached < 0.99).mean(axis=1), **style)
    axes[0, 0].set(title="how random the world is\n(data from μ, n = 2)")
    axes[0, 1].set(title="how far the data is from the policy\n(randomness 0.5, n = 2)")
    axes[0, 2].set(title="how long the backup is\n(randomness 0.5, data from μ)")
    axes[1, 0].set(xlabel="0: deterministic,\n1: every next state is equally likely")
    axes[1, 1].set(xlabel="0: the policy's own data,\n1: that of another policy μ")
    axes[1, 2].set(xlabel="n", xticks=(1, 2, 3, 4))
    axes[0, 0].set_ylabel("share of the possible\nimprovement reached\n(band: 80% of the worlds)")
    axes[1, 0].set_ylabel("worlds that fail (%):\nless than 99% reached")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    save(fig, path)


# --- Main -------------------------------------------------------------------------------------------------------------


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
        mdp = classic_mdp()
        trajectories = enumerate_trajectories(mdp, uniform_policy(mdp), steps=2)
        n = classic_counts(trajectories, sample_counts(trajectories, args.seeds))
        estimates = classic_estimates(*n)
        print_estimates("classic", estimates, truth=0.5)
        print_crossing(estimates, "Batch TD(0)", "MC")
        print_crossing(estimates, "DAE", "Batch TD(0)")
        draw_estimates(args.out / "classic.png", estimates, truth=0.5)

        mdp = classic_stoch_mdp()
        trajectories = enumerate_trajectories(mdp, uniform_policy(mdp), steps=4)
        estimates = classic_stoch_estimates(mdp, trajectories, sample_counts(trajectories, args.seeds))
        print_estimates("classic_stochastic", estimates, truth=1.0)
        print_crossing(estimates, "Off-policy DAE (learned p)", "DAE")
        print_crossing(estimates, "Off-policy DAE (oracle p)", "DAE")
        draw_estimates(args.out / "classic_stochastic.png", estimates, truth=1.0)

        grid = np.linspace(0.05, 0.95, 19)
        estimates = counterexample_grid(grid)
        print_counterexample(grid, estimates)
        draw_counterexample(args.out / "counterexample.png", grid, estimates)

        print("\nsolving the random MDPs of the theorem ...", flush=True)
        errors, identities = theorem_errors()
        print_theorem(errors, identities)
        draw_theorem(args.out / "theorem.png", errors)
        print_uniqueness(uniqueness_cases())

        print("\noptimising the policies of random worlds ...", flush=True)
        shares = policy_shares()
        print_policy(shares)
        draw_policy(args.out / "policy.png", shares)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
