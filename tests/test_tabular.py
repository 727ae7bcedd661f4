"""The numbers of tabular_examples.py: against the paper's statements, and against slow references written out here."""

import itertools
import signal
import subprocess
import sys

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import tabular_examples as te
from tabular_examples import D, U

SHAPES = [(2, 2, 0.5, False), (3, 2, 0.9, True), (2, 3, 0.99, False), (4, 2, 0.9, True), (3, 3, 0.99, False)]


def sampled(stochastic):
    """Trajectories of Figure `classic` or `classic_stoch`, counts and estimates, over 1000 seeds and 100 sizes."""
    mdp = te.classic_mdp(stochastic)
    trajectories = te.enumerate_trajectories(mdp, te.uniform_policy(mdp), steps=4)
    counts = te.sample_counts(trajectories, 1000)
    return trajectories, counts, te.classic_estimates(mdp, trajectories, counts)


@pytest.fixture(scope="module")
def classic():
    return sampled(stochastic=False)


@pytest.fixture(scope="module")
def stochastic():
    return sampled(stochastic=True)


@pytest.fixture(scope="module")
def theorem():
    """Other MDPs than the script's own."""
    return te.theorem_errors(seed=1, repeats=2)


@pytest.fixture(scope="module")
def policy():
    return te.policy_shares(worlds=30)


def random_case(seed, S, A, gamma, terminal=False, deterministic=False):
    rng = np.random.default_rng(seed)
    mdp = te.random_mdp(rng, S, A, gamma, deterministic, terminal)
    return mdp, te.random_distribution(rng, S, A), te.random_distribution(rng, S, A)


def walk(states, actions):
    """The (s, a, s') of one trajectory, up to its end."""
    return [(s, a, t) for s, a, t in zip(states[:-1], actions, states[1:], strict=True) if a >= 0]


def residual(mdp, states, actions, V, A, B):
    """Σ γ^t (r_t − A_t − γ B_t) + γ^T V(s_T) − V(s_0) along one trajectory, as in Eq. `loss_full`."""
    total, discount = -V[states[0]], 1.0
    for s, a, t in walk(states, actions):
        total += discount * (mdp.r[s, a] - A[s, a] - mdp.gamma * B[s, a, t])
        discount *= mdp.gamma
    return total + discount * V[states[-1]]


def residuals(mdp, trajectories, V, A, B):
    return np.array([residual(mdp, s, a, V, A, B) for s, a in zip(*trajectories[:2], strict=True)])


# --- MDPs, trajectories, features -------------------------------------------------------------------------------------
def test_exact_solution_of_the_toy_mdps():
    counter_policy = np.array([[0, 0], [1, 0], [0.3, 0.7]])
    cases = [
        (te.classic_mdp(), None, 4, [0, 0.5, 0.5, 0.5, 0], (3, [0.5, -0.5]), (3, [0, 0, 0, 0, 0])),
        (te.classic_mdp(True), None, 8, [0, 1, 1, 1, 0.5, 1, 0, 0], (3, [0.5, -0.5]), (4, [0] * 5 + [0.5, -0.5, 0])),
        (te.counterexample_mdp(), counter_policy, 3, [0, 0.15, 0.3], (2, [0.7, -0.3]), (1, [-0.15, 0, 0.15])),
    ]
    for mdp, pi, number, value, (s, advantage), (t, luck) in cases:
        pi = te.uniform_policy(mdp) if pi is None else pi
        V, A, B = te.exact_solution(mdp, pi)
        assert_allclose(V, value, atol=1e-15)
        assert_allclose(A[s], advantage, atol=1e-15)
        assert_allclose(B[t, U], luck, atol=1e-15)
        trajectories = te.enumerate_trajectories(mdp, pi, 4)
        assert len(trajectories.prob) == number and not te.available(mdp)[trajectories.states[:, -1]].any()
        assert te.decomposition_error(mdp, pi, trajectories) < 1e-14


