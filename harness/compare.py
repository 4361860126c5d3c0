"""Comparing tensors: bits, values, ULP. All on the tensors' device; only counts and a few elements leave it."""
from __future__ import annotations

import torch

_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """bool mask: elements whose bytes differ."""
    kind = _INT[a.element_size()]
    return a.contiguous().view(kind) != b.contiguous().view(kind)


def values_differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """bool mask: elements that are not equal. -0.0 equals 0.0 (a masked pair may turn one into the other), NaN equals NaN."""
    return (a != b) & ~(a.isnan() & b.isnan())


def ulp_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many representable values lie between a and b, int64. bf16 or fp32, finite."""
    def ordered(x: torch.Tensor) -> torch.Tensor:
        raw = x.contiguous().view(_INT[x.element_size()]).to(torch.int64)
        low = 1 << (8 * x.element_size() - 1)
        return torch.where(raw < 0, -(raw + low), raw)

    return (ordered(a) - ordered(b)).abs()


def ulp_histogram(a: torch.Tensor, b: torch.Tensor, bad: torch.Tensor) -> dict[str, int]:
    """Counts of differing elements by ULP distance: 1, 2, 3-4, 5-8, 9-16, more, and not finite."""
    left, right = a[bad], b[bad]
    finite = left.isfinite() & right.isfinite()
    distance = ulp_distance(left[finite], right[finite])
    edges = {"1": 1, "2": 2, "3-4": 4, "5-8": 8, "9-16": 16}
    counts, below = {}, 0
    for name, edge in edges.items():
        upto = int((distance <= edge).sum())
        counts[name], below = upto - below, upto
    counts["more"] = int(distance.numel()) - below
    counts["not finite"] = int((~finite).sum())
    return {name: count for name, count in counts.items() if count}


def margin(got: torch.Tensor, want: torch.Tensor, budget: torch.Tensor) -> torch.Tensor:
    """Error over budget, elementwise; 0 where equal, inf where a NaN or infinity stands on one side only."""
    error = (got.to(want.dtype) - want).abs()
    ratio = torch.where(budget > 0, error / budget, torch.inf)
    ratio = torch.where(values_differ(got.to(want.dtype), want), ratio, 0.0)
    return ratio.nan_to_num_(nan=torch.inf, posinf=torch.inf)
