"""Callbacks that fabricate ships, one per file; they use public names only, as a user's own do."""
