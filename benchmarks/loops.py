"""The compared loops that need no further packages: a hand-written one, raw Accelerate, fabricate.

Each trains `work` and returns the model. The options are those that an experienced user of each framework would choose. A framework is
imported when its loop runs, so that a fresh process measures only the imports of this loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.works import Clock, Work


def bare(work: Work, clock: Clock, folder: Path) -> torch.nn.Module:
    """A loop in plain PyTorch, by hand; with output: tqdm, TensorBoard and torch.save at the same moments."""
    model = work.build(clock)
    if work.compile:
        for block in model.gpt.transformer.h:
            block.compile(dynamic=None)
    optimizer = work.optimizer(model)
    scheduler = work.schedule(optimizer)
    loader = work.loader()
    parameters = list(model.parameters())
    bar = writer = None
    if work.output:
        from torch.utils.tensorboard import SummaryWriter
        from tqdm import tqdm

        bar, writer = tqdm(total=work.steps), SummaryWriter(str(folder / "tensorboard"))
    model.train()
    for micro_step, (x, y) in enumerate(loader, 1):
        loss = model(x, y)
        (loss / work.accumulation if work.accumulation > 1 else loss).backward()
        if micro_step % work.accumulation == 0:
            if work.clip is not None:
                torch.nn.utils.clip_grad_norm_(parameters, work.clip)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad(set_to_none=True)
        if bar is not None and writer is not None:
            bar.update(1)
            if micro_step % work.log_every == 0:
                writer.add_scalar("loss", loss.item(), micro_step)
            if micro_step % work.save_every == 0:
                torch.save(
                    {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"{micro_step}.pt"
                )
    if bar is not None and writer is not None:
        bar.close()
        writer.close()
    return model


def raw_accelerate(work: Work, clock: Clock, folder: Path) -> torch.nn.Module:
    """A loop as in Accelerate's documentation; with output: tqdm, its TensorBoard tracker and save_state at the same moments."""
    from accelerate import Accelerator

    forget_accelerator()
    output = {"log_with": "tensorboard", "project_dir": str(folder)} if work.output else {}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=work.accumulation, **output)
    model = work.build(clock)
    plain = work.optimizer(model)
    scheduler = work.schedule(plain)
    model, optimizer, loader = accelerator.prepare(model, plain, work.loader())
    scheduler = accelerator.prepare(scheduler) if scheduler is not None else None
    bar = None
    if work.output:
        from tqdm import tqdm

        bar = tqdm(total=work.steps)
        accelerator.init_trackers("bench")
    model.train()
    for micro_step, (x, y) in enumerate(loader, 1):
        with accelerator.accumulate(model):
            loss = model(x, y)
            accelerator.backward(loss)
            if work.clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), work.clip)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
        if bar is not None:
            bar.update(1)
            if micro_step % work.log_every == 0:
                accelerator.log({"loss": loss.item()}, step=micro_step)
            if micro_step % work.save_every == 0:
                accelerator.save_state(str(folder / f"{micro_step}"))
    if bar is not None:
        bar.close()
        accelerator.end_training()
    return work_model(model)


def forget_accelerator() -> None:
    """Reset Accelerate's state, which it keeps for the whole process, for the next loop."""
    import accelerate

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def work_model(model: Any) -> torch.nn.Module:
    """The model inside a framework's wrappers."""
    return getattr(model, "module", model)


def fabricated(work: Work, clock: Clock, folder: Path) -> torch.nn.Module:
    """A fit with fabricate; quiet: no progress bar and no files; with output: its progress bar, metrics and checkpoints at the same
    moments."""
    from benchmarks.module import MicroBatches, Module, Steps
    from fabricate import Trainer

    module = Module(work, clock)
    arguments: dict[str, Any] = {"progress": False, "log_every": work.log_every}
    if work.output:
        arguments = {
            "run_dir": folder,
            "trackers": ["tensorboard"],
            "log_every": work.log_every,
            "save_every": work.save_every,
        }
    trainer = Trainer(
        max_epochs=1,
        precision="fp32",
        gradient_accumulation_steps=work.accumulation,
        max_grad_norm=work.clip,
        compile=work.compile,
        plugins=[Steps(), MicroBatches()] if work.listeners else (),
        **arguments,
    )
    trainer.fit(module, work.loader())
    return module.model


LOOPS = {"bare PyTorch": bare, "Accelerate": raw_accelerate, "fabricate": fabricated}
"""The loops by their names in the tables; the others are compared with the first."""
