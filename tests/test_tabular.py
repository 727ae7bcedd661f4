"""The numbers of tabular_examples.py: against the paper's statements, and against slow references written out here."""

import itertools
import signal
import subprocess
import sys

import numpy as np
import pytest

import tabular_examples as te
from tabular_examples import D, U

SHAPES = [(2, 2, 0.5, False), (3, 2, 0.9, True), (2, 3, 0.99, False), (4, 2, 0.9, True), (3, 3, 0.99, False)]


@pytest.fixture(scope="module")
def classic():
    """Trajectories, the paper's four counts and the estimates, over 1000 seeds and 100 sizes."""
    mdp = te.classic_mdp()
    trajectories = te.enumerate_trajectories(mdp, te.uniform_policy(mdp), steps=2)
    n = te.classic_counts(trajectories, te.sample_counts(trajectories, 1000))
    return trajectories, n, te.classic_estimates(*n)


@pytest.fixture(scope="module")
def stochastic():
    mdp = te.classic_stoch_mdp()
    trajectories = te.enumerate_trajectories(mdp, te.uniform_policy(mdp), steps=4)
    counts = te.sample_counts(trajectories, 1000)
    return trajectories, counts, te.classic_stoch_estimates(mdp, trajectories, counts)


@pytest.fixture(scope="module")
def theorem():
    """Other MDPs than the script's own."""
    return te.theorem_errors(seed=1, repeats=3)


@pytest.fixture(scope="module")
def policy():
    return te.policy_shares(worlds=30)


def random_case(seed, S, A, gamma, terminal=False, deterministic=False):
    rng = np.random.default_rng(seed)
    mdp = te.random_mdp(rng, S, A, gamma, deterministic, terminal)
    return mdp, te.random_distribution(rng, S, A), te.random_distribution(rng, S, A)


def walk(mdp, states, actions):
    """The (s, a, s') of one trajectory, up to its end."""
    return [(s, a, t) for s, a, t in zip(states[:-1], actions, states[1:], strict=True) if a >= 0]


def residual(mdp, states, actions, V, A, B):
    """Σ γ^t (r_t − A_t − γ B_t) + γ^T V(s_T) − V(s_0) along one trajectory, as in Eq. `loss_full`."""
    total, discount = -V[states[0]], 1.0
    for s, a, t in walk(mdp, states, actions):
        total += discount * (mdp.r[s, a] - A[s, a] - mdp.gamma * B[s, a, t])
        discount *= mdp.gamma
    return total + discount * V[states[-1]]


def residuals(mdp, trajectories, V, A, B):
    return np.array([residual(mdp, s, a, V, A, B) for s, a in zip(*trajectories[:2], strict=True)])


# --- MDPs, trajectories, features -------------------------------------------------------------------------------------


def test_exact_solution_of_the_toy_mdps():
    mdp = te.classic_mdp()
    V, A, B = te.exact_solution(mdp, te.uniform_policy(mdp))
    np.testing.assert_allclose(V[1:], [0.5, 0.5, 0.5, 0.0], atol=1e-15)
    np.testing.assert_allclose(A[3], [0.5, -0.5], atol=1e-15)
    assert not B.any()
    mdp = te.classic_stoch_mdp()
    V, A, B = te.exact_solution(mdp, te.uniform_policy(mdp))
    np.testing.assert_allclose(V[1:], [1, 1, 1, 0.5, 1, 0, 0], atol=1e-15)
    np.testing.assert_allclose(A[3], [0.5, -0.5], atol=1e-15)
    np.testing.assert_allclose(B[4, U, 5:7], [0.5, -0.5], atol=1e-15)
    V, A, B = te.exact_solution(te.counterexample_mdp(), te.counterexample_policy(0.3))
    np.testing.assert_allclose(V, [0, 0.15, 0.3], atol=1e-15)
    np.testing.assert_allclose(A[2], [0.7, -0.3], atol=1e-15)
    np.testing.assert_allclose(B[1, U], [-0.15, 0, 0.15], atol=1e-15)


@pytest.mark.parametrize("shape", SHAPES)
def test_exact_solution_satisfies_bellman_and_both_constraints(shape):
    S, A, gamma, terminal = shape
    mdp, pi, _ = random_case(0, S, A, gamma, terminal)
    V, advantage, B = te.exact_solution(mdp, pi)
    value = np.zeros(S)
    for _ in range(4000):
        value = np.array(
            [sum(pi[s, a] * (mdp.r[s, a] + gamma * mdp.p[s, a] @ value) for a in range(A)) for s in range(S)]
        )
        if np.abs(value - V).max() < 1e-10:
            break
    np.testing.assert_allclose(V, value, atol=1e-10)
    np.testing.assert_allclose((pi * advantage).sum(axis=1), 0, atol=1e-12)
    np.testing.assert_allclose((mdp.p * B).sum(axis=2), 0, atol=1e-12)
    assert np.abs(B[mdp.p > 0]).max() > 0.01  # the random MDPs have luck in them
    assert not B[mdp.p == 0].any()
    assert (mdp.p[0] == 0).any() == (S > 2)  # and from three states on, transitions that never happen


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
def test_enumeration_finds_every_trajectory_with_its_probability(shape):
    mdp, _, mu = random_case(3, *shape)
    mu[0] = np.eye(len(mu[0]))[0]  # actions of probability 0 must not be followed
    expected = enumerate_slowly(mdp, mu, 3)
    states, actions, prob = te.enumerate_trajectories(mdp, mu, 3)
    assert len(prob) == len(expected)
    for s, a, p in zip(states.tolist(), actions.tolist(), prob, strict=True):
        assert expected[tuple(s), tuple(a)] == pytest.approx(p, rel=1e-12)
    assert prob.sum() == pytest.approx(1, abs=1e-12)