@pytest.mark.parametrize("shape", SHAPES)
def test_identities_on_random_mdps(shape):
    """Bellman's equation, both constraints, the decomposition of every return and the policy improvement lemma."""
    S, A, gamma, _ = shape
    mdp, pi, mu = random_case(5, *shape)
    V, advantage, B = te.exact_solution(mdp, pi)
    value = np.zeros(S)
    for _ in range(4000):
        value = np.array(
            [sum(pi[s, a] * (mdp.r[s, a] + gamma * mdp.p[s, a] @ value) for a in range(A)) for s in range(S)]
        )
    assert_allclose(V, value, atol=1e-10)
    assert_allclose((pi * advantage).sum(axis=1), 0, atol=1e-12)
    assert_allclose((mdp.p * B).sum(axis=2), 0, atol=1e-12)
    assert np.abs(B[mdp.p > 0]).max() > 0.01 and not B[mdp.p == 0].any()  # the random MDPs have luck in them
    assert (mdp.p[0] == 0).any() == (S > 2)  # and from three states on, transitions that never happen
    for steps in (1, 2, 3):  # the longer ones end or are cut, depending on the trajectory
        trajectories = te.enumerate_trajectories(mdp, mu, steps)
        assert np.abs(residuals(mdp, trajectories, V, advantage, B)).max() < 1e-11
        assert max(te.decomposition_error(mdp, policy, trajectories) for policy in (pi, mu)) < 1e-11
    assert np.abs(residuals(mdp, trajectories, V, advantage, 0 * B)).max() > 0.01  # skill alone does not explain it
    V_mu = te.exact_solution(mdp, mu)[0]
    assert_allclose(te.policy_improvement(mdp, mu, pi), V_mu, atol=1e-10)
    assert np.abs(V - V_mu).max() > 0.01


def enumerate_slowly(mdp, policy, steps):
    """{(states, actions): probability}, one trajectory at a time."""
    found = {}

    def extend(states, actions, prob):
        s = states[-1]
        if len(actions) == steps:
            found[states, actions] = prob
        elif not mdp.p[s].any():
            extend((*states, s), (*actions, -1), prob)
        else:
            for a, t in np.ndindex(mdp.p[s].shape):
                if policy[s, a] * mdp.p[s, a, t] > 0:
                    extend((*states, t), (*actions, a), prob * policy[s, a] * mdp.p[s, a, t])

    for s in np.flatnonzero(mdp.start):
        extend((int(s),), (), mdp.start[s])
    return found


@pytest.mark.parametrize("shape", [(2, 3, 0.9, False), (4, 2, 0.9, True)])
def test_enumeration_and_features(shape):
    """Every trajectory with its probability; features are the discounted counts along it."""
    mdp, _, mu = random_case(3, *shape)
    mu[0] = np.eye(len(mu[0]))[0]  # actions of probability 0 must not be followed
    expected, trajectories = enumerate_slowly(mdp, mu, 3), te.enumerate_trajectories(mdp, mu, 3)
    phi, lengths = te.features(mdp, trajectories), set()
    assert len(trajectories.prob) == len(expected) and trajectories.prob.sum() == pytest.approx(1, abs=1e-12)
    for i, (states, actions, prob) in enumerate(zip(*map(np.ndarray.tolist, trajectories), strict=True)):
        assert expected[tuple(states), tuple(actions)] == pytest.approx(prob, rel=1e-12)
        advantage, luck, returns, steps = np.zeros(mdp.r.shape), np.zeros(mdp.p.shape), 0.0, walk(states, actions)
        for t, (s, a, s_next) in enumerate(steps):
            advantage[s, a] += 0.9**t
            luck[s, a, s_next] += 0.9**t
            returns += 0.9**t * mdp.r[s, a]
        lengths.add(len(steps))
        assert_array_equal(phi.start[i], np.eye(len(mdp.p))[states[0]])
        assert_allclose(phi.advantage[i], advantage, atol=1e-14)
        assert_allclose(phi.luck[i], luck, atol=1e-14)
        assert phi.returns[i] == pytest.approx(returns, abs=1e-13)
        if mdp.p[states[-1]].any():
            assert_allclose(phi.end[i], 0.9**3 * np.eye(len(mdp.p))[states[-1]])
    assert lengths == ({1, 2, 3} if shape[3] else {3})


