"""The message for an exception that ends one of several ranks."""

from __future__ import annotations

import json
from pathlib import Path

from fabricate.errors import RankError
from fabricate.launch.uncaught import gist

HERE = Path(__file__)


def raised(text: str, *notes: str) -> Exception:
    try:
        json.loads(text)
    except ValueError as exc:
        for note in notes:
            exc.add_note(note)
        return exc
    raise AssertionError


def test_the_place_is_the_last_line_of_the_users_own_files() -> None:
    what, where, remedy = gist(raised("x"), 1)
    assert what == "rank 1 failed: JSONDecodeError: Expecting value: line 1 column 1 (char 0)"
    assert where.endswith(f"{HERE.name}:16, in raised: json.loads(text)")
    assert remedy == "correct it and start the same command again"


def test_the_last_note_says_what_to_do() -> None:
    assert gist(raised("x", "while training", "the same command continues from runs/a"), 0)[2] == (
        "the same command continues from runs/a"
    )


def test_of_a_long_message_the_first_and_the_last_line_are_shown() -> None:
    """As of a worker process, in whose message torch puts the traceback."""
    long = RankError("Caught ValueError in worker process 0.\n  File ...\nValueError: row 5\n")
    assert gist(long, 0)[0] == "rank 0 failed: RankError: Caught ValueError in worker process 0. ... ValueError: row 5"
    assert gist(RankError(), 0)[:2] == ("rank 0 failed: RankError", "at an unknown place")
