"""The rooms of the house: imports run from a room to those listed before it, without circles; built-ins use public names only; functions
are below the size limits. `python -m tests.support.house` prints the figures."""

from __future__ import annotations

import pytest

import fabricate
import fabricate.testing
from tests.support import house
from tests.support.house import MODULES, PLUGINS, ROOMS, imports, inner_imports, module_of, room

MAY_IMPORT_ACCELERATE = {"distributed", "strategies", "module", "trainer"}
"""`module` and `trainer` for the type of `trainer.accelerator` only."""
MAY_IMPORT_THE_PACKAGE = {"selfcheck", "testing", "cli"}
"""`from fabricate import X` resolves X from any room; for a room that is imported by others that would be a circle."""
SHIPPED = ("fabricate.callbacks.", "fabricate.testing.", "fabricate.strategies.", "fabricate.precisions.")
ABSTRACT = {"fabricate.strategies.base", "fabricate.strategies.sharding", "fabricate.precisions.base"}
BUILT_IN = {name for name in MODULES if name.startswith(SHIPPED)} - ABSTRACT


def test_one_listing_of_the_package_shows_every_room() -> None:
    names = {name.removesuffix(".py") for name in house.entries()}
    assert names - {"__init__", "py.typed"} == set(ROOMS)
    assert len(house.entries()) <= house.MOST_ENTRIES


@pytest.mark.parametrize("name", sorted(MODULES.keys() - {"fabricate"}))
def test_a_room_imports_only_from_rooms_listed_before_it(name: str) -> None:
    place = ROOMS.index(room(name))
    assert {other for other in inner_imports(name) if ROOMS.index(room(other)) > place} == set()
    assert room(name) in MAY_IMPORT_THE_PACKAGE or not {d for d in imports(name) if module_of(d) == "fabricate"}


def test_imports_make_no_circle() -> None:
    assert house.circle() == []
    assert house.folder_circle() == []


@pytest.mark.parametrize("name", sorted(BUILT_IN | PLUGINS.keys()))
def test_built_ins_testing_and_plugins_use_public_names_only(name: str) -> None:
    """Of fabricate, whatever a third party can import; and their neighbours in the same folder."""
    own = name.rpartition(".")[0] + "."
    foreign = {dotted for dotted in imports(name) if f"{dotted}.".startswith("fabricate.")} - {"fabricate"}
    foreign = {dotted for dotted in foreign if not f"{module_of(dotted)}.".startswith(own)}
    public = {*fabricate.__all__, *fabricate.testing.__all__}
    assert {dotted for dotted in foreign if dotted.rpartition(".")[2] not in public} == set()


@pytest.mark.parametrize("name", sorted(MODULES))
def test_accelerate_is_imported_in_few_rooms(name: str) -> None:
    imports_it = any(dotted.partition(".")[0] == "accelerate" for dotted in imports(name))
    assert not imports_it or room(name) in MAY_IMPORT_ACCELERATE


def test_every_function_can_be_read_on_one_screen() -> None:
    assert house.too_large() == []


def test_objects_that_the_loop_passes_around_are_frozen() -> None:
    mutable, owners = house.run_fields()
    assert mutable == 0
    assert len(owners) <= 7


def test_no_source_is_generated_and_ranks_exchange_data_through_torch_only() -> None:
    assert house.uses({"exec", "eval", "compile"}) == []
    assert house.transport() == []
