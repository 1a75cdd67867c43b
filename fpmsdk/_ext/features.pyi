ROLES: tuple[str, ...]
WORKLOAD_KINDS: tuple[str, ...]
SKIP_REASONS: tuple[str, ...]
AXES: tuple[str, ...]
