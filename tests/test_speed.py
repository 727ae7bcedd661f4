"""No work is done that need not be done, and the losses compile whole. Times are measured by experiments/speed.py."""

import copy
import importlib
import shutil

import pytest
import torch
from conftest import made
from torch._dynamo.utils import counters
from torch.utils.flop_counter import FlopCounterMode

import offdae_offpolicy

SMALL = dict(num_envs=8, batch_size=32, buffer_size=1000, channels=4, hidden=8, learning_rate=1e-3)


def needed_flops(args, channels, num_actions, online_frames, target_frames):
    """Of an actor-critic update, by hand: 2 for each multiplication and addition, forward, for the weights' gradients
    and for the inputs' gradients."""
    conv1, conv2 = channels * 9 * args.channels * 64, args.channels * 9 * args.channels * 36
    hidden, head = args.channels * 36 * args.hidden, args.hidden * num_actions
    luck = head * getattr(args, "latent_size", 0)
    forward = conv1 + conv2 + hidden + args.hidden + 2 * head + luck
    # the first layer's input and the policy head's input need no gradient
    backward = 2 * forward - conv1 - head
    return 2 * (online_frames * (forward + backward) + target_frames * forward)


def needed_cvae_flops(args, cvae, channels, num_actions, frames):
    """Of a CVAE update: one pass over s and s', one of h, prior and posterior, and all decoders. Each weight of a
    convolution meets 100 pixels."""
    weights = {
        name: sum(x.weight.numel() for x in part.modules() if isinstance(x, torch.nn.Conv2d | torch.nn.ConvTranspose2d))
        for name, part in cvae.named_children()
    }
    times = dict(encoder=2, transition=1, prior=1, posterior=1, decoder=args.decode_latents)
    forward = sum(100 * times[name] * count for name, count in weights.items() if count)
    first = 900 * (2 * channels * args.cvae_channels // 2 + num_actions * args.cvae_channels)
    heads = 2 * args.cvae_channels * args.latent_size
    return 2 * frames * (3 * (forward + heads) - first)  # boards and actions need no gradient


@pytest.mark.parametrize("n", [8, 32])
def test_no_flop_is_wasted(script, n):
    """Of whole updates at the paper's widths, on 64 frames."""
    sizes = dict(env_id="seaquest", n=n, num_envs=8, batch_size=64, buffer_size=1000)
    sizes |= dict(cvae_channels=16) if script is offdae_offpolicy else {}
    args, games, agent, replay = made(script, steps=2 * n, **sizes)
    actions, ends = len(games.action_set), -(-args.batch_size // n)
    needed = needed_flops(args, games.channels, actions, args.batch_size, args.batch_size + ends)
    if script is offdae_offpolicy:
        needed += needed_cvae_flops(args, agent.cvae, games.channels, actions, args.batch_size)
    with FlopCounterMode(display=False) as counter:
        script.update(args, agent, replay)
    assert 0.99 < counter.get_total_flops() / needed < 1.03


def updates(script, args, agent, replay, losses):
    """20 of them, with an annealed learning rate; what each logs and how far the last one moved the weights."""
    logged = []
    for k in range(20):
        torch.manual_seed(k)
        agent.optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - k / 20)
        before = copy.deepcopy(list(agent.network.parameters()))
        logged.append(script.update(args, agent, replay, losses))
    pairs = zip(before, agent.network.parameters(), strict=True)
    return torch.stack(logged), max((left - right).abs().max().item() for left, right in pairs)


COMPILER = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
COMPILED = [("offdae_uncorrected", "aot_eager"), ("offdae_dae", "aot_eager"), ("offdae_tree", "aot_eager")]
COMPILED += [pytest.param("offdae_offpolicy", "aot_eager", marks=pytest.mark.slow)]
COMPILED += [pytest.param("offdae_dae", "inductor", marks=[pytest.mark.slow, COMPILER])]


@pytest.mark.parametrize(("name", "backend"), COMPILED)
def test_losses_compile_whole_and_only_once(name, backend):
    script = importlib.import_module(name)
    cvae = dict(latent_size=5, cvae_channels=4, decode_latents=3, cvae_every=2) if script is offdae_offpolicy else {}
    args, _, agent, replay = made(script, **SMALL, **cvae)
    twin = copy.deepcopy(agent)
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(script.compute_losses, fullgraph=True, backend=backend)
        fast, fast_last = updates(script, args, agent, replay, compiled)
    slow, slow_last = updates(script, args, twin, replay, script.compute_losses)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    torch.testing.assert_close(fast, slow, rtol=1e-3, atol=1e-5)
    # Adam moves a weight by about the learning rate: a frozen one would have moved it 20 times as far at the end
    assert fast_last == pytest.approx(slow_last, rel=0.01) and fast_last < 4 * args.learning_rate / 20
