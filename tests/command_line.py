"""The command ``triptych`` within the process of a test."""

from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest import mock

from typer.main import get_command
from typer.testing import CliRunner, Result

from triptych.cli.main import app

_made = cache(get_command)
"""Typer's runner makes the command for each line, which takes 25 ms."""


def invoke(arguments: Sequence[str], **options: Any) -> Result:
    """Run one line. ``options``: those of ``CliRunner.invoke``."""
    with mock.patch("typer.testing._get_command", _made):
        return CliRunner().invoke(app, arguments, **options)
