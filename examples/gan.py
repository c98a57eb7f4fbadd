"""A GAN on every core: `tutti run -n 2 examples/gan.py`. It draws handwritten digits into gan.png.

Each model goes through `distribute` with its optimizer. Any number of ranks gives the result of plain torch
in one process, because the noise depends only on the sample and the epoch.
"""

import sys

import torch
import tutti
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

LATENT = 16
EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 200


def noise(number: int) -> Tensor:
    """Return the input of the generator for one digit."""
    return torch.randn(LATENT, generator=torch.Generator().manual_seed(number))


class DigitsWithNoise(Dataset):
    """Images of 8 x 8 pixels between -1 and 1, each with noise that changes with the epoch."""

    def __init__(self) -> None:
        self.images = torch.Tensor(load_digits().data / 8 - 1)
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], noise((self.epoch + 1) * len(self) + index)


def network(inputs: int, outputs: int, last: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 256),
        nn.LeakyReLU(0.2),
        nn.Linear(256, 256),
        nn.LeakyReLU(0.2),
        nn.Linear(256, outputs),
        last,
    )


rank = tutti.init().rank
torch.manual_seed(0)
generator, critic = network(LATENT, 64, nn.Tanh()), network(64, 1, nn.Flatten(0))
generator, generator_optimizer = tutti.distribute(
    generator, torch.optim.Adam(generator.parameters(), 2e-4, (0.5, 0.999))
)
critic, critic_optimizer = tutti.distribute(critic, torch.optim.Adam(critic.parameters(), 2e-4, (0.5, 0.999)))
digits = DigitsWithNoise()
loader = DataLoader(digits, batch_size=64, shuffle=True)


def critic_loss(images: Tensor, real: bool) -> Tensor:
    """Return the critic's loss where all images are real, or where all are drawn."""
    logits = critic(images)
    return nn.functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


for digits.epoch in range(EPOCHS):
    for images, points in tutti.shard(loader):
        drawn = generator(points)
        critic_optimizer.zero_grad()
        (critic_loss(images, real=True) + critic_loss(drawn.detach(), real=False)).backward()
        critic_optimizer.step()
        generator_optimizer.zero_grad()
        critic_loss(drawn, real=True).backward()
        generator_optimizer.step()

if rank == 0:
    with torch.no_grad():
        drawn = generator(torch.stack([noise(number) for number in range(40)]))
    sheet = (
        nn.functional.pad(drawn.view(4, 10, 8, 8), (1, 1, 1, 1), value=-1.0).transpose(1, 2).reshape(40, 100)
    )
    image = Image.fromarray(((sheet + 1) * 127.5).to(torch.uint8).numpy())
    image.resize((800, 320), Image.Resampling.NEAREST).save("gan.png")
    print("40 drawn digits: gan.png")
