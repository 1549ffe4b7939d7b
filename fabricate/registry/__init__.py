"""Plugins: names and the objects made from them (`registry`, `names`), checks of strategies and precisions that users write (`validation`),
checks of hooks (`hook_checks`), hook calls (`hook_calls`)."""
