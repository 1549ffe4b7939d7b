"""What the files of a run directory say, for the commands `report`.

`files` reads them; `goodput` sums up where the time went; `curves` makes charts of the metrics; `page` puts the page of
`fabricate report --html` together, with `markup`, `drawing` and the files in `assets/`. None of it imports torch.
"""
