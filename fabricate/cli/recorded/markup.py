"""HTML whose text cannot become markup: every string is escaped, except those that this module made."""

from __future__ import annotations

import html
import json
from typing import Any

__all__ = ["Html", "element", "joined", "json_block"]

_VOID = ("meta", "input", "br")
"""Names of elements without an end tag."""


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def element(name: str, /, *children: str, **attributes: str | float | None) -> Html:
    """An element. `class_` is the attribute class, `data_chart` is data-chart. Attributes that are None are left out.

    >>> element("p", "1 < 2", class_="sum")
    '<p class="sum">1 &lt; 2</p>'
    """
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    start = "".join(f' {key}="{html.escape(str(value))}"' for key, value in given.items())
    return Html(f"<{name}{start}>" if name in _VOID else f"<{name}{start}>{joined(*children)}</{name}>")


def joined(*children: str) -> Html:
    """The concatenation of `children`, escaped."""
    return Html("".join(child if isinstance(child, Html) else html.escape(child) for child in children))


def json_block(name: str, value: Any) -> Html:
    """Data for the page's script, as the text of `<script type="application/json">`: no character in it can end the element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Html(f'<script type="application/json" id="{name}">{text}</script>')
