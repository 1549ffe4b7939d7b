"""Plugins: names and what they stand for (`registry`, `names`), checks of what users bring (`validation`), hook calls (`hook_calls`)."""
