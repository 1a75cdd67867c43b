"""The simulated engine: how one is launched, and whether it schedules as the recorded real one did."""
