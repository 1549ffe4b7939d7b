"""The command line. `main` collects the commands; each imports its dependencies only when it runs, so that help is fast. `launch` has the
options of commands that start a script, and `runner` is the process that runs it; `checkpoints`, `plugins` (with `plugin_template`),
`report`, `doctor` (with `doctor_checks`) and `self_checks` are the other commands; `dry_run` has the options of `plan --dry-run`; `tables`
prints tables."""
