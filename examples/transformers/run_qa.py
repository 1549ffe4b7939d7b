"""transformers' run_qa.py: answers are found as spans of a text. The command line is that of transformers' script.

python examples/transformers/run_qa.py --do_train --do_eval --output_dir runs/qa
fabricate run examples/transformers/run_qa.py --nproc 2 -- --model_name_or_path google-bert/bert-base-uncased \\
    --dataset_name rajpurkar/squad --learning_rate 3e-5 --num_train_epochs 2 --do_train --do_eval --output_dir runs/squad
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import datasets
import torch
from tiny import Source, open_source
from transformers import (
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    HfArgumentParser,
    TrainingArguments,
    default_data_collator,  # fmt: skip
)

from fabricate import Trainer, TrainModule, from_training_arguments


@dataclass
class Options(Source):
    max_seq_length: int = 384
    doc_stride: int = 128
    max_answer_length: int = 30


class Reader(TrainModule):
    """A model that finds answers in a text. rows: the validation set made by `to_rows`. answers: the correct answers, by the id of the
    question."""

    def __init__(
        self, name: str, tokenizer: Any, settings: Any, rows: Any, answers: dict[str, Any], longest: int
    ) -> None:
        super().__init__()
        self.name, self.tokenizer, self.settings = name, tokenizer, settings
        self.rows, self.answers, self.longest = rows, answers, longest

    def configure_model(self) -> None:
        self.model = AutoModelForQuestionAnswering.from_pretrained(self.name)

    def configure_optimizers(self) -> Any:
        return self.settings.optimizers(self)

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.model(**batch).loss

    def validation_step(self, batch: Any) -> dict[str, Any]:
        output = self.model(**batch)
        return {"loss": output.loss, "outputs": (output.start_logits, output.end_logits)}

    def compute_metrics(self, outputs: list[Any]) -> dict[str, float]:
        """The answer is the span with the highest score in all windows of a text."""
        best: dict[str, tuple[float, str]] = {}
        for (start, end), row in zip(
            outputs, self.rows, strict=False
        ):  # the check before training reads only the first rows
            scores = start[:, None] + end[None, :]
            inside = torch.tensor([at >= 0 for at, _ in row["offsets"]])
            allowed = torch.ones_like(scores, dtype=torch.bool).triu().tril(self.longest - 1) & inside[:, None] & inside
            place = int(scores.masked_fill(~allowed, -torch.inf).argmax())
            first, last = divmod(place, len(end))
            text = row["context"][row["offsets"][first][0] : row["offsets"][last][1]]
            candidate = (float(scores.flatten()[place]), text)
            best[row["id"]] = max(best.get(row["id"], candidate), candidate, key=lambda each: each[0])
        wanted = {key: self.answers[key]["text"] or [""] for key in best}
        exact = [max(best[key][1] == answer for answer in answers) for key, answers in wanted.items()]
        f1 = [max(overlap(best[key][1], answer) for answer in answers) for key, answers in wanted.items()]
        return {"exact_match": 100 * sum(exact) / len(exact), "f1": 100 * sum(f1) / len(f1)}


def overlap(answer: str, wanted: str) -> float:
    """The F1 score of the words of two answers."""
    left, right = answer.lower().split(), wanted.lower().split()
    return 2 * sum((Counter(left) & Counter(right)).values()) / max(len(left) + len(right), 1)


def to_rows(raw: Any, tokenizer: Any, options: Options) -> datasets.Dataset:
    """A row for each window of a text: its tokens, the positions of the answer, and the offsets to cut it out. If the window does not
    contain the answer, its position is the first token. Tokens outside the text have the offsets -1."""
    size = min(options.max_seq_length, tokenizer.model_max_length)
    windows = {"max_length": size, "stride": min(options.doc_stride, size // 2), "padding": "max_length"}
    windows |= {"truncation": "only_second", "return_overflowing_tokens": True, "return_offsets_mapping": True}

    def tokens(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        encoding = tokenizer([question.lstrip() for question in rows["question"]], rows["context"], **windows)
        origins, offsets = encoding.pop("overflow_to_sample_mapping"), encoding.pop("offset_mapping")
        new: dict[str, list[Any]] = {**encoding, "id": [], "context": [], "offsets": []}
        new |= {"start_positions": [], "end_positions": []}
        for number, (origin, places) in enumerate(zip(origins, offsets, strict=True)):
            own = [
                place if part == 1 else (-1, -1)
                for place, part in zip(places, encoding.sequence_ids(number), strict=True)
            ]
            answer, span = rows["answers"][origin], (0, 0)
            if answer["answer_start"]:
                begin = answer["answer_start"][0]
                end = begin + len(answer["text"][0])
                inside = [at for at, (left, right) in enumerate(own) if left >= 0 and left < end and right > begin]
                if inside and own[inside[0]][0] <= begin and own[inside[-1]][1] >= end:
                    span = (inside[0], inside[-1])
            values = {"id": rows["id"][origin], "context": rows["context"][origin], "offsets": own}
            for name, value in {**values, "start_positions": span[0], "end_positions": span[1]}.items():
                new[name].append(value)
        return new

    return raw.map(tokens, batched=True, remove_columns=raw.column_names)


def main(argv: list[str] | None = None) -> dict[str, float]:
    options, args = HfArgumentParser((Options, TrainingArguments)).parse_args_into_dataclasses(argv)
    name, raw = open_source(options, args, "BertForQuestionAnswering", "questions")
    tokenizer = AutoTokenizer.from_pretrained(name)
    with args.main_process_first():
        rows = {split: to_rows(raw[split], tokenizer, options) for split in ("train", "validation")}
    inputs = {split: part.remove_columns(["id", "context", "offsets"]) for split, part in rows.items()}

    settings = from_training_arguments(args)
    answers = dict(zip(raw["validation"]["id"], raw["validation"]["answers"], strict=True))
    module = Reader(name, tokenizer, settings, rows["validation"], answers, options.max_answer_length)
    trainer = Trainer(**settings.trainer)
    train, val = settings.loaders(inputs["train"], inputs["validation"], default_data_collator)
    metrics = {}
    if args.do_train:
        metrics = trainer.fit(module, train, val, resume=settings.resume).metrics
    if args.do_eval:
        metrics = trainer.validate(module, val)
        module.print(f"exact match {metrics['val_exact_match']:.2f}, F1 {metrics['val_f1']:.2f}")
    return metrics


if __name__ == "__main__":
    main()
