"""The numbers of tabular_examples.py: against the paper's statements, and against slow references written out here."""

import functools
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


@functools.cache
def sampled(stochastic):
    """Trajectories of Figure `classic` or `classic_stoch`, counts and estimates, over 1000 seeds and 100 sizes."""
    mdp = te.classic_mdp(stochastic)
    trajectories = te.enumerate_trajectories(mdp, te.uniform_policy(mdp), steps=4)
    counts = te.sample_counts(trajectories, 1000)
    return trajectories, counts, te.classic_estimates(mdp, trajectories, counts)


theorem = functools.cache(functools.partial(te.theorem_errors, seed=1, repeats=2))  # other MDPs than the script's own
policy = functools.cache(functools.partial(te.policy_shares, worlds=30))


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
    mdp, pi, mu = random_case(5, *shape)
    V, advantage, B = te.exact_solution(mdp, pi)
    assert_allclose(V, (pi * (mdp.r + mdp.gamma * mdp.p @ V)).sum(axis=1), atol=1e-10)
    assert_allclose((pi * advantage).sum(axis=1), 0, atol=1e-12)
    assert_allclose((mdp.p * B).sum(axis=2), 0, atol=1e-12)
    assert np.abs(B[mdp.p > 0]).max() > 0.01 and not B[mdp.p == 0].any()  # the random MDPs have luck in them
    assert (mdp.p[0] == 0).any() == (len(V) > 2)  # and from three states on, transitions that never happen
    for steps in (1, 2, 3):  # the longer ones end or are cut, depending on the trajectory
        trajectories = te.enumerate_trajectories(mdp, mu, steps)
        assert np.abs(residuals(mdp, trajectories, V, advantage, B)).max() < 1e-11
        assert max(te.decomposition_error(mdp, policy, trajectories) for policy in (pi, mu)) < 1e-11
    assert np.abs(residuals(mdp, trajectories, V, advantage, 0 * B)).max() > 0.01  # skill alone does not explain it
    V_mu = te.exact_solution(mdp, mu)[0]
    assert_allclose(te.policy_improvement(mdp, mu, pi), V_mu, atol=1e-10)
    assert np.abs(V - V_mu).max() > 0.01


@pytest.mark.parametrize("shape", [(2, 3, 0.9, False), (4, 2, 0.9, True)])
def test_enumeration_and_features(shape):
    """Every trajectory with its probability; features are the discounted counts along it."""
    mdp, _, mu = random_case(3, *shape)
    mu[0] = np.eye(len(mu[0]))[0]  # actions of probability 0 must not be followed
    trajectories = te.enumerate_trajectories(mdp, mu, 3)
    phi, lengths, different = te.features(mdp, trajectories), set(), set()
    for i, (states, actions, prob) in enumerate(zip(*map(np.ndarray.tolist, trajectories), strict=True)):
        different.add((*states, *actions))
        expected, steps = mdp.start[states[0]], walk(states, actions)
        advantage, luck, returns = np.zeros(mdp.r.shape), np.zeros(mdp.p.shape), 0.0
        for t, (s, a, s_next) in enumerate(steps):
            expected *= mu[s, a] * mdp.p[s, a, s_next]
            advantage[s, a] += 0.9**t
            luck[s, a, s_next] += 0.9**t
            returns += 0.9**t * mdp.r[s, a]
        lengths.add(len(steps))
        assert prob == pytest.approx(expected, rel=1e-12) and prob > 0
        assert len(steps) == 3 or not mdp.p[states[-1]].any()
        assert_array_equal(phi.start[i], np.eye(len(mdp.p))[states[0]])
        assert_allclose(phi.advantage[i], advantage, atol=1e-14)
        assert_allclose(phi.luck[i], luck, atol=1e-14)
        assert phi.returns[i] == pytest.approx(returns, abs=1e-13)
        if mdp.p[states[-1]].any():
            assert_allclose(phi.end[i], 0.9**3 * np.eye(len(mdp.p))[states[-1]])
    assert lengths == ({1, 2, 3} if shape[3] else {3})
    assert len(different) == len(trajectories.prob) and trajectories.prob.sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("method", te.METHODS)