# --- Constrained least squares ----------------------------------------------------------------------------------------
def test_null_space_and_the_shortest_minimiser():
    C = np.random.default_rng(0).normal(size=(2, 6))
    basis = te.null_space(C)
    assert basis.shape == (6, 4) and te.null_space(np.zeros((1, 3))).shape == (3, 3)
    assert_allclose(C @ basis, 0, atol=1e-12)
    assert_allclose(basis.T @ basis, np.eye(4), atol=1e-12)
    shortest = te.least_squares(np.array([[1.0, 2.0]]), np.array([10.0]), np.array([[1.0], [3.0]]))
    assert_allclose(shortest, [[2, 4], [2, 4]], atol=1e-12)


@pytest.mark.parametrize("method", te.METHODS)
def test_solutions_meet_the_lagrangian_system(method):
    """The minimiser, and where repeated regressions on the last V settle: the fixed point with a target network."""
    mdp, pi, mu = random_case(12, 3, 2, 0.5)
    trajectories = te.enumerate_trajectories(mdp, mu, 2)
    X, X_online, y, weight, C, unknown = te.off_policy_problem(mdp, pi, trajectories, method)
    C = C[np.abs(C).sum(axis=1) > 0]

    def minimise(X, y):
        kkt = np.block([[X.T @ (weight[:, None] * X), C.T], [C, np.zeros((len(C), len(C)))]])
        return np.linalg.lstsq(kkt, np.concatenate([X.T @ (weight * y), np.zeros(len(C))]), rcond=1e-12)[0][: len(X.T)]

    target = np.zeros(X.shape[1])
    for _ in range(60):
        target = minimise(X_online, y + (X_online - X) @ target)
    for solution, target_network in ((minimise(X, y), False), (target, True)):
        found = te.solve_off_policy(mdp, pi, trajectories, method, target_network)
        for x, expected in zip(found, te.unpack(mdp, unknown, solution, 0.0), strict=True):
            assert_allclose(x, expected, atol=1e-9)
        V, A, B = found
        assert_allclose((pi * A).sum(axis=1), 0, atol=1e-12)
        assert_allclose((mdp.p * B).sum(axis=2), 0, atol=1e-12)
        assert (np.abs(residuals(mdp, trajectories, V, A, B)).max() < 1e-10) == (method == "Off-policy DAE")


# --- Figures classic and classic_stoch --------------------------------------------------------------------------------
def test_counts_are_cumulated_over_each_seeds_trajectories(classic):
    trajectories, counts, _ = classic
    assert_array_equal(counts.sum(axis=-1), np.broadcast_to(np.arange(1, 101), (1000, 100)))
    steps = np.diff(counts, axis=1)
    assert (steps.sum(axis=-1) == 1).all() and (steps.max(axis=-1) == 1).all()
    assert_allclose(counts[:, -1].mean(axis=0) / 100, trajectories.prob, atol=0.005)
    assert_array_equal(counts[:10], te.sample_counts(trajectories, 10))  # a seed's data is its own
    assert (te.sample_counts(trajectories, 10, seed=1) != counts[:10]).any()


@pytest.mark.parametrize("seed", range(6))
def test_estimates_equal_one_regression_per_dataset(classic, stochastic, seed):
    for k in (0, 1, 2, 4, 9, 29, 99):
        for (states, actions, _), counts, estimates in (classic, stochastic):
            dataset = np.repeat(np.arange(counts.shape[-1]), counts[seed, k].astype(int))
            start = np.array([[states[i, 0] == 1, states[i, 0] == 2] for i in dataset], dtype=float)
            u, lucky = (actions[dataset, 1] == U).astype(float), (states[dataset, 3] == 5).astype(float)
            columns = {"MC": [start], "DAE": [start, 2 * u - 1]}  # A(3,d) = −A(3,u)
            for name, p in (("learned p", lucky.mean()), ("oracle p", 0.5)):
                # B(4,6) = −B(4,5) p(5|4)/p(6|4), or p(5|4) B(4,5) = 0
                luck = np.where(lucky, 1, -p / (1 - p)) if p < 1 else 0 * lucky
                columns[f"Off-policy DAE ({name})"] = [*columns["DAE"], luck]
            for name in estimates.keys() & columns.keys():
                expected = np.linalg.lstsq(np.column_stack(columns[name]), u + lucky, rcond=1e-10)[0][:2]
                assert_allclose(estimates[name][seed, k], expected, atol=1e-10, err_msg=name)
        assert len(estimates) == 3


