"""`serve.sh` and `job.sbatch`: the workers of a deployment, started on one machine or in a Slurm allocation.

Source: predict-recommend.md section 10.3.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fpmsdk.errors import OnboardError
from fpmsdk.recommendation.emit.workers import PORT, SIDE_CHANNEL_PORT, SIDE_CHANNELS, ServingWorker

# Whichever worker ends takes the others with it, and its exit code becomes that of the script.
_WAIT = """\
wait -n
exit $?
"""


class _Started(NamedTuple):
    # One worker: its number among all, its node and the first of its GPUs there.
    worker: ServingWorker
    number: int
    node: int
    first_gpu: int


def serve_script(workers: Sequence[ServingWorker], about: Sequence[str]) -> str:
    """The text of `serve.sh`.

    Parameters
    ----------
    workers: by role.
    about: lines of its heading.
    """
    gpus = sum(worker.replicas * worker.gpus for worker in workers)
    lines = [
        "#!/usr/bin/env bash",
        *_comments(about),
        f"# Needs one machine with {gpus} GPUs. Workers listen on port {PORT} and the following ones.",
        *_comments(_in_front(workers)),
        "set -euo pipefail",
        "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT",
        "",
    ]
    for started in _placed(workers, gpus):
        first, worker = started.first_gpu, started.worker
        devices = ",".join(str(gpu) for gpu in range(first, first + worker.gpus))
        environment = [f"CUDA_VISIBLE_DEVICES={devices}", *_side_channel(started)]
        lines += [f"# {_named(started)}", f"{' '.join(environment)} \\", *_command(started), ""]
    return "\n".join(lines) + "\n" + _WAIT


def slurm_script(
    workers: Sequence[ServingWorker], about: Sequence[str], *, name: str, gpus_per_node: int, image: str | None
) -> str:
    """The text of `job.sbatch`.

    Parameters
    ----------
    workers, about: as `serve_script` takes them.
    name: of the job.
    gpus_per_node: of the system.
    image: container of every worker, for Slurm with Pyxis; None runs the `vllm` of the nodes.

    Raises
    ------
    OnboardError: a worker takes more GPUs than a node has.
    """
    placed = list(_placed(workers, gpus_per_node))
    nodes = placed[-1].node + 1
    widest = max(sum(one.worker.gpus for one in placed if one.node == node) for node in range(nodes))
    container = [] if image is None else [f"--container-image={shlex.quote(image)}"]
    lines = [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name={name}",
        f"#SBATCH --nodes={nodes}",
        f"#SBATCH --gpus-per-node={widest}",
        "#SBATCH --exclusive",
        "#SBATCH --output=%x-%j.log",
        *_comments(about),
        f"# Workers listen on port {PORT} of their node and the following ones; partition, account and time are yours",
        "# to add.",
        *_comments(_in_front(workers)),
        "set -euo pipefail",
        "",
    ]
    for started in placed:
        step = ["srun", f"--relative={started.node}", "--nodes=1", "--ntasks=1", "--exact"]
        step += [f"--gpus-per-task={started.worker.gpus}", *container]
        if channel := _side_channel(started, host="$SLURMD_NODENAME"):
            # The name of the node is known on the node.
            words = " ".join(["exec", "env", *channel, "vllm", "serve", *_words(started)])
            lines += [f"# {_named(started)}", f"{' '.join(step)} bash -c {shlex.quote(words)} &", ""]
        else:
            lines += [f"# {_named(started)}", f"{' '.join(step)} \\", *_command(started), ""]
    return "\n".join(lines) + "\n" + _WAIT


def _placed(workers: Sequence[ServingWorker], gpus_per_node: int) -> Iterator[_Started]:
    """Every worker on the first node that still holds it."""
    free: list[int] = []
    index = 0
    for worker in workers:
        require_one_node(worker, gpus_per_node)
        for _ in range(worker.replicas):
            node = next((node for node, gpus in enumerate(free) if gpus >= worker.gpus), len(free))
            if node == len(free):
                free.append(gpus_per_node)
            yield _Started(worker, index, node, gpus_per_node - free[node])
            free[node] -= worker.gpus
            index += 1


def require_one_node(worker: ServingWorker, gpus_per_node: int) -> None:
    """Refuse a worker that spans nodes.

    Raises
    ------
    OnboardError: names its GPUs and those of a node.
    """
    if worker.gpus > gpus_per_node:
        raise OnboardError(
            f"engine.workers.{worker.role}: one worker takes {worker.gpus} GPUs and a node has {gpus_per_node}; files "
            "are written for workers that fit a node",
            f"engine.workers.{worker.role}.parallelism",
        )


def _named(started: _Started) -> str:
    worker = started.worker
    return f"Worker {started.number}, {worker.role}: {worker.gpus} {worker.hardware} ({worker.layout})"


def _words(started: _Started) -> list[str]:
    words = [started.worker.model, "--port", str(PORT + started.number), *started.worker.arguments]
    return [shlex.quote(word) for word in words]


def _command(started: _Started) -> list[str]:
    """`vllm serve` with an option a line, in the background."""
    options: list[str] = []
    for word in _words(started)[1:]:
        if word.startswith("--"):
            options.append(word)
        else:
            options[-1] += f" {word}"
    first, *further = [f"vllm serve {shlex.quote(started.worker.model)}", *options]
    lines = [f"  {first}", *(f"    {option}" for option in further)]
    return [f"{line} \\" for line in lines[:-1]] + [f"{lines[-1]} &"]


def _side_channel(started: _Started, host: str = "") -> list[str]:
    if not started.worker.transfers_kv:
        return []
    port = SIDE_CHANNEL_PORT + SIDE_CHANNELS * started.number
    return [*([f"VLLM_NIXL_SIDE_CHANNEL_HOST={host}"] if host else []), f"VLLM_NIXL_SIDE_CHANNEL_PORT={port}"]


def _in_front(workers: Sequence[ServingWorker]) -> list[str]:
    if any(worker.transfers_kv for worker in workers):
        return ["Put a router for disaggregated prefill in front of them; it is not started here."]
    if sum(worker.replicas for worker in workers) > 1:
        return ["Put a load balancer in front of them; it is not started here."]
    return []


def _comments(lines: Sequence[str]) -> list[str]:
    return [f"# {line}" for line in lines]
