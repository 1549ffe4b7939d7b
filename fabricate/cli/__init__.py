"""The command line: `main` gathers the commands; each imports what it needs only when it runs, so that help costs nothing."""
