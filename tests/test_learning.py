"""Agents learn, and agents with a sign error or without advantages do not."""

import importlib
import json

import numpy as np
import pytest
import torch

import offdae_dae
import offdae_offpolicy

BREAKOUT = ["--env-id", "breakout", "--small", "--total-timesteps", 120_000, "--run-name", "learning"]


@pytest.fixture(scope="module")
def random_return():
    """Uniform play, the policy of a network whose policy head is 0."""
    args = offdae_dae.Args(env_id="breakout", channels=1, hidden=1, eval_episodes=400)
    agent = offdae_dae.Agent(args, offdae_dae.Games(args, np.random.SeedSequence(0).spawn(1)), torch.device("cpu"))
    torch.nn.init.zeros_(agent.network.policy.weight)
    torch.nn.init.zeros_(agent.network.policy.bias)
    return offdae_dae.evaluate(args, agent.network, torch.device("cpu"))["mean"]


def learned(run, script, *arguments):
    directory = run(script, *BREAKOUT, *arguments) / "runs" / "learning"
    assert len((directory / "curve.csv").read_text().splitlines()) == 1 + 500  # 938 steps, 500 points
    return json.loads((directory / "eval.json").read_text())["mean"]


def test_dae_learns_breakout(run, random_return):
    assert learned(run, offdae_dae) >= 4 * random_return > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["offdae_uncorrected", "offdae_tree"])
def test_the_others_learn_breakout(run, random_return, name):
    assert learned(run, importlib.import_module(name)) >= 4 * random_return > 0


@pytest.mark.slow
def test_off_policy_dae_learns_breakout(run, random_return):
    """With a smaller CVAE, for there is no chance in Breakout that it could find."""
    arguments = "--cvae-channels", 2, "--latent-size", 2
    assert learned(run, offdae_offpolicy, *arguments) >= 4 * random_return > 0


@pytest.mark.slow
@pytest.mark.parametrize("factor", [-1.0, 0.0], ids=["reversed advantage", "no advantage"])
def test_a_broken_actor_does_not_learn(run, random_return, monkeypatch, factor):
    actor_loss = offdae_dae.actor_loss
    broken = lambda args, online, target: actor_loss(  # noqa: E731
        args, online._replace(advantage=factor * online.advantage), target
    )
    monkeypatch.setattr(offdae_dae, "actor_loss", broken)
    assert learned(run, offdae_dae) < 4 * random_return
