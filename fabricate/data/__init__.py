"""Data: turns the user's data into windows of micro-batches in one global order.

Owns the reading of data sets, loaders, streams and iterables, the position in an epoch (one integer: rows of the global order consumed),
each rank's share of every micro-step, and the random state during reading. Must not know devices (except `transfer`), collectives, models,
checkpoints or the loop: ranks need no messages to agree, because each of them computes the same order.

Two kinds of source. *Indexed* data (a data set, a DataLoader over one) has random access: any position is reached at
once, and a torch DataLoader reads this rank's lists of indices. *Sequential* data (streams of rows, iterables of batches) is
read whole by every rank, under a random state that depends on (seed, epoch) only, so that all ranks see the same order and
a resumed run replays it.

`user_data` makes a source of the user's data, `source` is the base class of sources, `indexed` and `sequential` are the two kinds, `order`
is the arithmetic of the order, `batches` has the objects that a source yields, `random_scope` the random state, `workers` the worker
processes, `transfer` the copies to the device, and `digests` and `identity` recognise data.
"""
