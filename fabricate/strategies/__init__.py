"""Strategies: the abstract class (`base`), which part of a tensor a rank holds (`sharding`), and the built-in strategies.

The file of a built-in strategy imports only public names of fabricate and its neighbours, like a strategy of a third party."""
