"""The networks against Figures `ac_net` and `cvae_net`, layer by layer."""

import pytest
import torch
from conftest import made
from torch.nn import functional as F

import offdae_offpolicy

META = torch.device("meta")


def test_actor_critic_layer_by_layer(script, float64):
    network = made(script, env_id="seaquest", channels=5, hidden=7, num_envs=1, steps=0)[2].network
    weights, states = network.state_dict(), torch.rand(3, 10, 10, 10)

    def linear(name, x):
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    x = F.relu(F.conv2d(states, weights["convolutions.0.weight"], weights["convolutions.0.bias"]))
    x = F.relu(F.conv2d(x, weights["convolutions.2.weight"], weights["convolutions.2.bias"]))
    assert x.shape == (3, 5, 6, 6)
    x = F.relu(linear("hidden.0", x.flatten(1)))
    output = network(states)
    torch.testing.assert_close(output.value, linear("value", x)[:, 0])
    torch.testing.assert_close(output.advantage, linear("advantage", x))
    torch.testing.assert_close(output.log_policy, linear("policy", x).softmax(1).log())
    heads = {"value", "advantage", "policy"}
    if script is offdae_offpolicy:
        heads.add("luck")
        assert output.luck.shape == (3, 6, 16) and torch.equal(output.luck[1, 2], linear("luck", x)[1, 32:48])
    assert {name.split(".")[0] for name in weights} == heads | {"convolutions", "hidden"}


@pytest.mark.parametrize("luck_gradient", [True, False])
def test_luck_trains_the_shared_layers_or_its_head_alone(luck_gradient):
    network = made(offdae_offpolicy, channels=2, hidden=4, steps=0, luck_gradient=luck_gradient)[2].network
    network(torch.rand(3, 4, 10, 10)).luck.sum().backward()
    trained = {name.split(".")[0] for name, x in network.named_parameters() if x.grad is not None}
    assert trained == ({"convolutions", "hidden", "luck"} if luck_gradient else {"luck"})


def test_a_residual_block_by_hand(float64):
    block = offdae_offpolicy.ResidualBlock(3)
    x, weights = torch.rand(4, 3, 10, 10), block.state_dict()
    y = x
    for norm, conv in ((0, 2), (3, 5)):
        y = (y - y.mean((0, 2, 3), keepdim=True)) / (y.var((0, 2, 3), correction=0, keepdim=True) + 1e-5).sqrt()
        assert (weights[f"{norm}.weight"] == 1).all() and (weights[f"{norm}.bias"] == 0).all()
        y = y * y.sigmoid()
        y = F.conv2d(y, weights[f"{conv}.weight"], weights[f"{conv}.bias"], padding=1)
    torch.testing.assert_close(block(x), x + y)


def layers(module):
    """Inputs and outputs of each layer, in order; a residual block is its width."""
    found = []
    for layer in module:
        if isinstance(layer, offdae_offpolicy.ResidualBlock):
            assert [x.in_channels for x in layer if isinstance(x, torch.nn.Conv2d)] == [layer[0].num_features] * 2
            found.append(layer[0].num_features)
        elif isinstance(layer, torch.nn.Conv2d | torch.nn.ConvTranspose2d):
            assert layer.kernel_size == (3, 3) and layer.padding == (1, 1) and layer.stride == (1, 1)
            found.append((layer.in_channels, layer.out_channels))
    return found


def test_cvae_has_the_papers_layers():
    with META:
        cvae = offdae_offpolicy.CVAE(offdae_offpolicy.Args(), channels=10, num_actions=6)
    assert layers(cvae.encoder) == [(10, 64), 64, (64, 128), 128]
    assert layers(cvae.transition) == [(128 + 6, 128), 128, 128]
    assert layers(cvae.prior)[-2:] == [128, 128]
    assert layers(cvae.posterior) == [(256, 128), 128, 128]
    assert layers(cvae.decoder) == [128, (128, 64), 64, (64, 10)]
    assert [type(cvae.decoder[i]).__name__ for i in (1, 3)] == ["ConvTranspose2d"] * 2
    assert cvae.to_p.weight.shape == cvae.to_q.weight.shape == cvae.latents.shape == (16, 128)


def test_the_action_is_tiled_over_the_board():
    """The transition part sees enc(s) and the one-hot action in every cell, the posterior h and enc(s')."""
    cvae, seen = offdae_offpolicy.CVAE(offdae_offpolicy.Args(cvae_channels=4), channels=2, num_actions=3).eval(), []
    for part in (cvae.transition, cvae.posterior):
        part[0].register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    (states, next_states), actions = torch.rand(2, 5, 2, 10, 10), torch.tensor([0, 1, 2, 1, 0])
    h, _ = cvae(states, actions, next_states)
    tiled = F.one_hot(actions, 3)[:, :, None, None].expand(-1, -1, 10, 10).float()
    torch.testing.assert_close(seen[0], torch.cat([cvae.encoder(states), tiled], dim=1))
    torch.testing.assert_close(seen[1], torch.cat([h, cvae.encoder(next_states)], dim=1))
