"""`python -m fpmsdk.collect.local_watchdog RECORD`: ends an engine whose executor was killed.

It reads what is known of the engine from its standard input, a line at a time, until that closes; `null` says that the
executor is done with it. Source: collector.md section 4.3.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from fpmsdk.collect.local_process import end_group

_GRACE_S = 10.0


def watch(lines: Iterable[str], record: Path) -> None:
    """End the processes of the last line that was read, unless it is `null`.

    Parameters
    ----------
    lines: JSON of `{pid, pgid, start_time, token}`, or `null`; the iteration ends with the executor.
    record: the file that the executor keeps of the engine.

    Raises
    ------
    CollectionError: some processes do not end.

    Source: collector.md section 4.3.
    """
    known = None
    for line in lines:
        known = json.loads(line)
    if known is not None:
        end_group(known, record, grace_s=_GRACE_S)


if __name__ == "__main__":
    watch(sys.stdin, Path(sys.argv[1]))
