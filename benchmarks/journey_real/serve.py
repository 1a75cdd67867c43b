"""Serve recorded arrivals with a real engine and keep what happened: token times and the telemetry of every pass.

    python benchmarks/journey_real/serve.py ENGINE.json ARRIVALS.json FOLDER

Runs where vLLM and ai-dynamo are installed. ENGINE.json: arguments of the engine, and versions. ARRIVALS.json: requests
with `id`, `arrival` (s), `prompt` and `output` (tokens). Writes `requests_eval.json` and `fpm_eval.bin` in the
form of the package's recorded runs; telemetry is what Dynamo's scheduler publishes, byte for byte.
"""

import asyncio
import gc
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

VOCABULARY = 8000
# Passes before the first arrival, so that nothing is run for the first time under measurement.
WARM_UP = [(700, 30)] * 6 + [(64, 60)] * 16
SETTLE_SECONDS = 1.0


def free_port():
    """A port that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Telemetry:
    """Frames as the scheduler publishes them, from a thread of their own."""

    def __init__(self, port):
        import zmq

        self.frames, self._ended = [], threading.Event()
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, 200)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def _receive(self):
        import zmq

        while not self._ended.is_set():
            try:
                self.frames.append(self._socket.recv_multipart()[-1])
            except zmq.Again:
                continue

    def end(self):
        self._ended.set()
        self._thread.join()


async def served(engine, name, prompt, output, clock):
    """Serve one request; when the engine got it, and the time of each of its tokens, in s."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    seed = sum(name.encode())
    tokens = TokensPrompt(prompt_token_ids=[3 + (seed * 37 + place * 11) % VOCABULARY for place in range(prompt)])
    wanted = SamplingParams(
        max_tokens=output, ignore_eos=True, detokenize=False, temperature=0.0, output_kind=RequestOutputKind.DELTA
    )
    added, times = clock(), []
    async for told in engine.generate(tokens, wanted, request_id=name):
        now = clock()
        times += [now] * len(told.outputs[0].token_ids)
    return added, times


async def run(engine, arrivals, telemetry):
    """Serve all arrivals at their times; what is written, and its frames."""
    await asyncio.gather(
        *(served(engine, f"warm{at}", *lengths, time.perf_counter) for at, lengths in enumerate(WARM_UP))
    )
    await asyncio.sleep(SETTLE_SECONDS)
    telemetry.frames.clear()
    gc.collect()
    gc.freeze()
    gc.disable()
    begun = time.perf_counter()

    def clock():
        return time.perf_counter() - begun

    async def one(request):
        await asyncio.sleep(request["arrival"] - clock())
        added, times = await served(engine, request["id"], request["prompt"], request["output"], clock)
        return {**request, "added": round(added, 6), "token_times": [round(at, 6) for at in times]}

    rows = await asyncio.gather(*map(one, arrivals))
    wall = clock()
    await asyncio.sleep(SETTLE_SECONDS)
    return rows, wall


async def main():
    """Start the engine, serve, write."""
    settings, asked = (json.loads(Path(name).read_text()) for name in sys.argv[1:3])
    folder = Path(sys.argv[3])
    port = free_port()
    os.environ |= {"DYN_FORWARDPASS_METRIC_PORT": str(port), "DYN_FPM_WORKER_ID": "served"}
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings["arguments"]))
    telemetry = Telemetry(port)
    rows, wall = await run(engine, asked["requests"], telemetry)
    telemetry.end()
    cache = engine.vllm_config.cache_config
    scheduler = {
        "max_model_len": engine.vllm_config.model_config.max_model_len,
        "enforce_eager": engine.vllm_config.model_config.enforce_eager,
        "max_num_seqs": engine.vllm_config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": engine.vllm_config.scheduler_config.max_num_batched_tokens,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "block_size": cache.block_size,
        "num_gpu_blocks_override": cache.num_gpu_blocks,
    }
    engine.shutdown()
    document = {"engine": scheduler, "model": "tiny", "rate": asked["rate"], "seed": asked["seed"], "wall": wall}
    (folder / "requests_eval.json").write_text(json.dumps(document | settings["versions"] | {"requests": rows}))
    with open(folder / "fpm_eval.bin", "wb") as file:
        for frame in telemetry.frames:
            file.write(len(frame).to_bytes(4, "little") + frame)
    print(f"{len(rows)} requests in {wall:.1f} s, {len(telemetry.frames)} frames")


if __name__ == "__main__":
    asyncio.run(main())
