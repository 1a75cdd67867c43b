"""What an assessment of evidence found: what is missing, and what contradicts.

Source: onboarding.md section 8.5 (assess).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fpmsdk.documents.evidence import verify_evidence
from fpmsdk.errors import EvidenceError, OnboardError


@dataclass
class Findings:
    """Missing evidence leaves a result open; a contradiction decides it.

    >>> findings = Findings()
    >>> findings.expect(2, 3, "two ranks")
    >>> findings.failures
    ['two ranks: expected 2, found 3']
    """

    missing: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def expect(self, expected: Any, found: Any, what: str) -> None:
        """Note a contradiction unless both are equal."""
        if expected != found:
            self.failures.append(f"{what}: expected {expected}, found {found}")

    def sources(self, references: Any, what: str) -> None:
        """Verify a list of evidence references; none at all, and one that cannot be read, is missing evidence."""
        if not isinstance(references, list) or not references:
            self.missing.append(f"{what}: no evidence files are given")
            return
        for reference in references:
            with self.unavailable(what):
                try:
                    verify_evidence(reference)
                except EvidenceError as fault:
                    is_gone = not os.path.lexists(reference["path"])
                    (self.missing if is_gone else self.failures).append(str(fault))

    @contextmanager
    def unavailable(self, what: str) -> Iterator[None]:
        """Note evidence as missing when reading it fails."""
        try:
            yield
        except (OSError, OnboardError, KeyError, TypeError, AttributeError, ValueError) as fault:
            self.missing.append(f"{what} is unavailable: {fault}")