def test_solutions_meet_the_lagrangian_system(method):
    """The minimiser, and where repeated regressions on the last V settle: the fixed point with a target network."""
    mdp, pi, mu = random_case(12, 3, 2, 0.5)
    trajectories = te.enumerate_trajectories(mdp, mu, 2)
    X, X_online, y, weight, C, unknown = te.off_policy_problem(mdp, pi, trajectories, method)
    C = C[np.abs(C).sum(axis=1) > 0]

    def minimise(X, y):
        kkt = np.block([[X.T @ (weight[:, None] * X), C.T], [C, np.zeros((len(C), len(C)))]])
        return np.linalg.solve(kkt, np.concatenate([X.T @ (weight * y), np.zeros(len(C))]))[: len(X.T)]

    target = np.zeros(X.shape[1])
    for _ in range(60):
        target = minimise(X_online, y + (X_online - X) @ target)
    for solution, target_network in ((minimise(X, y), False), (target, True)):
        found = te.solve_off_policy(mdp, pi, trajectories, method, target_network)
        for x, expected in zip(found, te.unpack(mdp, unknown, solution, 0.0), strict=True):
            assert_allclose(x, expected, atol=1e-9)
        assert (np.abs(residuals(mdp, trajectories, *found)).max() < 1e-10) == (method == "Off-policy DAE")


# --- Figures classic and classic_stoch --------------------------------------------------------------------------------
def test_counts_are_cumulated_over_each_seeds_trajectories():
    trajectories, counts, _ = sampled(False)
    steps = np.diff(counts, axis=1, prepend=0)
    assert (steps.sum(axis=-1) == 1).all() and (steps.max(axis=-1) == 1).all()
    assert_allclose(counts[:, -1].mean(axis=0) / 100, trajectories.prob, atol=0.005)
    assert_array_equal(counts[:10], te.sample_counts(trajectories, 10))  # a seed's data is its own


@pytest.mark.parametrize("seed", range(6))
def test_estimates_equal_one_regression_per_dataset(seed):
    for k in (0, 1, 2, 4, 9, 29, 99):
        for (states, actions, _), counts, estimates in (sampled(False), sampled(True)):
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


def test_batch_td_formula_is_where_td_updates_settle():
    trajectories, counts, V = sampled(False)[0], np.array([3.0, 1.0, 1.0, 2.0]), np.zeros(5)
    for _ in range(3000):
        update = np.zeros(5)
        for states, actions, c in zip(trajectories.states, trajectories.actions, counts, strict=True):
            update[states[0]] += c * (V[3] - V[states[0]])
            update[3] += c * (float(actions[1] == U) - V[3])
        V += 0.05 * update
    estimate = te.classic_estimates(te.classic_mdp(), trajectories, counts)["Batch TD(0)"]
    assert_allclose(estimate, V[1:3], atol=1e-10)


@pytest.mark.parametrize("k", [50, 100])
def test_who_varies_less(k):
    mc, td, dae = (V[:, k - 1].std(axis=0) for V in sampled(False)[2].values())
    assert dae[1] < 0.8 * td[1] and td[1] < 0.5 * mc[1] and dae[0] < td[0] < mc[0]
    dae, *with_luck = (V[:, k - 1].std(axis=0) for V in sampled(True)[2].values())
    assert all(luck[1] < 0.6 * dae[1] and luck[0] < dae[0] for luck in with_luck)


def test_dae_says_zero_until_state_2_is_seen_and_is_exact_soon_after():
    """So it overtakes TD(0), whose formula in the appendix already says V(3), only after some thirty trajectories."""
    (states, actions, _), counts, estimates = sampled(False)
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


def test_luck_term_leaves_only_the_error_of_the_learned_probability():
    """With everything seen, the true p gives exactly 1, and the learned one 1/2 + p̂(5|4)."""
    (states, actions, _), counts, estimates = sampled(True)
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
def test_counterexample():
    """The numerical minimiser is the paper's closed form, is biased unless on-policy, and luck removes the bias."""
    grid = np.linspace(0.03, 0.97, 8)
    truth, closed_form, dae, off_policy = te.counterexample_grid(grid).values()
    assert_allclose(dae, closed_form, atol=1e-10)
    assert_allclose(truth[..., 0], np.broadcast_to(grid[:, None] / 2, (8, 8)))
    on_policy = np.eye(8, dtype=bool)
    assert_allclose((dae - truth)[on_policy], 0, atol=1e-10)
    assert ((dae - truth)[~on_policy][:, 0] < -1e-5).all() and (dae - truth)[..., 0].min() < -0.4  # always too low
    assert_allclose(off_policy, truth, atol=1e-10)


