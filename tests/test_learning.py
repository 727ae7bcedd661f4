"""Agents learn, and agents with a sign error or without advantages do not."""

import importlib
import json

import pytest
import torch
from conftest import CPU, made

import offdae_dae

BREAKOUT = "--env-id breakout --small --batch-size 256 --steps-per-update 64 --learning-rate 1e-3 --tau 0.99 "
BREAKOUT += "--kl-coef 3 --channels 16 --hidden 128 --run-name learning"
LONG, SHORT = "--total-timesteps 120000 --learning-starts 10000", "--total-timesteps 60000 --learning-starts 5000"


@pytest.fixture(scope="module")
def random_return():
    """Uniform play, the policy of a network whose policy head is 0."""
    args, _, agent, _ = made(offdae_dae, env_id="breakout", channels=1, hidden=1, eval_episodes=400, steps=0)
    for parameter in agent.network.policy.parameters():
        torch.nn.init.zeros_(parameter)
    return offdae_dae.evaluate(args, agent.network, CPU)["mean"]


def learned(run, script, *arguments):
    directory = run(script, *BREAKOUT.split(), *" ".join(arguments).split()) / "runs" / "learning"
    return json.loads((directory / "eval.json").read_text())["mean"]


def test_dae_learns_breakout(run, random_return):
    assert learned(run, offdae_dae, SHORT) >= 3 * random_return > 0  # a broken actor stays below twice that


@pytest.mark.slow
@pytest.mark.parametrize("name", ["offdae_uncorrected", "offdae_offpolicy", "offdae_tree"])
def test_the_others_learn_breakout(run, random_return, name):
    """Off-policy DAE with a small CVAE, for there is no chance in Breakout that it could find."""
    small = "--cvae-channels 2 --latent-size 2 --batch-size 128 --total-timesteps 90000"
    small = small if name == "offdae_offpolicy" else ""
    assert learned(run, importlib.import_module(name), LONG, small) >= 2.5 * random_return > 0


@pytest.mark.slow
@pytest.mark.parametrize("factor", [-1.0, 0.0], ids=["reversed advantage", "no advantage"])
def test_a_broken_actor_does_not_learn(run, random_return, monkeypatch, factor):
    actor_loss = offdae_dae.actor_loss

    def broken(args, online, target):
        return actor_loss(args, online._replace(advantage=factor * online.advantage), target)

    monkeypatch.setattr(offdae_dae, "actor_loss", broken)
    assert learned(run, offdae_dae, SHORT) < 2 * random_return
