"""Plugins: names and what they stand for (`registry`, `names`), checks of strategies and precisions that users bring (`validation`) and
of their hooks (`hook_checks`), hook calls (`hook_calls`)."""
