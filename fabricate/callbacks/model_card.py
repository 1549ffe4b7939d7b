"""The model card (README.md) of a model, made from the files of its run.

Owns the text and the metadata of a model card. Must not know: how the card is uploaded, a run in progress.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabricate.errors import ConfigurationError

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

_BEGIN, _END = "<!-- fabricate: begin -->", "<!-- fabricate: end -->"
"""The text between these two lines is replaced each time; the text around them is kept."""
_TASKS = {
    "ForCausalLM": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "ForImageClassification": "image-classification",
    "ForSpeechSeq2Seq": "automatic-speech-recognition",
}
"""The task on the hub of a transformers model, by the ending of its class name."""
_SETTINGS = (
    *("module", "parameters_trainable", "parameters_frozen", "strategy", "precision", "world_size", "device"),
    *("train", "global_batch_size", "micro_batch_size", "gradient_accumulation_steps", "total_steps"),
    *("learning_rate", "clipping", "seed", "deterministic", "compile"),
)
"""The settings of plan.json that the table shows, in this order. Paths are left out."""
_GOES_ON = (
    "These are the weights of step {step} of a training run that goes on. The table shows the last validation up to this step; if the run "
    "averages its weights (EMA), that is a validation of the average, which the run pushes when it ends."
)
_EARLIER = "These are the weights of step {step}. The table shows the last validation before it."
_NOT_MEASURED = (
    "The last fit of the run did not write these weights, so their validation is not known: an earlier fit wrote them, or they were "
    "exported from a checkpoint."
)


def write_card(
    run_dir: Path,
    folder: Path,
    repo: str,
    *,
    license: str | None = None,
    datasets: Sequence[str] = (),
    step: int | None = None,
) -> None:
    """Write `folder`/README.md about the weights in `folder`, from plan.json, metrics.jsonl and events.jsonl of `run_dir`.

    repo: "user/name" on the hub. license, datasets: identifiers of the hub ("apache-2.0"; "stanfordnlp/imdb"). step: for the
    weights of a fit that goes on, the update that they come from, because the fit may have validated later ones since. An existing
    README.md (peft writes one) keeps its text and metadata; only what is missing is added.
    """
    from huggingface_hub import ModelCard

    settings = {name: each["value"] for name, each in _plan(run_dir)["settings"].items()}
    events = [event for event in _lines(run_dir / "events.jsonl") if event["event"] in ("started", "exported")]
    started: dict[str, Any] = next((event for event in reversed(events) if event["event"] == "started"), {})
    measured, state = None, _NOT_MEASURED
    if step is not None:
        measured, state = _measured(run_dir, step), _GOES_ON.format(step=step)
    elif events and events[-1]["event"] == "exported":
        step = events[-1]["of_step"]
        measured = _measured(run_dir, step)
        state = _EARLIER.format(step=step) if measured and measured["step"] < step else ""
    file, name = folder / "README.md", repo.rpartition("/")[2]
    data = _metadata(folder, name, settings, measured, datasets)
    text = "\n".join([_BEGIN, *_body(folder, repo, settings, started, measured), *(["", state] if state else []), _END])
    new = f"---\n{data.to_yaml()}\n---\n\n# {name}\n\n{text}\n"
    card = _completed(file, data, text) if file.exists() else ModelCard(new)
    if license is not None:
        card.data["license"] = license
    card.save(file)


def _completed(file: Path, data: ModelCardData, text: str) -> ModelCard:
    """The card in `file`, with what is missing of `data`, and with `text` in the place of that of an earlier card."""
    from huggingface_hub import ModelCard

    card: ModelCard = ModelCard.load(file, ignore_metadata_errors=True)
    there: Any = card.data
    if _BEGIN in card.text:
        there.eval_results = None  # those of the earlier card
        there.pop("model-index", None)
    metadata: dict[str, Any] = data.to_dict()  # type: ignore[no-untyped-call]
    for key, value in metadata.items():
        if key == "model-index" or not there.get(key):
            there[key] = value
    before, _, rest = card.text.partition(_BEGIN)
    parts = (before, text, rest.partition(_END)[2])
    card.text = "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"
    return card


def _plan(run_dir: Path) -> dict[str, Any]:
    try:
        plan: dict[str, Any] = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigurationError(
            f"{str(run_dir)!r} has no plan.json that can be read ({exc}). Give the run directory of a fit"
        ) from exc
    return plan


def _lines(file: Path) -> list[dict[str, Any]]:
    """The complete lines of a .jsonl file, without a last line that is still being written."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:-1]]


