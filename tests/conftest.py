"""Settings of the whole suite."""

from hypothesis import settings

# Examples are checked for what they say, not for how long they take on a busy machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Programs of make targets, in environments of their own.
collect_ignore = ["planner/soak.py", "planner/suite.py", "packaging/wheel_check.py"]
