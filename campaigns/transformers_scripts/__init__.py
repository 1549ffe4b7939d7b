"""The scripts of examples/transformers beside transformers' own: the same command line, model and data; see `__main__`.

cases: what is run. sides: how each side is run, and what came of it. page: the tables.
"""