def test_toy_mdps_have_four_eight_and_three_trajectories():
    for mdp, steps, number in (
        (te.classic_mdp(), 2, 4),
        (te.classic_stoch_mdp(), 4, 8),
        (te.counterexample_mdp(), 2, 3),
    ):
        trajectories = te.enumerate_trajectories(mdp, te.uniform_policy(mdp), steps)
        assert len(trajectories.prob) == number
        assert not te.available(mdp)[trajectories.states[:, -1]].any()  # all of them have ended


def test_features_are_the_discounted_counts():
    mdp, _, mu = random_case(4, 3, 2, 0.9, terminal=True)
    trajectories = te.enumerate_trajectories(mdp, mu, 4)
    phi = te.features(mdp, trajectories)
    lengths = set()
    for i, (states, actions) in enumerate(zip(*trajectories[:2], strict=True)):
        start, advantage, luck, returns = np.zeros(3), np.zeros((3, 2)), np.zeros((3, 2, 3)), 0.0
        start[states[0]] = 1
        steps = walk(mdp, states, actions)
        for t, (s, a, s_next) in enumerate(steps):
            advantage[s, a] += 0.9**t
            luck[s, a, s_next] += 0.9**t
            returns += 0.9**t * mdp.r[s, a]
        lengths.add(len(steps))
        np.testing.assert_allclose(phi.start[i], start)
        np.testing.assert_allclose(phi.advantage[i], advantage, atol=1e-14)
        np.testing.assert_allclose(phi.luck[i], luck, atol=1e-14)
        assert phi.returns[i] == pytest.approx(returns, abs=1e-13)
        if states[-1] != 2:
            np.testing.assert_allclose(phi.end[i], 0.9**4 * np.eye(3)[states[-1]])
    assert lengths == {1, 2, 3, 4}


# --- The decomposition and the policy improvement lemma ---------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_return_is_value_plus_skill_plus_luck_on_every_trajectory(shape):
    mdp, pi, mu = random_case(5, *shape)
    solution = te.exact_solution(mdp, pi)
    for steps in (1, 2, 3):  # the longer ones end or are cut, depending on the trajectory
        trajectories = te.enumerate_trajectories(mdp, mu, steps)
        assert np.abs(residuals(mdp, trajectories, *solution)).max() < 1e-11
        assert te.decomposition_error(mdp, pi, trajectories) < 1e-11
    V, A, B = solution
    assert np.abs(residuals(mdp, trajectories, V, A, 0 * B)).max() > 0.01  # skill alone does not explain the return
    assert te.decomposition_error(mdp, mu, trajectories) < 1e-11  # it holds for any policy


def test_return_decomposes_in_the_toy_mdps():
    for mdp, steps in ((te.classic_mdp(), 2), (te.classic_stoch_mdp(), 4), (te.counterexample_mdp(), 2)):
        pi = te.uniform_policy(mdp)
        trajectories = te.enumerate_trajectories(mdp, pi, steps)
        assert te.decomposition_error(mdp, pi, trajectories) < 1e-14


@pytest.mark.parametrize("shape", SHAPES)
def test_policy_improvement_lemma(shape):
    mdp, pi, mu = random_case(6, *shape)
    V_mu = te.exact_solution(mdp, mu)[0]
    np.testing.assert_allclose(te.policy_improvement(mdp, mu, pi), V_mu, atol=1e-10)
    assert np.abs(te.exact_solution(mdp, pi)[0] - V_mu).max() > 0.01


def test_policy_improvement_lemma_from_all_trajectories():
    """E_μ[Σ A^π_t | s_0] counted trajectory by trajectory, where all of them end: V^μ = 0.2 + 0.5 against V^π = 1."""
    mdp = te.classic_stoch_mdp()
    pi, mu = te.uniform_policy(mdp), te.uniform_policy(mdp)
    mu[3] = 0.2, 0.8
    V, A, _ = te.exact_solution(mdp, pi)
    states, actions, prob = te.enumerate_trajectories(mdp, mu, 4)
    skill = np.array([sum(A[s, a] for s, a, _ in walk(mdp, x, y)) for x, y in zip(states, actions, strict=True)])
    for s in (1, 2):
        here = states[:, 0] == s
        expected = V[s] + (prob * skill)[here].sum() / prob[here].sum()
        assert expected == pytest.approx(0.7, abs=1e-12)
        assert te.policy_improvement(mdp, mu, pi)[s] == pytest.approx(0.7, abs=1e-12)


