"""Names to objects: options in strings, built-in and installed plugins, blocking, and messages about broken ones."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

import fabricate
from fabricate import DDP, FSDP, Callback, ConfigurationError, PluginError, Precision, Single, Strategy
from fabricate.registry.names import build, parse_name
from fabricate.registry.registry import Registry
from fabricate.strategies.device_map import DeviceMap
from tests.support.distributions import Install, installing


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    yield from installing(tmp_path, monkeypatch)


MARS = """
class Mars(Strategy):
    name = "mars"
    def __init__(self, depth: int = 1): self.depth = depth
@hookimpl
def register_strategies(register): register("mars", Mars, summary="red")
"""


@dataclasses.dataclass(eq=False)
class Optioned(Strategy):
    flag: bool = False
    count: int = 1
    rate: float = 0.5
    mode: Literal["fast", "slow"] = "fast"
    level: Literal[0, 1] | None = None
    place: str | None = None
    either: int | str = 0
    names: list[str] = dataclasses.field(default_factory=list)
    sizes: tuple[int, ...] = ()


# ----------------------------------------------------------------------------------------------------------- options in strings


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("ddp", "ddp", {}),
        ("fsdp:wrap=Block", "fsdp", {"wrap": "Block"}),
        ("a/zero3: offload-optimizer = cpu , x=1", "a/zero3", {"offload_optimizer": "cpu", "x": "1"}),
        ("x:path=a=b", "x", {"path": "a=b"}),
    ],
)
def test_a_name_with_options_is_split(text: str, name: str, options: dict[str, str]) -> None:
    assert parse_name("strategy", text) == (name, options)


@pytest.mark.parametrize(
    ("text", "message"),
    [("fsdp:wrap", "write fsdp:wrap=VALUE"), (":a=1", "the name is empty"), ("", "the name is empty")],
)
def test_a_name_that_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_name("strategy", text)


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        ("flag", "true", True),
        ("flag", "No", False),
        ("count", "3", 3),
        ("rate", "1e-3", 1e-3),
        ("rate", "2", 2.0),
        ("mode", "SLOW", "slow"),
        ("level", "1", 1),
        ("level", "none", None),
        ("place", "None", None),
        ("place", "here", "here"),
        ("either", "7", 7),
        ("either", "seven", "seven"),
    ],
)
def test_an_option_is_converted_by_the_type_that_is_declared(option: str, text: str, value: object) -> None:
    attribute = getattr(build(Optioned, "strategy", "optioned", {option: text}), option)
    assert (attribute, type(attribute)) == (value, type(value))


@pytest.mark.parametrize(
    ("option", "text", "wanted"),
    [
        ("flag", "maybe", "bool"),
        ("count", "1.5", "int"),
        ("rate", "fast", "float"),
        ("mode", "medium", "fast, slow"),
        ("level", "2", "0, 1"),
        ("names", "a", r"list\[str\]"),
        ("sizes", "1", r"tuple\[int, \.\.\.\]"),
    ],
)
def test_an_option_of_another_type_is_refused(option: str, text: str, wanted: str) -> None:
    with pytest.raises(ConfigurationError, match=f"strategy='optioned': option {option}='{text}' is not {wanted}"):
        build(Optioned, "strategy", "optioned", {option: text})


def test_an_unknown_option_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ConfigurationError, match="strategy='fsdp' has no option 'warp'; did you mean 'wrap'\\?; options: wrap, reshard"
    ):
        Registry().resolve("strategy", "fsdp:warp=Block")


def test_a_factory_that_takes_any_option_gets_text() -> None:
    def factory(**options: str) -> Single:
        strategy = Single()
        strategy.label = options  # type: ignore[attr-defined]
        return strategy

    assert build(factory, "strategy", "any", {"a": "1"}).label == {"a": "1"}


# ------------------------------------------------------------------------------------------------------------------ resolving


def test_built_in_names_give_built_in_objects() -> None:
    registry = Registry()
    assert {name: type(registry.resolve("strategy", name)[0]) for name in registry.names("strategy")} == {
        "ddp": DDP,
        "device_map": DeviceMap,
        "fsdp": FSDP,
        "single": Single,
    }
    assert registry.names("precision") == ["bf16", "bf16-true", "fp16", "fp32", "no", "tf32"]


def test_a_name_with_options_sets_them_and_tells_its_origin() -> None:
    strategy, offer = Registry().resolve("strategy", "fsdp:offload=cpu,reshard-after-forward=false")
    assert (strategy.offload, strategy.reshard_after_forward) == ("cpu", False)
    assert str(offer.origin) == f"fabricate-trainer {fabricate.__version__}"  # type: ignore[union-attr]


def test_an_object_is_taken_as_it_is() -> None:
    strategy = FSDP(offload="cpu")
    assert Registry().resolve("strategy", strategy) == (strategy, None)


def test_a_class_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"strategy=FSDP is a class; pass an object, FSDP\(\), or a name"):
        Registry().resolve("strategy", FSDP)


@pytest.mark.parametrize("value", [None, 3, Precision()])
def test_what_is_neither_name_nor_strategy_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"give a name \(ddp, device_map, fsdp, single\), a name with options"):
        Registry().resolve("strategy", value)


@pytest.mark.parametrize(
    ("kind", "wrong", "right"), [("strategy", "dpp", "ddp"), ("strategy", "fdsp", "fsdp"), ("precision", "bf6", "bf16")]
)
def test_an_unknown_name_is_refused_with_the_nearest(kind: str, wrong: str, right: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{kind}='{wrong}' is not known; did you mean '{right}'\\?; known: "):
        Registry().resolve(kind, wrong)


def test_built_in_names_import_no_installed_plugin(install: Install) -> None:
    install("fabricate-mars", MARS)
    registry = Registry()
    for kind in ("strategy", "precision"):
        for name in registry.names(kind):
            registry.resolve(kind, name)
    assert "fabricate_mars" not in sys.modules


def test_the_registry_does_not_import_torch() -> None:
    code = "import sys; from fabricate.registry.registry import Registry; Registry().resolve('strategy', 'ddp'); "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ----------------------------------------------------------------------------------------------------------- installed plugins


def test_an_installed_strategy_is_found_by_its_name(install: Install) -> None:
    install("fabricate-mars", MARS, name="space", version="2.5")
    strategy, offer = Registry().resolve("strategy", "mars:depth=4")
    assert strategy.depth == 4
    assert offer is not None
    assert (offer.plugin, str(offer.origin)) == ("space", "fabricate-mars 2.5")


def test_a_factory_given_as_text_is_imported_only_when_chosen(install: Install) -> None:
    install(
        "fabricate-lazy", "@hookimpl\ndef register_strategies(register): register('lazy', 'fabricate_lazy_part:Lazy')"
    )
    install("fabricate-lazy-part", "class Lazy(Strategy): name = 'lazy'", name="part")
    registry = Registry()
    offer = registry.find("strategy", "lazy")
    assert type(registry.resolve("strategy", "lazy")[0]).__name__ == "Lazy"
    assert offer.factory == "fabricate_lazy_part:Lazy"


def test_a_factory_that_is_not_there_is_an_error_that_names_its_distribution(install: Install) -> None:
    install("fabricate-lazy", "@hookimpl\ndef register_strategies(register): register('lazy', 'nowhere_at_all:Lazy')")
    with pytest.raises(
        PluginError,
        match=r"strategy 'lazy' of plugin 'fabricate_lazy' \(fabricate-lazy 1.0\) cannot be loaded from 'nowhere_at_all:Lazy'",
    ):
        Registry().resolve("strategy", "lazy")


def test_a_factory_that_makes_something_else_is_an_error(install: Install) -> None:
    install("fabricate-odd", "@hookimpl\ndef register_strategies(register): register('odd', dict)")
    with pytest.raises(
        PluginError, match=r"strategy 'odd' of plugin 'fabricate_odd' \(fabricate-odd 1.0\) made a dict, not a Strategy"
    ):
        Registry().resolve("strategy", "odd")


def test_a_name_that_cannot_be_written_in_a_string_is_refused(install: Install) -> None:
    install("fabricate-odd", "@hookimpl\ndef register_strategies(register): register('a:b', Strategy)")
    with pytest.raises(PluginError, match="registers the strategy name 'a:b'; use letters, digits, - and _"):
        Registry(["fabricate_odd"])


def test_one_name_from_two_plugins_needs_the_qualified_name(install: Install) -> None:
    install("fabricate-mars", MARS, name="one")
    install("fabricate-venus", MARS.replace("red", "hot"), name="two", version="3.0")
    with pytest.raises(
        PluginError,
        match=r"strategy='mars' is offered by 'one' \(fabricate-mars 1.0\) and 'two' \(fabricate-venus 3.0\); choose with one/mars or "
        "two/mars",
    ):
        Registry().resolve("strategy", "mars")
    strategy, offer = Registry().resolve("strategy", "two/mars")
    assert (type(strategy).__module__, offer.summary) == ("fabricate_venus", "hot")  # type: ignore[union-attr]


def test_a_built_in_name_wins_and_the_qualified_one_gives_the_other(install: Install) -> None:
    install("fabricate-mars", MARS.replace('"mars"', '"ddp"'), name="mars")
    assert type(Registry().resolve("strategy", "ddp")[0]) is DDP
    assert type(Registry().resolve("strategy", "mars/ddp")[0]).__name__ == "Mars"
    assert type(Registry().resolve("strategy", "fabricate/ddp")[0]) is DDP


def test_an_installed_plugin_is_not_active_by_itself(install: Install) -> None:
    install("fabricate-moon", "@hookimpl\ndef on_step(step): pass", name="moon")
    registry = Registry()
    registry.resolve("strategy", "single")
    assert registry.active == []
    assert registry.activate([]).table() == []


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_a_named_plugin_is_active(how: str, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "class Moon(Callback):\n    def __init__(self, decay: float = 0.9): self.decay = decay\n    def on_step(self, step): pass"
    install("fabricate-moon", code, name="moon", attribute="Moon")
    if how == "environment":
        monkeypatch.setenv("FABRICATE_PLUGINS", "moon:decay=0.5")
    registry = Registry(["moon:decay=0.5"] if how == "argument" else [])
    [(name, plugin)] = registry.active
    assert (name, plugin.decay) == ("moon", 0.5)  # type: ignore[attr-defined]
    manager = registry.activate([])
    assert manager.table() == [["on_step", ["moon"]]]
    assert str(manager.origins["moon"]) == "fabricate-moon 1.0"


def test_a_plugin_that_only_offers_names_is_no_plugin_to_activate(install: Install) -> None:
    install("fabricate-mars", MARS, name="mars")
    with pytest.raises(
        PluginError, match="plugins='mars': this plugin implements no hook, it only offers names; choose one with "
    ):
        Registry(["mars"])


def test_a_tracker_given_as_a_plugin_is_told_the_argument_for_trackers(install: Install) -> None:
    code = "@hookimpl\ndef register_trackers(register): register('logs', dict, summary='logs')"
    install("fabricate-logs", code, name="logs")
    with pytest.raises(PluginError, match=r"it only offers names; choose one with trackers=\['logs'\]"):
        Registry(["logs"])


def test_a_listener_asked_for_as_a_strategy_is_told_from_a_misspelt_name(install: Install) -> None:
    install("fabricate-moon", "class Moon(Callback):\n    def on_step(self): pass", name="moon", attribute="Moon")
    with pytest.raises(ConfigurationError, match=r"'moon' is a plugin that implements hooks: use plugins=\['moon'\]"):
        Registry().resolve("strategy", "moon")


def test_an_option_that_is_given_twice_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="option 'a' is given twice"):
        parse_name("strategy", "mine:a=1,a=2")


def test_a_module_of_functions_is_a_plugin(install: Install) -> None:
    install("fabricate-print", "@hookimpl\ndef on_step(step): pass", name="print")
    assert Registry(["print"]).activate([]).table() == [["on_step", ["print"]]]
    with pytest.raises(PluginError, match=r"plugins='print': this plugin takes no options, but \{'a': '1'\} was given"):
        Registry(["print:a=1"])


def test_a_module_with_an_unmarked_hook_is_refused(install: Install) -> None:
    install("fabricate-print", "def on_step(step): pass", name="print")
    with pytest.raises(
        PluginError,
        match=r"fabricate_print.on_step would never be called: inherit from fabricate.Callback or decorate it",
    ):
        Registry(["print"]).activate([])


def test_an_unknown_plugin_is_refused_with_the_nearest(install: Install) -> None:
    install("fabricate-moon", name="moon")
    with pytest.raises(
        PluginError,
        match=r"plugins='mooon': no installed plugin has this name; did you mean 'moon'\?; installed: .*moon",
    ):
        Registry(["mooon"])


def test_a_plugin_listed_twice_is_refused(install: Install) -> None:
    install("fabricate-moon", "class Moon(Callback):\n    def on_step(self): pass", name="moon", attribute="Moon")
    with pytest.raises(PluginError, match="plugins: 'moon' is listed twice; remove one"):
        Registry(["moon", "moon"])


def test_two_distributions_with_one_plugin_name_are_an_error_naming_both(install: Install) -> None:
    install("fabricate-one", MARS, name="moon")
    install("fabricate-two", MARS, name="moon", version="2.0")
    with pytest.raises(
        PluginError, match=r"plugins='moon' is offered by fabricate-one 1.0 and fabricate-two 2.0; uninstall one"
    ):
        Registry(["moon"])


def test_an_objects_distribution_is_told(install: Install) -> None:
    install("fabricate-moon", "class Moon(Callback):\n    def on_step(self, step): pass", name="moon")
    registry = Registry([importlib.import_module("fabricate_moon").Moon()])
    assert str(registry.manager.origins["Moon"]) == "fabricate-moon 1.0"


# ----------------------------------------------------------------------------------------------------------- blocked and broken


def test_a_blocked_plugin_offers_nothing_and_is_not_imported(install: Install) -> None:
    install("fabricate-mars", MARS, name="mars")
    registry = Registry(["no:mars"])
    with pytest.raises(ConfigurationError, match="strategy='mars' is not known"):
        registry.resolve("strategy", "mars")
    assert "fabricate_mars" not in sys.modules


def test_what_is_asked_for_and_blocked_is_refused(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("fabricate-mars", MARS, name="mars")
    monkeypatch.setenv("FABRICATE_PLUGINS", "no:mars")
    with pytest.raises(PluginError, match="'mars' is requested and blocked by 'no:mars'"):
        Registry(["mars"])


def test_a_broken_plugin_harms_nobody_who_did_not_ask_for_it(install: Install) -> None:
    install("fabricate-broken", "import a_module_that_is_missing", name="broken")
    install("fabricate-mars", MARS, name="mars")
    assert Registry().resolve("strategy", "mars")[0].name == "mars"


def test_a_broken_plugin_that_is_asked_for_says_why(install: Install) -> None:
    install("fabricate-broken", "import a_module_that_is_missing", name="broken")
    with pytest.raises(
        PluginError,
        match=r"plugin 'broken' \(fabricate-broken 1.0, fabricate_broken\) fails to import: ModuleNotFoundError: No module named",
    ):
        Registry(["broken"])


def test_an_unknown_name_tells_about_broken_plugins(install: Install) -> None:
    install("fabricate-broken", "import a_module_that_is_missing", name="broken")
    with pytest.raises(
        ConfigurationError,
        match=r"strategy='venus' is not known; known: .*; plugin 'broken' is broken: .*a_module_that_is_missing",
    ):
        Registry().resolve("strategy", "venus")


def test_a_plugin_that_fails_while_offering_says_where(install: Install) -> None:
    install("fabricate-broken", "@hookimpl\ndef register_strategies(register): 1 / 0", name="broken")
    with pytest.raises(
        PluginError, match=r"plugin 'broken' \(fabricate-broken 1.0\) fails in register_strategies: ZeroDivisionError"
    ):
        Registry(["broken"])


def test_every_plugin_is_described_with_its_state(install: Install) -> None:
    install("fabricate-active", "@hookimpl\ndef on_step(step): pass", name="active", version="1.1")
    install("fabricate-blocked", MARS, name="blocked")
    install("fabricate-broken", "import a_module_that_is_missing", name="broken")
    install("fabricate-failing", "@hookimpl\ndef register_precisions(register): 1 / 0", name="failing")
    install("fabricate-mars", MARS, name="mars", version="1.2")

    class Mine(Callback):
        def on_step(self) -> None: ...

    ours = ("fabricate", "Mine", "active", "blocked", "broken", "failing", "mars")
    rows = [row for row in Registry(["active", "no:blocked", Mine()]).describe() if row.name in ours]
    assert [(row.name, row.distribution, row.version, row.state) for row in rows] == [
        ("fabricate", "fabricate-trainer", fabricate.__version__, "built-in"),
        ("Mine", "", "", "active"),
        ("active", "fabricate-active", "1.1", "active"),
        ("blocked", "fabricate-blocked", "1.0", "blocked"),
        ("broken", "fabricate-broken", "1.0", "broken"),
        ("failing", "fabricate-failing", "1.0", "broken"),
        ("mars", "fabricate-mars", "1.2", "available"),
    ]
    by_name = {row.name: row for row in rows}
    assert by_name["mars"].offers == ("strategy:mars",)
    assert "strategy:ddp" in by_name["fabricate"].offers
    assert (
        by_name["broken"].reason
        == "fabricate_broken fails to import: ModuleNotFoundError: No module named 'a_module_that_is_missing'"
    )
    assert by_name["failing"].reason == "register_precisions: ZeroDivisionError: division by zero"


def test_an_unknown_name_from_the_command_line_says_where_an_option_of_the_script_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FABRICATE_PRECISION", "high")
    with pytest.raises(ConfigurationError, match=r"'high' is not known; known: .*put an option of the script after --"):
        Registry().resolve("precision", "high")
