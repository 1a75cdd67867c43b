"""The `fpmsdk` command: one module per subcommand, results on stdout, progress and errors on stderr.

Exit codes: 0, 1 (ran, and the result is negative), 2 (the input was rejected), 130 (interrupted, partial result).
"""


def main() -> None:
    """Run the command line of this process."""
    import gc
    import os
    import sys

    # Nearly all objects of a start stay, those of libraries foremost; looking through them again and again takes as
    # long as a tenth of a short command.
    gc.set_threshold(50_000, 20, 100)
    # pyarrow imports pandas and pydantic looks for plugins where there are some; each takes long, and no command has a
    # use for them.
    sys.meta_path.insert(0, _WithoutPandas())
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")
    from fpmsdk.cli.app import app

    try:
        app()
    finally:
        # The interpreter's last collections would walk through every object of every library once more, a tenth of a
        # short command, only for the process to end.
        gc.freeze()


class _WithoutPandas:
    """An import hook for which pandas is not installed."""

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("this command does without pandas", name=name)
