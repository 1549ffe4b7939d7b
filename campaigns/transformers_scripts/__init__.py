"""A comparison of the scripts of examples/transformers with transformers' own: the same command line, model and data; see `__main__`.

`cases` has the scripts, `sides` runs each side, `page` makes the tables.
"""
