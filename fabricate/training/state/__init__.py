"""The state of a run: `run_state` with the objects that own what changes, and the `journal`, which writes metrics and events."""
