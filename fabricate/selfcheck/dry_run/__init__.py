"""The memory and communication of an update on any number of ranks, tried on one machine: `fabricate plan SCRIPT --dry-run`.

`start` runs the script with the Trainer of `trainer`, whose fit is a `rehearsal`: a few updates of the real loop under the real strategy,
on tensors without memory (`fakes`), in a group whose other ranks do not exist (`engines`), while `recorder` counts memory (`ledger`) and
messages (`traffic`). `outlines` builds a script's models without values. `report` is the result and its text.
"""
