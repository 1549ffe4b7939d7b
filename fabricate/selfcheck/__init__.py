"""Checks of a user's script: it is run several times, killed, resumed or split differently, and differences are named.

`resume_check` and `invariance` start the script and compare. Each rank runs it through `runner`, which puts `checked_trainer` in
the place of `fabricate.Trainer`; `plugins` note what a fit does. `requests` carries what to do from one to the other.
`dry_run/` tries updates as one of many ranks, without memory.
"""
