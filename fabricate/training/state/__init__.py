"""What a run is while it runs: `run_state` with the objects that own what changes, and the `journal`, which writes metrics and events."""
