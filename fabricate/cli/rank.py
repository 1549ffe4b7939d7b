"""`python -m fabricate.cli.rank SCRIPT ARGUMENTS`: one of several ranks that `fabricate run` starts.

Owns how a script is run inside a process of fabricate. Imports no torch.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from fabricate.launch import uncaught


def main(arguments: Sequence[str]) -> None:
    """Run the script. An exception that ends it, even before its first fit, is printed once for all ranks."""
    uncaught.end_where_hopeless()
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts != "0" and os.environ["LOCAL_RANK"] == "0":
        print(
            f"restart {restarts} of {os.environ['TORCHELASTIC_MAX_RESTARTS']}: all ranks start again", file=sys.stderr
        )
    uncaught.install(int(os.environ["RANK"]))
    run_script(arguments[0], arguments[1:])


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Run the script like `python script`, but in this process, so that signals and debuggers reach it as usual."""
    sys.argv = [script, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    runpy.run_path(os.path.abspath(script), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
