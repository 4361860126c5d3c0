"""What to try: case records, their text form, and (in cases.inputs and cases.indexer_inputs, which need torch) a case's tensors."""
from cases.families import FAMILIES, Case, family_of, format_case, parse_case
from cases.indexer_topk import IndexerTopkCase
from cases.sparse_prefill import SparsePrefillCase
from cases.suites import load_suite, override, suite_names
from cases.text import CaseError

__all__ = ["FAMILIES", "Case", "CaseError", "IndexerTopkCase", "SparsePrefillCase", "family_of", "format_case", "load_suite", "override",
           "parse_case", "suite_names"]