# --- Constrained least squares ----------------------------------------------------------------------------------------


def test_null_space_is_orthonormal_and_batched():
    C = np.random.default_rng(0).normal(size=(5, 3, 2, 6))
    basis = te.null_space(C)
    assert basis.shape == (5, 3, 6, 4)
    np.testing.assert_allclose(C @ basis, 0, atol=1e-12)
    np.testing.assert_allclose(np.swapaxes(basis, -1, -2) @ basis, np.broadcast_to(np.eye(4), (5, 3, 4, 4)), atol=1e-12)
    assert te.null_space(np.zeros((1, 3))).shape == (3, 3)
    with pytest.raises(ValueError, match="different ranks"):
        te.null_space(np.array([[[1.0, 0.0]], [[0.0, 0.0]]]))


def test_constrained_least_squares_solves_the_lagrangian_system():
    rng = np.random.default_rng(1)
    X, y, weight, C = rng.normal(size=(9, 5)), rng.normal(size=9), rng.uniform(size=9), rng.normal(size=(2, 5))
    gram = X.T @ (weight[:, None] * X)
    kkt = np.block([[gram, C.T], [C, np.zeros((2, 2))]])
    expected = np.linalg.solve(kkt, np.concatenate([X.T @ (weight * y), np.zeros(2)]))[:5]
    np.testing.assert_allclose(te.constrained_least_squares(X, y, weight, C), expected, atol=1e-12)


def test_constrained_least_squares_returns_the_shortest_minimiser():
    """x_0 + x_1 + x_2 = 3 with x_1 = x_2: the shortest is (1, 1, 1), and one direction stays free."""
    X, y, weight, C = np.array([[1.0, 1.0, 1.0]]), np.array([3.0]), np.ones(1), np.array([[0.0, 1.0, -1.0]])
    np.testing.assert_allclose(te.constrained_least_squares(X, y, weight, C), [1, 1, 1], atol=1e-12)
    direction = te.free_directions(X, weight, C)
    np.testing.assert_allclose(np.abs(direction[:, 0]), np.array([2, 1, 1]) / 6**0.5, atol=1e-12)
    assert direction.shape == (3, 1)


# --- Figure classic ---------------------------------------------------------------------------------------------------


def test_counts_are_cumulated_over_each_seeds_trajectories(classic):
    trajectories = classic[0]
    counts = te.sample_counts(trajectories, 1000)
    np.testing.assert_array_equal(counts.sum(axis=-1), np.broadcast_to(np.arange(1, 101), (1000, 100)))
    steps = np.diff(counts, axis=1)
    assert (steps.sum(axis=-1) == 1).all() and (steps.max(axis=-1) == 1).all()
    np.testing.assert_allclose(counts[:, -1].mean(axis=0) / 100, trajectories.prob, atol=0.005)
    np.testing.assert_array_equal(counts, te.sample_counts(trajectories, 1000))
    np.testing.assert_array_equal(counts[:10], te.sample_counts(trajectories, 10))  # a seed's data is its own
    assert (te.sample_counts(trajectories, 10, seed=1) != counts[:10]).any()
    n = dict(zip(["1u", "1d", "2u", "2d"], te.classic_counts(trajectories, trajectories.prob), strict=True))
    assert n == pytest.approx({"1u": 0.45, "1d": 0.45, "2u": 0.05, "2d": 0.05})


def test_classic_estimates_equal_one_regression_per_dataset(classic):
    _, n, estimates = classic
    for seed in range(15):
        for k in (0, 1, 2, 4, 9, 29, 99):
            counts = [int(x[seed, k]) for x in n]
            dataset = [x for x, c in zip([(1, U), (1, D), (2, U), (2, D)], counts, strict=True) for _ in range(c)]
            returns = np.array([float(a == U) for _, a in dataset])
            start = np.array([[s == 1, s == 2] for s, _ in dataset], dtype=float)
            sign = np.array([1.0 if a == U else -1.0 for _, a in dataset])  # A(3,d) = −A(3,u)
            mc = np.linalg.lstsq(start, returns)[0]
            dae = np.linalg.lstsq(np.column_stack([sign, start]), returns)[0][1:]
            np.testing.assert_allclose(estimates["MC"][seed, k], mc, atol=1e-12)
            np.testing.assert_allclose(estimates["DAE"][seed, k], dae, atol=1e-12)


def test_batch_td_formula_is_where_td_updates_settle():
    counts = {(1, U): 3, (1, D): 1, (2, U): 1, (2, D): 2}
    V = np.zeros(5)
    for _ in range(3000):
        update = np.zeros(5)
        for (s, a), c in counts.items():
            update[s] += c * (V[3] - V[s])
            update[3] += c * (float(a == U) - V[3])
        V += 0.05 * update
    estimate = te.classic_estimates(*[np.array(float(c)) for c in counts.values()])["Batch TD(0)"]
    np.testing.assert_allclose(estimate, V[1:3], atol=1e-10)
    np.testing.assert_allclose(estimate, 4 / 7, atol=1e-12)


