"""What is right: torch references with derived error budgets."""
from references.sparse_prefill import Expected, reference

__all__ = ["Expected", "reference"]
