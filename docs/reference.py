"""Writes docs/hooks.md, docs/interfaces.md, docs/trainer.md and the tables of names in docs/from-transformers.md from the source:
`python docs/reference.py`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from fabricate import Precision, Strategy, Trainer, TrainModule, hooks
from fabricate.configuration import training_arguments
from fabricate.registry import foreign_names
from fabricate.strategies.base import GROUPS

DOCS = Path(__file__).parent
_INTRODUCTION = """\
# Hooks

Written by `docs/reference.py` from `fabricate/hooks.py`; change the text there.

A hook is a named point of the loop. A module or a plugin implements a hook by defining a method of that name. The method can take any
of the hook's arguments that are listed below; fabricate passes them by name. `trainer` is the `Trainer` that calls the hook, and `module`
is the `TrainModule` that this `Trainer` runs. Objects that do not inherit from `Callback`, `Strategy`, `Precision` or `TrainModule` mark
their functions with `@fabricate.hookimpl`. The module and the plugins that implement a hook are its *listeners*;
[Plugins](plugins.md) explains the order in which they are called. Start with [Write a plugin](write-a-plugin.md). The
[glossary](glossary.md) explains window, boundary and other terms.
"""
_INTERFACES = """\
# Strategies and precisions: what to override

Written by `docs/reference.py` from `fabricate/strategies/base.py` and `fabricate/precisions/base.py`; change the text there.

A strategy or a precision inherits from the classes below, or from a built-in one, and overrides the methods that differ. Every method has
a working default. The attributes below are class attributes; options are the fields of a `@dataclass(eq=False)`. Both are also plugin
objects: they can implement [hooks](hooks.md) and keep state. A public name that fabricate would never use, such as a misspelt method, is
an error before the first step. Start with [Write a plugin](write-a-plugin.md); [Testing plugins](testing-plugins.md) shows how to test
the result. The [glossary](glossary.md) explains window, part and other terms.

In the descriptions, *pure* means: the method has no side effects and always returns the same result for the same input. *All ranks* means:
every rank calls the method, in the same order. *No wait* means: the method must not wait for the device.
"""
_TRAINER = """\
# Trainer and TrainModule

Written by `docs/reference.py` from `fabricate/trainer.py` and `fabricate/module.py`; change the text there.