def test_classic_estimates_converge_to_one_half(classic):
    trajectories = classic[0]
    counts = np.random.default_rng(0).multinomial(1_000_000, trajectories.prob, size=20).astype(float)
    for method, V in te.classic_estimates(*te.classic_counts(trajectories, counts)).items():
        np.testing.assert_allclose(V, 0.5, atol=0.01 if method == "MC" else 0.003, err_msg=method)


@pytest.mark.parametrize("k", [50, 100])
def test_dae_varies_less_than_td_and_td_less_than_mc(classic, k):
    std = {method: V[:, k - 1].std(axis=0) for method, V in classic[2].items()}
    assert std["DAE"][1] < 0.8 * std["Batch TD(0)"][1]
    assert std["Batch TD(0)"][1] < 0.5 * std["MC"][1]
    assert std["DAE"][0] < std["Batch TD(0)"][0] < std["MC"][0]


def test_dae_overtakes_td_on_v2_only_after_some_thirty_trajectories(classic):
    """Until state 2 has been seen DAE says 0, and the appendix's TD(0) formula already says V(3)."""
    std = {method: V[..., 1].std(axis=0) for method, V in classic[2].items()}
    assert 28 <= te.below_from(std["DAE"], std["Batch TD(0)"]) <= 38
    assert (std["DAE"][4:25] > std["Batch TD(0)"][4:25]).all()
    assert te.below_from(np.array([3, 1, 1.0]), np.array([2, 2, 2.0])) == 2
    assert te.below_from(np.array([1, 1, 2.0]), np.array([2, 2, 2.0])) is None


def test_estimates_are_skewed_towards_zero_while_n_2_is_zero(classic):
    _, (n_1u, n_1d, n_2u, n_2d), estimates = classic
    unseen = n_2u + n_2d == 0
    assert 0.8 < unseen[:, 0].mean() < 1 and unseen[:, -1].mean() < 0.01
    assert not estimates["DAE"][unseen][:, 1].any() and not estimates["MC"][unseen][:, 1].any()
    # once state 2 has been seen, and both actions after one of the states, DAE is exact: the rest is deterministic
    known = ~unseen & (((n_1u > 0) & (n_1d > 0)) | ((n_2u > 0) & (n_2d > 0)))
    np.testing.assert_allclose(estimates["DAE"][known][:, 1], 0.5, atol=1e-12)
    k = np.arange(20, 101)
    p_unseen = 0.9**k
    mean, std = estimates["DAE"][:, 19:, 1].mean(axis=0), estimates["DAE"][:, 19:, 1].std(axis=0)
    np.testing.assert_allclose(mean, 0.5 * (1 - p_unseen), atol=0.02)
    np.testing.assert_allclose(std, 0.5 * np.sqrt(p_unseen * (1 - p_unseen)), atol=0.02)
    assert estimates["DAE"][:, 4, 1].mean() < 0.25


# --- Figure classic_stoch ---------------------------------------------------------------------------------------------


def test_stochastic_estimates_equal_one_regression_per_dataset(stochastic):
    trajectories, counts, estimates = stochastic
    states, actions, _ = trajectories
    for seed in range(15):
        for k in (0, 1, 2, 4, 9, 29, 99):
            dataset = np.repeat(np.arange(8), counts[seed, k].astype(int))
            start = np.array([[states[i, 0] == 1, states[i, 0] == 2] for i in dataset], dtype=float)
            u, lucky = (actions[dataset, 1] == U).astype(float), (states[dataset, 3] == 5).astype(float)
            returns = u + lucky
            for method, p in (("DAE", None), ("learned p", lucky.mean()), ("oracle p", 0.5)):
                columns = [start, 2 * u - 1]  # A(3,d) = −A(3,u)
                if p == 1:
                    columns.append(0 * lucky)  # p(5|4) B(4,5) = 0
                elif p is not None:
                    columns.append(np.where(lucky, 1, -p / (1 - p)))  # B(4,6) = −B(4,5) p(5|4)/p(6|4)
                expected = np.linalg.lstsq(np.column_stack(columns), returns, rcond=1e-10)[0][:2]
                name = method if p is None else f"Off-policy DAE ({method})"
                np.testing.assert_allclose(estimates[name][seed, k], expected, atol=1e-10, err_msg=name)


def test_shortest_solution_shares_one_return_equally_among_its_unknowns(stochastic):
    """As the pseudoinverse of `app:classic` does: V(s), ±A(3,u) and, if p leaves it free, ±B(4,5) are equal."""
    trajectories, counts, estimates = stochastic
    first = counts[:, 0].argmax(axis=-1)
    returns = (trajectories.actions[first, 1] == U) + (trajectories.states[first, 3] == 5).astype(float)
    assert set(returns) == {0, 1, 2}
    for method, unknowns in (("DAE", 2), ("Off-policy DAE (learned p)", 2), ("Off-policy DAE (oracle p)", 3)):
        np.testing.assert_allclose(estimates[method][:, 0].sum(axis=-1), returns / unknowns, atol=1e-12, err_msg=method)


