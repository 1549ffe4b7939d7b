"""The contents of run directories, for the commands `report`, `watch`, `rows` and `diff`.

`files` reads them, `following` while they grow; `goodput` sums up where the time went; `curves` makes charts of the metrics; `page` puts
the page of `fabricate report --html` together, with `markup`, `drawing` and the files in `assets/`; `terminal` is what `watch` shows;
`rows` computes which rows made a step, `script_data` opens the data of a script for it; `compared` is what `diff` finds. None of it
imports torch, except `script_data`.
"""
