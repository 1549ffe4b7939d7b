"""A diffusion model (DDPM, Ho et al. 2020) of handwritten digits, 8 x 8 pixels: it learns to predict noise, and draws new images.

python examples/diffusion.py
python examples/diffusion.py --run-dir runs/diffusion --max-epochs 200
"""

from __future__ import annotations

import argparse
import math

import torch
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import TensorDataset

from fabricate import Trainer, TrainModule, seed_everything

SHADES = " .:-=+*#%@"


class Denoiser(torch.nn.Module):
    """Predicts the noise in images (rows, 1, 8, 8), given the digit and the step of the noise."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.times = torch.nn.Sequential(torch.nn.Linear(32, width), torch.nn.SiLU(), torch.nn.Linear(width, width))
        self.digits = torch.nn.Embedding(10, width)
        self.first = torch.nn.Conv2d(1, width, 3, padding=1)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.GroupNorm(8, width), torch.nn.SiLU(), torch.nn.Conv2d(width, width, 3, padding=1)
            )
            for _ in range(4)
        )
        self.last = torch.nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, images: torch.Tensor, times: torch.Tensor, digits: torch.Tensor) -> torch.Tensor:
        angles = times[:, None] * torch.exp(-math.log(1000) * torch.arange(16, device=times.device) / 16)
        condition = self.times(torch.cat([angles.sin(), angles.cos()], 1)) + self.digits(digits)
        hidden = self.first(images)
        for block in self.blocks:
            hidden = hidden + block(hidden + condition[:, :, None, None])
        return self.last(hidden)


class Diffusion(TrainModule):
    """A diffusion of `steps` steps from an image to noise, with a linear schedule of the added variance."""

    def __init__(self, width: int = 64, steps: int = 100) -> None:
        super().__init__()
        self.denoiser = Denoiser(width)
        self.steps = steps
        beta = torch.linspace(1e-3, 0.15, steps)
        self.register_buffer("beta", beta)
        self.register_buffer(
            "alpha_bar", torch.cumprod(1 - beta, 0)
        )  # the share of the image's variance after each step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)

    def _loss(self, batch: list[torch.Tensor], times: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        images, digits = batch
        alpha_bar = self.alpha_bar[times][:, None, None, None]
        noisy = alpha_bar.sqrt() * images + (1 - alpha_bar).sqrt() * noise
        return functional.mse_loss(self.denoiser(noisy, times, digits), noise)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        times = torch.randint(self.steps, (len(batch[0]),), device=self.device)
        return self._loss(batch, times, torch.randn_like(batch[0]))

    def validation_step(self, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        # The same noise in each validation, so that the losses can be compared.
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(batch[0].shape, generator=generator).to(self.device)
        times = torch.arange(len(noise), device=self.device) % self.steps
        return {"loss": self._loss(batch, times, noise)}

    def predict_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """New images of the digits in `batch`, shape (rows, 1, 8, 8), about -1 to 1."""
        (digits,) = batch
        images = torch.randn(len(digits), 1, 8, 8, device=self.device)
        for step in reversed(range(self.steps)):
            times = torch.full((len(digits),), step, device=self.device)
            noise = self.denoiser(images, times, digits)
            mean = images - self.beta[step] / (1 - self.alpha_bar[step]).sqrt() * noise
            images = mean / (1 - self.beta[step]).sqrt()
            if step:
                images = images + self.beta[step].sqrt() * torch.randn_like(images)
        return images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-epochs", type=int, default=30)
    parser.add_argument("--run-dir", help="write checkpoints and metrics there, and resume from there")
    options = parser.parse_args()
    seed_everything(0)
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    digits = torch.tensor(data.target)
    train, val = TensorDataset(images[:1500], digits[:1500]), TensorDataset(images[1500:], digits[1500:])
    module = Diffusion()
    trainer = Trainer(
        max_epochs=options.max_epochs, run_dir=options.run_dir, max_grad_norm=1.0, validate_every="5 epochs"
    )
    result = trainer.fit(module, train, val, batch_size=64)
    drawn = trainer.predict(module, TensorDataset(torch.arange(4)), batch_size=2)
    if drawn is not None:  # rank 0
        shades = ((torch.stack(drawn).clamp(-1, 1) + 1) / 2 * (len(SHADES) - 1)).round().int()
        for row in range(8):
            print("   ".join("".join(SHADES[shade] * 2 for shade in image) for image in shades[:, 0, row].tolist()))
        print(f"validation loss {result.metrics['val_loss']:.3f}")


if __name__ == "__main__":
    main()