def test_stochastic_estimates_converge_to_one(stochastic):
    trajectories = stochastic[0]
    counts = np.random.default_rng(0).multinomial(1_000_000, trajectories.prob, size=20).astype(float)
    estimates = te.classic_stoch_estimates(te.classic_stoch_mdp(), trajectories, counts)
    assert len(estimates) == 3
    for method, V in estimates.items():
        np.testing.assert_allclose(V, 1.0, atol=0.01, err_msg=method)


@pytest.mark.parametrize("k", [50, 100])
@pytest.mark.parametrize("method", ["learned", "oracle"])
def test_off_policy_dae_varies_less_than_dae(stochastic, method, k):
    estimates = stochastic[2]
    luck, dae = estimates[f"Off-policy DAE ({method} p)"][:, k - 1].std(axis=0), estimates["DAE"][:, k - 1].std(axis=0)
    assert luck[1] < 0.6 * dae[1]
    assert luck[0] < dae[0]


def test_luck_term_leaves_only_the_error_of_the_learned_probability(stochastic):
    """With everything seen, the true p gives exactly 1, and the learned one 1/2 + p̂(5|4)."""
    trajectories, counts, estimates = stochastic
    states, actions, _ = trajectories
    seen = [states[:, 0] == 1, states[:, 0] == 2, actions[:, 1] == U, actions[:, 1] == D]
    seen += [states[:, 3] == 5, states[:, 3] == 6]
    known = np.all([counts[..., mask].sum(axis=-1) > 0 for mask in seen], axis=0)
    known[:, :50] = False  # few trajectories may have shown everything, but not in enough combinations
    assert known.sum() > 40_000
    np.testing.assert_allclose(estimates["Off-policy DAE (oracle p)"][known], 1.0, atol=1e-10)
    p_5 = (counts[..., states[:, 3] == 5].sum(axis=-1) / counts.sum(axis=-1))[known]
    learned = estimates["Off-policy DAE (learned p)"][known]
    np.testing.assert_allclose(learned, np.stack([0.5 + p_5] * 2, axis=-1), atol=1e-10)
    assert np.abs(estimates["DAE"][known] - 1).max() > 0.1


# --- Counterexample ---------------------------------------------------------------------------------------------------

GRID = np.linspace(0.03, 0.97, 12)


@pytest.fixture(scope="module")
def counterexample():
    return te.counterexample_grid(GRID)


def naive_loss(pi_u, mu_u, V, A_u):
    """Appendix `app:counter`, with A(2,d) from the constraint."""
    A_d = -A_u * pi_u / (1 - pi_u)
    return 0.5 * mu_u * (1 - A_u - V) ** 2 + 0.5 * (1 - mu_u) * (0 - A_d - V) ** 2 + 0.5 * V**2


def test_numerical_minimiser_is_the_papers_closed_form(counterexample):
    np.testing.assert_allclose(counterexample["DAE"], counterexample["closed form"], atol=1e-10)
    pi, mu = GRID[:, None], GRID[None, :]
    V, A_u, A_d = np.moveaxis(counterexample["DAE"], -1, 0)
    np.testing.assert_allclose(pi * A_u + (1 - pi) * A_d, 0, atol=1e-12)
    best = naive_loss(pi, mu, V, A_u)
    for step in ((1e-3, 0), (-1e-3, 0), (0, 1e-3), (0, -1e-3)):
        assert (naive_loss(pi, mu, V + step[0], A_u + step[1]) > best).all()


def test_naive_dae_is_biased_unless_on_policy(counterexample):
    on_policy = np.eye(len(GRID), dtype=bool)
    np.testing.assert_allclose(counterexample["truth"][..., 0], np.broadcast_to(GRID[:, None] / 2, (12, 12)))
    bias = counterexample["DAE"] - counterexample["truth"]
    np.testing.assert_allclose(bias[on_policy], 0, atol=1e-10)
    assert (bias[~on_policy][:, 0] < -1e-5).all()  # always too low
    assert (np.abs(bias[~on_policy]).max(axis=-1) > 1e-3).all()
    assert bias[..., 0].min() < -0.4


def test_luck_term_removes_the_bias(counterexample):
    np.testing.assert_allclose(counterexample["Off-policy DAE"], counterexample["truth"], atol=1e-10)


# --- Theorem ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", te.BACKUPS)
def test_off_policy_dae_recovers_value_advantage_and_luck(theorem, n):
    for deterministic in (False, True):
        for target in (False, True):
            error = theorem[0][deterministic, target, "Off-policy DAE", n]
            assert error.shape == (len(te.SIZES) * len(te.GAMMAS) * 3, 3)
            assert error.max() < 1e-8  # nan would fail too


