"""Precisions: the abstract class (`base`) and the built-in ones (`builtin`)."""
