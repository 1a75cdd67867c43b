"""Subcommands load when they run, and the list of them says what each says of itself."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from fpmsdk.cli.app import SUBCOMMANDS, app
from fpmsdk.version import __version__


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_the_list_of_commands_has_the_first_line_of_each_ones_help(name):
    command = SUBCOMMANDS[name].load(name)
    assert command.help.split("\n\n")[0].replace("\n", " ") == SUBCOMMANDS[name].help


def test_every_command_is_listed():
    listed = CliRunner().invoke(app, ["--help"]).stdout
    assert [name for name in SUBCOMMANDS if f"  {name} " not in listed] == []


def test_the_list_of_commands_loads_no_command_and_no_library_of_one():
    code = "from typer.testing import CliRunner; from fpmsdk.cli.app import app; CliRunner().invoke(app, ['--help'])"
    probe = f"import sys; {code}; print(*(name for name in sys.modules if name.startswith('fpmsdk') or name in heavy))"
    ran = subprocess.run(
        [sys.executable, "-c", f"heavy = ('numpy', 'pyarrow', 'pydantic', 'rich.console'); {probe}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(ran.stdout.split()) == [
        "fpmsdk",
        "fpmsdk.cli",
        "fpmsdk.cli.app",
        "fpmsdk.cli.console",
        "fpmsdk.cli.lazy",
        "fpmsdk.errors",
        "fpmsdk.version",
    ]


def test_a_misspelt_command_is_told_with_the_name_that_was_meant():
    ran = CliRunner().invoke(app, ["tracee"])
    assert ran.exit_code == 2
    assert "Did you mean 'trace'?" in ran.stderr


def test_the_version_is_printed():
    assert CliRunner().invoke(app, ["--version"]).stdout == f"{__version__}\n"


def test_a_group_offers_no_options_that_install_completion():
    assert "completion" not in CliRunner().invoke(app, ["trace", "--help"]).stdout
