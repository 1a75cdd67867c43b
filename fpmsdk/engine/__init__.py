"""The simulated engine: how one is launched, and whether its scheduler decides as the recorded real one did."""
