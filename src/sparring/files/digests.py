"""Digests of what files hold, so that a file that was damaged or edited, or belongs elsewhere, is noticed.

They detect accidents and edits, not an adversary: whoever can rewrite a file can write a new digest as well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

SUM = "sha256"  # the field of a sealed object


def of_json(value: Any) -> str:
    """sha256 of a value as JSON, whatever the order of its keys and the spaces it is written with."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def chained(digest: str, record: Mapping[str, Any]) -> str:
    """The digest of a list of records with one more; that of an empty list is ""."""
    return of_json([digest, record])


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """The object with a digest of all of it as its last field."""
    return {**content, SUM: of_json(content)}


def intact(content: Mapping[str, Any]) -> bool:
    """Whether a sealed object is as it was written."""
    return content.get(SUM) == of_json({name: value for name, value in content.items() if name != SUM})
