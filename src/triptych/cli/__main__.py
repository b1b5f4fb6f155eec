"""The command's entry point, which says what to install where that is missing."""

import sys


def main() -> None:
    """``triptych``, and ``python -m triptych.cli``."""
    try:
        from triptych.cli.main import main as command
    except ModuleNotFoundError as error:
        sys.exit(f"triptych: {error.name} is not installed: the command needs Triptych's extra 'cli'")
    command()


if __name__ == "__main__":
    main()
