"""No work is done that need not be done, and the losses compile whole. Times are measured by experiments/speed.py."""

import copy
import importlib
import shutil

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils.flop_counter import FlopCounterMode

import offdae_dae
import offdae_offpolicy


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


def needed_cvae_flops(args, channels, num_actions, frames):
    """Of a CVAE update: one pass over s and s', one of h, prior and posterior, and all decoders, each 10 x 10 x 9."""
    wide, narrow, Z = args.cvae_channels, args.cvae_channels // 2, args.latent_size
    encoder = channels * narrow + 2 * narrow**2 + narrow * wide + 2 * wide**2
    transition = (wide + num_actions) * wide + 4 * wide**2
    prior = 4 * wide**2
    posterior = 2 * wide * wide + 4 * wide**2
    decoder = 2 * wide**2 + wide * narrow + 2 * narrow**2 + narrow * channels
    forward = 2 * encoder + transition + prior + posterior + min(args.decode_latents, Z) * decoder
    backward = 2 * forward - 2 * channels * narrow - num_actions * wide  # boards and actions need no gradient
    return 2 * frames * (900 * (forward + backward) + 3 * 2 * wide * Z)


def counted_flops(function):
    counter = FlopCounterMode(display=False)
    with counter:
        function()
    return counter.get_total_flops()


def made(script, device="cpu", **sizes):
    """Arguments, an agent and a replay with a few frames in it."""
    args = script.Args(**sizes)
    games = script.Games(args, script.spawn_seeds(args)[2])
    agent, replay = script.Agent(args, games, device), script.Replay(args, games.channels, device)
    for _ in range(2 * args.n):
        replay.add(games.step(script.np.zeros(args.num_envs, dtype=int)))
    return args, games, agent, replay


@pytest.mark.parametrize("n", [8, 32])
def test_no_flop_is_wasted(script, n):
    """Of whole updates at the paper's widths, on 64 frames."""
    sizes = dict(env_id="seaquest", n=n, num_envs=8, batch_size=64, buffer_size=1000)
    args, games, agent, replay = made(script, **sizes | (dict(cvae_channels=16) if hasattr(script, "CVAE") else {}))
    actions, ends = len(games.action_set), -(-args.batch_size // n)
    needed = needed_flops(args, games.channels, actions, args.batch_size, args.batch_size + ends)
    if hasattr(script, "CVAE"):
        needed += needed_cvae_flops(args, games.channels, actions, args.batch_size)
    counted = counted_flops(lambda: script.update(args, agent, replay))
    assert 0.99 < counted / needed < 1.03


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


def check_compiled(script, backend):
    cvae = dict(latent_size=5, cvae_channels=4, decode_latents=3) if hasattr(script, "CVAE") else {}
    small = dict(num_envs=8, batch_size=32, buffer_size=1000, channels=4, hidden=8, learning_rate=1e-3) | cvae
    args, games, agent, replay = made(script, **small)
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


@pytest.mark.parametrize("name", ["offdae_uncorrected", "offdae_dae", "offdae_tree"])
def test_losses_compile_whole_and_only_once(name):
    check_compiled(importlib.import_module(name), "aot_eager")


@pytest.mark.slow
def test_off_policy_losses_compile_whole_and_only_once():
    check_compiled(offdae_offpolicy, "aot_eager")


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
def test_losses_compile_with_inductor():
    check_compiled(offdae_dae, "inductor")


def test_bfloat16_runs_the_cvae_in_bfloat16_and_nothing_else():
    """The losses are close to float32's and are float32; the weights and the actor-critic stay what they were."""
    script = offdae_offpolicy
    args, games, agent, replay = made(
        script, num_envs=8, batch_size=32, buffer_size=1000, channels=4, hidden=8, cvae_channels=16
    )
    args.bf16, batch = True, replay.sample()
    seen = []
    agent.cvae.decoder.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    agent.network.register_forward_hook(lambda module, inputs, output: seen.append(output.value.dtype))
    loss, logged = script.compute_losses(args, agent, batch)
    loss.backward()
    assert set(seen) == {torch.float32, torch.bfloat16} and seen[0] == torch.float32 and loss.dtype == torch.float32
    args.bf16 = False
    torch.testing.assert_close(logged, script.compute_losses(args, agent, batch)[1], rtol=0.1, atol=0.02)
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in agent.cvae.parameters())
