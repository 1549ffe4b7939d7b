"""Checks of a user's script: run it several times (killed, resumed, or with batches split differently), and report the differences.

`resume_check` and `invariance` start the script and compare the results. Each rank runs the script through `runner`, which replaces
`fabricate.Trainer` by `checked_trainer`; `plugins` record what a fit does. `requests` describes what each start has to do. `dry_run/` tries
updates as one of many ranks, without memory.
"""
