"""`python -m fabricate`: the same as the `fabricate` command."""

from __future__ import annotations

from fabricate.cli.main import main

if __name__ == "__main__":
    main(prog_name="fabricate")
