"""The same training in other frameworks, if they are installed (see docs/benchmarks.md for an environment).

Each has as little output as possible; with output: its own progress bar, TensorBoard and checkpoints at the same moments.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.works import Clock, Work

Loop = Callable[[Work, Clock, Path], torch.nn.Module]


def transformers_trainer(work: Work, clock: Clock, folder: Path) -> torch.nn.Module:
    """transformers.Trainer."""
    from transformers import PrinterCallback, ProgressCallback, Trainer, TrainingArguments

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = work.build(clock)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.inner(x, y)}

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        x, y = torch.utils.data.default_collate(rows)
        return {"x": x, "y": y}

    model = Wrapped()
    optimizer = work.optimizer(model)
    schedule = work.schedule(optimizer) or torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1.0)
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        num_train_epochs=1,
        per_device_train_batch_size=work.batch_size,
        gradient_accumulation_steps=work.accumulation,
        max_grad_norm=work.clip or 0.0,
        disable_tqdm=not work.output,
        report_to=["tensorboard"] if work.output else [],
        logging_strategy="steps" if work.output else "no",
        logging_steps=work.log_every,
        save_strategy="steps" if work.output else "no",
        save_steps=work.save_every,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    trainer = InOrder(
        model=model,
        args=arguments,
        train_dataset=work.dataset(),
        data_collator=collate,
        optimizers=(optimizer, schedule),
    )
    if not work.output:
        trainer.remove_callback(PrinterCallback)
        trainer.remove_callback(ProgressCallback)
    trainer.train()
    return model.inner


def lightning_trainer(work: Work, clock: Clock, folder: Path) -> torch.nn.Module:
    """Lightning's Trainer."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import TensorBoardLogger

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.build(clock)

        def training_step(self, batch: Any) -> torch.Tensor:
            x, y = batch
            loss: torch.Tensor = self.model(x, y)
            if work.output:
                self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = work.optimizer(self.model)
            schedule = work.schedule(optimizer)
            if schedule is None:
                return optimizer
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=work.accumulation,
        gradient_clip_val=work.clip,
        logger=TensorBoardLogger(str(folder)) if work.output else False,
        log_every_n_steps=work.log_every,
        enable_checkpointing=work.output,
        callbacks=[ModelCheckpoint(str(folder), every_n_train_steps=work.save_every, save_top_k=-1)]
        if work.output
        else [],
        enable_progress_bar=work.output,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, work.loader())
    return module.model


def lightning_fabric(work: Work, clock: Clock, folder: Path) -> torch.nn.Module:
    """Lightning Fabric, which leaves the loop to the user: tqdm and the logger by hand."""
    from lightning.fabric import Fabric
    from lightning.fabric.loggers import TensorBoardLogger
    from tqdm import tqdm

    fabric = Fabric(accelerator="cpu", devices=1, loggers=TensorBoardLogger(str(folder)) if work.output else [])
    inner = work.build(clock)
    model, optimizer = fabric.setup(inner, work.optimizer(inner))
    schedule = work.schedule(optimizer)
    loader = fabric.setup_dataloaders(work.loader())
    bar = tqdm(total=work.steps) if work.output else None
    model.train()
    for micro_step, (x, y) in enumerate(loader, 1):
        loss = model(x, y)
        fabric.backward(loss / work.accumulation if work.accumulation > 1 else loss)
        if micro_step % work.accumulation == 0:
            if work.clip is not None:
                fabric.clip_gradients(model, optimizer, max_norm=work.clip)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            optimizer.zero_grad()
        if bar is not None:
            bar.update(1)
            if micro_step % work.log_every == 0:
                fabric.log("loss", loss.item(), micro_step)
            if micro_step % work.save_every == 0:
                fabric.save(folder / f"{micro_step}.ckpt", {"model": model, "optimizer": optimizer})
    if bar is not None:
        bar.close()
        fabric.logger.finalize("success")
    return inner


def pytorch_accelerated(work: Work, clock: Clock, folder: Path) -> torch.nn.Module:
    """pytorch-accelerated. It clips by value only, so an override clips the norm. It has no TensorBoard logger."""
    from pytorch_accelerated import Trainer
    from pytorch_accelerated.callbacks import ProgressBarCallback

    class Own(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            x, y = batch
            return {"loss": self.model(x, y), "model_outputs": None, "batch_size": len(x)}

        def create_train_dataloader(self, *args: Any, **kwargs: Any) -> Any:
            return work.loader()

        def optimizer_step(self) -> None:
            if work.clip is not None and self._accelerator.sync_gradients:
                self._accelerator.clip_grad_norm_(self.model.parameters(), work.clip)
            super().optimizer_step()

    model = work.build(clock)
    optimizer = work.optimizer(model)
    callbacks = (ProgressBarCallback,) if work.output else ()
    schedule = (lambda optimizer: work.schedule(optimizer)) if work.cosine else None
    trainer = Own(model=model, loss_func=None, optimizer=optimizer, callbacks=callbacks)
    trainer.train(
        train_dataset=work.dataset(),
        num_epochs=1,
        per_device_batch_size=work.batch_size,
        gradient_accumulation_steps=work.accumulation,
        create_scheduler_fn=schedule,
    )
    return model


def ignite(work: Work, clock: Clock, folder: Path) -> torch.nn.Module:
    """Ignite's Engine around a hand-written step, as in its documentation."""
    from ignite.contrib.handlers import ProgressBar
    from ignite.engine import Engine, Events
    from ignite.handlers import Checkpoint, DiskSaver
    from ignite.handlers.tensorboard_logger import TensorboardLogger

    model = work.build(clock)
    optimizer = work.optimizer(model)
    schedule = work.schedule(optimizer)
    model.train()

    def step(engine: Engine, batch: Any) -> float:
        x, y = batch
        loss = model(x, y)
        (loss / work.accumulation if work.accumulation > 1 else loss).backward()
        if engine.state.iteration % work.accumulation == 0:
            if work.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            optimizer.zero_grad()
        return float(loss.item())

    engine = Engine(step)
    logger = None
    if work.output:
        ProgressBar().attach(engine, output_transform=lambda loss: {"loss": loss})
        logger = TensorboardLogger(log_dir=str(folder))
        logger.attach_output_handler(
            engine,
            Events.ITERATION_COMPLETED(every=work.log_every),
            "train",
            output_transform=lambda loss: {"loss": loss},
        )
        saved = Checkpoint({"model": model, "optimizer": optimizer}, DiskSaver(str(folder), require_empty=False))
        engine.add_event_handler(Events.ITERATION_COMPLETED(every=work.save_every), saved)
    engine.run(work.loader(), max_epochs=1)
    if logger is not None:
        logger.close()
    return model


_NEEDS = {
    "transformers.Trainer": ("transformers", transformers_trainer),
    "Lightning": ("lightning", lightning_trainer),
    "Fabric": ("lightning", lightning_fabric),
    "pytorch-accelerated": ("pytorch_accelerated", pytorch_accelerated),
    "Ignite": ("ignite", ignite),
}


def available() -> dict[str, Loop]:
    """The frameworks that are installed here, by name."""
    return {name: loop for name, (package, loop) in _NEEDS.items() if importlib.util.find_spec(package) is not None}
