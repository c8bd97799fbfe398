"""Use of a recommendation in a script: one added line makes the changes that its trials made."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from steptune.tuner.errors import RecommendationError
from steptune.tuner.scripts.agent import OUTSIDE


def enable(recommendation: str | Path = "steptune.json") -> None:
    """Apply the changes of a recommendation to this script's training, from outside the script, as the recommendation's
    trials did.

        import steptune
        steptune.enable("steptune.json")

    Place the line above all code that makes loaders, models and optimizers. It prints one line on standard error that
    names the changes. Where the file is missing, that line says so, and the script trains unchanged.

    Args:
        recommendation: The JSON export of a study of a command; looked for in the current folder, then in the script's.

    Raises:
        RecommendationError: The script, torch, the number of ranks or the device differs from the one that was tuned.
            Device and ranks are known only at the first forward pass; a difference in these is raised there.
    """
    if OUTSIDE in os.environ:  # a verification compares the script with and without it
        return
    from steptune.tuner.scripts.agent.enabled import enable_from, is_first

    path = _found(Path(recommendation).expanduser())
    if path is not None:
        enable_from(path, RecommendationError)
    elif is_first():
        sys.stderr.write(f"steptune: nothing was changed, because {recommendation} does not exist\n")


def _found(path: Path) -> Path | None:
    main = getattr(sys.modules["__main__"], "__file__", None)
    folders = [Path(), *([Path(main).resolve().parent] if main else [])]
    return next((folder / path for folder in folders if (folder / path).is_file()), None)
