# SPDX-License-Identifier: Apache-2.0
"""What a check says."""

import enum
from dataclasses import dataclass


class State(enum.StrEnum):
    """How a check ended.

    Attributes:
        SUCCESS: nothing to do.
        PARTIAL: it works, with less than there could be.
        MISSING: something that was asked for, or is needed, does not work.
        NOT_AVAILABLE: there is nothing to check here.
        CRASHED: the check itself failed.
    """

    SUCCESS = "success"
    PARTIAL = "partial"
    MISSING = "missing"
    NOT_AVAILABLE = "not available"
    CRASHED = "crashed"


@dataclass(frozen=True)
class Finding:
    """The answer of one check.

    Attributes:
        state: how it ended.
        summary: one line, with the values that were found.
        details: further lines.
        remedy: the command, option or variable that helps. PARTIAL and MISSING
            always have one.
    """

    state: State
    summary: str
    details: tuple[str, ...] = ()
    remedy: str | None = None

    def __post_init__(self) -> None:
        if self.state in (State.PARTIAL, State.MISSING) and not self.remedy:
            raise ValueError(f"{self.state} without a remedy: {self.summary}")
