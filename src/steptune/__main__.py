"""The command `steptune`, also as `python -m steptune`."""


def main() -> None:
    """Run the command."""
    from steptune.service.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
