"""Each loss and its gradient against a slow reference: one frame and one step at a time, straight from the equation."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import offdae_dae
import offdae_offpolicy
import offdae_tree
import offdae_uncorrected

CHANNELS, ACTIONS, GAMMA = 3, 4, 0.9
GAMES = SimpleNamespace(channels=CHANNELS, action_set=list(range(ACTIONS)))


def make_args(script, **changes):
    if script is offdae_offpolicy:
        changes = dict(latent_size=3, cvae_channels=4) | changes
    return script.Args(**dict(channels=4, hidden=16, gamma=GAMMA, n=5, batch_size=16, kl_coef=0.7) | changes)


def make_agent(script, args, seed=0):
    """An agent whose target network is another network, as after some updates."""
    torch.manual_seed(seed)
    agent = script.Agent(args, GAMES, torch.device("cpu"))
    with torch.no_grad():
        for parameter in agent.target_network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    if script is offdae_offpolicy:
        agent.cvae.eval()  # with running statistics a frame does not depend on the rest of the batch
        for module in agent.cvae.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                torch.nn.init.normal_(module.running_mean)
                torch.nn.init.uniform_(module.running_var, 0.5, 2.0)
    return agent


def random_state():
    return (torch.rand(CHANNELS, 10, 10) < 0.3).to(torch.get_default_dtype())


def random_segments(n, frames, rng):
    """Segments of n transitions or up to a terminal state; the front of the last one is cut off to fit."""
    segments = []
    while frames > 0:
        terminal = bool(rng.random() < 0.5)
        length = int(rng.integers(1, n + 1)) if terminal else n
        length = min(length, frames)
        frames -= length
        segments.append(
            SimpleNamespace(
                states=[random_state() for _ in range(length)],
                actions=[int(a) for a in rng.integers(ACTIONS, size=length)],
                rewards=[float(r) for r in rng.normal(size=length)],
                terminal=terminal,
                end=random_state(),
            )
        )
    return segments


def as_batch(script, args, segments):
    """What `Replay.sample` makes of these segments, by loops."""
    frames = [(s, i) for s, segment in enumerate(segments) for i in range(len(segment.states))]
    slots, ends = {}, []
    for s, segment in enumerate(segments):
        slots[s] = len(ends)
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
        following = [[*segment.states[1:], segment.end] for segment in segments]
        fields["next_states"] = torch.stack([following[s][i] for s, i in frames])
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
        """B(s,a,s') = sum_z q(z|s,a,s') g(s,a,z) - sum_z p(z|s,a) g(s,a,z)"""
        state, action = segment.states[t], segment.actions[t]
        following = [*segment.states[1:], segment.end][t]
        with torch.no_grad():
            _, log_p, log_q = self.agent.cvae(state[None], torch.tensor([action]), following[None])
        g, total = self.output(self.agent.network, state).luck[0], 0.0
        for z in range(self.args.latent_size):
            total = total + log_q[0, z].exp() * g[action, z] - log_p[0, z].exp() * g[action, z]
        return total

    def end_value(self, segment, network=None):
        network = network or self.agent.target_network
        return 0.0 if segment.terminal else self.value(network, segment.end)

    def frame_loss(self, script, segment, i):
        gamma, network, target = self.args.gamma, self.agent.network, self.agent.target_network
        length = len(segment.states)
        state, action = segment.states[i], segment.actions[i]
        if script is offdae_tree:
            prediction = self.value(network, state) + self.advantage(network, state, action)
            return (prediction - self.tree(segment, i).detach()) ** 2
        end_network = network if not getattr(self.args, "target_network", True) else target
        total = gamma ** (length - i) * self.end_value(segment, end_network)
        for t in range(i, length):
            total = total + gamma ** (t - i) * segment.rewards[t]
            if script is offdae_offpolicy:
                total = total - gamma ** (t - i + 1) * self.luck(segment, t)
            if script in (offdae_dae, offdae_offpolicy):
                total = total - gamma ** (t - i) * self.advantage(network, segment.states[t], segment.actions[t])
        prediction = self.value(network, state)
        if script is offdae_uncorrected:
            prediction = prediction + self.advantage(network, state, action)
        return (prediction - total) ** 2

    def tree(self, segment, t):
        """Eq. `tree` as it is printed, n being the steps left in the segment."""
        target = self.agent.target_network
        if t == len(segment.states) - 1:
            return torch.as_tensor(segment.rewards[t] + self.args.gamma * self.end_value(segment))
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


@pytest.mark.parametrize(("script", "changes"), CASES)
@pytest.mark.parametrize(("n", "frames"), [(1, 6), (3, 17), (5, 16), (16, 16)])
def test_losses_and_gradients_match_the_slow_reference(float64, script, changes, n, frames):
    args = make_args(script, n=n, batch_size=frames, **changes)
    agent, slow = make_agent(script, args), None
    for repeat in range(3):
        segments = random_segments(n, frames, np.random.default_rng(repeat))
        loss, logged = script.compute_losses(args, agent, as_batch(script, args, segments))
        slow = Slow(args, agent)
        critic, actor = slow.critic(script, segments), slow.actor(segments)
        torch.testing.assert_close(logged[0], critic.detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(logged[1], actor.detach(), rtol=1e-10, atol=1e-10)
        assert_same_gradients(gradients(loss, agent), gradients(critic + actor, agent))


def test_the_random_segments_cover_every_kind_of_end():
    kinds = set()
    for repeat in range(3):
        for segment in random_segments(5, 16, np.random.default_rng(repeat)):
            kinds.add((segment.terminal, len(segment.states) == 5))
    assert kinds >= {(True, False), (False, True), (False, False)}  # terminal, full, and cut at the front


def outputs(script, agent, batch):
    """Centred outputs of both networks, as `losses` makes them."""
    online, target = agent.network(batch.states), agent.target_network(batch.states)
    policy = target.log_policy.exp()
    if script is offdae_offpolicy:
        _, log_p, log_q = agent.cvae(batch.states, batch.actions, batch.next_states)
        luck = script.centred_luck(online.luck, batch.actions, log_q.exp().detach(), log_p.exp().detach())
        online = online._replace(luck=luck)  # [F]
    return [x._replace(advantage=script.centred(x.advantage, policy)) for x in (online, target)]


def make_case(script, n=5, frames=16, **changes):
    args = make_args(script, n=n, batch_size=frames, **changes)
    agent = make_agent(script, args)
    return args, agent, as_batch(script, args, random_segments(n, frames, np.random.default_rng(0)))


def test_tree_with_a_policy_concentrated_on_the_actions_taken_is_the_n_step_return(float64):
    args, agent, batch = make_case(offdae_tree)
    online, target = outputs(offdae_tree, agent, batch)
    certain = torch.full_like(target.log_policy, -torch.inf).scatter(1, batch.actions[:, None], 0.0)
    advantage = target.advantage - target.advantage.gather(1, batch.actions[:, None])
    target = target._replace(log_policy=certain, advantage=advantage)
    tree = offdae_tree.critic_loss(args, agent, batch, online, target)
    n_step = offdae_uncorrected.critic_loss(args, agent, batch, online, target)
    torch.testing.assert_close(tree, n_step, rtol=1e-12, atol=1e-12)
    ordinary = offdae_tree.critic_loss(args, agent, batch, *outputs(offdae_tree, agent, batch))
    assert abs(ordinary - n_step) > 1e-3


def test_dae_without_advantages_is_uncorrected(float64):
    args, agent, batch = make_case(offdae_dae)
    online, target = outputs(offdae_dae, agent, batch)
    zero = online._replace(advantage=torch.zeros_like(online.advantage))
    dae = offdae_dae.critic_loss(args, agent, batch, zero, target)
    uncorrected = offdae_uncorrected.critic_loss(args, agent, batch, zero, target)
    assert dae == uncorrected
    assert offdae_dae.critic_loss(args, agent, batch, online, target) != dae


def test_off_policy_dae_without_luck_is_dae(float64):
    args, agent, batch = make_case(offdae_offpolicy)
    online, target = outputs(offdae_offpolicy, agent, batch)
    without = offdae_offpolicy.critic_loss(args, agent, batch, online, target, torch.zeros_like(online.luck))
    assert without == offdae_dae.critic_loss(args, agent, batch, online, target)
    assert abs(offdae_offpolicy.critic_loss(args, agent, batch, online, target, online.luck) - without) > 1e-4


@pytest.mark.parametrize("other", [offdae_uncorrected, offdae_tree])
def test_all_methods_agree_at_n_1(float64, other):
    results = []
    for script in (offdae_dae, other):
        args, agent, batch = make_case(script, n=1, frames=12)
        loss, logged = script.compute_losses(args, agent, batch)
        results.append((logged, gradients(loss, agent)))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-12, atol=1e-12)
    assert_same_gradients(results[0][1], results[1][1], 1e-12)


def test_methods_differ_beyond_n_1(float64):
    critics = []
    for script in (offdae_dae, offdae_uncorrected, offdae_offpolicy, offdae_tree):
        args, agent, batch = make_case(script, n=3, frames=12)
        critics.append(script.compute_losses(args, agent, batch)[1][0].item())
    assert min(abs(a - b) for a, b in itertools.combinations(critics, 2)) > 1e-4


def test_advantage_is_centred_under_the_ema_policy(script):
    _, agent, batch = make_case(script)
    online, target = outputs(script, agent, batch)
    for output in (online, target):
        assert (target.log_policy.exp() * output.advantage).sum(1).abs().max() < 1e-6
    uncentred = agent.network(batch.states).advantage
    assert (target.log_policy.exp() * uncentred).sum(1).abs().max() > 1e-3


def test_the_actor_loss_trains_the_policy_head_alone(script):
    args, agent, batch = make_case(script)
    actor, _, _ = script.actor_loss(args, *outputs(script, agent, batch))
    names = [name for name, _ in agent.network.named_parameters()]
    for name, gradient in zip(names, gradients(actor, agent), strict=True):
        assert (gradient is not None and gradient.abs().max() > 0) == name.startswith("policy")


def test_no_loss_reaches_the_ema_network(script):
    for changes in [{}, dict(target_network=False)] if hasattr(script.Args, "target_network") else [{}]:
        args, agent, batch = make_case(script, **changes)
        script.compute_losses(args, agent, batch)[0].backward()
        assert not any(p.requires_grad or p.grad is not None for p in agent.target_network.parameters())
        assert all(p.grad is not None for p in agent.network.parameters())


def adam(parameter, gradient_list, lr, betas, eps):
    """Adam as its paper writes it, for a few steps with known gradients."""
    mean, square = torch.zeros_like(parameter), torch.zeros_like(parameter)
    for t, gradient in enumerate(gradient_list, start=1):
        mean = betas[0] * mean + (1 - betas[0]) * gradient
        square = betas[1] * square + (1 - betas[1]) * gradient**2
        corrected = mean / (1 - betas[0] ** t), square / (1 - betas[1] ** t)
        parameter = parameter - lr[t - 1] * corrected[0] / (corrected[1].sqrt() + eps)
    return parameter


def test_two_updates_by_hand(float64, script):
    """Fresh gradients each time, Adam with its annealed rate, the moving average; the CVAE has betas of its own."""
    args, agent, batch = make_case(script, tau=0.9)
    network, average = (list(x.parameters()) for x in (agent.network, agent.target_network))
    trained = [(network, [0.01, 0.004], (0.9, 0.999), 1e-4)]
    if script is offdae_offpolicy:
        trained.append((list(agent.cvae.parameters()), [0.01, 0.004], (0.5, 0.9), 1e-8))
    starts = [[p.detach().clone() for p in parameters] for parameters, *_ in trained]
    moving, gradients_of = [p.clone() for p in average], [[], []]
    for k in range(2):
        for group in agent.optimizer.param_groups:
            group["lr"] = [0.01, 0.004][k]
        loss, _ = script.compute_losses(args, agent, batch)
        for i, (parameters, *_) in enumerate(trained):
            gradients_of[i].append(torch.autograd.grad(loss, parameters, retain_graph=True))
        script.update(args, agent, SimpleNamespace(sample=lambda: batch))
        moving = [0.9 * old + 0.1 * new.detach() for old, new in zip(moving, network, strict=True)]
    for (parameters, *settings), start, found in zip(trained, starts, gradients_of, strict=False):
        for parameter, first, steps in zip(parameters, start, zip(*found, strict=True), strict=True):
            torch.testing.assert_close(parameter.detach(), adam(first, steps, *settings), rtol=1e-6, atol=1e-9)
    for parameter, expected in zip(average, moving, strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-10, atol=1e-12)