@pytest.mark.parametrize("n", te.BACKUPS)
def test_dae_and_uncorrected_do_not_on_the_same_stochastic_data(theorem, n):
    dae, uncorrected = (theorem[0][False, False, method, n] for method in ("DAE", "Uncorrected"))
    assert dae[:, 0].min() > 1e-3 and np.isnan(dae[:, 2]).all()
    assert uncorrected[:, 0].min() > 1e-3 and np.isnan(uncorrected[:, 1:]).all()


@pytest.mark.parametrize("n", te.BACKUPS)
def test_dae_suffices_without_luck_but_uncorrected_does_not(theorem, n):
    for target in (False, True):
        assert theorem[0][True, target, "DAE", n][:, :2].max() < 1e-8
        assert theorem[0][True, target, "Uncorrected", n][:, 0].min() > 1e-3


def test_identities_hold_in_every_random_mdp(theorem):
    assert set(theorem[1]) == {"decomposition", "policy improvement"}
    assert max(theorem[1].values()) < 1e-10


def test_with_a_target_network_only_backups_beyond_one_step_need_the_luck_term(theorem):
    assert theorem[0][False, True, "DAE", 0][:, :2].max() < 1e-8
    for n in te.BACKUPS[1:]:
        assert theorem[0][False, True, "DAE", n][:, 0].min() > 1e-4


@pytest.mark.parametrize("deterministic", [False, True])
def test_uncorrected_with_a_target_network_learns_the_behaviour_policys_value(deterministic):
    mdp, pi, mu = random_case(9, 3, 2, 0.9, deterministic=deterministic)
    V_mu = te.exact_solution(mdp, mu)[0]
    for n in te.BACKUPS:
        trajectories = te.enumerate_trajectories(mdp, mu, n + 1)
        V = te.solve_off_policy(mdp, pi, trajectories, "Uncorrected", target_network=True)[0]
        np.testing.assert_allclose(V, V_mu, atol=1e-10)
        # without one, V̂(s_{n+1}) is fitted too, and its variance is paid for with a bias
        V = te.solve_off_policy(mdp, pi, trajectories, "Uncorrected")[0]
        assert np.abs(V - V_mu).max() > 1e-3


def test_without_a_target_network_even_on_policy_dae_needs_the_luck_term():
    mdp, pi, _ = random_case(10, 3, 2, 0.9)
    V = te.exact_solution(mdp, pi)[0]
    for n in te.BACKUPS:
        trajectories = te.enumerate_trajectories(mdp, pi, n + 1)
        error = {
            (method, target): np.abs(te.solve_off_policy(mdp, pi, trajectories, method, target)[0] - V).max()
            for method in ("DAE", "Off-policy DAE")
            for target in (False, True)
        }
        assert error["Off-policy DAE", False] < 1e-10 and error["Off-policy DAE", True] < 1e-10
        assert error["DAE", True] < 1e-10
        assert error["DAE", False] > 1e-3


def test_fixed_point_is_where_repeated_regressions_on_v_target_settle():
    mdp, pi, mu = random_case(11, 3, 2, 0.5)
    trajectories = te.enumerate_trajectories(mdp, mu, 2)
    X, X_online, y, weight, C, unknown = te.off_policy_problem(mdp, pi, trajectories, "DAE")
    x = np.zeros(X.shape[1])
    for _ in range(60):
        x = te.constrained_least_squares(X_online, y + (X_online - X) @ x, weight, C)
    V, A, _ = te.unpack(mdp, unknown, x, 0.0)
    expected = te.solve_off_policy(mdp, pi, trajectories, "DAE", target_network=True)
    np.testing.assert_allclose(V, expected[0], atol=1e-10)
    np.testing.assert_allclose(A, expected[1], atol=1e-10)


def test_minimiser_has_zero_loss_and_meets_the_constraints():
    mdp, pi, mu = random_case(12, 3, 2, 0.9, terminal=True)
    trajectories = te.enumerate_trajectories(mdp, mu, 3)
    V, A, B = te.solve_off_policy(mdp, pi, trajectories)
    assert np.abs(residuals(mdp, trajectories, V, A, B)).max() < 1e-10
    np.testing.assert_allclose((pi * A).sum(axis=1)[:2], 0, atol=1e-12)
    np.testing.assert_allclose((mdp.p * B).sum(axis=2), 0, atol=1e-12)
    V, A, B = te.solve_off_policy(mdp, pi, trajectories, "DAE")
    np.testing.assert_allclose((pi * A).sum(axis=1)[:2], 0, atol=1e-12)
    assert np.abs(residuals(mdp, trajectories, V, A, B)).max() > 0.01 and not B.any()


