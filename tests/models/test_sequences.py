"""The built-in models for sequences and for sets of particles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tutti import models
from tutti.errors import BadModel, BadOption, UnknownName

READERS: dict[str, dict[str, object]] = {
    "gru": {"hidden": 5, "layers": 2, "dropout": 0.3},
    "gru both ways": {"hidden": 3, "layers": 2, "bidirectional": True},
    "transformer": {"width": 8, "heads": 2},
    "jets": {"phi": [6, 5], "f": [4]},
}


def built(name: str, shape: tuple[int, ...], outputs: int = 3, **options: object) -> nn.Module:
    torch.manual_seed(0)
    return models.build(name.partition(" ")[0], shape, outputs, options).double()


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "outputs", "options", "known"),
    [
        # 3 (H F + H H + 2 H) in each direction, and the dense layer.
        ("gru", (28, 20), 10, {"hidden": 32}, 3 * (32 * 20 + 32 * 32 + 64) + 330),
        (
            "gru",
            (28, 20),
            10,
            {"hidden": 32, "layers": 2, "bidirectional": True},
            2 * 3 * (32 * 20 + 32 * 32 + 64) + 2 * 3 * (32 * 64 + 32 * 32 + 64) + 650,
        ),
        # A layer of the paper's base model, and one of the twelve of BERT.
        (
            "transformer",
            (9, 512),
            1,
            {"width": 512, "heads": 8, "layers": 1},
            3_152_384 + 262_656 + 1024 + 513,
        ),
        (
            "transformer",
            (512,),
            2,
            {"width": 768, "heads": 12, "layers": 1, "vocabulary": 9},
            85_054_464 // 12 + 768 * 9 + 1536 + 1538,
        ),
        ("jets", (139, 3), 2, {}, 82_458),
    ],
)
def test_models_have_the_known_number_of_parameters(
    name: str, shape: tuple[int, ...], outputs: int, options: dict[str, object], known: int
) -> None:
    assert count(models.build(name, shape, outputs, options)) == known


@pytest.mark.parametrize("name", ["gru", "transformer"])
@pytest.mark.parametrize("shape", [(6,), (6, 4), (1, 6, 4), (3, 6, 4)])
def test_steps_are_numbers_vectors_or_the_rows_of_an_image(name: str, shape: tuple[int, ...]) -> None:
    module = built(name, shape).eval()
    rows = random(2, *shape)
    assert module(rows).shape == (2, 3)
    if shape == (3, 6, 4):
        beside = torch.cat([rows[:, 0], rows[:, 1], rows[:, 2]], dim=2)
        assert torch.equal(module.steps(rows), beside)


@pytest.mark.parametrize("name", READERS)
def test_padding_is_not_looked_at(name: str) -> None:
    module = built(name, (7, 4), **READERS[name]).eval()
    inputs, lengths = random(3, 7, 4), torch.tensor([7, 2, 4])
    alone = torch.cat([module(inputs[i : i + 1, :n]) for i, n in enumerate(lengths.tolist())])
    torch.testing.assert_close(module(inputs, lengths), alone, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(module(inputs, lengths.new_full((3,), 7)), module(inputs), rtol=1e-12, atol=0)
    inputs[1:, 4:] = 1e9
    torch.testing.assert_close(module(inputs[1:], lengths[1:]), alone[1:], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", READERS)
def test_an_empty_sequence_has_outputs_too(name: str) -> None:
    module = built(name, (3, 4), **READERS[name]).eval()
    assert module(torch.zeros(2, 3, 4, dtype=torch.float64), torch.tensor([0, 2])).isfinite().all()


@pytest.mark.parametrize("name", ["gru", "transformer"])
def test_tokens_are_embedded(name: str) -> None:
    module = built(name, (5,), vocabulary=9).eval()
    tokens = torch.tensor([[1, 2, 3, 8, 0], [1, 2, 0, 0, 0]])
    lengths = torch.tensor([5, 2])
    outputs = module(tokens, lengths)
    torch.testing.assert_close(outputs[1:], module(tokens[1:, :2]), rtol=1e-12, atol=1e-14)
    assert not torch.allclose(outputs[0], module(tokens[:1].flip(1))[0])
    with pytest.raises(BadModel, match=r"vocabulary of 9, so tokens are 0 to 8, but the inputs have 1 to 9"):
        module(tokens + 1)
    with pytest.raises(BadModel, match=r"the inputs are no whole numbers; leave --model.vocabulary out"):
        module(tokens.double())
    with pytest.raises(BadModel, match=r"say how many there are: --model.vocabulary N"):
        built(name, (5,))(tokens)


def test_the_order_of_particles_does_not_matter_and_empty_ones_do_not_count() -> None:
    module = built("jets", (5, 3))
    particles = random(2, 5, 3)
    outputs = module(particles)
    assert outputs.abs().min() > 0
    torch.testing.assert_close(module(particles[:, [3, 1, 4, 0, 2]]), outputs, rtol=1e-12, atol=1e-14)
    padded = torch.cat([torch.zeros(2, 4, 3, dtype=torch.float64), particles], dim=1)
    torch.testing.assert_close(module(padded), outputs, rtol=1e-12, atol=1e-14)
    for layer in module.phi:
        if isinstance(layer, nn.Linear):
            nn.init.ones_(layer.bias)
    torch.testing.assert_close(module(padded), module(particles), rtol=1e-12, atol=1e-14)
    once_more = torch.cat([particles, particles[:, :1]], dim=1)
    assert not torch.allclose(module(once_more), module(particles))


def test_the_encoder_is_the_papers_but_for_the_place_of_the_norm() -> None:
    module = built("transformer", (6, 8), width=8, heads=2, hidden=12, layers=1).eval()
    own = module.layers[0]
    theirs = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=True).double().eval()
    joined = {"self_attn.in_proj": (own.queries, own.keys, own.values), "self_attn.out_proj.": (own.join,)}
    state = {
        "norm1": own.attention_norm,
        "norm2": own.dense_norm,
        "linear1": own.dense[0],
        "linear2": own.dense[2],
    }
    named = {
        f"{place}.{kind}": getattr(layer, kind)
        for place, layer in state.items()
        for kind in ("weight", "bias")
    }
    for place, layers in joined.items():
        for kind in ("weight", "bias"):
            name = f"{place}{kind}" if place.endswith(".") else f"{place}_{kind}"
            named[name] = torch.cat([getattr(layer, kind) for layer in layers])
    theirs.load_state_dict(named)
    vectors, there = random(2, 6, 8), torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    found = theirs(vectors, src_key_padding_mask=~there)
    torch.testing.assert_close(own(vectors, there)[there], found[there], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("name", "shape", "options", "error", "message"),
    [
        ("gru", (1, 2, 3, 4), {}, BadModel, r"\(length,\)"),
        ("gru", (6, 4), {"vocabulary": 5}, BadModel, "vocabulary"),
        ("transformer", (), {}, BadModel, r"shape \(\)"),
        ("jets", (6,), {}, BadModel, "'mlp'"),
        ("gru", (6,), {"vocabulary": 0}, BadOption, "'vocabulary'"),
        ("gru", (6,), {"bidirectional": 2}, BadOption, "'bidirectional'"),
        ("gru", (6,), {"hiden": 2}, UnknownName, "'hidden'"),
        ("transformer", (6,), {"width": 6}, BadOption, "'width'"),
        ("transformer", (6,), {"layers": [1, 2]}, BadOption, "'layers'"),
        ("jets", (6, 3), {"phi": "x"}, BadOption, "'phi'"),
    ],
)
def test_wrong_models_are_refused(
    name: str, shape: tuple[int, ...], options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        models.build(name, shape, 3, options)