def test_batch_td_formula_is_where_td_updates_settle(classic):
    trajectories, counts, V = classic[0], np.array([3.0, 1.0, 1.0, 2.0]), np.zeros(5)
    for _ in range(3000):
        update = np.zeros(5)
        for states, actions, c in zip(trajectories.states, trajectories.actions, counts, strict=True):
            update[states[0]] += c * (V[3] - V[states[0]])
            update[3] += c * (float(actions[1] == U) - V[3])
        V += 0.05 * update
    estimate = te.classic_estimates(te.classic_mdp(), trajectories, counts)["Batch TD(0)"]
    assert_allclose(estimate, V[1:3], atol=1e-10)


def test_estimates_converge(classic, stochastic):
    for (trajectories, _, _), truth in ((classic, 0.5), (stochastic, 1.0)):
        counts = np.random.default_rng(0).multinomial(1_000_000, trajectories.prob, size=20).astype(float)
        for method, V in te.classic_estimates(te.classic_mdp(truth == 1.0), trajectories, counts).items():
            assert_allclose(V, truth, atol=0.01, err_msg=method)


@pytest.mark.parametrize("k", [50, 100])
def test_who_varies_less(classic, stochastic, k):
    std = {method: V[:, k - 1].std(axis=0) for method, V in classic[2].items()}
    assert std["DAE"][1] < 0.8 * std["Batch TD(0)"][1] and std["Batch TD(0)"][1] < 0.5 * std["MC"][1]
    assert std["DAE"][0] < std["Batch TD(0)"][0] < std["MC"][0]
    dae, *with_luck = (V[:, k - 1].std(axis=0) for V in stochastic[2].values())
    assert all(luck[1] < 0.6 * dae[1] and luck[0] < dae[0] for luck in with_luck)


def test_dae_says_zero_until_state_2_is_seen_and_is_exact_soon_after(classic):
    """So it overtakes TD(0), whose formula in the appendix already says V(3), only after some thirty trajectories."""
    (states, actions, _), counts, estimates = classic
    std = {method: V[..., 1].std(axis=0) for method, V in estimates.items()}
    assert 28 <= te.below_from(std["DAE"], std["Batch TD(0)"]) <= 38
    assert te.below_from(np.array([3, 1, 1.0]), np.array([2, 2, 2.0])) == 2
    assert te.below_from(np.array([1, 1, 2.0]), np.array([2, 2, 2.0])) is None
    n = {(s, a): counts[..., (states[:, 0] == s) & (actions[:, 1] == a)][..., 0] for s in (1, 2) for a in (U, D)}
    unseen = n[2, U] + n[2, D] == 0
    assert not estimates["DAE"][unseen][:, 1].any() and not estimates["MC"][unseen][:, 1].any()
    # once state 2 has been seen, and both actions after one of the states, DAE is exact: the rest is deterministic
    known = ~unseen & (((n[1, U] > 0) & (n[1, D] > 0)) | ((n[2, U] > 0) & (n[2, D] > 0)))
    assert_allclose(estimates["DAE"][known][:, 1], 0.5, atol=1e-12)


