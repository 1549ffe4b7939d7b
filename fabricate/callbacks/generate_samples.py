"""Texts that a language model generates at each validation, to show its progress."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabricate.callbacks.kept_state import generator_states, set_generator_states
from fabricate.errors import ConfigurationError
from fabricate.hooks import Callback, hookimpl

if TYPE_CHECKING:
    import torch

    from fabricate.module import TrainModule
    from fabricate.trainer import Trainer


class GenerateSamples(Callback):
    """Generates continuations of `prompts` when a validation begins. Rank 0 prints the texts and appends them to `RUN_DIR/samples.jsonl`.

    prompts: texts. tokenizer: an object with `encode(text)`, which returns a list of token numbers, and `decode(numbers)`, like those of
    transformers; default: `module.tokenizer`. model: the name of the submodule with the method `generate`, such as "language_model" or
    "parts.decoder"; default: the module if it has the method, else its only submodule that does. seed: the seed of torch's generators
    during sampling, so that texts differ only because the weights do. Other arguments are passed to `generate`: max_new_tokens=40,
    do_sample=True, top_p=0.9, ...

    The model is in eval mode and runs in the precision of the fit. Random generators are restored afterwards. Prompts are processed one at
    a time. Under strategies that divide the weights, all ranks generate the same texts; otherwise only rank 0 generates.

        Trainer(plugins=[GenerateSamples(["Once upon a time"], max_new_tokens=40)], ...)
    """

    def __init__(
        self,
        prompts: Sequence[str],
        *,
        tokenizer: Any = None,
        model: str | None = None,
        seed: int = 0,
        **generate: Any,
    ) -> None:
        if isinstance(prompts, str) or not prompts or not all(isinstance(prompt, str) for prompt in prompts):
            raise ConfigurationError(f"GenerateSamples(prompts={prompts!r}): give a list of texts")
        self.prompts = tuple(prompts)
        self.tokenizer, self.model, self.seed, self.generate = tokenizer, model, seed, generate
        self.texts: list[str] = []
        """The texts of the last validation, in the order of the prompts: what `generate` returned, decoded. A decoder repeats the prompt,
        an encoder-decoder does not. Empty on ranks that generated nothing."""
        self._first = True
        """Whether this fit has written no texts yet."""
        self._began, self._start = 0.0, math.inf
        """The time at which this fit began, and the step from which it trains."""

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._first, self._began, self._start = True, time.time(), math.inf
        self._tokenizer(module)
        self._model(module)
        if not trainer.validates:
            raise ConfigurationError(
                "GenerateSamples: samples are generated at the start of a validation, but this fit runs none. Pass val= to fit, "
                "and set validate_every to an interval that is shorter than the fit"
            )

    def on_epoch_start(self, trainer: Trainer) -> None:
        self._start = min(self._start, trainer.step)

    @hookimpl(trylast=True)  # after plugins that exchange the weights for the evaluation
    def on_eval_start(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self.texts = []
        if stage != "validate" or not (trainer.is_main or trainer.strategy.lockstep):
            return
        import torch

        states = generator_states()
        try:
            torch.manual_seed(self.seed)
            self.texts = trainer.in_forward(lambda: self._continue(trainer, module))
        finally:
            set_generator_states(states)
        if trainer.is_main:
            self._report(trainer)

    def _continue(self, trainer: Trainer, module: TrainModule) -> list[str]:
        import torch

        tokenizer, model = self._tokenizer(module), self._model(module)
        options = dict(self.generate)
        several = trainer.accelerator.num_processes > 1
        texts = []
        for prompt in self.prompts:
            tokens = torch.tensor([tokenizer.encode(prompt)], device=module.device)
            if hasattr(model, "generation_config"):
                options["attention_mask"] = torch.ones_like(tokens)
                options.setdefault("synced_gpus", several and trainer.strategy.lockstep)
                options.setdefault("pad_token_id", _padding(tokenizer, model))
            texts.append(tokenizer.decode(model.generate(tokens, **options)[0].tolist()))
        return texts

    def _report(self, trainer: Trainer) -> None:
        for text in self.texts:
            print(f"sample at step {trainer.step}: {text}", flush=True)
        if trainer.run_dir is not None:
            path = trainer.run_dir / "samples.jsonl"
            if self._first:
                _cut(path, min(trainer.step, self._start + 1), self._began)
                self._first = False
            with path.open("a", encoding="utf-8") as file:
                for prompt, text in zip(self.prompts, self.texts, strict=True):
                    line = {"step": trainer.step, "prompt": prompt, "text": text, "time": time.time()}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _tokenizer(self, module: TrainModule) -> Any:
        tokenizer = self.tokenizer if self.tokenizer is not None else getattr(module, "tokenizer", None)
        if not callable(getattr(tokenizer, "encode", None)) or not callable(getattr(tokenizer, "decode", None)):
            raise ConfigurationError(
                f"GenerateSamples(tokenizer={self.tokenizer!r}): neither this argument nor {type(module).__name__}.tokenizer is an "
                "object with the methods encode and decode. Give one, for example transformers.AutoTokenizer.from_pretrained(...)"
            )
        return tokenizer

    def _model(self, module: TrainModule) -> Any:
        if self.model is not None:
            model: torch.nn.Module | None = dict(module.named_modules()).get(self.model)
            if not callable(getattr(model, "generate", None)):
                raise ConfigurationError(
                    f"GenerateSamples(model={self.model!r}): {type(module).__name__}.{self.model} is not a module with a "
                    "method generate. Give the name of the submodule that generates"
                )
            return model
        if callable(getattr(type(module), "generate", None)):
            return module
        names = [name for name, child in module.named_modules() if name and callable(getattr(child, "generate", None))]
        outer = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
        if len(outer) != 1:
            raise ConfigurationError(
                f"GenerateSamples(model=None): {type(module).__name__} has {'several submodules' if outer else 'no submodule'} with "
                f"a method generate{': ' if outer else ''}{', '.join(outer)}. Give the name of the one to use, model='...'"
            )
        return module.get_submodule(outer[0])


def _cut(path: Path, step: float, began: float) -> None:
    """Remove the lines of `step` and later, which a fit left that was killed after its last checkpoint, or before its first. Lines since
    `began` are those of this fit, by another GenerateSamples."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        whole = [(line, json.loads(line)) for line in lines if line.endswith("\n")]
        kept = [line for line, values in whole if values["step"] < step or values["time"] >= began]
        if len(kept) < len(lines):
            path.write_text("".join(kept), encoding="utf-8")


def _padding(tokenizer: Any, model: Any) -> int | None:
    """The padding token for `generate`, which warns at every call if there is none."""
    for number in (getattr(tokenizer, "pad_token_id", None), model.generation_config.pad_token_id):
        if number is not None:
            return int(number)
    ends = model.generation_config.eos_token_id
    first = ends[0] if isinstance(ends, list) else ends
    return None if first is None else int(first)
