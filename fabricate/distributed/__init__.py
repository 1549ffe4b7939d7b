"""Ranks: the process group and messages (`group`), the Accelerator (`engine`), comparing ranks (`consistency`), forks (`fork`)."""