def test_luck_term_leaves_only_the_error_of_the_learned_probability(stochastic):
    """With everything seen, the true p gives exactly 1, and the learned one 1/2 + p̂(5|4)."""
    (states, actions, _), counts, estimates = stochastic
    seen = [states[:, 0] == 1, states[:, 0] == 2, actions[:, 1] == U, actions[:, 1] == D]
    seen += [states[:, 3] == 5, states[:, 3] == 6]
    known = np.all([counts[..., mask].sum(axis=-1) > 0 for mask in seen], axis=0)
    known[:, :50] = False  # few trajectories may have shown everything, but not in enough combinations
    assert known.sum() > 40_000
    assert_allclose(estimates["Off-policy DAE (oracle p)"][known], 1.0, atol=1e-10)
    p_5 = (counts[..., states[:, 3] == 5].sum(axis=-1) / counts.sum(axis=-1))[known]
    assert_allclose(estimates["Off-policy DAE (learned p)"][known], np.stack([0.5 + p_5] * 2, axis=-1), atol=1e-10)
    assert np.abs(estimates["DAE"][known] - 1).max() > 0.1


# --- Counterexample ---------------------------------------------------------------------------------------------------
def naive_loss(pi_u, mu_u, V, A_u):
    """Appendix `app:counter`, with A(2,d) from the constraint."""
    A_d = -A_u * pi_u / (1 - pi_u)
    return 0.5 * mu_u * (1 - A_u - V) ** 2 + 0.5 * (1 - mu_u) * (0 - A_d - V) ** 2 + 0.5 * V**2


def test_counterexample():
    """The numerical minimiser is the paper's closed form, is biased unless on-policy, and luck removes the bias."""
    grid = np.linspace(0.03, 0.97, 8)
    truth, closed_form, dae, off_policy = te.counterexample_grid(grid).values()
    assert_allclose(dae, closed_form, atol=1e-10)
    pi, mu = grid[:, None], grid[None, :]
    V, A_u, A_d = np.moveaxis(dae, -1, 0)
    assert_allclose(pi * A_u + (1 - pi) * A_d, 0, atol=1e-12)
    for step in ((1e-3, 0), (-1e-3, 0), (0, 1e-3), (0, -1e-3)):
        assert (naive_loss(pi, mu, V + step[0], A_u + step[1]) > naive_loss(pi, mu, V, A_u)).all()
    assert_allclose(truth[..., 0], np.broadcast_to(pi / 2, (8, 8)))
    on_policy = np.eye(8, dtype=bool)
    assert_allclose((dae - truth)[on_policy], 0, atol=1e-10)
    assert ((dae - truth)[~on_policy][:, 0] < -1e-5).all() and (dae - truth)[..., 0].min() < -0.4  # always too low
    assert_allclose(off_policy, truth, atol=1e-10)


# --- Theorem ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", te.BACKUPS)
def test_theorem(theorem, n):
    """Off-policy DAE is right everywhere; DAE without luck, or after one step from a V_target; Uncorrected never."""
    errors, identities = theorem
    assert set(identities) == {"decomposition", "policy improvement"} and max(identities.values()) < 1e-10
    for deterministic, target in itertools.product((False, True), (False, True)):
        off_policy, dae, uncorrected = (errors[deterministic, target, method, n] for method in te.METHODS)
        assert off_policy.shape == (len(te.SIZES) * len(te.GAMMAS) * 2, 3) and off_policy.max() < 1e-8
        assert dae.shape[1] == 2 and uncorrected.shape[1] == 1 and uncorrected.min() > 1e-3
        if deterministic or (target and n == 0):
            assert dae.max() < 1e-8
        else:
            assert dae[:, 0].min() > 1e-4


@pytest.mark.parametrize("deterministic", [False, True])
def test_uncorrected_with_a_target_network_learns_the_behaviour_policys_value(deterministic):
    mdp, pi, mu = random_case(9, 3, 2, 0.9, deterministic=deterministic)
    V_mu = te.exact_solution(mdp, mu)[0]
    for n in te.BACKUPS:
        trajectories = te.enumerate_trajectories(mdp, mu, n + 1)
        with_target, without = (te.solve_off_policy(mdp, pi, trajectories, "Uncorrected", x)[0] for x in (True, False))
        assert_allclose(with_target, V_mu, atol=1e-10)
        # without one, V̂(s_{n+1}) is fitted too, and its variance is paid for with a bias
        assert np.abs(without - V_mu).max() > 1e-3


