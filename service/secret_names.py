"""Detection of names and texts that suggest secrets, which must not be stored or shown to others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

VARIABLE = re.compile(
    r"TOKEN(?!I[ZS])|SECRET|PASS(WORD|WD|PHRASE)?(_|$)|CREDENTIAL|AUTH|(^|_)(API_?)?KEY(_|$)|COOKIE"
    r"|(^|_)(PWD|PAT|JWT|BEARER|DSN)(_|$)|CONNECTION_STRING|DATABASE_URL",
    re.IGNORECASE,
)
"""Pattern for names of environment variables that suggest a secret; `TOKENIZERS_PARALLELISM` does not match."""
_TEXT = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY|://[^\s/:@\"'{}<>]+:[^\s/:@\"'{}<>]+@"
    r"|\b(hf_[A-Za-z0-9]{30,}|sk-[\w-]{32,}|gh[pousr]_[A-Za-z0-9]{30,}|AKIA[A-Z0-9]{16}\b|stp_\w{20,})"
)
"""Pattern for private keys, URLs with a password, and tokens of well-known formats."""
_ALONE = frozenset({"apikey", "credential", "credentials", "passwd", "password", "passwords", "secret", "secrets"})
_OF_KIND = {
    "token": ("access", "api", "auth", "bearer", "github", "hf", "hub", "wandb"),
    "key": ("access", "api", "private", "wandb"),
}
_FILES = re.compile(r"id_(rsa|dsa|ecdsa|ed25519)|netrc|kaggle|service[-_]?account", re.IGNORECASE)
_CODE = frozenset({".py", ".pyi", ".pyx", ".c", ".cpp", ".cu", ".cuh", ".h", ".hpp"})


def secret_in(command: Sequence[str]) -> str | None:
    """Find an argument of a command that suggests a secret, by its name or its value.

    Returns:
        Its name, without its value; None where there is none.
    """
    for argument in command:
        for word in argument.split():  # a shell's text has several
            name, equals, _ = word.lstrip("+\"'").partition("=")
            is_option = name.startswith("-") or bool(equals)
            is_variable = bool(equals) and name.isupper()
            if (is_option and _sounds_secret(_words(name))) or (is_variable and VARIABLE.search(name)):
                return name
            if holds_secret(word):
                return "an argument"
    return None


def holds_secret(text: str) -> bool:
    """Say whether a text contains a private key, a URL with a password, or a token of a well-known format."""
    return _TEXT.search(text) is not None


def is_secret_file(path: Path) -> bool:
    """Say whether the name of a file or of its folder suggests a secret. For a code file, the whole name must be a word
    for secrets: `secrets.py`, but not `password_field.py`.
    """
    words = _words(path.stem)
    if path.suffix in _CODE:
        return "".join(words) in _ALONE
    within = {path.parent.name.lower(), *words}
    return bool(within & _ALONE) or _sounds_secret(words) or _FILES.match(path.name) is not None


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[-_.\s]+", name.lower()) if word]


def _sounds_secret(words: Sequence[str]) -> bool:
    """Say whether the words of a name suggest a secret; the words of `--pad-token` and `--sort-key` do not."""
    last = words[-1] if words else ""
    alone = last in _ALONE or list(words) == ["token"]
    return alone or (last in _OF_KIND and any(word in _OF_KIND[last] for word in words))
