"""Strategies: the abstract class (`base`), which part of a tensor a rank holds (`sharding`), and the built-in strategies.

A file of a built-in strategy imports nothing of fabricate but public names and its neighbours, as a third party would."""