def _measured(run_dir: Path, step: int) -> dict[str, Any] | None:
    """The line of the last validation up to update `step`; None if there is none."""
    lines = _lines(run_dir / "metrics.jsonl")
    validated = [line for line in lines if line["stage"] == "validate" and line["step"] <= step]
    return validated[-1] if validated else None


def _configuration(folder: Path, name: str) -> dict[str, Any]:
    file = folder / name
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def _metadata(
    folder: Path, name: str, settings: dict[str, Any], measured: dict[str, Any] | None, datasets: Sequence[str]
) -> ModelCardData:
    from huggingface_hub import ModelCardData

    model, adapter = _configuration(folder, "config.json"), _configuration(folder, "adapter_config.json")
    architecture = next(iter(model.get("architectures") or ()), "")
    task = next((task for ending, task in _TASKS.items() if architecture.endswith(ending)), None)
    base = str(adapter.get("base_model_name_or_path") or "")
    return ModelCardData(
        model_name=name,
        library_name="peft" if adapter else "transformers" if model else "pytorch",
        pipeline_tag=task,
        base_model=base if base and not Path(base).exists() else None,
        datasets=list(datasets) or None,
        tags=["fabricate"],
        eval_results=_results(measured, task or "other", datasets) or None,
    )


def _results(measured: dict[str, Any] | None, task: str, datasets: Sequence[str]) -> list[EvalResult]:
    from huggingface_hub import EvalResult

    data = datasets[0] if datasets else "unknown"
    return [
        EvalResult(
            task_type=task,
            dataset_type=data,
            dataset_name=data if datasets else "validation data of the run",
            metric_type=name.removeprefix("val_"),
            metric_name=name,
            metric_value=value,
        )
        for name, value in (measured["metrics"] if measured else {}).items()
        if isinstance(value, int | float)
    ]


def _body(
    folder: Path, repo: str, settings: dict[str, Any], started: dict[str, Any], measured: dict[str, Any] | None
) -> list[str]:
    lines = ["Trained with fabricate.", "", *_usage(folder, repo)]
    if measured is not None:
        lines += ["", f"## Validation, step {measured['step']}", "", "| metric | value |", "|---|---|"]
        lines += [f"| {name} | {_cell(value)} |" for name, value in measured["metrics"].items()]
    lines += ["", "## Training", "", "| setting | value |", "|---|---|"]
    lines += [
        f"| {name.replace('_', ' ')} | {_cell(settings[name])} |"
        for name in _SETTINGS
        if settings.get(name) is not None
    ]
    data = {name: value for name, value in started.get("data", {}).items() if value is not None}
    for title, table in (("Data", data), ("Versions", started.get("versions", {}))):
        if table:
            lines += ["", f"## {title}", "", f"| {title.lower()} | |", "|---|---|"]
            lines += [f"| {name.replace('_', ' ')} | {_cell(value)} |" for name, value in table.items()]
    return lines


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if value >= 10_000 else str(value)
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return str(value).replace("|", "\\|").replace("\n", " ")


def _usage(folder: Path, repo: str) -> list[str]:
    """The lines of code that load the weights."""
    if (folder / "adapter_config.json").exists():
        code = ["from peft import AutoPeftModel", "", f'model = AutoPeftModel.from_pretrained("{repo}")']
    elif architecture := next(iter(_configuration(folder, "config.json").get("architectures") or ()), None):
        code = [f"from transformers import {architecture}", "", f'model = {architecture}.from_pretrained("{repo}")']
    elif (folder / "model.safetensors").exists():
        code = ["from huggingface_hub import hf_hub_download", "from safetensors.torch import load_file", ""]
        code += [f'weights = load_file(hf_hub_download("{repo}", "model.safetensors"))  # a state dict']
    else:
        return []
    return ["```python", *code, "```"]
