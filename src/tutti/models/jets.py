"""A network over sets of particles."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from tutti.errors import BadModel
from tutti.models.fitting import share, whole_numbers
from tutti.models.sequences import is_there
from tutti.registry import part


@part("jets")
def jets(
    shape: tuple[int, ...],
    outputs: int,
    phi: object = (100, 100, 256),
    f: object = (100, 100, 100),
    dropout: float = 0.0,
) -> nn.Module:
    """Build a particle flow network: F(sum of Phi(particle) over the particles), in any order.

    With three features and two outputs it has 82,458 parameters, as EnergyFlow's by default.

    Komiske, Metodiev, Thaler 2019, "Energy Flow Networks: Deep Sets for Particle Jets", equation 1.3 and
    section 4.2; Zaheer et al. 2017, "Deep Sets". Initialised as EnergyFlow's: He et al.'s uniform weights,
    and Glorot and Bengio's in the last layer.

    Args:
        shape: of one input: (particles, features). A particle whose features are all 0 is padding, and so is
            what follows the end of a list of particles where these are of unequal length.
        outputs: size of the last layer.
        phi: sizes of the layers that each particle goes through.
        f: sizes of the layers behind the sum.
        dropout: probability with which each output of these is dropped in training.

    Raises:
        BadModel: the inputs are no lists of particles.
        BadOption: an option's value cannot be used.
    """
    if len(shape) != 2:
        raise BadModel(
            "model 'jets' takes inputs of shape (particles, features), but the data's have shape "
            f"{tuple(shape)}; use 'mlp' for them"
        )
    dropped, width = share("dropout", dropout), shape[1]
    particle, whole = list[nn.Module](), list[nn.Module]()
    for size in whole_numbers("phi", phi):
        particle += [nn.Linear(width, size), nn.ReLU()]
        width = size
    for size in whole_numbers("f", f):
        whole += [nn.Linear(width, size), nn.ReLU()]
        whole += [nn.Dropout(dropped)] if dropped else []
        width = size
    last = nn.Linear(width, outputs)
    network = ParticleFlow(nn.Sequential(*particle), nn.Sequential(*whole, last))
    for layer in network.modules():
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    nn.init.xavier_uniform_(last.weight)
    return network


class ParticleFlow(nn.Module):
    """A function of the sum over particles."""

    def __init__(self, phi: nn.Module, f: nn.Module) -> None:
        super().__init__()
        self.phi, self.f = phi, f

    @override
    def forward(self, particles: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the outputs, of shape (n, outputs), of particles of shape (n, particles, features).

        Without `lengths`, of shape (n,), a particle is one with a feature that is not 0.
        """
        there = particles.ne(0).any(dim=2)
        if lengths is not None:
            there = there & is_there(particles, lengths)
        vectors: Tensor = self.phi(particles)
        # Multiplying by 0 would keep NaN.
        outputs: Tensor = self.f(torch.where(there.unsqueeze(2), vectors, 0).sum(dim=1))
        return outputs
