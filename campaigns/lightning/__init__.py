"""Public Lightning code, unmodified, under fabricate: `python -m campaigns.lightning --source CHECKOUT ...`.

`cases` names the code and what it needs, `sources` reads it from checkouts, `fakes` makes data, `runs` trains, `page` writes the tables.
"""
