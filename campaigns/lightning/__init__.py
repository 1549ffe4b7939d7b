"""Public Lightning code, unmodified, under fabricate: `python -m campaigns.lightning --source CHECKOUT ...`.

`cases` has the code and its setup, `sources` reads it from checkouts, `fakes` makes data, `runs` trains, `page` writes the tables.
"""
