"""Campaigns against checkpoints: crashes at every operation, real kills, altered bytes, and checks removed one by one.

Each prints what it did, and ends with exit code 1 at the first checkpoint that is lost or damage that is not noticed. Seeds are fixed.

    python -m campaigns.checkpoints crash      every operation of a save as the end of a process or machine, unsynced data lost
    python -m campaigns.checkpoints corrupt    altered, swapped and forged checkpoints
    python -m campaigns.checkpoints mutants    the code without one fsync, rename or check: do the campaigns notice?
    python -m campaigns.checkpoints kill       real SIGKILLs of whole runs, which then have to end bit by bit as if unharmed
    python -m campaigns.checkpoints pairs      every checkpoint under every strategy, which continues as if it had written it
    python -m campaigns.checkpoints memory     how much more a rank holds while it saves and resumes
    python -m campaigns.checkpoints            all of them; --long for the full number, --out for the page of the documentation
"""
