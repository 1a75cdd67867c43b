"""Settings of the whole suite."""

import signal

import pytest
from hypothesis import settings

# Examples are checked for what they say, not for how long they take on a busy machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Programs of make targets, in environments of their own.
collect_ignore = ["planner/soak.py", "planner/suite.py", "packaging/wheel_check.py"]


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard():
    """A shell that starts the suite in the background has it ignore Ctrl-C, which tests press."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
