"""Indexer kernels with a fault that only a worker can tell of: one ends its process, one is wrong once it has run for a while."""
import itertools
import os

from arms import indexer_topk_kernel
from arms.indexer_topk.torch_dense import torch_dense


@indexer_topk_kernel("exits")
def exits(problem):
    return lambda: os._exit(7)


@indexer_topk_kernel("late_topk", arm="dense")
def late_topk(problem):
    launch, launches = torch_dense(problem), itertools.count()

    def late():
        result = launch()
        if next(launches) > 40:
            result.indices[0, 0] = result.indices[0, 1]
        return result

    return late