Every argument, attribute and method, with defaults. Start with the [quickstart](quickstart.md); a module may also define
[hooks](hooks.md); the [glossary](glossary.md) explains this project's own terms. There are tables of the names that
[Lightning](from-lightning.md#arguments-of-the-trainer) and [transformers](from-transformers.md#arguments-by-their-old-names) use
for the same arguments.

## Arguments of `Trainer`
"""
_SECTIONS = {
    "Wrappable work": (
        hooks.ACTIONS,
        "Each of these hooks does one piece of the loop's work. Of several implementations, the first that returns a value other than "
        "None is used. To wrap this work, write a generator function marked with `@hookimpl(wrapper=True)`: it yields once, receives "
        "the returned value from `yield`, and returns this value.",
    ),
    "The state of a listener": (
        hooks.PER_LISTENER,
        "These hooks are called separately for each listener, so they cannot be wrapped. It is an error if a checkpoint holds the state "
        "of a plugin that is not active, or lacks the state of an active plugin; `Trainer(accept_changes=('plugins',))` accepts both.",
    ),
    "Events": (
        tuple(n for n in hooks.EVENTS if n not in hooks.ACTIONS + hooks.PER_LISTENER),
        "Events return nothing; a returned value is an error. To request an action, call `trainer.request_save()`, "
        "`trainer.request_eval()` or `trainer.stop(reason)`, which act at the next boundary between two updates. "
        "Collectives are allowed in an event unless its text says otherwise.",
    ),
    "Registrations": (
        hooks.REGISTRATIONS,
        "An installed distribution implements these hooks to offer strategies and other objects by name. None of these hooks runs in "
        "a training loop.",
    ),
}


def hooks_page() -> str:
    """docs/hooks.md, ending in a newline."""
    loop = (hooks.__doc__ or "").partition("as the hooks see it:\n")[2].partition("\nEvery hook runs")[0]
    parts = [_INTRODUCTION, "## The loop\n", "```text\n" + inspect.cleandoc(loop) + "\n```\n"]
    parts.append(
        "Every hook runs on every rank, in the same order on each, unless its text says otherwise. If several optimizers take\n"
        "[turns](glossary.md) on a window, the hooks from `train_step` to `optimizer_step` run in every turn, and `on_step` runs after\n"
        "the last turn.\n"
    )
    for title, (names, text) in _SECTIONS.items():
        parts += [f"## {title}\n", text + "\n", *map(_entry, names)]
    return "\n".join(parts)


def _entry(name: str) -> str:
    function = getattr(hooks.Registrations if name in hooks.REGISTRATIONS else hooks.Events, name)
    arguments = ", ".join(p for p in inspect.signature(function).parameters if p != "self")
    return f"### `{name}({arguments})`\n\n{inspect.getdoc(function)}\n"


def interfaces_page() -> str:
    """docs/interfaces.md, ending in a newline."""
    parts = [_INTERFACES]
    for kind in (Strategy, Precision):
        (tree,) = ast.parse(inspect.getsource(kind)).body
        assert isinstance(tree, ast.ClassDef)
        parts += [f"## {kind.__name__}\n", f"{inspect.getdoc(kind)}\n", *_members(tree, "###")]
    return "\n".join(parts)


def trainer_page() -> str:
    """docs/trainer.md, ending in a newline."""
    parts = [_TRAINER, "\n".join(_arguments(Trainer)) + "\n"]
    for kind in (Trainer, TrainModule):
        (tree,) = ast.parse(inspect.getsource(kind)).body
        assert isinstance(tree, ast.ClassDef)
        parts += [f"## What `{kind.__name__}` has\n", *_members(tree, "###")]
    return "\n".join(parts)


def _arguments(kind: type) -> list[str]:
    """A line for each paragraph of the class's text that describes arguments, with their defaults."""
    parameters = inspect.signature(kind).parameters
    lines: list[str] = []
    for line in (inspect.getdoc(kind) or "").partition("\n\n")[2].splitlines():
        names, colon, _ = line.partition(": ")
        known = re.split(r", ", names)
        if colon and all(name in parameters for name in known):
            defaults = ", ".join(f"`{name}={parameters[name].default!r}`" for name in known)
            lines.append(f"- {defaults}: {line.removeprefix(names + ': ')}")
        else:
            lines.append(f"  {line}")
    return lines


_ALIASES = {"Part": Strategy.Part}  # classes that have a file of their own


def _members(tree: ast.ClassDef, level: str) -> list[str]:
    """The attributes of a class as a list, then its methods and inner classes, each with what its source says of it."""
    attributes, entries = [], []
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
            (node,) = ast.parse(inspect.getsource(_ALIASES[ast.unparse(node.target)])).body
        if isinstance(node, ast.AnnAssign) and not ast.unparse(node.target).startswith("_"):
            told = after.value if isinstance(after, ast.Expr) else None
            text = f": {inspect.cleandoc(told.value)}" if isinstance(told, ast.Constant) else ""
            default = f" = {ast.unparse(node.value)}".replace("*GROUPS", repr(GROUPS)[1:-1]) if node.value else ""
            kind = (
                ast.unparse(node.annotation)
                .removeprefix("ClassVar[")
                .removesuffix("]" * ("ClassVar" in ast.unparse(node)))
            )
            attributes.append(f"- `{ast.unparse(node.target)}: {kind}{default}`{text}")
        elif isinstance(node, ast.ClassDef):
            entries += [
                f"{level} `{tree.name}.{node.name}`\n",
                f"{ast.get_docstring(node)}\n",
                *_members(node, level + "#"),
            ]
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and ast.get_docstring(node):
            arguments = ", ".join(a.arg for a in (*node.args.args[1:], *node.args.kwonlyargs))
            called = all(isinstance(decorator, ast.Call) for decorator in node.decorator_list)
            title = f"{node.name}({arguments})" if called else node.name
            entries.append(f"{level} `{title}`\n\n{ast.get_docstring(node)}\n")
    return (["\n".join(attributes) + "\n"] if attributes else []) + entries


_TRAINER_ARGUMENTS = (
    *("train_dataset", "eval_dataset", "data_collator", "processing_class", "model_init", "compute_loss_func"),
    *("compute_metrics", "preprocess_logits_for_metrics", "callbacks", "optimizers", "optimizer_cls_and_kwargs"),
)
"""Of transformers.Trainer, beside the model and args."""


def transformers_page() -> str:
    """docs/from-transformers.md with its tables of names; all else stays as it is."""
    from transformers import TrainerCallback

    events = [name for name in dir(TrainerCallback) if name in foreign_names.HOOKS]
    tables = {
        "| transformers | fabricate | `from_training_arguments` |": _training_arguments(),
        "## Arguments of `transformers.Trainer`": _names(_TRAINER_ARGUMENTS, foreign_names.ARGUMENTS),
        "## Methods and attributes of the trainer": _names(foreign_names.TRANSFORMERS_TRAINER, foreign_names.TRAINER),
        "## Callbacks and their events": _names(
            [name for name in foreign_names.PLUGINS if name.endswith("Callback")], foreign_names.PLUGINS
        ),
        "| event | hook |": _names(events, foreign_names.HOOKS),
    }
    page = (DOCS / "from-transformers.md").read_text(encoding="utf-8")
    for heading, lines in tables.items():
        before, found, after = page.partition(f"{heading}\n")
        begin, rule, rows = after.partition("|---|\n")
        page = before + found + begin + rule + "\n".join(lines) + "\n" + re.sub(r"\A(\|.*\n)*", "", rows)
    return page


def _names(names: Iterable[str], table: Mapping[str, str]) -> list[str]:
    return [f"| `{name}` | {table[name].replace('|', chr(92) + '|')} |" for name in names]


def _training_arguments() -> list[str]:
    """A line for each field of transformers' arguments: what to use here, and what `from_training_arguments` does with it."""
    from transformers import Seq2SeqTrainingArguments

    taken = {name for names in training_arguments._PARTS for name in names}
    places = {
        **dict.fromkeys(training_arguments._LOADERS, "`loaders`"),
        **dict.fromkeys(training_arguments._OPTIMIZER, "`optimizers`"),
        "resume_from_checkpoint": "`resume`",
        "use_cpu": "the device",
        "gradient_checkpointing": "`trainer`",
        "gradient_checkpointing_kwargs": "`trainer`",
    }
    lines = []
    for name in (field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)):
        use = foreign_names.ARGUMENTS.get(name, "the same")
        place = (
            "`trainer`" if name in taken else places.get(name, "left out" if use.startswith("nothing") else "an error")
        )
        lines.append(f"| `{name}` | {use} | {place} |")
    return lines


PAGES: dict[str, Callable[[], str]] = {
    "from-transformers.md": transformers_page,
    "hooks.md": hooks_page,
    "interfaces.md": interfaces_page,
    "trainer.md": trainer_page,
}

if __name__ == "__main__":
    for name, render in PAGES.items():
        (DOCS / name).write_text(render(), encoding="utf-8")
