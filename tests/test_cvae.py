"""The CVAE and luck: losses by loops over z, which gradients flow where, and processes whose chance is known."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import CPU, made
from test_runs import read_curve
from torch.nn.functional import logsigmoid

import offdae_dae
import offdae_offpolicy as script


def make_cvae(boards=3, actions=4, **changes):
    args = script.Args(**dict(latent_size=3, cvae_channels=6, batch_size=10, ent_coef=0.02, n=5) | changes)
    cvae = script.CVAE(args, boards, actions)
    states, next_states = (torch.rand(2, args.batch_size, boards, 10, 10) < 0.3).to(torch.get_default_dtype())
    actions = torch.arange(args.batch_size) % actions
    return args, cvae, SimpleNamespace(states=states, next_states=next_states, actions=actions)


def gradients(loss, module):
    found = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True, allow_unused=True)
    return dict(zip([name for name, _ in module.named_parameters()], found, strict=True))


@pytest.mark.parametrize("every", [1, 3])
def test_loss_and_gradients_match_a_loop_over_z(float64, every):
    """With every third frame q and the decoder learn from these alone; the prior, q and p are those of all frames."""
    args, cvae, batch = make_cvae(cvae_every=every)
    cvae.eval()
    cvae.ent_coef.fill_(0.7)
    loss, q, p, logged = script.cvae_loss(args, cvae, batch)
    reconstruction, kl, entropy, away, trained = 0.0, 0.0, 0.0, 0.0, range(0, args.batch_size, every)
    for i in range(args.batch_size):
        states = batch.states[i : i + 1], batch.next_states[i : i + 1]
        asked, fits = (states[0], batch.actions[i : i + 1]), []
        log_p, (h, log_q) = cvae.log_prior(*asked), cvae(*asked, states[1])
        for z in range(3):
            posterior, prior = log_q[0, z].exp(), log_p[0, z].exp()
            assert q[i, z] == pytest.approx(posterior.item()) and p[i, z] == pytest.approx(prior.item())
            kl = kl + posterior.detach() * (posterior.detach().log() - prior.log()) / args.batch_size
            if i not in trained:
                continue
            entropy = entropy - posterior * posterior.log() / len(trained)
            logits = cvae.decoder(h + cvae.latents[z].view(1, -1, 1, 1))
            likelihood = states[1] * logsigmoid(logits) + (1 - states[1]) * logsigmoid(-logits)
            reconstruction = reconstruction - posterior * likelihood.mean() / len(trained)
            fits.append((likelihood.mean() / 0.7).exp().item())
        away = away - sum(fit / sum(fits) * log_q[0, z] / len(trained) for z, fit in enumerate(fits))
    slow = kl + reconstruction - 0.7 * entropy + 0.1 * away
    for fast, expected in zip((loss, *logged), (slow, reconstruction, kl, entropy), strict=True):
        torch.testing.assert_close(fast, expected, rtol=1e-10, atol=1e-10)
    left, right = gradients(loss, cvae), gradients(slow, cvae)
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-8, atol=1e-9, msg=name)


@pytest.mark.parametrize("k", [2, 3, 4, 5, 9])
def test_the_sum_over_few_latents_is_right_on_average(float64, monkeypatch, k):
    """Value and gradients, averaged over every z that can be drawn, are those of the exact sum; with all z exact."""
    F, Z = 4, 5
    scores, table = torch.randn(F, Z, requires_grad=True), torch.randn(F, Z, requires_grad=True)
    log_q = scores.log_softmax(1)
    exact = (log_q.exp() * table).sum(1)
    rest = log_q.detach().scatter(1, log_q.topk(min(k, Z) - 1).indices, -torch.inf).softmax(1)  # the law of the draw
    mean = torch.zeros(F)
    for drawn in range(Z):
        noise = torch.ones(F, Z).index_fill(1, torch.tensor(drawn), 1e-300)  # its -log is larger than all others
        monkeypatch.setattr(torch.Tensor, "exponential_", lambda self, noise=noise: noise)
        estimate, errors, log_chosen = script.expected_error(log_q, k, lambda z: table.gather(1, z))
        assert errors.shape == (F, min(k, Z)) and torch.allclose(log_chosen.exp().sum(1), torch.ones(F))
        mean = mean + torch.where(rest[:, drawn] > 0, rest[:, drawn] * estimate, 0.0)
        assert k < Z or torch.allclose(estimate, exact, rtol=1e-12)
    torch.testing.assert_close(mean, exact, rtol=1e-10, atol=1e-10)
    left, right = (torch.autograd.grad(x.square().sum(), (scores, table), retain_graph=True) for x in (mean, exact))
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)


def test_the_drawn_latent_follows_the_posterior():
    """Of four latents the likeliest is always chosen, the other one in proportion to q."""
    log_q, seen = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(40_000, 4), []
    script.expected_error(log_q, 2, lambda z: seen.append(z) or torch.zeros(z.shape))
    assert (seen[0][:, 0] == 0).all()
    counts = seen[0][:, 1].bincount(minlength=4) / 40_000
    torch.testing.assert_close(counts, torch.tensor([0.0, 0.6, 0.3, 0.1]), rtol=0, atol=0.01)


def test_all_chosen_latents_are_decoded_as_one_batch():
    """BatchNorm would subtract the z of a batch with one z."""
    args, cvae, batch = make_cvae(decode_latents=2)
    shapes = []
    cvae.decoder[0].register_forward_hook(lambda module, inputs, output: shapes.append(tuple(inputs[0].shape)))
    script.cvae_loss(args, cvae, batch)
    assert shapes == [(10 * 2, 6, 10, 10)]


def test_which_gradients_flow_where():
    """KL(q || p) trains the prior and nothing else; the reconstruction everything but the prior."""
    args, cvae, batch = make_cvae()
    _, _, _, (reconstruction, kl, entropy) = script.cvae_loss(args, cvae, batch)
    by_kl, by_reconstruction, by_entropy = (
        {name.split(".")[0] for name, x in gradients(loss, cvae).items() if x is not None and x.abs().max() > 0}
        for loss in (kl, reconstruction, entropy)
    )
    assert by_kl == {"prior", "to_p"} and not by_kl & by_reconstruction
    assert by_kl | by_reconstruction == {name.split(".")[0] for name, _ in cvae.named_parameters()}
    assert by_entropy == {"encoder", "transition", "posterior", "to_q"}


def test_agent_and_cvae_do_not_train_each_other():
    sizes = dict(n=4, num_envs=8, channels=4, hidden=8, batch_size=16, cvae_channels=4, latent_size=3)
    args, _, agent, replay = made(script, **sizes)
    batch = replay.sample()
    total, _ = script.compute_losses(args, agent, batch)
    cvae, q, p, _ = script.cvae_loss(args, agent.cvae, batch)
    assert not q.requires_grad and not p.requires_grad
    assert all(x is None for x in gradients(cvae, agent.network).values())
    assert all(x is not None for x in gradients(total, agent.network).values())
    # the whole loss trains the CVAE exactly as its own loss does
    torch.testing.assert_close(gradients(total, agent.cvae), gradients(cvae, agent.cvae), rtol=1e-4, atol=1e-6)


def test_a_twin_changes_nothing_but_who_tells(float64):
    """The z missed least takes half the frames of the one with most left to explain: all else stays."""
    args, _, agent, replay = made(script, n=4, num_envs=8, channels=4, hidden=8, batch_size=16, latent_size=4)
    cvae, batch = agent.cvae.eval(), replay.sample()

    def told():
        return cvae.log_prior(*batch[:2]), cvae(*batch[:2], batch.next_states)[1]

    with torch.no_grad():
        cvae.to_q.bias[2] = cvae.to_p.bias[2] = -40.0  # nobody's
        cvae.unexplained.copy_(torch.tensor([0.2, 0.4, 0.0, 0.0]))
        cvae.missed.copy_(torch.tensor([3.0, 3.0, 0.0, 9.0]))  # the last one explains its frames alone
        before, luck = told(), agent.network(batch.states).luck
        script.make_twin(agent)
        after, twins = told(), agent.network(batch.states).luck
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new.exp()[:, [1, 2]], old.exp()[:, [1, 1]] / 2)
        torch.testing.assert_close(new.exp()[:, [0, 3]], old.exp()[:, [0, 3]])
    torch.testing.assert_close(twins, luck[:, :, [0, 1, 1, 3]])
    assert 0 < (cvae.latents[2] - cvae.latents[1]).abs().max() < 1


def test_statistics_of_the_latents_by_loops(float64):
    args, cvae, batch = make_cvae(cvae_every=3)
    cvae.eval()
    script.cvae_loss(args, cvae, batch)
    missed, unexplained = torch.zeros(3), torch.zeros(3)
    for i in range(0, 10, 3):
        states = batch.states[i : i + 1], batch.next_states[i : i + 1]
        h, log_q = cvae(states[0], batch.actions[i : i + 1], states[1])
        q, errors = log_q[0].exp(), cvae.errors(h, torch.arange(3)[None], states[1])[0]
        for z in range(3):
            missed[z] -= (1 - q[z]).log().item() / 4
            unexplained[z] += (q[z] * sum(q[other] * errors[other] for other in range(3))).item() / 4
    torch.testing.assert_close((cvae.missed, cvae.unexplained), (0.05 * missed, 0.05 * unexplained))


def test_a_seed_gives_dae_and_off_policy_dae_the_same_start():
    networks = []
    for module in (offdae_dae, script):
        torch.manual_seed(3)
        networks.append(made(module, num_envs=1, steps=0, channels=4, hidden=8)[2].network.state_dict())
    assert all(torch.equal(value, networks[1][name]) for name, value in networks[0].items())
    assert set(networks[1]) - set(networks[0]) == {"luck.weight", "luck.bias"}


def test_luck_with_the_exact_posterior_is_zero_on_average(float64):
    """A known process: z ~ p(z|s,a), s' ~ p(s'|s,a,z). By Bayes' rule q averages to p over s'. Also by a loop."""
    p, likelihood = torch.rand(3).softmax(0), torch.rand(3, 5).softmax(1)
    joint = p[:, None] * likelihood  # [z, s']
    next_state = joint.sum(0)
    q, p = (joint / next_state).T, p.expand(5, -1)  # [s', z]
    g, actions = torch.randn(1, 2, 3).expand(5, -1, -1), torch.ones(5, dtype=torch.long)
    luck = script.centred_luck(g, actions, q, p)
    assert luck.abs().max() > 1e-3 and abs((next_state * luck).sum()) < 1e-14
    expected = [sum((q[i, z] - p[i, z]) * p[i, z] ** 0.5 * g[i, 1, z] for z in range(3)) for i in range(5)]
    torch.testing.assert_close(luck, torch.stack(expected))


# ------------------------------------------------------------------------ processes whose chance and values are known
CHANNELS, END = 2, 17


def board(number):
    """A board that shows a number as a 3 x 3 block in one of nine places of one of two channels."""
    shown = np.zeros((10, 10, CHANNELS), dtype=bool)
    row, column = 3 * (number % 3), 3 * (number // 3 % 3)
    shown[row : row + 3, column : column + 3, number // 9] = True
    return shown


BOARDS = script.pack([board(number) for number in range(END + 1)])


def train(probability, rewards, updates):
    """Start s and action a lead by chance to outcome o, whose only step pays `rewards[o]` and ends. Train agent and
    CVAE with the script's own replay and update; return prior, posterior and luck of each (s, a, o), and all values and
    lucks of a batch."""
    starts, actions, outcomes = probability.shape
    args = dict(n=2, num_envs=64, batch_size=64, channels=8, hidden=64, learning_rate=2e-3, tau=0.95)
    args = script.Args(**args, latent_size=6, cvae_channels=8, decode_latents=3)
    replay = script.Replay(args, CHANNELS, CPU)
    agent = script.Agent(args, SimpleNamespace(channels=CHANNELS, action_set=range(actions)), CPU)
    rng, never = np.random.default_rng(0), np.zeros(64, dtype=bool)
    for _ in range(200):
        start, (action, second) = rng.integers(starts, size=64), rng.integers(actions, size=(2, 64))
        outcome = (probability[start, action].cumsum(1) > rng.random((64, 1))).argmax(1)
        before, after = BOARDS[start], BOARDS[starts + outcome]
        replay.add(script.Transitions(before, action, np.zeros(64), after, never, never))
        replay.add(script.Transitions(after, second, rewards[outcome], BOARDS[[END] * 64], ~never, never))
    for k in range(updates):
        for group in agent.optimizer.param_groups:
            group["lr"] = 2e-3 * (1 - k / updates)
        agent.cvae.ent_coef.fill_(args.ent_coef * 300 ** max(0, 1 - 2 * k / updates))
        script.update(args, agent, replay)
        if (k + 1) % 20 == 0 and 0.25 <= k / updates < 0.75:
            script.make_twin(agent)
    # luck, prior and posterior as an update sees them, with the statistics of a large batch
    replay.batch_size = 2048
    batch = replay.sample()
    with torch.no_grad():
        log_p, (_, log_q) = agent.cvae.log_prior(*batch[:2]), agent.cvae(*batch[:2], batch.next_states)
        output = agent.network(batch.states)
        luck = script.centred_luck(output.luck, batch.actions, log_q.exp(), log_p.exp())
    boards, cases = script.unpack(torch.from_numpy(BOARDS), CHANNELS), {}
    shown, following = (
        (states[:, None] == boards).all(dim=(2, 3, 4)).long().argmax(1) for states in (batch.states, batch.next_states)
    )
    for s, a, o in np.argwhere(probability > 0):
        these = (shown == s) & (batch.actions == a) & (following == starts + o)
        cases[s, a, o] = [x[these].mean(0).numpy() for x in (log_p.exp(), log_q.exp(), luck)]
    return cases, output.value.numpy(), luck.numpy()


@pytest.mark.slow
def test_training_separates_the_outcomes_of_chance():
    probability = np.array([[[0.5, 0.3, 0.2], [0.1, 0.3, 0.6]], [[0.2, 0.6, 0.2], [0.7, 0.0, 0.3]]])
    rewards, errors, learned, expected = np.array([3.0, -1.0, 0.5]), [], [], []
    cases, _, _ = train(probability, rewards, updates=400)
    for (s, a, o), (prior, _, luck) in cases.items():
        owner = {}
        for (_, _, outcome), (_, posterior, _) in ((key, x) for key, x in cases.items() if key[:2] == (s, a)):
            for z in np.flatnonzero(posterior > 0.05):
                assert owner.setdefault(z, outcome) == outcome, "a latent is shared by two outcomes"
        mass = sum(prior[z] for z, outcome in owner.items() if outcome == o)
        errors.append(abs(mass - probability[s, a, o]))
        learned.append(luck)
        expected.append(rewards[o] - probability[s, a] @ rewards)
    assert max(errors) < 0.1 and np.mean(errors) < 0.05, "the prior is not the law of chance"
    assert np.corrcoef(learned, expected)[0, 1] >= 0.95
    assert 0.8 <= np.polyfit(expected, learned, 1)[0] <= 1.2


@pytest.mark.slow
def test_without_chance_there_is_no_luck():
    certain = np.eye(4)[(np.arange(3)[:, None] + np.arange(2)) % 4]
    _, value, luck = train(certain, np.array([3.0, -1.0, 0.5, 2.0]), updates=200)
    assert np.std(luck) < 0.05 * np.std(value) and np.std(value) > 0.5


@pytest.mark.slow
def test_the_cvae_of_asterix_is_alive(run):
    """No posterior collapse in a real game, and luck that the critic uses."""
    sizes = "--small --cvae-every 1 --learning-starts 5000 --steps-per-update 64 --latent-size 8 --kl-coef 3"
    directory = run(script, *sizes.split(), "--total-timesteps", 24_000, "--eval-episodes", 1, "--run-name", "alive")
    last = [row for row in read_curve(directory / "runs" / "alive") if row["losses/critic"]][-50:]
    kl, luck, advantage = (
        np.mean([float(row[f"losses/{tag}"]) for row in last]) for tag in ("cvae_kl", "luck_std", "advantage_std")
    )
    assert kl >= 0.1 and 0.2 * advantage <= luck <= 3 * advantage, (kl, luck, advantage)
