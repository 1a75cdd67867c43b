"""The simulated engine: how one is launched, how it schedules, how it keeps its KV cache."""
