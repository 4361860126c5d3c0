"""A file whose import never ends."""
from __future__ import annotations

import time

time.sleep(1000)
