"""The whole agent on a world whose truth is known: without luck the policy falls short, with luck it does not."""

import known_world
import numpy as np
import pytest


def test_the_chosen_worlds_are_those_that_dae_fails_on():
    assert known_world.choose_worlds(2, deterministic=False) == [12, 26]
    world = known_world.make_world(12, deterministic=False)
    assert known_world.closed_form_dae(world) <= 0.85
    assert known_world.share(world.mdp, known_world.tabular.uniform_policy(world.mdp)) == pytest.approx(0)


def test_correlation_and_slope():
    truth, weight = np.array([0.0, 1.0, 2.0, 5.0]), np.array([1.0, 2.0, 1.0, 0.0])
    assert known_world.line(truth, 3 * truth + 7, weight) == pytest.approx((1, 3))
    assert known_world.line(truth, -truth, weight) == pytest.approx((-1, -1))
    assert known_world.line(0 * truth, truth, weight) == (None, None)


@pytest.mark.slow
def test_with_luck_the_agent_is_right_where_dae_is_not():
    """Critic, actor and replay of the scripts, with chance told and with chance as the CVAE learns it."""
    world = known_world.make_world(12, deterministic=False)
    runs = {
        method: known_world.train(world, method, seed=1, updates=300, behaviour="mu") for method in known_world.METHODS
    }
    dae = runs.pop("dae")
    for run in runs.values():
        assert run["A_correlation"] > 0.95 > 0.6 > dae["A_correlation"]
        assert run["B_correlation"] > 0.95 and 0.8 < run["B_slope"] < 1.2
        assert run["nats"] > 0.95 * run["nats_of"] and run["share"] > dae["share"] + 0.1
