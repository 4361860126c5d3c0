"""What is tried: sparse-prefill kernels, with the topk_length sources that turn each into three arms, and indexer top-k kernels."""
from arms.kernel import (
                         BITWISE,
                         KERNELS,
                         Convention,
                         Kernel,
                         Launch,
                         Limit,
                         Outputs,
                         Problem,
                         Requires,
                         SkipPromise,
                         load_file,
                         load_package,
                         make_problem,
                         normalise,
                         sparse_prefill_kernel,
)
from arms.lengths import SOURCES, Source
from arms.topk import (
                       WAYS,
                       TopkKernel,
                       TopkLaunch,
                       TopkProblem,
                       TopkResult,
                       check_problem,
                       indexer_topk_kernel,
)

__all__ = ["BITWISE", "KERNELS", "SOURCES", "WAYS", "Convention", "Kernel", "Launch", "Limit", "Outputs", "Problem", "Requires",
           "SkipPromise", "Source", "TopkKernel", "TopkLaunch", "TopkProblem", "TopkResult", "check_problem", "indexer_topk_kernel",
           "load_file", "load_package", "make_problem", "normalise", "sparse_prefill_kernel"]
