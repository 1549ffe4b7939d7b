"""A generative adversarial network on points of the plane: two optimizers that take turns on each batch.

python examples/gan.py
"""

from __future__ import annotations

import argparse

import torch
from torch.nn.functional import softplus
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import TensorDataset

from fabricate import Trainer, TrainModule, seed_everything

MEAN = torch.tensor([2.0, -1.0])
STD = torch.tensor([0.5, 1.5])


class GAN(TrainModule):
    def __init__(self, noise: int = 4, width: int = 32) -> None:
        super().__init__()
        self.noise = noise
        self.generator = layers(noise, width, 2)
        self.discriminator = layers(2, width, 1)

    def configure_optimizers(self) -> dict[str, tuple[torch.optim.Optimizer, LinearLR]]:
        pairs = {}
        for name, network in (("discriminator", self.discriminator), ("generator", self.generator)):
            optimizer = torch.optim.Adam(network.parameters(), lr=2e-3, betas=(0.5, 0.9))
            pairs[name] = optimizer, LinearLR(optimizer, 1.0, 0.05, total_iters=self.trainer.total_steps)
        return pairs

    def training_step(self, batch: list[torch.Tensor], optimizer: str) -> torch.Tensor:
        # Called for one optimizer after the other on the same batch; the other network is frozen meanwhile.
        (real,) = batch
        fake = self.generate(len(real))
        if optimizer == "discriminator":
            loss = softplus(-self.discriminator(real)).mean() + softplus(self.discriminator(fake)).mean()
            loss = loss + self.penalty(real)
        else:
            loss = softplus(-self.discriminator(fake)).mean()
        self.log(f"{optimizer}_loss", loss)
        return loss

    def generate(self, rows: int) -> torch.Tensor:
        """`rows` generated points, shape (rows, 2)."""
        return self.generator(torch.randn(rows, self.noise, device=self.device))

    def penalty(self, real: torch.Tensor) -> torch.Tensor:
        """Mean squared gradient of the discriminator at real points (R1), without which the training does not converge."""
        real = real.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.discriminator(real).sum(), real, create_graph=True)
        return gradient.square().sum(1).mean() / 2


def layers(inputs: int, width: int, outputs: int) -> torch.nn.Sequential:
    linear, activation = torch.nn.Linear, torch.nn.LeakyReLU
    return torch.nn.Sequential(
        linear(inputs, width), activation(0.2), linear(width, width), activation(0.2), linear(width, outputs)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-steps", type=int, default=1500)
    options = parser.parse_args()
    seed_everything(0)  # before the module draws its weights; it also determines the order of the data

    points = MEAN + STD * torch.randn(4096, 2, generator=torch.Generator().manual_seed(0))
    trainer = Trainer(max_steps=options.max_steps, log_every="500 steps")
    module = GAN()
    trainer.fit(module, TensorDataset(points), batch_size=128)
    if trainer.is_main:
        with torch.no_grad():
            sample = module.generate(10_000)
        for name, value, wanted in (("mean", sample.mean(0), MEAN), ("std", sample.std(0), STD)):
            print(f"{name}: generated {value[0]:.2f} {value[1]:.2f}, wanted {wanted[0]:.2f} {wanted[1]:.2f}")


if __name__ == "__main__":
    main()