# --- Theorem ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", te.BACKUPS)
def test_theorem(n):
    """Off-policy DAE is right everywhere; DAE without luck, or after one step from a V_target; Uncorrected never."""
    errors, identities = theorem()
    assert set(identities) == {"decomposition", "policy improvement"} and max(identities.values()) < 1e-10
    for deterministic, target in itertools.product((False, True), (False, True)):
        off_policy, dae, uncorrected = (errors[deterministic, target, method, n] for method in te.METHODS)
        assert off_policy.shape == (len(te.SIZES) * len(te.GAMMAS) * 2, 3) and off_policy.max() < 1e-8
        assert dae.shape[1] == 2 and uncorrected.shape[1] == 1 and uncorrected.min() > 1e-3
        if deterministic or (target and n == 0):
            assert dae.max() < 1e-8
        else:
            assert dae[:, 0].min() > 1e-4


@pytest.mark.parametrize("n", te.BACKUPS)
def test_what_a_target_network_changes(n):
    """With one, Uncorrected learns the value of μ; without, V̂(s_{n+1}) is fitted too, and its variance is paid for with
    a bias, so that even DAE on-policy needs the luck term."""
    for deterministic in (False, True):
        mdp, pi, mu = random_case(9, 3, 2, 0.9, deterministic=deterministic)
        V_mu, trajectories = te.exact_solution(mdp, mu)[0], te.enumerate_trajectories(mdp, mu, n + 1)
        assert_allclose(te.solve_off_policy(mdp, pi, trajectories, "Uncorrected", True)[0], V_mu, atol=1e-10)
        assert np.abs(te.solve_off_policy(mdp, pi, trajectories, "Uncorrected", False)[0] - V_mu).max() > 1e-3
    mdp, pi, _ = random_case(10, 3, 2, 0.9)
    V, trajectories = te.exact_solution(mdp, pi)[0], te.enumerate_trajectories(mdp, pi, n + 1)
    for case in itertools.product(te.METHODS[:2], (False, True)):
        error = np.abs(te.solve_off_policy(mdp, pi, trajectories, *case)[0] - V).max()
        assert error > 1e-3 if case == ("DAE", False) else error < 1e-10


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


# --- Policy optimisation ----------------------------------------------------------------------------------------------
def unstack(worlds):
    return [te.MDP(p, r, worlds.gamma, start) for p, r, start in zip(worlds.p, worlds.r, worlds.start, strict=True)]


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("randomness", [0.0, 0.4])
@pytest.mark.parametrize("method", ["DAE", "Off-policy DAE"])
def test_dae_critic_is_the_fixed_point_on_all_trajectories(randomness, n, method):
    (worlds, mu), pi = te.random_worlds(randomness, 3), te.random_distribution(np.random.default_rng(n), 3, 4, 3)
    V, A = te.dae_critic(worlds, mu, n, method)(pi)
    for i, mdp in enumerate(unstack(worlds)):
        trajectories = te.enumerate_trajectories(mdp, mu[i], n)
        expected = te.solve_off_policy(mdp, pi[i], trajectories, method, target_network=True)
        assert_allclose(V[i], expected[0], atol=1e-9)
        assert_allclose(A[i], expected[1], atol=1e-9)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_q_critic_is_its_own_expected_target(n):
    """Uncorrected: of the n-step return. Tree Backup's fixed point is the truth."""
    worlds, mu = te.random_worlds(0.4, 2, S=3, A=2)
    pi = te.random_distribution(np.random.default_rng(0), 2, 3, 2)
    truth = te.exact_solution(worlds, pi)
    for x, expected in zip(te.q_critic(worlds, mu, n, "Tree Backup")(pi), truth[:2], strict=True):
        assert_allclose(x, expected, atol=1e-10)
    V, A = te.q_critic(worlds, mu, n, "Uncorrected")(pi)
    assert_allclose((pi * A).sum(axis=-1), 0, atol=1e-12)
    for i, mdp in enumerate(unstack(worlds)):
        trajectories, sums = te.enumerate_trajectories(mdp, mu[i], n), np.zeros((2, 3, 2))
        phi, first = te.features(mdp, trajectories), (trajectories.states[:, 0], trajectories.actions[:, 0])
        for total, x in zip(sums, (phi.returns + phi.end @ V[i], 1.0), strict=True):
            np.add.at(total, first, trajectories.prob * x)
        assert_allclose(V[i][:, None] + A[i], sums[0] / sums[1], atol=1e-10)
    assert (np.abs(A - truth[1]).max() < 1e-10) == (n == 1)


