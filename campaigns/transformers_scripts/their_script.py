"""Runs one of transformers' scripts like `python SCRIPT ARGUMENTS`, with masks drawn from the tokens (see `sides`)."""

from __future__ import annotations

import runpy
import sys

from campaigns.transformers_scripts.sides import masks_by_content

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    with masks_by_content():
        runpy.run_path(sys.argv[0], run_name="__main__")
