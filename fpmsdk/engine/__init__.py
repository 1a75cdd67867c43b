"""The simulated engine: launch configuration and conformance of the scheduler with recorded real decisions."""