def test_share_reached_is_measured_from_the_uniform_to_the_best_of_all_policies():
    worlds, mu = te.random_worlds(0.3, 5, S=3, A=3)
    every = [np.broadcast_to(np.eye(3)[list(actions)], (5, 3, 3)) for actions in itertools.product(range(3), repeat=3)]
    shares = np.array([te.share_reached(worlds, pi) for pi in every])
    assert_allclose(shares.max(axis=0), 1, atol=1e-12)
    assert (shares.min(axis=0) < 0).all()
    assert_allclose(te.share_reached(worlds, te.uniform_policy(worlds)), 0, atol=1e-12)


def failing(cell, method):
    """Share of the worlds in which the policy stays below 99% of the possible improvement."""
    return (policy()[cell][method] < 0.99).mean()


def test_what_the_bias_of_a_critic_costs_the_policy():
    """Nothing where there is none: Off-policy DAE and Tree Backup; one step, or data of the policy itself; DAE where
    nothing is random. DAE's loss grows with randomness, both with the distance between data and policy."""
    for shares in policy().values():
        for method in ("Off-policy DAE", "Tree Backup"):
            assert 0.99 < shares[method].min() and shares[method].max() <= 1 + 1e-12, method
    for cell, method in itertools.product(((0.0, 1.0, 1), (0.5, 1.0, 1), (0.5, 0.0, 2)), ("DAE", "Uncorrected")):
        assert failing(cell, method) == 0
    for n in (2, 3, 4):
        assert failing((0.0, 1.0, n), "DAE") == 0 and failing((0.0, 1.0, n), "Uncorrected") > 0.25
        assert failing((0.5, 1.0, n), "DAE") > 0.15 and failing((0.5, 1.0, n), "Uncorrected") > 0.15
    dae = [failing(cell, "DAE") for cell in te.SWEEPS[0]]
    assert 0 == dae[0] < 0.1 < dae[1] < dae[3] and min(dae[3:]) > 0.3
    # where the next state does not depend on the action, actions differ only in their reward, which is not biased
    mean = [policy()[cell]["Uncorrected"].mean() for cell in te.SWEEPS[0]]
    assert mean == sorted(mean) and failing(te.SWEEPS[0][-1], "Uncorrected") == 0
    for method in ("DAE", "Uncorrected"):
        mean = [policy()[cell][method].mean() for cell in te.SWEEPS[1]]
        fails = [failing(cell, method) for cell in te.SWEEPS[1]]
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
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
    script = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    while "theorem ..." not in script.stdout.readline():
        pass
    script.send_signal(signal.SIGINT)
    _, err = script.communicate(timeout=600)
    assert (script.returncode, err) == (130, "\ninterrupted\n")


def test_script_prints_what_the_functions_return(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(te, "theorem_errors", theorem)
    monkeypatch.setattr(te, "policy_shares", policy)
    te.main(["--out", str(tmp_path / "a" / "figures"), "--seeds", "30"])
    names = {"classic.png", "classic_stochastic.png", "counterexample.png", "theorem.png", "policy.png"}
    assert {path.name for path in (tmp_path / "a" / "figures").iterdir()} == names
    # the last case: V(3) of Figure `classic` is free: every transition is seen, but nothing starts there
    yes, no = (True, True, True), (False, False, False)
    assert list(te.uniqueness_cases().values()) == [yes, no, yes, (False, True, True)]
    out, V, shares = capsys.readouterr().out, sampled(False)[2]["MC"][:30, 49, 1], policy()[0.25, 1.0, 2]["DAE"]
    assert f"{V.mean():.4f} ± {V.std():.4f}" in out
    assert f"    0.90    0.10    0.4500{0.9 / 9.11111111:10.4f}" in out
    assert f"{theorem()[0][False, False, 'Off-policy DAE', 3].max():.1e}" in out
    cell = f"{shares.mean():.3f} {shares.min():6.2f} {np.mean(shares < 0.99):4.0%}"
    assert any(line.startswith("      0.25        1.00   2") and cell in line for line in out.splitlines())
