"""A file that does not import."""
from __future__ import annotations

import threearm_no_such_module  # noqa: F401
