"""The command `steptune`, also as `python -m steptune`."""

import sys
import traceback

USER_ERROR = 2


def main() -> None:
    """Load the command, which loads strategies of other packages too, and run it."""
    from steptune.tuner.errors import SteptuneError

    try:
        from steptune.service.cli.main import main as run
    except SteptuneError as error:
        if "--debug" in sys.argv:
            traceback.print_exc()
        sys.stderr.write(f"error: {error}\n")
        sys.exit(USER_ERROR)
    run()


if __name__ == "__main__":
    main()
