"""The update never waits for the device: checked on PyTorch's meta device, and on a GPU where there is one."""

import importlib

import pytest
import torch
from conftest import made
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SIZES = dict(env_id="seaquest", num_envs=8, n=4, channels=8, hidden=16, batch_size=32)


class OnlyMeta(TorchDispatchMode):
    """Fails on an operator with a tensor that is not on the meta device, and so on anything that asks for a value."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                raise AssertionError(f"{function} got or made a tensor on {leaf.device}")
        return result


@pytest.fixture
def adam_on_meta(monkeypatch):
    """Fused Adam does not exist on meta; the capturable one keeps its counters on the device as the fused one does."""
    plain = torch.optim.Adam
    make = lambda parameters, fused, **settings: plain(parameters, capturable=True, foreach=False, **settings)  # noqa: E731
    monkeypatch.setattr(torch.optim, "Adam", make)
    adam = importlib.import_module("torch.optim.adam")
    monkeypatch.setattr(adam, "_get_capturable_supported_devices", lambda *_, **__: ["meta"])


def test_an_update_stays_on_the_device(script, adam_on_meta):
    for changes in [{}, dict(target_network=False)] if hasattr(script.Args, "target_network") else [{}]:
        args, _, agent, replay = made(script, torch.device("meta"), **SIZES, **changes)
        with OnlyMeta():
            for _ in range(2):
                logged = script.update(args, agent, replay)
                getattr(script, "make_twin", id)(agent)
        assert logged.device.type == "meta" and logged.shape == (len(script.LOGGED),)


@pytest.mark.parametrize("leak", ["replay", "network", "value"])
def test_the_check_notices(common, adam_on_meta, monkeypatch, leak):
    """A tensor left on the CPU, a network left on the CPU, a value asked for: each must fail."""
    args, games, agent, replay = made(common, torch.device("meta"), **SIZES)
    if leak == "replay":
        replay.ring["segments"] = torch.zeros(args.buffer_size, 2, dtype=torch.int64)
    elif leak == "network":
        agent.target_network = common.Network(args, games.channels, len(games.action_set))
    else:
        critic_loss = common.critic_loss
        monkeypatch.setattr(common, "critic_loss", lambda *x: critic_loss(*x) * critic_loss(*x).item())
    with pytest.raises((AssertionError, RuntimeError)), OnlyMeta():
        common.update(args, agent, replay)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_updates_on_a_gpu_never_synchronise(script):
    args, _, agent, replay = made(script, torch.device("cuda"), **SIZES)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            script.update(args, agent, replay)
            getattr(script, "make_twin", id)(agent)
    finally:
        torch.cuda.set_sync_debug_mode("default")