def other_minimiser(mdp, pi, trajectories):
    """(V, A, B) moved as far as 1 along the directions that the data leaves free."""
    X, _, y, weight, C, unknown = te.off_policy_problem(mdp, pi, trajectories)
    free = te.free_directions(X, weight, C)
    x = te.constrained_least_squares(X, y, weight, C) + free @ np.random.default_rng(0).normal(size=free.shape[1])
    return te.unpack(mdp, unknown, x, 0.0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("n", [0, 1, 2])
def test_minimiser_is_not_unique_if_mu_misses_an_action_that_pi_takes(seed, n):
    mdp, pi, mu = random_case(seed, 3, 3, 0.9)
    mu[0] = 0.4, 0.6, 0.0
    trajectories = te.enumerate_trajectories(mdp, mu, n + 1)
    V, A, B = other_minimiser(mdp, pi, trajectories)
    assert np.abs(residuals(mdp, trajectories, V, A, B)).max() < 1e-10  # still a minimiser
    np.testing.assert_allclose((pi * A).sum(axis=1), 0, atol=1e-10)
    np.testing.assert_allclose((mdp.p * B).sum(axis=2), 0, atol=1e-10)
    assert np.abs(V - te.exact_solution(mdp, pi)[0]).max() > 1e-2
    assert te.agreement(mdp, mu, pi, n) == (False, False, False)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("n", [0, 1, 2])
def test_minimiser_stays_unique_where_pi_goes_if_mu_misses_what_pi_never_takes(seed, n):
    mdp, pi, mu = random_case(seed, 3, 3, 0.9)
    mu[0], pi[0] = (0.4, 0.6, 0.0), (0.7, 0.3, 0.0)
    trajectories = te.enumerate_trajectories(mdp, mu, n + 1)
    V, A, B = te.exact_solution(mdp, pi)
    for found in (te.solve_off_policy(mdp, pi, trajectories), other_minimiser(mdp, pi, trajectories)):
        np.testing.assert_allclose(found[0], V, atol=1e-8)
        np.testing.assert_allclose(found[1][pi > 0], A[pi > 0], atol=1e-8)
        np.testing.assert_allclose(found[2][pi > 0], B[pi > 0], atol=1e-8)
    assert np.abs(found[1][0, 2] - A[0, 2]) > 1e-2  # nothing is known about the action nobody takes
    assert te.agreement(mdp, mu, pi, n) == (True, True, True)


def test_uniqueness_table():
    """The last case: V(3) of Figure `classic` is free: every transition is seen, but nothing starts there."""
    yes, no = (True, True, True), (False, False, False)
    assert list(te.uniqueness_cases().values()) == [yes, no, yes, (False, True, True)]


# --- Policy optimisation ----------------------------------------------------------------------------------------------


def stack(mdps):
    return te.MDP(
        *(np.stack([getattr(mdp, x) for mdp in mdps]) for x in ("p", "r")), 0.9, np.stack([m.start for m in mdps])
    )


def unstack(worlds):
    return [te.MDP(p, r, worlds.gamma, start) for p, r, start in zip(worlds.p, worlds.r, worlds.start, strict=True)]


def test_random_worlds_go_from_deterministic_to_uniform_and_change_nothing_else():
    (first, mu), (middle, _), (last, mu_last) = (te.random_worlds(x, 50) for x in (0, 0.5, 1))
    assert set(np.unique(first.p)) == {0, 1}
    np.testing.assert_allclose(middle.p, (first.p + last.p) / 2)
    assert (last.p == 0.25).all()
    for x, y in ((first.r, last.r), (first.start, last.start), (mu, mu_last)):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_allclose([mu.sum(axis=-1), first.p.sum(axis=-1)[..., 0]], 1)
    assert np.median(mu.max(axis=-1) / mu.min(axis=-1)) > 4  # well off the uniform policy


def test_exact_solution_of_many_mdps_is_that_of_each():
    worlds, mu = te.random_worlds(0.3, 4)
    for together, *one in zip(te.exact_solution(worlds, mu), *map(te.exact_solution, unstack(worlds), mu), strict=True):
        np.testing.assert_allclose(together, one, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("kind", ["deterministic", "some successors missing", "all successors"])
@pytest.mark.parametrize("method", ["DAE", "Off-policy DAE"])
def test_dae_critic_is_the_fixed_point_on_all_trajectories(kind, n, method):
    rng = np.random.default_rng(n)
    if kind == "all successors":
        worlds, _ = te.random_worlds(0.4, 3)
    else:
        worlds = stack([te.random_mdp(rng, 4, 3, 0.9, deterministic=kind == "deterministic") for _ in range(3)])
    pi, mu = te.random_distribution(rng, 2, 3, 4, 3)
    V, A = te.dae_critic(worlds, mu, n, method)(pi)
    for i, mdp in enumerate(unstack(worlds)):
        trajectories = te.enumerate_trajectories(mdp, mu[i], n)
        expected = te.solve_off_policy(mdp, pi[i], trajectories, method, target_network=True)
        np.testing.assert_allclose(V[i], expected[0], atol=1e-9)
        np.testing.assert_allclose(A[i], expected[1], atol=1e-9)


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
    np.testing.assert_allclose((pi * A).sum(axis=-1), 0, atol=1e-12)
    for i, mdp in enumerate(unstack(worlds)):
        mean, total = np.zeros((3, 2)), np.zeros((3, 2))
        for (states, actions), prob in enumerate_slowly(mdp, mu[i], n).items():
            mean[states[0], actions[0]] += prob * n_step_target(mdp, pi[i], Q[i], states, actions, method)
            total[states[0], actions[0]] += prob
        np.testing.assert_allclose(Q[i], mean / total, atol=1e-10)
    error = np.abs(A - te.exact_solution(worlds, pi)[1]).max(axis=(1, 2))
    assert (error < 1e-10).all() if n == 1 or method == "Tree Backup" else (error > 1e-3).all()


def test_share_reached_is_measured_from_the_uniform_to_the_best_of_all_policies():
    worlds, mu = te.random_worlds(0.3, 5, S=3, A=3)
    shares = np.array(
        [
            te.share_reached(worlds, np.broadcast_to(np.eye(3)[list(actions)], (5, 3, 3)))
            for actions in itertools.product(range(3), repeat=3)
        ]
    )
    np.testing.assert_allclose(shares.max(axis=0), 1, atol=1e-12)
    assert (shares.min(axis=0) < 0).all()
    np.testing.assert_allclose(te.share_reached(worlds, te.uniform_policy(worlds)), 0, atol=1e-12)


def failing(policy, cell, method):
    """Share of the worlds in which the policy stays below 99% of the possible improvement."""
    return (policy[cell][method] < 0.99).mean()


def test_unbiased_critics_lead_to_the_optimal_policy_everywhere(policy):
    assert len(policy) == len({cell for cells in te.SWEEPS for cell in cells}) == 17
    for cell, shares in policy.items():
        assert set(shares) == set(te.POLICY_METHODS)
        for method in ("Off-policy DAE", "Tree Backup"):
            assert 0.99 < shares[method].min() and shares[method].max() <= 1 + 1e-12, (cell, method)


def test_one_step_backups_and_on_policy_data_need_no_correction(policy):
    for cell in ((0.0, 1.0, 1), (0.5, 1.0, 1), (0.5, 0.0, 2)):
        for method in ("DAE", "Uncorrected"):
            assert failing(policy, cell, method) == 0, (cell, method)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_without_randomness_dae_is_optimal_and_uncorrected_is_not(policy, n):
    assert failing(policy, (0.0, 1.0, n), "DAE") == 0
    assert failing(policy, (0.0, 1.0, n), "Uncorrected") > 0.25
    assert policy[0.0, 1.0, n]["Uncorrected"].mean() < 0.95


@pytest.mark.parametrize("n", [2, 3, 4])
def test_with_randomness_both_fail(policy, n):
    for method in ("DAE", "Uncorrected"):
        assert failing(policy, (0.5, 1.0, n), method) > 0.15, method
    assert policy[0.5, 1.0, n]["DAE"].mean() < 0.97


def test_randomness_costs_dae_and_relieves_uncorrected(policy):
    """Where the next state does not depend on the action, actions differ only in their reward, which is not biased."""
    dae, uncorrected = ([failing(policy, cell, m) for cell in te.SWEEPS[0]] for m in ("DAE", "Uncorrected"))
    assert dae[0] == 0 and dae[1] > 0.1 and min(dae[3:]) > 0.3
    assert dae[0] < dae[1] < dae[3]
    assert uncorrected[-1] == 0 and uncorrected[0] > 0.25
    mean = [policy[cell]["Uncorrected"].mean() for cell in te.SWEEPS[0]]
    assert mean == sorted(mean)


def test_loss_grows_with_the_distance_between_data_and_policy(policy):
    for method in ("DAE", "Uncorrected"):
        mean = [policy[cell][method].mean() for cell in te.SWEEPS[1]]
        assert mean == sorted(mean, reverse=True), method
        fails = [failing(policy, cell, method) for cell in te.SWEEPS[1]]
        assert fails == sorted(fails) and fails[0] == 0 < fails[2] < fails[-1], method


# --- Command line -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [["--output", "x"], ["--seeds", "0"], ["--seeds", "many"], ["extra"]])
def test_wrong_flags_exit_with_status_2_and_write_nothing(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        te.main(argv)
    assert exit_info.value.code == 2
    assert argv[0] in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_out_that_is_a_file_exits_with_status_2(tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    with pytest.raises(SystemExit) as exit_info:
        te.main(["--out", str(tmp_path / "taken")])
    assert exit_info.value.code == 2
    assert "cannot be made a directory" in capsys.readouterr().err


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
    V = te.classic_estimates(*te.classic_counts(trajectories, te.sample_counts(trajectories, 30)))["MC"][:, 49, 1]
    assert f"{V.mean():.4f} ± {V.std():.4f}" in out
    row = "".join(f"{x:.4f}".rjust(width) for x, width in ((0.45, 10), (0.9 / 9.11111111, 10)))
    assert f"    0.90    0.10{row}" in out
    assert f"{theorem[0][False, False, 'Off-policy DAE', 3].max():.1e}" in out
    shares = policy[0.25, 1.0, 2]["DAE"]
    cell = f"{shares.mean():.3f} {shares.min():6.2f} {np.mean(shares < 0.99):4.0%}"
    assert any(line.startswith("      0.25        1.00   2") and cell in line for line in out.splitlines())
