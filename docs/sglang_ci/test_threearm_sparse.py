"""Sparse MLA prefill kernels of SGLang: every topk_length source against an fp32 reference, within derived error budgets.

Copy to test/registered/kernels/. Needs `pip install threearm` in the CI image; run as `python3 test_threearm_sparse.py`.
A failure prints the line that repeats it. THREEARM_SUITE, THREEARM_ARMS and THREEARM_DEVICE choose something else by hand.
"""

import importlib.util
import os
import sys

import pytest

from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=240, stage="base-b-kernel-unit", runner_config="1-gpu-large")

SUITE = "edge"
ARMS = "sglang_q8kv8 sgl_kernel"


def options() -> list[str]:
    """For pytest. No path: the items are the suite's cases alone."""
    arms = os.environ.get("THREEARM_ARMS", ARMS).split()
    chosen = [word for arm in arms for word in ("--threearm-arm", arm)]
    return [
        "-v",
        "--threearm-suite",
        os.environ.get("THREEARM_SUITE", SUITE),
        "--threearm-device",
        os.environ.get("THREEARM_DEVICE", "cuda"),
        *chosen,
    ]


if __name__ == "__main__":
    if importlib.util.find_spec("threearm_pytest") is None:
        sys.exit("threearm is not installed: pip install threearm")
    sys.exit(pytest.main(options()))
