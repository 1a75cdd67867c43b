"""What is certain to fail on this machine is refused before a model is loaded for it.

Source: collector.md sections 4.3 and 10.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from fpmsdk.errors import CollectionError

METRIC_PORT = "DYN_FORWARDPASS_METRIC_PORT"
_DEFAULT_METRIC_PORT = 20380
# Logs of a few megabytes and results of some tens; full disks are found out before hours are spent.
MIN_FREE_BYTES = 256 * 2**20


def require_space(folder: Path) -> None:
    """Require room for logs and results.

    Parameters
    ----------
    folder: where they are written; it exists.

    Raises
    ------
    CollectionError: less than `MIN_FREE_BYTES` are free.

    Source: collector.md section 4.3.
    """
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < MIN_FREE_BYTES:
        raise CollectionError(
            f"{folder}: {free_bytes >> 20} MiB are free, logs and results need {MIN_FREE_BYTES >> 20} MiB; make room, "
            "then resume"
        )


def metric_ports(environment: Mapping[str, str], ranks: Iterable[int]) -> list[int]:
    """Ports on which the schedulers of these data-parallel ranks publish.

    Raises
    ------
    CollectionError: the variable holds no port.

    Example
    -------
    >>> metric_ports({}, range(2))
    [20380, 20381]

    Source: collector.md section 10.
    """
    given = environment.get(METRIC_PORT, str(_DEFAULT_METRIC_PORT))
    ports = [int(given) + rank for rank in ranks] if given.isascii() and given.isdecimal() else [0]
    if not all(0 < port < 2**16 for port in ports):
        raise CollectionError(f"{METRIC_PORT}: expected a port for every rank from it on, found {given!r}")
    return ports


def require_ports(ports: Iterable[int]) -> None:
    """Require that nobody listens on some ports of this machine.

    Raises
    ------
    CollectionError: one is taken; names it and the variable.

    Source: collector.md section 10.
    """
    for port in ports:
        with socket.socket() as probe:
            # Connections that have ended linger; they do not keep an engine from listening.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError as fault:
                raise CollectionError(
                    f"port {port}: {fault.strerror}; the engine publishes there. End what has it, or set {METRIC_PORT} "
                    "to another port"
                ) from fault
