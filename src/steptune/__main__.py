"""`python -m steptune` is the command `steptune`."""

from steptune.service.cli.main import main

main()
