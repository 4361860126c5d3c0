"""What is right: torch references with derived error budgets."""
from references.indexer_topk import TopkExpected, topk_reference
from references.sparse_prefill import Expected, reference

__all__ = ["Expected", "TopkExpected", "reference", "topk_reference"]
