"""The data room: turns whatever the user passed as data into windows of micro-batches with one global order.

Owns the reading of data sets, loaders, streams and iterables, the position in an epoch (one integer: rows of the
global order consumed), each rank's share of every micro-step, and the random state that reading happens under. The
arithmetic is `fabricate.data.order`'s. Must not know devices, collectives, models, checkpoints or the loop: ranks agree
because every one of them computes the same order, not because they talk.

Two kinds of source. *Indexed* data (a data set, a DataLoader over one) has random access: any position is reached at
once, and reading is left to a torch DataLoader that is handed this rank's index lists. *Sequential* data (streams of
rows, iterables of batches) is read whole by every rank, under a random state of its own that depends on (seed, epoch)
only, so that all ranks see the same order and a resumed run replays it.
"""