def test_without_a_target_network_even_on_policy_dae_needs_the_luck_term():
    mdp, pi, _ = random_case(10, 3, 2, 0.9)
    V = te.exact_solution(mdp, pi)[0]
    for n, (method, target) in itertools.product(te.BACKUPS, itertools.product(te.METHODS[:2], (False, True))):
        found = te.solve_off_policy(mdp, pi, te.enumerate_trajectories(mdp, pi, n + 1), method, target)[0]
        error = np.abs(found - V).max()
        assert error > 1e-3 if (method, target) == ("DAE", False) else error < 1e-10


@pytest.mark.parametrize(("seed", "n"), [(0, 0), (1, 1), (2, 2)])
@pytest.mark.parametrize("taken", [True, False])
def test_minimiser_is_unique_unless_mu_misses_an_action_that_pi_takes(seed, n, taken):
    """Another minimiser: moved along the directions that the data leaves free."""
    mdp, pi, mu = random_case(seed, 3, 3, 0.9)
    mu[0] = 0.4, 0.6, 0.0
    pi[0] = pi[0] if taken else (0.7, 0.3, 0.0)
    trajectories = te.enumerate_trajectories(mdp, mu, n + 1)
    X, _, y, weight, C, unknown = te.off_policy_problem(mdp, pi, trajectories)
    free = te.null_space(np.vstack([np.sqrt(weight)[:, None] * X, C]))
    solution = np.linalg.lstsq(np.vstack([X, C]), np.concatenate([y, np.zeros(len(C))]), rcond=1e-10)[0]
    moved = solution + free @ np.random.default_rng(0).normal(size=free.shape[1])
    V, A, B = te.unpack(mdp, unknown, moved, 0.0)
    assert np.abs(residuals(mdp, trajectories, V, A, B)).max() < 1e-10  # still a minimiser
    assert_allclose((pi * A).sum(axis=1), 0, atol=1e-10)
    assert_allclose((mdp.p * B).sum(axis=2), 0, atol=1e-10)
    truth = te.exact_solution(mdp, pi)
    if taken:
        assert np.abs(V - truth[0]).max() > 1e-2
    else:
        assert_allclose(V, truth[0], atol=1e-8)
        assert_allclose(A[pi > 0], truth[1][pi > 0], atol=1e-8)
        assert_allclose(B[pi > 0], truth[2][pi > 0], atol=1e-8)
    assert np.abs(A[0, 2] - truth[1][0, 2]) > 1e-2  # nothing is known about the action that μ misses
    assert te.agreement(mdp, mu, pi, n) == (not taken,) * 3


def test_uniqueness_table():
    """The last case: V(3) of Figure `classic` is free: every transition is seen, but nothing starts there."""
    yes, no = (True, True, True), (False, False, False)
    assert list(te.uniqueness_cases().values()) == [yes, no, yes, (False, True, True)]


# --- Policy optimisation ----------------------------------------------------------------------------------------------
def unstack(worlds):
    return [te.MDP(p, r, worlds.gamma, start) for p, r, start in zip(worlds.p, worlds.r, worlds.start, strict=True)]


