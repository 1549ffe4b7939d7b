"""The command line. `main` gathers the commands; each imports what it needs only when it runs, so that help costs nothing.

`launch` has the options of whatever starts a script and `runner` is the process that runs it; `checkpoints`, `plugins` (with
`plugin_template`), `report`, `doctor` (with `doctor_checks`) and `self_checks` are the other commands; `dry_run` has the options of `plan
--dry-run`; `tables` prints tables.
"""
