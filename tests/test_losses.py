"""Each loss and its gradient against a slow reference: one frame and one step at a time, straight from the equation."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import CPU

import offdae_dae
import offdae_offpolicy
import offdae_tree
import offdae_uncorrected

CHANNELS, ACTIONS, GAMMA = 3, 4, 0.9
GAMES = SimpleNamespace(channels=CHANNELS, action_set=list(range(ACTIONS)))


def make_agent(script, n=5, frames=16, **changes):
    """Arguments, and an agent whose target network is another network, as after some updates."""
    if script is offdae_offpolicy:
        changes |= dict(latent_size=3, cvae_channels=4)
    args = script.Args(channels=4, hidden=16, gamma=GAMMA, kl_coef=0.7, n=n, batch_size=frames, **changes)
    torch.manual_seed(0)
    agent = script.Agent(args, GAMES, CPU)
    with torch.no_grad():
        for parameter in agent.target_network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    if script is offdae_offpolicy:
        agent.cvae.eval()  # with running statistics a frame does not depend on the rest of the batch
        for module in agent.cvae.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                torch.nn.init.normal_(module.running_mean)
                torch.nn.init.uniform_(module.running_var, 0.5, 2.0)
    return args, agent


def random_state():
    return (torch.rand(CHANNELS, 10, 10) < 0.3).to(torch.get_default_dtype())


def random_segments(n, frames, rng):
    """Segments of n transitions or up to a terminal state; the front of the last one is cut off to fit."""
    segments = []
    while frames > 0:
        terminal = bool(rng.random() < 0.5)
        length = min(int(rng.integers(1, n + 1)) if terminal else n, frames)
        frames -= length
        states, end = [random_state() for _ in range(length)], random_state()
        actions, rewards = rng.integers(ACTIONS, size=length).tolist(), rng.normal(size=length).tolist()
        segment = dict(states=states, following=[*states[1:], end], actions=actions, rewards=rewards)
        segments.append(SimpleNamespace(**segment, terminal=terminal, end=end))
    return segments


def as_batch(script, args, segments):
    """What `Replay.sample` makes of these segments, by loops."""
    frames = [(s, i) for s, segment in enumerate(segments) for i in range(len(segment.states))]
    slots, ends = [], []
    for segment in segments:
        slots.append(len(ends))
        if not segment.terminal:
            ends.append(segment.end)
    slot_count = math.ceil(args.batch_size / args.n)
    ends += [random_state() for _ in range(slot_count - len(ends))]
    discounts = torch.zeros(len(frames), len(frames))
    for row, (s, i) in enumerate(frames):
        for column, (t, j) in enumerate(frames):
            if s == t and j >= i:
                discounts[row, column] = args.gamma ** (j - i)
    fields = dict(
        states=torch.stack([segments[s].states[i] for s, i in frames]),
        actions=torch.tensor([segments[s].actions[i] for s, i in frames]),
        rewards=torch.tensor([segments[s].rewards[i] for s, i in frames]),
        remaining=torch.tensor([len(segments[s].states) - i for s, i in frames]),
        discounts=discounts,
        end_states=torch.stack(ends),
        end_slot=torch.tensor([min(slots[s], slot_count - 1) for s, _ in frames]),
        end_terminal=torch.tensor([segments[s].terminal for s, _ in frames]),
    )
    if script is offdae_offpolicy:
        fields["next_states"] = torch.stack([segments[s].following[i] for s, i in frames])
    return script.Batch(**fields)


class Slow:
    """The quantities of the equations, of one state at a time."""

    def __init__(self, args, agent):
        self.args, self.agent, self.outputs = args, agent, {}

    def output(self, network, state):
        key = id(network), id(state)
        if key not in self.outputs:
            self.outputs[key] = network(state[None])
        return self.outputs[key]

    def value(self, network, state):
        return self.output(network, state).value[0]

    def target_policy(self, state):
        return [p.exp() for p in self.output(self.agent.target_network, state).log_policy[0]]

    def advantage(self, network, state, action):
        raw, policy = self.output(network, state).advantage[0], self.target_policy(state)
        return raw[action] - sum(policy[a] * raw[a] for a in range(ACTIONS))

    def luck(self, segment, t):
        """B(s,a,s') = sum_z q(z|s,a,s') g(s,a,z) - sum_z p(z|s,a) g(s,a,z), g(s,a,z) = sqrt(p(z|s,a)) times the head"""
        state, action = segment.states[t], segment.actions[t]
        with torch.no_grad():
            asked = state[None], torch.tensor([action])
            log_p, (_, log_q) = self.agent.cvae.log_prior(*asked), self.agent.cvae(*asked, segment.following[t][None])
        head, total = self.output(self.agent.network, state).luck[0], 0.0
        for z in range(self.args.latent_size):
            g = log_p[0, z].exp() ** 0.5 * head[action, z]
            total = total + log_q[0, z].exp() * g - log_p[0, z].exp() * g
        return total

    def end_value(self, segment, network):
        return 0.0 if segment.terminal else self.value(network, segment.end)

    def frame_loss(self, script, segment, i):
        gamma, network, length = self.args.gamma, self.agent.network, len(segment.states)
        prediction = self.value(network, segment.states[i])
        if script in (offdae_uncorrected, offdae_tree):
            prediction = prediction + self.advantage(network, segment.states[i], segment.actions[i])
        if script is offdae_tree:
            return (prediction - self.tree(segment, i).detach()) ** 2
        end_network = self.agent.target_network if getattr(self.args, "target_network", True) else network
        total = gamma ** (length - i) * self.end_value(segment, end_network)
        for t in range(i, length):
            total = total + gamma ** (t - i) * segment.rewards[t]
            if script is offdae_offpolicy:
                total = total - gamma ** (t - i + 1) * self.luck(segment, t)
            if script in (offdae_dae, offdae_offpolicy):
                total = total - gamma ** (t - i) * self.advantage(network, segment.states[t], segment.actions[t])
        return (prediction - total) ** 2

    def tree(self, segment, t):
        """Eq. `tree` as it is printed, n being the steps left in the segment."""
        target = self.agent.target_network
        if t == len(segment.states) - 1:
            return torch.as_tensor(segment.rewards[t] + self.args.gamma * self.end_value(segment, target))
        state, action = segment.states[t + 1], segment.actions[t + 1]
        policy = self.target_policy(state)
        others = 0.0
        for a in range(ACTIONS):
            if a != action:
                others = others + policy[a] * (self.value(target, state) + self.advantage(target, state, a))
        return segment.rewards[t] + self.args.gamma * (others + policy[action] * self.tree(segment, t + 1))

    def critic(self, script, segments):
        errors = [self.frame_loss(script, segment, i) for segment in segments for i in range(len(segment.states))]
        return sum(errors) / len(errors)

    def actor(self, segments):
        states = [state for segment in segments for state in segment.states]
        network, skill, kl, square = self.agent.network, 0.0, 0.0, 0.0
        for state in states:
            policy, target_policy = self.output(network, state).log_policy[0].exp(), self.target_policy(state)
            for a in range(ACTIONS):
                advantage = self.advantage(network, state, a).detach()
                skill = skill + policy[a] * advantage
                kl = kl + policy[a] * (policy[a].log() - target_policy[a].log())
                square = square + target_policy[a] * advantage**2
        count = len(states)
        return -(skill / count) / ((square / count) ** 0.5 + 1e-5) + self.args.kl_coef * kl / count


def gradients(loss, agent):
    return torch.autograd.grad(loss, list(agent.network.parameters()), retain_graph=True, allow_unused=True)


def assert_same_gradients(left, right, tolerance=1e-10):
    for a, b in zip(left, right, strict=True):
        if a is None or b is None:
            present = a if b is None else b
            assert present is None or torch.count_nonzero(present) == 0
        else:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


WITHOUT_TARGET = dict(target_network=False)
CASES = [(offdae_uncorrected, {}), (offdae_tree, {}), (offdae_dae, {}), (offdae_offpolicy, {})]
CASES += [(offdae_dae, WITHOUT_TARGET), (offdae_offpolicy, WITHOUT_TARGET)]
SHAPES = [(1, 6), (3, 17), (5, 16), (16, 16)]  # n, frames


@pytest.mark.parametrize(("script", "changes"), CASES)
@pytest.mark.parametrize(("n", "frames"), SHAPES)
def test_losses_and_gradients_match_the_slow_reference(float64, script, changes, n, frames):
    (args, agent), kinds = make_agent(script, n, frames, **changes), set()
    for repeat in range(2 if script is offdae_offpolicy else 3):
        segments = random_segments(n, frames, np.random.default_rng(repeat))
        kinds |= {(segment.terminal, len(segment.states) == n) for segment in segments}
        loss, logged = script.compute_losses(args, agent, as_batch(script, args, segments))
        slow = Slow(args, agent)
        critic, actor = slow.critic(script, segments), slow.actor(segments)
        torch.testing.assert_close(logged[0], critic.detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(logged[1], actor.detach(), rtol=1e-10, atol=1e-10)
        assert_same_gradients(gradients(loss, agent), gradients(critic + actor, agent))
    assert n != 5 or kinds >= {(True, False), (False, True), (False, False)}  # terminal, full, and cut at the front


def make_case(script, **changes):
    args, agent = make_agent(script, **changes)
    return args, agent, as_batch(script, args, random_segments(args.n, args.batch_size, np.random.default_rng(0)))


def test_methods_agree_at_n_1_and_differ_beyond(float64):
    for n in (1, 3):
        losses, gradient_lists = [], []
        for script in (offdae_dae, offdae_uncorrected, offdae_tree):
            args, agent, batch = make_case(script, n=n, frames=12)
            loss, _ = script.compute_losses(args, agent, batch)
            losses.append(loss)
            gradient_lists.append(gradients(loss, agent))
        for other in (1, 2):
            assert (abs(losses[0] - losses[other]) < 1e-12) == (n == 1)
            if n == 1:
                assert_same_gradients(gradient_lists[0], gradient_lists[other], 1e-12)


def test_the_actor_loss_trains_the_policy_head_alone_and_no_loss_the_ema_network(script):
    args, agent, batch = make_case(script)
    actor, _, _ = script.actor_loss(args, agent.network(batch.states), agent.target_network(batch.states))
    names = [name for name, _ in agent.network.named_parameters()]
    for name, gradient in zip(names, gradients(actor, agent), strict=True):
        assert (gradient is not None and gradient.abs().max() > 0) == name.startswith("policy")
    script.compute_losses(args, agent, batch)[0].backward()
    assert not any(p.requires_grad or p.grad is not None for p in agent.target_network.parameters())
    assert all(p.grad is not None for p in agent.network.parameters())


def test_two_updates_by_hand(float64, script):
    """Fresh gradients each time, Adam with its annealed rate, the moving average; the CVAE has betas of its own."""
    args, agent, batch = make_case(script, tau=0.9)
    settings = [(agent.network, (0.9, 0.999), 1e-4)]
    if script is offdae_offpolicy:
        settings.append((agent.cvae, (0.5, 0.9), 1e-8))
    trained, moving = [], [p.clone() for p in agent.target_network.parameters()]
    for module, betas, eps in settings:
        copies = [p.detach().clone() for p in module.parameters()]
        trained.append((list(module.parameters()), copies, torch.optim.Adam(copies, betas=betas, eps=eps)))
    for rate in (0.01, 0.004):
        loss, _ = script.compute_losses(args, agent, batch)
        for parameters, copies, adam in trained:
            for copy, gradient in zip(copies, torch.autograd.grad(loss, parameters, retain_graph=True), strict=True):
                copy.grad = gradient
            adam.param_groups[0]["lr"] = rate
            adam.step()
        for group in agent.optimizer.param_groups:
            group["lr"] = rate
        script.update(args, agent, SimpleNamespace(sample=lambda: batch))
        moving = [0.9 * old + 0.1 * new.detach() for old, new in zip(moving, agent.network.parameters(), strict=True)]
    for parameters, copies, _ in trained:
        torch.testing.assert_close([p.detach() for p in parameters], copies, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close([*agent.target_network.parameters()], moving, rtol=1e-10, atol=1e-12)
