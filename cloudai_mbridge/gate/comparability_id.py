"""The digest of what must be equal for two results to be compared."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def comparability_id(fields: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of the fields' canonical JSON; equal fields give equal digits."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
