"""What all ranks must have in common before a run begins: code, settings, data, validation sets, quantised weights and the groups of
optimizers.

Must not know: how ranks exchange messages (`distributed`), how a module is prepared (`opening`).
"""

from __future__ import annotations

from fabricate.checkpoint.state.logical import digest
from fabricate.data.digests import digest as digest_of
from fabricate.distributed.consistency import check_alike
from fabricate.errors import ConfigurationError, few
from fabricate.module import TrainModule
from fabricate.optim.optimizers import reorder
from fabricate.seeding import is_generator, state_of
from fabricate.strategies.quantised import quantised_weights
from fabricate.strategies.sharding import is_sharded
from fabricate.training.saves.attributes import remembered
from fabricate.training.saves.unsaved import reached_by_reading
from fabricate.training.state.run_state import Run

_SAME = (
    *("log_every", "validate_every", "save_every", "validate_first", "sanity_batches", "min_steps", "min_epochs"),
    *("load_best", "max_grad_norm", "max_grad_value", "nonfinite", "save", "save_weights_only", "save_frozen"),
)
"""The arguments that decide what the ranks do together, and when."""


def check_ranks(run: Run, seed: int) -> None:
    """Raise an error unless all ranks have the same code, settings and data. The module is built, but not prepared. All ranks."""
    training = run.source is not None
    _check_data(run)
    check_alike(
        run.engine,
        dict(run.calls.manager.table()),
        run.module,
        {
            "seed": seed,
            # `preparation` checks that it is the same directory; its path may differ between nodes
            "run_dir": "set" if run.settings.run_dir else None,
            "total steps": run.optim.total_steps,
            **{name: str(getattr(run.settings, name)) for name in _SAME if training},
            **(_base(run.module) if run.engine.world_size > 1 else {}),
        },
    )


def _check_data(run: Run) -> None:
    """Compare between the ranks the number of rows, what determines the rows, and some of the rows. All ranks."""
    sources = [source for source in (run.source, *run.validation.values()) if source is not None]
    if run.engine.world_size == 1:
        return
    _check_sets(run)
    data = [source.data for source in sources if not isinstance(source.data, list | dict)]
    restore = remembered(run.module, [*data, *(getattr(each, "dataset", None) for each in data)])
    mine = [[source.num_units, source.held(), source.probe()] for source in sources]
    restore()  # a data set may count how often a row is read
    if run.engine.all_have(mine):
        return
    everyone = run.engine.gather_json(mine)
    for number, source in enumerate(sources):
        lengths, held, rows = zip(*(rank[number] for rank in everyone), strict=True)
        error = source.different(lengths, "another number of rows") or source.different(held, "other rows")
        if error := error or (source.different(rows, "other rows") if all(rows) else None):
            raise error


def _check_sets(run: Run) -> None:
    """Raise `ConfigurationError` unless all ranks have the same validation sets. All ranks."""
    mine = list(run.validation)
    if run.engine.all_have(mine):
        return
    everyone = run.engine.gather_json(mine)
    other = next(rank for rank, names in enumerate(everyone) if names != everyone[0])
    zero, there = (
        "no data" if not names else "one data set" if names == [""] else f"the sets {few(names)}"
        for names in (everyone[0], everyone[other])
    )
    raise ConfigurationError(
        f"val is {zero} on rank 0 and {there} on rank {other}. Every rank has to pass the same, whole data, because fabricate divides it"
    )


def _base(module: TrainModule) -> dict[str, str]:
    """A digest of each quantised weight by name, because every rank has loaded them itself. If a weight is sharded, the digest of its
    scales."""
    weights = quantised_weights(module)
    sharded = {name for name, each in weights.items() if is_sharded(each.weight)}
    held = {name: each.scales if name in sharded else each.tensors() for name, each in weights.items()}
    return {f"the quantised {name}": " ".join(map(digest, tensors)) for name, tensors in held.items()}


def agree_on_order(run: Run, where: str) -> None:
    """Put the parameters of a group of an optimizer in the order of the module, if ranks have them in different orders because they come
    from a set. `ConfigurationError` if a group has other parameters on another rank. All ranks."""
    if run.engine.world_size == 1:
        return
    order = {p: (number, name) for number, (name, p) in enumerate(run.module.named_parameters())}
    groups = {
        f"group {n} of optimizer {o!r}": g
        for o, made in run.optim.optimizers.items()
        for n, g in enumerate(made.param_groups)
    }
    mine = {label: [order[p][1] for p in group["params"] if p in order] for label, group in groups.items()}
    if run.engine.all_have(mine):
        return
    everyone = run.engine.gather_json(mine)
    _refuse_other_groups(where, everyone)
    for label, group in groups.items():
        if any(names[label] != mine[label] for names in everyone):
            places = [order.get(p, (len(order), "")) for p in group["params"]]
            reorder(group, sorted(range(len(places)), key=places.__getitem__))


def _refuse_other_groups(where: str, everyone: list[dict[str, list[str]]]) -> None:
    """Raise `ConfigurationError` if a group has other parameters on another rank. `everyone`: the names in each group, of each rank."""
    for rank, names in enumerate(everyone):
        for label in {**everyone[0], **names}:
            if sorted(everyone[0].get(label, [])) != sorted(names.get(label, [])):
                raise ConfigurationError(
                    f"{where}: {label} has other parameters on rank {rank} than on rank 0. Every rank has to make the same groups, so do "
                    "not take them from the order of a set"
                )


def note_copied_generators(run: Run) -> None:
    """Note random generators of the training data of which ranks or worker processes have equal copies. All ranks."""
    if run.source is None or not run.source.copies_generators:
        return
    found = reached_by_reading(run)
    inside = {n: v for n, v in found.generators.items() if is_generator(v) and n not in found.in_libraries}
    generators = run.source.own_generators() | {name: digest_of(state_of(value)) for name, value in inside.items()}
    on_ranks = run.engine.world_size > 1 and run.engine.all_have(generators)
    if generators and (on_ranks or run.source.several_workers):
        readers = "each rank" if on_ranks else "each worker process"
        run.notes.append(
            f"train: {readers} has a copy of {few(list(generators))}, so all of them draw the same numbers from it, and rows or "
            "augmentations that it chooses repeat, unless it is seeded for each row. Draw from the global generators of torch, NumPy or "
            "Python instead, which draw other numbers for each batch"
        )
