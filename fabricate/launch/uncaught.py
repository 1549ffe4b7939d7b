"""The output of several ranks when an exception ends them: one traceback per host, and at the end a summary in three lines.

Owns `sys.excepthook` of a rank, and the file in which torchrun and launchers based on it look for the reason why a rank ended. Must not
know what the ranks were doing; imports no torch.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from fabricate.errors import ConfigurationError, RankError
from fabricate.launch.commands import PREEMPTED_FILE

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""torchrun's variable: the file into which a rank writes why it ended. The files of the ranks of one host are in neighbouring folders."""
_PACKAGE = str(Path(__file__).parents[1])
_WAIT_SECONDS = 2.0
AGAIN = "correct it and start the same command again"


def gist(exc: BaseException, rank: int) -> tuple[str, str, str]:
    """A summary of the exception that ended `rank`: what happened, where in the user's files, what to do (its last note)."""
    first, *others = f"{type(exc).__name__}: {exc}".removesuffix(": ").strip().splitlines()
    # In an error from a data worker, torch puts the traceback of the worker between the first and the last line.
    what = f"{first} ... {others[-1].strip()}" if others else first
    notes = getattr(exc, "__notes__", [])
    return f"rank {rank} failed: {what}", f"at {_place(exc.__traceback__)}", notes[-1] if notes else AGAIN


def _place(trace: TracebackType | None) -> str:
    """The innermost line of the traceback that is neither fabricate's, nor an installed package's, nor Python's own."""
    frames = traceback.extract_tb(trace)
    frame = next(
        (f for f in reversed(frames) if not f.filename.startswith(_libraries())), frames[-1] if frames else None
    )
    if frame is None:
        return "an unknown place"
    path = os.path.relpath(frame.filename) if frame.filename.startswith(os.getcwd() + os.sep) else frame.filename
    return f"{path}:{frame.lineno}, in {frame.name}: {frame.line}"


def install(rank: int) -> None:
    """Install the `sys.excepthook` of this module, for one of several ranks. When a process group opens, torch wraps the current hook in
    its own; call this again to remove torch's."""
    if not _installed:
        _installed.append(_Uncaught(rank, sys.excepthook))
    sys.excepthook = _installed[0]


class _Uncaught:
    """The hook that prints the exception that ends this process. `before`: the hook until now, perhaps the user's own."""

    def __init__(self, rank: int, before: Callable[..., object]) -> None:
        self._rank, self._before = rank, before
        self._file = Path(os.environ[_ERROR_FILE]) if os.environ.get(_ERROR_FILE) else None

    def __call__(self, kind: type[BaseException], exc: BaseException, trace: TracebackType | None) -> None:
        follows = exc.first if isinstance(exc, RankError) else ()
        summary = follows or gist(exc, self._rank)
        if not follows and self._is_first():
            print(f"rank {self._rank}:", file=sys.stderr)
            self._before(kind, exc.with_traceback(_of_script(trace)), _of_script(trace))
        else:
            self._wait_for_first()
            line = f"rank {self._rank} stopped because of that" if follows else f"{summary[0]} ({summary[1]})"
            print(line, file=sys.stderr)
        if isinstance(exc, ConfigurationError) and (path := _hopeless()):
            path.write_text("\n".join(summary))
        if self._file is None:
            print(*(() if follows else summary), sep="\n", file=sys.stderr, flush=True)
        else:
            _leave(self._file, "\n".join(summary))

    def _is_first(self) -> bool:
        """Whether no other rank of this host prints its traceback."""
        if self._file is None:
            return True
        try:
            (self._file.parents[1] / "first-traceback").touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            pass
        return True

    def _wait_for_first(self) -> None:
        """Wait until the rank that prints the traceback has written its error file, because the launcher ends all ranks as soon as one has
        ended."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while self._file is not None and time.monotonic() < deadline:
            if any(self._file.parents[1].glob("*/error.json")):
                return
            time.sleep(0.05)


def _leave(file: Path, text: str) -> None:
    """Write `text` to `file` in torch's format. torchrun shows the text of the rank that failed first."""
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    try:
        file.write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
    except OSError as exc:
        print(f"{file}: {exc}\n{text}", file=sys.stderr, flush=True)


def _hopeless() -> Path | None:
    """The file in which a rank reports that it would fail again after a restart by `fabricate run --max-restarts`; None under other
    launchers."""
    file = os.environ.get(PREEMPTED_FILE)
    return Path(file).with_name("configuration-error") if file else None


def end_where_hopeless() -> None:
    """End this rank at once, for the same reason, if it was restarted after a `ConfigurationError`."""
    path = _hopeless()
    if path is None or not path.exists():
        return
    if os.environ.get(_ERROR_FILE):
        _leave(Path(os.environ[_ERROR_FILE]), path.read_text())
    sys.exit(1)


_installed: list[_Uncaught] = []


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """`trace` without the frames that lead to the script."""
    ours = os.path.join(_PACKAGE, "cli") + os.sep
    rest = trace
    while rest is not None and rest.tb_frame.f_code.co_filename.startswith(("<frozen runpy>", ours)):
        rest = rest.tb_next
    return rest or trace


@functools.cache
def _libraries() -> tuple[str, ...]:
    """The folders of code that is not the user's: Python, installed packages, fabricate."""
    return (*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")), _PACKAGE, "<")
