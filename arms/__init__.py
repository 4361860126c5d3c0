"""What is tried: kernels, and the topk_length sources that turn each into three arms."""
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

__all__ = ["BITWISE", "KERNELS", "SOURCES", "Convention", "Kernel", "Launch", "Limit", "Outputs", "Problem", "Requires",
           "SkipPromise", "Source", "load_file", "load_package", "make_problem", "normalise", "sparse_prefill_kernel"]
