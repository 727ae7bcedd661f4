"""The networks against Figures `ac_net` and `cvae_net`, layer by layer."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import offdae_dae
import offdae_offpolicy

META = torch.device("meta")


def test_actor_critic_layer_by_layer(script, float64):
    args = script.Args(env_id="seaquest", channels=5, hidden=7)
    network = script.Agent(args, script.Games(args, np.random.SeedSequence(0).spawn(1)), torch.device("cpu")).network
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
    if script is offdae_offpolicy:
        g = linear("luck", x)
        assert output.luck.shape == (3, 6, 16) and torch.equal(output.luck[1, 2], g[1, 2 * 16 : 3 * 16])


def test_actor_critic_has_the_papers_size(script):
    args = script.Args(env_id="seaquest")
    with META:
        shapes = {name: tuple(x.shape) for name, x in script.Network(args, 10, 6).state_dict().items()}
    weights = {name: shape for name, shape in shapes.items() if name.endswith("weight")}
    expected = dict.fromkeys(("advantage.weight", "policy.weight"), (6, 1024)) | {"value.weight": (1, 1024)}
    expected |= {"convolutions.0.weight": (128, 10, 3, 3), "convolutions.2.weight": (128, 128, 3, 3)}
    expected |= {"hidden.0.weight": (1024, 128 * 36)}
    if script is offdae_offpolicy:
        expected["luck.weight"] = (6 * 16, 1024)
    assert weights == expected


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


def convolutions(module):
    """Inputs and outputs of each convolution, in order; a residual block is its width."""
    layers = []
    for layer in module:
        if isinstance(layer, offdae_offpolicy.ResidualBlock):
            assert [x.in_channels for x in layer if isinstance(x, torch.nn.Conv2d)] == [layer[0].num_features] * 2
            layers.append(layer[0].num_features)
        elif isinstance(layer, torch.nn.Conv2d | torch.nn.ConvTranspose2d):
            assert layer.kernel_size == (3, 3) and layer.padding == (1, 1) and layer.stride == (1, 1)
            layers.append((layer.in_channels, layer.out_channels))
        elif isinstance(layer, torch.nn.Linear):
            layers.append((layer.in_features, layer.out_features))
    return layers


def test_cvae_has_the_papers_layers():
    with META:
        cvae = offdae_offpolicy.CVAE(offdae_offpolicy.Args(), channels=10, num_actions=6)
    assert convolutions(cvae.encoder) == [(10, 64), 64, (64, 128), 128]
    assert convolutions(cvae.transition) == [(128 + 6, 128), 128, 128]
    assert convolutions(cvae.prior) == [128, 128] and convolutions([cvae.to_p]) == [(128, 16)]
    assert convolutions(cvae.posterior) == [(256, 128), 128, 128] and convolutions([cvae.to_q]) == [(128, 16)]
    assert convolutions(cvae.decoder) == [128, (128, 64), 64, (64, 10)]
    assert [type(cvae.decoder[i]).__name__ for i in (1, 3)] == ["ConvTranspose2d"] * 2
    assert cvae.latents.shape == (16, 128)


def test_the_action_is_tiled_over_the_board():
    """The transition part sees enc(s) and the one-hot action in every cell, the posterior h and enc(s')."""
    cvae = offdae_offpolicy.CVAE(offdae_offpolicy.Args(cvae_channels=4), channels=2, num_actions=3)
    seen = {}
    cvae.transition[0].register_forward_hook(lambda module, inputs, output: seen.update(transition=inputs[0]))
    cvae.posterior[0].register_forward_hook(lambda module, inputs, output: seen.update(posterior=inputs[0]))
    cvae.eval()
    states, next_states = torch.rand(2, 5, 2, 10, 10)
    actions = torch.tensor([0, 1, 2, 1, 0])
    h, _, _ = cvae(states, actions, next_states)
    assert torch.equal(
        seen["transition"][:, 4:], F.one_hot(actions, 3)[:, :, None, None].expand(-1, -1, 10, 10).float()
    )
    torch.testing.assert_close(seen["transition"][:, :4], cvae.encoder(states))
    torch.testing.assert_close(seen["posterior"], torch.cat([h, cvae.encoder(next_states)], dim=1))


@pytest.mark.parametrize("channels", [4, 7])
def test_dae_has_no_luck(channels):
    assert not any("luck" in name for name in offdae_dae.Network(offdae_dae.Args(channels=channels), 4, 5).state_dict())
