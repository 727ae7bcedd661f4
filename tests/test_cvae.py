"""The CVAE and luck: losses by loops over z, which gradients flow where, and processes whose chance is known."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

import offdae_dae
import offdae_offpolicy as script

CPU = torch.device("cpu")


def make_cvae(boards=3, actions=4, **changes):
    args = script.Args(**dict(latent_size=3, cvae_channels=6, batch_size=10, ent_coef=0.02, n=5) | changes)
    cvae = script.CVAE(args, boards, actions)
    states, next_states = (torch.rand(2, args.batch_size, boards, 10, 10) < 0.3).to(torch.get_default_dtype())
    batch = SimpleNamespace(states=states, next_states=next_states, actions=torch.arange(args.batch_size) % actions)
    return args, cvae, batch


def gradients(loss, cvae):
    found = torch.autograd.grad(loss, list(cvae.parameters()), retain_graph=True, allow_unused=True)
    return dict(zip([name for name, _ in cvae.named_parameters()], found, strict=True))


def test_loss_and_gradients_match_a_loop_over_z(float64):
    args, cvae, batch = make_cvae()
    cvae.eval()
    cvae.ent_coef.fill_(0.7)
    loss, q, p, logged = script.cvae_loss(args, cvae, batch)
    reconstruction, kl, entropy = 0.0, 0.0, 0.0
    for i in range(args.batch_size):
        states = batch.states[i : i + 1], batch.next_states[i : i + 1]
        h, log_p, log_q = cvae(states[0], batch.actions[i : i + 1], states[1])
        for z in range(3):
            posterior, prior = log_q[0, z].exp(), log_p[0, z].exp()
            kl = kl + posterior.detach() * (posterior.detach().log() - prior.log()) / args.batch_size
            entropy = entropy - posterior * posterior.log() / args.batch_size
            assert q[i, z] == pytest.approx(posterior.item()) and p[i, z] == pytest.approx(prior.item())
            logits = cvae.decoder(h + cvae.latents[z].view(1, -1, 1, 1))
            likelihood = states[1] * logsigmoid(logits) + (1 - states[1]) * logsigmoid(-logits)
            reconstruction = reconstruction - posterior * likelihood.mean() / args.batch_size
    slow = kl + reconstruction - 0.7 * entropy
    torch.testing.assert_close(loss, slow, rtol=1e-10, atol=1e-10)
    for fast, expected in zip(logged, (reconstruction, kl, entropy), strict=False):
        torch.testing.assert_close(fast, expected, rtol=1e-10, atol=1e-10)
    left, right = gradients(loss, cvae), gradients(slow, cvae)
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-8, atol=1e-9, msg=name)
    mean = q.mean(0)
    torch.testing.assert_close(logged[3], -(mean * mean.log()).sum())


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
        estimate = script.expected_error(log_q, k, lambda z: table.gather(1, z))
        mean = mean + torch.where(rest[:, drawn] > 0, rest[:, drawn] * estimate, 0.0)
        assert k < Z or torch.allclose(estimate, exact, rtol=1e-12)
    torch.testing.assert_close(mean, exact, rtol=1e-10, atol=1e-10)
    left, right = (torch.autograd.grad(x.square().sum(), (scores, table), retain_graph=True) for x in (mean, exact))
    for fast, slow in zip(left, right, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-10)


def test_the_drawn_latent_follows_the_posterior():
    """Of four latents the likeliest is always chosen, the other one in proportion to q."""
    log_q, seen = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(40_000, 4), []
    script.expected_error(log_q, 2, lambda z: seen.append(z) or torch.zeros(z.shape))
    assert (seen[0][:, 0] == 0).all()
    counts = seen[0][:, 1].bincount(minlength=4) / 40_000
    torch.testing.assert_close(counts, torch.tensor([0.0, 0.6, 0.3, 0.1]), rtol=0, atol=0.01)


def test_all_chosen_latents_are_decoded_as_one_batch():
    args, cvae, batch = make_cvae(decode_latents=2)
    shapes = []
    cvae.decoder[0].register_forward_hook(lambda module, inputs, output: shapes.append(tuple(inputs[0].shape)))
    h, _, _ = cvae(batch.states, batch.actions, batch.next_states)
    script.cvae_loss(args, cvae, batch)
    assert shapes == [(10 * 2, 6, 10, 10)]
    together, alone = (cvae.errors(h, torch.tensor(z).expand(10, -1), batch.next_states) for z in ([0, 1, 2], [0]))
    assert (together[:, 0] - alone[:, 0]).abs().max() > 0.01, "BatchNorm subtracts the z of a batch with one z"


def test_which_gradients_flow_where():
    """KL reaches only the prior; reconstruction and entropy the rest, the entropy not what comes after q."""
    args, cvae, batch = make_cvae()
    _, _, _, (reconstruction, kl, entropy, _) = script.cvae_loss(args, cvae, batch)
    parts = {"encoder", "transition", "prior", "to_p", "posterior", "to_q", "decoder", "latents"}
    reached = {
        "kl": (kl, {"prior", "to_p"}),
        "reconstruction": (reconstruction, parts - {"prior", "to_p"}),
        "entropy": (entropy, {"encoder", "transition", "posterior", "to_q"}),
    }
    for term, (loss, expected) in reached.items():
        found = {name.split(".")[0] for name, x in gradients(loss, cvae).items() if x is not None and x.abs().max() > 0}
        assert found == expected, term


def test_agent_and_cvae_do_not_train_each_other():
    args = script.Args(n=4, num_envs=8, channels=4, hidden=8, batch_size=16, cvae_channels=4, latent_size=3)
    games = script.Games(args, script.spawn_seeds(args)[2])
    replay, agent = script.Replay(args, games.channels, CPU), script.Agent(args, games, CPU)
    for _ in range(8):
        replay.add(games.step(np.zeros(8, dtype=np.int64)))
    batch = replay.sample()
    total, _ = script.compute_losses(args, agent, batch)
    cvae, q, p, _ = script.cvae_loss(args, agent.cvae, batch)
    network_gradients = torch.autograd.grad(total, list(agent.network.parameters()), retain_graph=True)
    of_cvae = torch.autograd.grad(cvae, list(agent.network.parameters()), retain_graph=True, allow_unused=True)
    assert all(x is None for x in of_cvae) and all(x is not None for x in network_gradients)
    assert not q.requires_grad and not p.requires_grad
    # the whole loss trains the CVAE exactly as its own loss does
    for name, x in gradients(total, agent.cvae).items():
        torch.testing.assert_close(x, gradients(cvae, agent.cvae)[name], rtol=1e-4, atol=1e-6, msg=name)


def test_a_seed_gives_dae_and_off_policy_dae_the_same_start():
    networks = []
    for module in (offdae_dae, script):
        args = module.Args(channels=4, hidden=8)
        games = module.Games(args, module.spawn_seeds(args)[2][:1])
        torch.manual_seed(3)
        networks.append(module.Agent(args, games, CPU).network.state_dict())
    assert all(torch.equal(value, networks[1][name]) for name, value in networks[0].items())
    assert set(networks[1]) - set(networks[0]) == {"luck.weight", "luck.bias"}


def test_luck_is_zero_where_the_posterior_is_the_prior():
    luck, actions, p = torch.randn(7, 4, 3), torch.arange(7) % 4, torch.rand(7, 3).softmax(1)
    assert (script.centred_luck(luck, actions, p, p) == 0).all()
    q = torch.rand(7, 3).softmax(1)
    expected = [sum((q[i, z] - p[i, z]) * luck[i, actions[i], z] for z in range(3)) for i in range(7)]
    torch.testing.assert_close(script.centred_luck(luck, actions, q, p), torch.stack(expected))


def test_luck_with_the_exact_posterior_is_zero_on_average(float64):
    """A known process: z ~ p(z|s,a), s' ~ p(s'|s,a,z). By Bayes' rule q averages to p over s'."""
    p, likelihood = torch.rand(3).softmax(0), torch.rand(3, 5).softmax(1)
    joint = p[:, None] * likelihood  # [z, s']
    next_state = joint.sum(0)
    q = (joint / next_state).T  # [s', z]
    g = torch.randn(1, 2, 3).expand(5, -1, -1)
    luck = script.centred_luck(g, torch.ones(5, dtype=torch.long), q, p.expand(5, -1))
    assert luck.abs().max() > 1e-3 and abs((next_state * luck).sum()) < 1e-14


# ------------------------------------------------------------------------ processes whose chance and values are known
BOARDS = 2  # channels


def board(number):
    """A board that shows a number as a 3 x 3 block in one of nine places."""
    shown = np.zeros((10, 10, BOARDS), dtype=bool)
    row, column = 3 * (number % 3), 3 * (number // 3 % 3)
    shown[row : row + 3, column : column + 3, number // 9] = True
    return shown


class Process:
    """From start s, action a leads by chance to outcome o, whose only step pays `rewards[o]` and ends."""

    def __init__(self, probability, rewards):
        self.probability, self.rewards = np.array(probability), np.array(rewards)  # [s, a, o], [o]
        self.starts, self.actions, self.outcomes = self.probability.shape

    def transitions(self, rng, games):
        start, action = rng.integers(self.starts, size=games), rng.integers(self.actions, size=games)
        outcome = np.array(
            [rng.choice(self.outcomes, p=self.probability[s, a]) for s, a in zip(start, action, strict=True)]
        )
        boards = [script.pack([board(k) for k in numbers]) for numbers in (start, self.starts + outcome)]
        end, never = script.pack([board(17)] * games), np.zeros(games, dtype=bool)
        yield script.Transitions(boards[0], action, np.zeros(games), boards[1], never, never)
        second = rng.integers(self.actions, size=games)
        yield script.Transitions(boards[1], second, self.rewards[outcome], end, ~never, never)


def train(process, updates):
    """Train agent and CVAE with the script's own replay and update; return prior, posterior and luck of each
    (s, a, o), and all values and lucks of a batch."""
    args = dict(n=2, num_envs=64, batch_size=64, channels=8, hidden=64, learning_rate=2e-3, tau=0.95)
    args |= dict(latent_size=6, cvae_channels=16)
    args = script.Args(**args)
    replay = script.Replay(args, BOARDS, CPU)
    agent = script.Agent(args, SimpleNamespace(channels=BOARDS, action_set=list(range(process.actions))), CPU)
    rng = np.random.default_rng(0)
    for _ in range(200):
        for transitions in process.transitions(rng, 64):
            replay.add(transitions)
    for k in range(updates):
        for group in agent.optimizer.param_groups:
            group["lr"] = 2e-3 * (1 - k / updates)
        agent.cvae.ent_coef.fill_(args.ent_coef * 300 ** (1 - k / updates))
        script.update(args, agent, replay)
    # luck, prior and posterior as an update sees them, with the statistics of a large batch
    replay.batch_size = 2048
    batch = replay.sample()
    with torch.no_grad():
        _, log_p, log_q = agent.cvae(batch.states, batch.actions, batch.next_states)
        output = agent.network(batch.states)
        luck = script.centred_luck(output.luck, batch.actions, log_q.exp(), log_p.exp())
    boards = {script.pack([board(k)]).tobytes(): k for k in range(process.starts + process.outcomes)}
    first = (batch.remaining == 2).numpy()
    start, following = (
        np.array([boards[script.pack([x.bool().permute(1, 2, 0).numpy()]).tobytes()] for x in states[first]])
        for states in (batch.states, batch.next_states)
    )
    cases = {}
    for s, a, o in np.argwhere(process.probability > 0):
        these = (start == s) & (batch.actions[first].numpy() == a) & (following == process.starts + o)
        cases[s, a, o] = [x[first][these].mean(0).numpy() for x in (log_p.exp(), log_q.exp(), luck)]
    return cases, output.value.numpy(), luck.numpy()


@pytest.mark.slow
def test_training_separates_the_outcomes_of_chance():
    probability = [[[0.5, 0.3, 0.2], [0.1, 0.3, 0.6]], [[0.2, 0.6, 0.2], [0.7, 0.0, 0.3]]]
    process = Process(probability, rewards=[3.0, -1.0, 0.5])
    cases, _, _ = train(process, updates=600)
    learned, expected = [], []
    for (s, a, o), (prior, _, luck) in cases.items():
        owner = {}
        for (_, _, outcome), (_, posterior, _) in ((key, x) for key, x in cases.items() if key[:2] == (s, a)):
            for z in np.flatnonzero(posterior > 0.05):
                assert owner.setdefault(z, outcome) == outcome, "a latent is shared by two outcomes"
        mass = sum(prior[z] for z, outcome in owner.items() if outcome == o)
        assert mass == pytest.approx(process.probability[s, a, o], abs=0.05)
        learned.append(luck)
        expected.append(process.rewards[o] - process.probability[s, a] @ process.rewards)
    assert np.corrcoef(learned, expected)[0, 1] >= 0.9
    assert 0.8 <= np.polyfit(expected, learned, 1)[0] <= 1.2


@pytest.mark.slow
def test_without_chance_there_is_no_luck():
    certain = np.zeros((3, 2, 4))
    for s, a in np.ndindex(3, 2):
        certain[s, a, (s + a) % 4] = 1.0
    _, value, luck = train(Process(certain, rewards=[3.0, -1.0, 0.5, 2.0]), updates=400)
    assert np.std(luck) < 0.05 * np.std(value) and np.std(value) > 0.5


# --------------------------------------------------------------------------------------------- the CVAE of a real game
def health(directory, frames=2048):
    """Of a run's CVAE, on fresh frames of its own policy: KL(q || p), luck against advantage, what z adds to the
    reconstruction, and how luck correlates with itself when z comes by batch instead of running statistics."""
    model = torch.load(directory / "model.pt", weights_only=True)
    args = script.Args(**model["args"])
    games = script.Games(args, np.random.SeedSequence(args.seed + 1000).spawn(args.num_envs))
    agent = script.Agent(args, games, CPU)
    for name in ("network", "target_network", "cvae"):
        getattr(agent, name).load_state_dict(model[name])
    played = []
    for _ in range(100 + 4 * frames // args.num_envs):
        played.append(games.step(script.act(agent.network, games, CPU)))
    # in random order, for the games' hidden timers start together
    chosen = np.random.default_rng(0).permutation(args.num_envs * (len(played) - 100))[:frames]
    states, actions, next_states = (
        torch.from_numpy(np.concatenate([getattr(x, name) for x in played[100:]])[chosen])
        for name in ("states", "actions", "next_states")
    )
    states, next_states = script.unpack(states, games.channels), script.unpack(next_states, games.channels)
    with torch.no_grad():
        agent.cvae.eval()
        h, log_p, log_q = agent.cvae(states, actions, next_states)
        q, p = log_q.exp(), log_p.exp()
        every_z, parts = torch.arange(args.latent_size), zip(h.split(256), next_states.split(256), strict=True)
        errors = torch.cat([agent.cvae.errors(part, every_z.expand(len(part), -1), after) for part, after in parts])
        error_with_q, error_with_p = ((x * errors).sum(1).mean() for x in (q, p))
        kl = (q * (log_q - log_p)).sum(1).mean()
        online, target_policy = agent.network(states), agent.target_network(states).log_policy.exp()
        advantage = script.taken(script.centred(online.advantage, target_policy), actions)
        luck = script.centred_luck(online.luck, actions, q, p)
        agent.cvae.train()
        batches = zip(states.split(256), actions.split(256), next_states.split(256), strict=True)
        logs = zip(*(agent.cvae(*batch)[1:] for batch in batches), strict=True)
        p, q = (torch.cat(parts).exp() for parts in logs)
        luck_in_training = script.centred_luck(online.luck, actions, q, p)
    return dict(
        kl=kl.item(),
        luck_std=luck.std().item(),
        advantage_std=advantage.std().item(),
        error_with_q=error_with_q.item(),
        error_with_p=error_with_p.item(),
        agreement=torch.corrcoef(torch.stack([luck, luck_in_training]))[0, 1].item(),
    )


@pytest.mark.slow
def test_the_cvae_of_asterix_is_alive(run):
    directory = run(script, "--small", "--total-timesteps", 60_000, "--eval-episodes", 5, "--run-name", "alive")
    found = health(directory / "runs" / "alive")
    print(found)
    assert found["kl"] >= 0.1
    assert found["luck_std"] >= 0.2 * found["advantage_std"]
    assert found["error_with_q"] <= 0.8 * found["error_with_p"]
    assert found["agreement"] >= 0.95
