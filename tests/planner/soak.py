"""The real Planner's scaling state over fpmsdk for ten thousand ticks of recorded telemetry.

    python tests/planner/soak.py [TICKS]

needs an environment with ai-dynamo, fpmsdk and its alias; `make soak-planner` makes one. Every tick observes a message
of a real engine and decides on load, every 36th on throughput as well. In the middle the model is saved, and a second
state goes on from what was restored: from there on both must decide, estimate and learn alike, to the last bit. Exits 1
on a difference, an exception, a warning of the Planner, or memory that grows.
"""

import copy
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from dynamo.common.forward_pass_metrics import ForwardPassMetrics, decode
from dynamo.planner.config.planner_config import PlannerConfig
from dynamo.planner.core.state_machine import PlannerScalingState
from dynamo.planner.core.types import (
    EngineCapabilities,
    FpmObservations,
    TrafficObservation,
    WorkerCapabilities,
    WorkerCounts,
)

from fpmsdk import ForwardPassPerfModel, sample

TICKS = 10_000
WARM_UP = 2_000
# Pages that the allocator takes and gives back; ten thousand ticks that each kept a message would hold 30 MB.
LARGEST_GROWTH_KB = 1_500
WORKERS = ("w0", "w1")
LIMITS = {"max_num_batched_tokens": 512, "max_num_seqs": 16, "max_kv_tokens": 12_768, "kv_cache_block_size": 32}


class Complaints(logging.Handler):
    """What the Planner warns of: a model that fails inside a tick is only logged there."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self.messages.append(record.getMessage())


def planner_state() -> PlannerScalingState:
    """The scaling state of an aggregated deployment that the Planner knows nothing about."""
    config = PlannerConfig(
        mode="agg",
        backend="vllm",
        namespace="soak",
        optimization_target="sla",
        ttft_ms=2000.0,
        itl_ms=60.0,
        max_num_fpm_samples=64,
        load_min_observations=5,
        enable_load_scaling=True,
        enable_throughput_scaling=True,
    )
    return PlannerScalingState(config, WorkerCapabilities(decode=EngineCapabilities(num_gpu=1, **LIMITS)))


def messages() -> list[ForwardPassMetrics]:
    """The recorded messages as the Planner's own decoder reads them."""
    decoded = [decode(frame) for frame in sample.train_frames()]
    return [message for message in decoded if message is not None]


def tick(state: PlannerScalingState, number: int, recorded: list[ForwardPassMetrics]) -> tuple[Any, ...]:
    """What one tick decides and estimates."""
    observed = {
        (worker, 0): msgspec.structs.replace(recorded[(number * len(WORKERS) + i) % len(recorded)], worker_id=worker)
        for i, worker in enumerate(WORKERS)
    }
    observations = FpmObservations(decode=observed)
    state.begin_tick()
    state.observe_worker_counts(WorkerCounts(ready_num_decode=len(WORKERS), expected_num_decode=len(WORKERS)))
    state.observe_fpm(observations)
    load = state.advance_load(observations)
    throughput = None
    if number % 36 == 35:
        traffic = TrafficObservation(duration_s=180.0, num_req=400.0 + number % 7, isl=600.0, osl=90.0, kv_hit_rate=0.1)
        throughput = state.advance_throughput_from_prediction(
            traffic,
            predicted_num_req=traffic.num_req,
            predicted_isl=traffic.isl,
            predicted_osl=traffic.osl,
            predicted_kv_hit_rate=traffic.kv_hit_rate,
        )
    return repr(load), repr(throughput), repr(state.diagnostics())


def model_of(state: PlannerScalingState) -> ForwardPassPerfModel:
    """The model behind the Planner's own object."""
    model: ForwardPassPerfModel = state.agg_regression._engine_model._model
    return model


def restored(state: PlannerScalingState, folder: Path) -> PlannerScalingState:
    """A copy of the state whose model was saved and restored."""
    config = model_of(state).save_state_snapshot(folder)
    config["estimator_config"]["state_snapshot"]["on_tune"] = "continue"
    twin = copy.copy(state)
    adapter = copied(state.agg_regression, but="_engine_model")
    adapter._engine_model = copied(state.agg_regression._engine_model, but="_model")
    adapter._engine_model._model = ForwardPassPerfModel.best_available(config)
    twin.install_regressions(agg=adapter)
    return twin


def copied(original: Any, *, but: str) -> Any:
    """A deep copy without one attribute."""
    twin = copy.copy(original)
    twin.__dict__ = {name: copy.deepcopy(value) for name, value in vars(original).items() if name != but}
    return twin


def resident_kb() -> int:
    """Memory of this process."""
    with open("/proc/self/status") as file:
        [line] = [line for line in file if line.startswith("VmRSS")]
    return int(line.split()[1])


def states_of(state: PlannerScalingState, folder: Path) -> bytes:
    """What a model has learned, as a snapshot holds it."""
    model_of(state).save_state_snapshot(folder)
    return (folder / "state.bin").read_bytes()


def main() -> None:
    """Run all ticks."""
    ticks = int(sys.argv[1]) if len(sys.argv) > 1 else TICKS
    recorded, state, twin = messages(), planner_state(), None
    complaints = Complaints()
    logging.getLogger("dynamo.planner").addHandler(complaints)
    logging.getLogger("dynamo.planner").setLevel(logging.WARNING)
    growth: list[int] = []
    with tempfile.TemporaryDirectory() as directory:
        for number in range(ticks):
            answer = tick(state, number, recorded)
            if twin is not None and tick(twin, number, recorded) != answer:
                sys.exit(f"FAILED: tick {number} differs after the restore")
            if number == ticks // 2:
                twin = restored(state, Path(directory) / "middle")
            if number >= WARM_UP and number % 500 == 0:
                growth.append(resident_kb())
            if number < WARM_UP:
                # A model that has seen little cannot tell a capacity, and the Planner says so.
                complaints.messages = [said for said in complaints.messages if "not ready" not in said]
            if complaints.messages:
                sys.exit(f"FAILED: tick {number}: {complaints.messages[0]}")
        assert twin is not None
        if states_of(state, Path(directory) / "one") != states_of(twin, Path(directory) / "other"):
            sys.exit("FAILED: the state after the restore differs")
        ready = model_of(state).diagnostics()
    print(f"{ticks} ticks of {len(WORKERS)} workers, saved and restored in the middle: no difference")
    print(
        f"resident memory, KB: {growth}; readiness {ready['readiness']}, {ready['retained_observations']} observations"
    )
    # The second state is made in the middle; each half is held against its own beginning.
    half = sum(number <= ticks // 2 for number in range(WARM_UP, ticks, 500))
    for part in (growth[:half], growth[half + 1 :]):
        if part and part[-1] - part[0] > LARGEST_GROWTH_KB:
            sys.exit(f"FAILED: memory grew by {part[-1] - part[0]} KB")


if __name__ == "__main__":
    main()
