"""`fabricate ckpt`: list, verify, inspect, compare, export, merge, import and prune checkpoints.

Owns the output and the exit codes: 1 if a check fails or two checkpoints differ, 2 for a wrong command. Must not know: the loop. Imports
torch only for torch's own formats.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fabricate.cli.tables import print_table
from fabricate.errors import CheckpointError, ConfigurationError, size_text

if TYPE_CHECKING:
    from fabricate.checkpoint.format.comparing import Difference
    from fabricate.checkpoint.format.directory import Reader

_DIRECTORY = click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path)
_MOST_ROWS = 12  # rows of one component in a table


@click.group()
def ckpt() -> None:
    """Look after checkpoints. CKPT is one checkpoint, or a run directory, whose newest is meant.

    \b
    Example:
      fabricate ckpt ls runs/first
    """


@ckpt.command()
@click.argument("path", type=_DIRECTORY)
def ls(path: Path) -> None:
    """List the checkpoints in PATH: a run directory, its checkpoints folder or one checkpoint.

    Reads the manifests and compares the sizes of files; `fabricate ckpt verify` reads everything.

    \b
    Example:
      fabricate ckpt ls runs/first
    """
    from fabricate.checkpoint.format.directory import Reader

    rows = []
    for checkpoint in _checkpoints(path):
        try:
            with Reader(checkpoint) as reader:
                manifest = reader.manifest
        except CheckpointError as exc:
            rows.append((checkpoint.name, "", "", "", "", _fault(exc)))
            continue
        size = sum(file.size for file in manifest.files)
        topology = manifest.topology
        strategy, world_size = (str(topology.get(key, "unknown")) for key in ("strategy", "world_size"))
        rows.append((str(manifest.step), size_text(size), manifest.created, strategy, world_size, "complete"))
    rows += [(bad.name, "", "", "", "", "set aside") for bad in sorted(_root(path).glob(".bad-*"))]
    if not rows:
        click.echo(f"no checkpoints in {path}")
        return
    print_table(("step", "size", "created", "strategy", "world size", "state"), rows)


@ckpt.command()
@click.argument("path", type=_DIRECTORY)
@click.pass_context
def verify(ctx: click.Context, path: Path) -> None:
    """Read every byte of the checkpoints in PATH, a run directory or one checkpoint, and compare digests.

    Prints one line each; a damaged one is named with the file at fault, and the exit code is 1.

    \b
    Examples:
      fabricate ckpt verify runs/first
      fabricate ckpt verify runs/first/checkpoints/step-00000500
    """
    checkpoints = _checkpoints(path)
    if not checkpoints:
        raise CheckpointError(f"no checkpoints in {str(path)!r}. Give a run directory or one checkpoint")
    damaged = False
    for checkpoint in checkpoints:
        if error := _damage(checkpoint):
            if ctx.find_root().params["debug"]:
                raise error
            damaged = True
            click.echo(f"{checkpoint.name}: {_fault(error)}", err=True)
        else:
            click.echo(f"{checkpoint.name}: good")
    if damaged:
        ctx.exit(1)


@ckpt.command()
@click.argument("checkpoint", metavar="CKPT", type=_DIRECTORY)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(checkpoint: Path, as_json: bool) -> None:
    """Show what CKPT holds: step, topology, versions, optimizers, groups of tensors, every tensor's dtype, shape and size.

    Reads the manifest and the values, not the tensors; `fabricate ckpt verify` reads everything.

    \b
    Examples:
      fabricate ckpt inspect runs/first
      fabricate ckpt inspect runs/first/checkpoints/step-00000500 --json
    """
    from fabricate.checkpoint.format.directory import Reader, find

    with Reader(find(checkpoint)) as reader:
        contents = _contents(reader)
    if as_json:
        click.echo(json.dumps(contents, indent=1))
        return
    click.echo(contents["path"])
    for topic in ("step", "run_id", "created", "topology", "versions", "progress", "metrics"):
        click.echo(f"  {topic.replace('_', ' '):<10} {_line(contents[topic])}")
    click.echo(f"  {'size':<10} {size_text(contents['size'])} in {len(contents['files'])} files")
    for name, optimizer in contents["optimizers"].items():
        click.echo(f"  optimizer  {name}: {optimizer['kind']}")
        for number, group in enumerate(optimizer["groups"]):
            click.echo(f"    group {number}: {group['parameters']} parameters, {_line(group['options'])}")
    rows = [
        (name, str(g["tensors"]), f"{g['elements']:,}", size_text(g["bytes"])) for name, g in contents["groups"].items()
    ]
    print_table(("group", "tensors", "elements", "size"), rows)
    tensors = [(n, t["dtype"], str(t["shape"]), size_text(t["bytes"])) for n, t in contents["tensors"].items()]
    tensors += [(alias, "", "", f"shared with {name}") for alias, name in contents["aliases"].items()]
    print_table(("tensor", "dtype", "shape", "size"), tensors)


def _contents(reader: Reader) -> dict[str, Any]:
    """The contents of a checkpoint, as JSON values."""
    from fabricate.checkpoint.format.comparing import component_of
    from fabricate.checkpoint.format.directory import ITEM_SIZES

    manifest = reader.manifest
    files = {record.name: record.size for record in manifest.files}
    state: Any = reader.json("state.json") if "state.json" in files else {}
    tensors: dict[str, dict[str, Any]] = {}
    groups: dict[str, Counter[str]] = {}
    for name, tensor in sorted(manifest.tensors.items()):
        size = tensor.num_elements * ITEM_SIZES[tensor.dtype]
        tensors[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "bytes": size}
        group = groups.setdefault(component_of(name, list(state.get("plugins", {}))), Counter())
        group.update(tensors=1, elements=tensor.num_elements, bytes=size)
    return {
        "path": str(reader.path),
        "step": manifest.step,
        "run_id": manifest.run_id,
        "created": manifest.created,
        "digest": manifest.digest,
        "topology": dict(manifest.topology),
        "versions": dict(manifest.versions),
        "progress": dict(manifest.progress),
        "metrics": {
            name: value if abs(value) < float("inf") else str(value) for name, value in manifest.metrics.items()
        },
        "size": sum(files.values()),
        "files": files,
        "optimizers": {
            name: {
                "kind": optimizer["kind"],
                "groups": [
                    {"parameters": len(group["names"]), "options": _options(group["options"])}
                    for group in optimizer["groups"]
                ],
            }
            for name, optimizer in state.get("optimizers", {}).items()
        },
        "groups": {name: dict(group) for name, group in groups.items()},
        "tensors": tensors,
        "aliases": dict(manifest.aliases),
    }


def _options(tree: Any) -> dict[str, Any]:
    """The options of a parameter group; values other than numbers and text are converted to text."""
    from fabricate.checkpoint.format import codec

    options: Any = codec.decode(tree, lambda name: f"tensor {name}")
    return {k: v if isinstance(v, int | float | str | None) else str(v) for k, v in options.items()}


@ckpt.command()
@click.argument("first", metavar="A", type=_DIRECTORY)
@click.argument("second", metavar="B", type=_DIRECTORY)
@click.option("--only", metavar="COMPONENT", multiple=True, help="weights, optimizer, rng, ...; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def diff(ctx: click.Context, first: Path, second: Path, only: tuple[str, ...], as_json: bool) -> None:
    """Compare the checkpoints A and B bit by bit. Exit code 1 if they differ.

    For each tensor the first element that differs and the largest difference; for state the value and its path. How the
    checkpoints were written (ranks, files, times) does not count.

    \b
    Examples:
      fabricate ckpt diff runs/first runs/second
      fabricate ckpt diff runs/first/checkpoints/step-00000500 runs/second --only weights
    """
    from fabricate.checkpoint.format.comparing import COMPONENTS, compare
    from fabricate.checkpoint.format.directory import Reader, find

    for component in only:
        if component.partition(" ")[0] not in {component_name.partition(" ")[0] for component_name in COMPONENTS}:
            raise ConfigurationError(f"--only {component!r} is not a component. Give one of {', '.join(COMPONENTS)}")
    paths = find(first), find(second)
    with Reader(paths[0]) as a, Reader(paths[1]) as b:
        differences = [d for d in compare(a, b) if not only or d.component.startswith(only)]
    if as_json:
        click.echo(
            json.dumps(
                {"first": str(paths[0]), "second": str(paths[1]), "differences": [d.to_json() for d in differences]}
            )
        )
    elif not differences:
        click.echo(f"no difference between {paths[0]} and {paths[1]}")
    else:
        click.echo(f"{paths[0]}\n{paths[1]}")
        print_differences(differences)
    if differences:
        ctx.exit(1)


def print_differences(differences: Sequence[Difference]) -> None:
    """Print a table with the first differences of each component."""
    rows = []
    for component, number in Counter(difference.component for difference in differences).items():
        some = [d for d in differences if d.component == component][:_MOST_ROWS]
        rows += [(component, d.name, d.text) for d in some]
        if number > len(some):
            rows.append((component, f"and {number - len(some)} more", "--json lists all"))
    print_table(("component", "what", "difference"), rows)


@ckpt.command()
@click.argument("checkpoint", metavar="CKPT", type=_DIRECTORY)
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "kind",
    metavar="NAME",
    help="safetensors (default), transformers, torch, accelerate or deepspeed.",
)
def export(checkpoint: Path, out: Path, kind: str | None) -> None:
    """Write the weights of CKPT as the new file or folder OUT, in a format that other tools read. Every byte is verified.

    \b
    safetensors   one file, named as in state_dict()
    transformers  a folder for from_pretrained: config.json and weights
    torch         one file of torch.save: a state dict
    accelerate    a folder for Accelerator.load_state, with optimizers and schedulers
    deepspeed     a folder for DeepSpeed's engine, universal layout, with the optimizer

    The last three are pickle by nature: whoever opens them has to trust them.

    \b
    Examples:
      fabricate ckpt export runs/first model.safetensors
      fabricate ckpt export runs/first/checkpoints/step-00000500 model --format transformers
    """
    from fabricate.checkpoint.convert.exporting import export as write

    remarks = write(checkpoint, out, kind)
    click.echo(f"wrote {out}")
    for remark in remarks:
        click.echo(f"note: {remark}", err=True)


@ckpt.command()
@click.argument("checkpoint", metavar="CKPT", type=_DIRECTORY)
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--base", metavar="NAME", help="The place of the base model; default: the place from which the run loaded it."
)
def merge(checkpoint: Path, out: Path, base: str | None) -> None:
    """Write the base model of CKPT with its peft adapters merged as the new folder OUT, dequantised, for transformers alone.

    The base is loaded on the CPU as the run loaded it, quantised if it was, and compared by digest with the one that the adapters were
    trained over.

    \b
    Examples:
      fabricate ckpt merge runs/first merged
      fabricate ckpt merge runs/first/checkpoints/step-00000500 merged --base ../models/llama
    """
    from fabricate.checkpoint.convert.merging import merge as write

    remarks = write(checkpoint, out, base)
    click.echo(f"wrote {out}")
    for remark in remarks:
        click.echo(f"note: {remark}", err=True)


@ckpt.command("import")
@click.argument("source", metavar="SOURCE", type=click.Path(path_type=Path))
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--rename",
    metavar="OLD=NEW",
    multiple=True,
    help="Replace OLD at the beginning of tensor names with NEW; repeatable.",
)
@click.option("--key", metavar="NAME", help="Where in the file the state dict is, if it is not the file or state_dict.")
@click.option("--step", type=click.IntRange(0), metavar="N", help="The step of OUT; default: what SOURCE says, else 0.")
def import_(source: Path, out: Path, rename: tuple[str, ...], key: str | None, step: int | None) -> None:
    """Make the checkpoint OUT of the weights in SOURCE. `TrainModule.load_from_checkpoint(OUT)` reads it.

    SOURCE is a folder of Accelerator.save_state or save_pretrained, a .safetensors file, a Lightning .ckpt, or a state dict
    in a file of torch.save. Nothing in it is executed; a file that would need that is refused. Optimizers are left out.

    \b
    Examples:
      fabricate ckpt import lightning.ckpt imported
      fabricate ckpt import state.pt imported --rename module.= --rename =model.
    """
    from fabricate.checkpoint.convert.importing import import_checkpoint

    rules = {}
    for rule in rename:
        old, equals, new = rule.partition("=")
        if not equals:
            raise ConfigurationError(
                f"--rename {rule!r}: give OLD=NEW, for instance module.= to remove the prefix module."
            )
        rules[old] = new
    path = import_checkpoint(source, out, rename=rules, key=key, step=step)
    click.echo(f"wrote {path}")


@ckpt.command()
@click.argument("run_dir", metavar="RUN_DIR", type=_DIRECTORY)
@click.option(
    "--keep",
    metavar="RULE",
    required=True,
    help="last=N, best=N, and for best metric=NAME and mode=min or max, joined by commas. The default metric and mode are those of the "
    "run's Trainer(keep=), or else val_loss and min.",
)
@click.option("--yes", is_flag=True, help="Delete. Without it, checkpoints are only listed.")
def prune(run_dir: Path, keep: str, yes: bool) -> None:
    """Delete the checkpoints in RUN_DIR that RULE does not keep; a rehearsal unless --yes is given.

    Every checkpoint that is kept is verified first. Damaged ones count as none and are left to you. The newest good one is
    never deleted. While the run is training, nothing is: it prunes by itself (`Trainer(keep=)`).

    \b
    Examples:
      fabricate ckpt prune runs/first --keep last=3,best=1
      fabricate ckpt prune runs/first --keep last=1,best=2,metric=accuracy,mode=max --yes
    """
    from fabricate.checkpoint.format.directory import committed
    from fabricate.checkpoint.format.directory import prune as delete
    from fabricate.checkpoint.format.lock import locked

    root = _root(run_dir)
    rule = _rule(keep, root.parent)
    with locked(root.parent) if yes else contextlib.nullcontext():
        checkpoints = committed(root)
        good, kept = _good_and_kept(checkpoints, rule)
        if not kept:
            raise CheckpointError(f"{str(run_dir)!r} has no good checkpoint to keep; nothing is deleted")
        surplus = [path for path in good if path not in kept]
        if yes:
            delete(surplus)
    if "best" in rule:
        click.echo(f"best by {rule['metric']} ({rule['mode']})")
    fate = "deleted" if yes else "would be deleted"
    for path in checkpoints:
        state = "kept" if path in kept else fate if path in surplus else "damaged, left as it is"
        click.echo(f"{path.name}: {state}")
    if surplus and not yes:
        click.echo("nothing is deleted without --yes")


def _good_and_kept(checkpoints: list[Path], rule: Mapping[str, Any]) -> tuple[list[Path], set[Path]]:
    """The checkpoints without damage, and those of them that `rule` keeps; every byte of the latter was verified."""
    from fabricate.checkpoint.format.retention import kept

    good = [path for path in checkpoints if not _damage(path, thoroughly=False)]
    _check_metric(good, rule)
    verified: set[Path] = set()
    while True:  # until all checkpoints that the rule keeps are good: the next one replaces a damaged one
        keeps = kept(good, rule)
        damaged = {path for path in keeps - verified if _damage(path)}
        verified |= keeps - damaged
        if not damaged:
            return good, keeps
        good = [path for path in good if path not in damaged]


def _rule(text: str, run_dir: Path) -> dict[str, Any]:
    """The value of `--keep` in the form of `Trainer(keep=)`, by default with the metric and mode of the run. Raises
    ConfigurationError if it is not valid."""
    from fabricate.checkpoint.format.retention import keep_of
    from fabricate.configuration.arguments import parse_keep

    rule: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in ("last", "best", "metric", "mode") or not value or name in rule:
            raise ConfigurationError(
                f"--keep {text!r}: {part.strip()!r} is not understood. Give for instance last=3,best=1,metric=val_loss,mode=min"
            )
        rule[name] = int(value) if value.isdecimal() else value
    if rule.keys() <= {"metric", "mode"}:
        raise ConfigurationError(f"--keep {text!r} keeps nothing. Give last=N, best=N or both")
    of_run = keep_of(run_dir) if "best" in rule else None
    if of_run is not None and rule.get("metric", of_run["metric"]) == of_run["metric"]:
        rule = {"metric": of_run["metric"], "mode": of_run["mode"], **rule}
    return parse_keep("keep", rule)


def _check_metric(checkpoints: list[Path], rule: Mapping[str, Any]) -> None:
    """Raise ConfigurationError if no checkpoint recorded the metric by which the best is chosen."""
    from fabricate.checkpoint.format.directory import Reader

    recorded: set[str] = set()
    for path in checkpoints if "best" in rule else ():
        with Reader(path) as reader:
            recorded |= reader.manifest.metrics.keys()
    if "best" in rule and checkpoints and rule["metric"] not in recorded:
        raise ConfigurationError(
            f"--keep best={rule['best']}: no checkpoint recorded the metric {rule['metric']!r}. Add metric=NAME with one of "
            f"{', '.join(sorted(recorded)) or 'none'}"
        )


def _damage(path: Path, thoroughly: bool = True) -> CheckpointError | None:
    """The damage of a checkpoint, None if it is good. Unless `thoroughly`, only the manifest and the sizes of files are checked."""
    from fabricate.checkpoint.format.directory import Reader

    try:
        with Reader(path) as reader:
            if thoroughly:
                reader.verify()
    except CheckpointError as exc:
        return exc
    return None


def _fault(error: CheckpointError) -> str:
    from fabricate.checkpoint.format.directory import NewerFormatError

    return f"{'too new' if isinstance(error, NewerFormatError) else 'damaged'}: {error}"


def _root(path: Path) -> Path:
    """The checkpoints folder of the run directory `path`, or `path` itself if it is this folder."""
    inner = path / "checkpoints"
    return inner if inner.is_dir() else path


def _checkpoints(path: Path) -> list[Path]:
    """The checkpoint `path`, or all checkpoints of the run `path`, oldest first."""
    from fabricate.checkpoint.format.directory import committed

    if path.name.startswith("step-") or (path / "manifest.json").exists():
        return [path]
    return committed(_root(path))


def _line(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    return ", ".join(f"{name.replace('_', ' ')} {each}" for name, each in value.items()) or "none"
