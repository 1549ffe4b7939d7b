"""Small frozen values in users' code: durations, the result of a fit, and which value of a metric is best. Must not know: torch, the
loop."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from pathlib import Path

from fabricate.errors import ConfigurationError

_UNITS = {
    "step": "steps",
    "steps": "steps",
    "epoch": "epochs",
    "epochs": "epochs",
    "second": "seconds",
    "seconds": "seconds",
    "minute": "minutes",
    "minutes": "minutes",
    "hour": "hours",
    "hours": "hours",
    "token": "tokens",
    "tokens": "tokens",
}
EXIT_PREEMPTED = 75
"""The exit code of a process whose fit was preempted after it saved its state, and can be started again (EX_TEMPFAIL of sysexits.h)."""

_TEXT = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?(?:[eE]\+?\d+)?)\s*([A-Za-z]+)\s*")


_HIGHER_IS_BETTER = frozenset(
    [
        "acc",
        "accuracy",
        "f1",
        "fbeta",
        "auc",
        "auroc",
        "auprc",
        "ap",
        "map",
        "precision",
        "recall",
        "sensitivity",
        "specificity",
        "r2",
        "bleu",
        "rouge",
        "meteor",
        "chrf",
        "iou",
        "miou",
        "dice",
        "psnr",
        "ssim",
        "mcc",
        "kappa",
        "ndcg",
        "mrr",
        "top",
        "exact",
        "em",
        "score",
        "reward",
        "return",
        "pearson",
        "pearsonr",
        "spearman",
        "spearmanr",
        "kendall",
        "corr",
        "correlation",
        "concordance",
        "jaccard",
        "hit",
        "hits",
        "hr",
        "success",
        "win",
        "pass",
        "elbo",
        "likelihood",
        "logprob",
        "similarity",
        "matthews",
        "qwk",
        "cindex",
        "index",
        "nmi",
        "ari",
        "silhouette",
        "cider",
        "stoi",
        "pesq",
        "sdr",
        "snr",
        "sharpe",
        "explained",
        "tpr",
        "gain",
        "lift",
        "sisdr",
    ]
)
_LOWER_IS_BETTER = frozenset(
    ["loss", "error", "err", "gap", "regret", "negative", "neg", "minus", "std", "dist", "distance"]
)
"""Words that turn a name with one of the words above around: `val_accuracy_gap`."""


def suggests_max(metric: str) -> bool:
    """Whether a word of the name of a metric (accuracy, f1, ...) suggests that higher values are better."""
    # `mAP` as one word, and `MulticlassAUROC` and `CLIPScore` as two.
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", metric)
    words = re.split(r"[^a-z0-9]+", f"{metric} {apart}".lower())
    words += [word.rstrip("0123456789") for word in words]
    return not _HIGHER_IS_BETTER.isdisjoint(words) and _LOWER_IS_BETTER.isdisjoint(words)


def metric_mode(where: str, metric: str, mode: str | None) -> str:
    """The mode of `metric`: "min" if its lowest value is the best, "max" if its highest is. It is `mode`, or "min" if `mode` is None.

    Raises `ConfigurationError` for another mode. Also if `mode` is None and a word of the name (accuracy, f1, ...) suggests that higher
    values are better, because the default would silently keep the worst. The message begins with `where`.
    """
    if mode not in ("min", "max", None):
        raise ConfigurationError(f"{where}: mode={mode!r}: give 'min' or 'max'")
    if mode is None and suggests_max(metric):
        raise ConfigurationError(
            f"{where}: is a higher or a lower {metric!r} better? The default is mode='min', but the name suggests 'max'; set mode"
        )
    return mode or "min"


@dataclass(frozen=True, kw_only=True)
class Every:
    """A recurring moment, in exactly one unit: `Every(steps=500)`, or `"500 steps"` as text.

    steps: applied updates. epochs: passes over the training data; a number below 1 is a share of a pass. minutes, hours: time since the fit
    started, by rank 0's clock. tokens: the sum over all ranks of the weights that `training_step` returns (the rows of the batch if it
    returns none).

    Raises `ConfigurationError` for no unit, two units, or a number that is not positive.
    """

    steps: int | None = None
    epochs: float | None = None
    minutes: float | None = None
    hours: float | None = None
    tokens: float | None = None

    def __post_init__(self) -> None:
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        if len(given) != 1:
            raise ConfigurationError(f"Every({given}) needs exactly one unit, for instance Every(steps=500)")
        unit, value = next(iter(given.items()))
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigurationError(f"Every({unit}={value!r}): the number has to be positive")
        if unit in ("steps", "epochs") and not float(value).is_integer() and not (unit == "epochs" and value < 1):
            raise ConfigurationError(f"Every({unit}={value!r}): {unit} are whole numbers")

    @property
    def unit(self) -> str:
        """The unit in use: "steps", "epochs", "minutes", "hours" or "tokens"."""
        return next(u for u in ("steps", "epochs", "minutes", "hours", "tokens") if getattr(self, u) is not None)

    @property
    def amount(self) -> float:
        """The number of `unit` between two moments."""
        return float(getattr(self, self.unit))

    @property
    def seconds(self) -> float:
        """The length in seconds, for the units minutes and hours."""
        return 60 * self.amount * (60 if self.unit == "hours" else 1)

    @classmethod
    def parse(cls, argument: str, value: str | float | Every) -> Every:
        """The `Every` for the value of `argument`: an `Every`, a whole number of steps, a share of an epoch (0.25), or text such as "1
        epoch" or "1e9 tokens"."""
        if isinstance(value, Every):
            return value
        given: tuple[str, float] | None = None
        if isinstance(value, str) and (match := _TEXT.fullmatch(value)):
            given = match[2].lower(), float(match[1].replace("_", ""))
        elif isinstance(value, int) and not isinstance(value, bool):
            given = "steps", value
        elif isinstance(value, float) and 0 < value <= 1:
            given = "epochs", value
        if given is None or given[0] not in _UNITS:
            raise ConfigurationError(
                f"{argument}={value!r} is not a duration: write '500 steps', '1 epoch', '10 minutes', '1e9 tokens' or "
                "Every(steps=500)"
            )
        unit, number = _UNITS[given[0]], given[1]
        if unit == "seconds":
            unit, number = "minutes", number / 60
        if unit in ("steps", "epochs") and float(number).is_integer():
            number = int(number)
        try:
            return cls(**{unit: number})  # type: ignore[arg-type]
        except ConfigurationError as exc:
            raise ConfigurationError(f"{argument}={value!r}: {exc}") from None

    def __str__(self) -> str:
        amount = self.amount
        number = str(int(amount)) if amount == int(amount) else str(amount)
        return f"{number} {self.unit}" if amount != 1 else f"{number} {self.unit.removesuffix('s')}"


@dataclass(frozen=True)
class FitResult:
    """The result of `Trainer.fit`, the same on every rank.

    steps: applied updates since the run began; epochs: completed passes; metrics: the last value of every metric, as a float (the last
    validation can be older than the last update, and with load_best=True it is not that of the weights that were loaded); stop_reason: why
    the fit ended ("max_steps", "max_epochs", "interrupted" by Ctrl-C, "preempted" by a signal, `max_time` or the stop file, or the reason
    passed to `stop()`); checkpoint: the newest committed checkpoint, or None without a `run_dir`; best_checkpoint and best_score: with
    `keep={"best": ...}`, the best checkpoint by the metric of `keep`, and the value of this metric.
    """

    steps: int
    epochs: int
    metrics: dict[str, float] = field(default_factory=dict)
    stop_reason: str = ""
    checkpoint: Path | None = None
    best_checkpoint: Path | None = None
    best_score: float | None = None

    @property
    def exit_code(self) -> int:
        """The exit code for `sys.exit`: 75 if the fit was preempted, so that a scheduler starts the job again; else 0."""
        return EXIT_PREEMPTED if self.stop_reason == "preempted" else 0