def test_random_worlds_go_from_deterministic_to_uniform_and_change_nothing_else():
    (first, mu), (middle, _), (last, mu_last) = (te.random_worlds(x, 50) for x in (0, 0.5, 1))
    assert set(np.unique(first.p)) == {0, 1} and (last.p == 0.25).all()
    assert_allclose(middle.p, (first.p + last.p) / 2)
    for x, y in ((first.r, last.r), (first.start, last.start), (mu, mu_last)):
        assert_array_equal(x, y)
    assert_allclose([mu.sum(axis=-1), first.p.sum(axis=-1)[..., 0]], 1)
    assert np.median(mu.max(axis=-1) / mu.min(axis=-1)) > 4  # well off the uniform policy
    for together, *one in zip(te.exact_solution(middle, mu), *map(te.exact_solution, unstack(middle), mu), strict=True):
        assert_allclose(together, one, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("kind", ["deterministic", "some successors missing", "all successors"])
@pytest.mark.parametrize("method", ["DAE", "Off-policy DAE"])
def test_dae_critic_is_the_fixed_point_on_all_trajectories(kind, n, method):
    rng = np.random.default_rng(n)
    worlds = te.random_worlds(0.4, 3)[0]
    if kind != "all successors":
        mdps = [te.random_mdp(rng, 4, 3, 0.9, deterministic=kind == "deterministic") for _ in range(3)]
        p, r, start = (np.stack([getattr(mdp, name) for mdp in mdps]) for name in ("p", "r", "start"))
        worlds = te.MDP(p, r, 0.9, start)
    pi, mu = te.random_distribution(rng, 2, 3, 4, 3)
    V, A = te.dae_critic(worlds, mu, n, method)(pi)
    for i, mdp in enumerate(unstack(worlds)):
        trajectories = te.enumerate_trajectories(mdp, mu[i], n)
        expected = te.solve_off_policy(mdp, pi[i], trajectories, method, target_network=True)
        assert_allclose(V[i], expected[0], atol=1e-9)
        assert_allclose(A[i], expected[1], atol=1e-9)


def n_step_target(mdp, pi, Q, states, actions, method):
    """Of one trajectory, Q a function of (s, a): as the paper writes them."""
    value = (pi * Q).sum(axis=1)
    target = mdp.r[states[-2], actions[-1]] + mdp.gamma * value[states[-1]]
    for t in range(len(actions) - 2, -1, -1):
        s, a = states[t + 1], actions[t + 1]
        if method == "Tree Backup":  # Eq. `tree`
            target = sum(pi[s, b] * Q[s, b] for b in range(pi.shape[1]) if b != a) + pi[s, a] * target
        target = mdp.r[states[t], actions[t]] + mdp.gamma * target
    return target


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("method", ["Uncorrected", "Tree Backup"])
def test_q_critic_is_its_own_expected_target(method, n):
    worlds, mu = te.random_worlds(0.4, 2, S=3, A=2)
    pi = te.random_distribution(np.random.default_rng(0), 2, 3, 2)
    V, A = te.q_critic(worlds, mu, n, method)(pi)
    Q = V[..., None] + A
    assert_allclose((pi * A).sum(axis=-1), 0, atol=1e-12)
    for i, mdp in enumerate(unstack(worlds)):
        mean, total = np.zeros((3, 2)), np.zeros((3, 2))
        for (states, actions), prob in enumerate_slowly(mdp, mu[i], n).items():
            mean[states[0], actions[0]] += prob * n_step_target(mdp, pi[i], Q[i], states, actions, method)
            total[states[0], actions[0]] += prob
        assert_allclose(Q[i], mean / total, atol=1e-10)
    error = np.abs(A - te.exact_solution(worlds, pi)[1]).max(axis=(1, 2))
    assert (error < 1e-10).all() if n == 1 or method == "Tree Backup" else (error > 1e-3).all()


def test_share_reached_is_measured_from_the_uniform_to_the_best_of_all_policies():
    worlds, mu = te.random_worlds(0.3, 5, S=3, A=3)
    every = [np.broadcast_to(np.eye(3)[list(actions)], (5, 3, 3)) for actions in itertools.product(range(3), repeat=3)]
    shares = np.array([te.share_reached(worlds, pi) for pi in every])
    assert_allclose(shares.max(axis=0), 1, atol=1e-12)
    assert (shares.min(axis=0) < 0).all()
    assert_allclose(te.share_reached(worlds, te.uniform_policy(worlds)), 0, atol=1e-12)


def failing(policy, cell, method):
    """Share of the worlds in which the policy stays below 99% of the possible improvement."""
    return (policy[cell][method] < 0.99).mean()


def test_unbiased_critics_lead_to_the_optimal_policy_everywhere(policy):
    assert len(policy) == 17
    for cell, shares in policy.items():
        assert set(shares) == set(te.POLICY_METHODS)
        for method in ("Off-policy DAE", "Tree Backup"):
            assert 0.99 < shares[method].min() and shares[method].max() <= 1 + 1e-12, (cell, method)


def test_biased_critics_fail_where_they_are_biased(policy):
    for cell, method in itertools.product(((0.0, 1.0, 1), (0.5, 1.0, 1), (0.5, 0.0, 2)), ("DAE", "Uncorrected")):
        assert failing(policy, cell, method) == 0, "one step or on-policy data need no correction"
    for n in (2, 3, 4):
        assert failing(policy, (0.0, 1.0, n), "DAE") == 0
        assert failing(policy, (0.0, 1.0, n), "Uncorrected") > 0.25 and failing(policy, (0.5, 1.0, n), "DAE") > 0.15
        assert failing(policy, (0.5, 1.0, n), "Uncorrected") > 0.15 and policy[0.5, 1.0, n]["DAE"].mean() < 0.97


def test_the_loss_grows_with_what_it_comes_from(policy):
    """DAE's with randomness, both with the distance between data and policy. Uncorrected's falls with randomness: where
    the next state does not depend on the action, actions differ only in their reward, which is not biased."""
    dae, uncorrected = ([failing(policy, cell, m) for cell in te.SWEEPS[0]] for m in ("DAE", "Uncorrected"))
    assert 0 == dae[0] < 0.1 < dae[1] < dae[3] and min(dae[3:]) > 0.3
    assert uncorrected[-1] == 0 and uncorrected[0] > 0.25
    mean = [policy[cell]["Uncorrected"].mean() for cell in te.SWEEPS[0]]
    assert mean == sorted(mean)
    for method in ("DAE", "Uncorrected"):
        mean = [policy[cell][method].mean() for cell in te.SWEEPS[1]]
        fails = [failing(policy, cell, method) for cell in te.SWEEPS[1]]
        assert mean == sorted(mean, reverse=True) and fails == sorted(fails) and fails[0] == 0 < fails[2] < fails[-1]


# --- Command line -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("argv", [["--output", "x"], ["--seeds", "0"], ["--seeds", "many"], ["extra"], ["--out", "f"]])
def test_wrong_flags_exit_with_status_2_and_write_nothing(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f").write_text("mine")
    with pytest.raises(SystemExit) as exit_info:
        te.main(argv)
    assert exit_info.value.code == 2 and argv[0] in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_interrupt_ends_with_one_line_and_status_130(tmp_path):
    command = [sys.executable, "-u", te.__file__, "--out", str(tmp_path), "--seeds", "1"]
    script = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while "theorem ..." not in script.stdout.readline():
        pass
    script.send_signal(signal.SIGINT)
    _, err = script.communicate(timeout=60)
    assert (script.returncode, err) == (130, "\ninterrupted\n")


def test_script_prints_what_the_functions_return(tmp_path, monkeypatch, capsys, theorem, policy):
    monkeypatch.setattr(te, "theorem_errors", lambda: theorem)
    monkeypatch.setattr(te, "policy_shares", lambda: policy)
    te.main(["--out", str(tmp_path / "a" / "figures"), "--seeds", "30"])
    names = {"classic.png", "classic_stochastic.png", "counterexample.png", "theorem.png", "policy.png"}
    assert {path.name for path in (tmp_path / "a" / "figures").iterdir()} == names
    out = capsys.readouterr().out
    mdp = te.classic_mdp()
    trajectories = te.enumerate_trajectories(mdp, te.uniform_policy(mdp), steps=2)
    V = te.classic_estimates(mdp, trajectories, te.sample_counts(trajectories, 30))["MC"][:, 49, 1]
    assert f"{V.mean():.4f} ± {V.std():.4f}" in out
    row = "".join(f"{x:.4f}".rjust(width) for x, width in ((0.45, 10), (0.9 / 9.11111111, 10)))
    assert f"    0.90    0.10{row}" in out
    assert f"{theorem[0][False, False, 'Off-policy DAE', 3].max():.1e}" in out
    shares = policy[0.25, 1.0, 2]["DAE"]
    cell = f"{shares.mean():.3f} {shares.min():6.2f} {np.mean(shares < 0.99):4.0%}"
    assert any(line.startswith("      0.25        1.00   2") and cell in line for line in out.splitlines())
