"""How many examples a property test draws: what it says in profile ci, many times that in profile nightly (conftest.py)."""
from __future__ import annotations

from hypothesis import settings

PLAIN = 100  # Hypothesis's own number, which profile ci keeps


def many(count: int) -> int:
    """`count` examples in profile ci, in others as many more as these have more than it."""
    return max(1, count * settings().max_examples // PLAIN)
