"""What to try: case records, their text form, and (in cases.inputs, which needs torch) the tensors a case stands for."""
from cases.sparse_prefill import SparsePrefillCase, format_case, parse_case
from cases.suites import load_suite, suite_names
from cases.text import CaseError

__all__ = ["CaseError", "SparsePrefillCase", "format_case", "load_suite", "parse_case", "suite_names"]
