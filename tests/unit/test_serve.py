"""`steptune serve`: its options are the settings."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from steptune.service import serving
from steptune.service.cli.main import application
from steptune.service.settings import Settings


def _options() -> dict[str, str]:
    commands: Any = typer.main.get_command(application())
    command = commands.commands["serve"]
    return {parameter.name: parameter.help or "" for parameter in command.params if parameter.name != "help"}


def test_every_setting_is_an_option_but_secrets_which_a_list_of_processes_would_show() -> None:
    secret = {name for name, field in Settings.model_fields.items() if "SecretStr" in str(field.annotation)}
    assert secret
    assert _options().keys() == Settings.model_fields.keys() - secret


def test_every_option_says_what_the_setting_means() -> None:
    for name, help_text in _options().items():
        assert Settings.model_fields[name].description in help_text


class TestPlainHttp:
    """Tokens travel as plain text over it."""

    @pytest.fixture(autouse=True)
    def as_it_was(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Nothing is served, and the address is never taken."""
        listener = socket.create_server(("127.0.0.1", 0))
        monkeypatch.setattr(serving, "listen", lambda settings: listener)
        monkeypatch.setattr(serving.Server, "run", lambda self, sockets: None)
        monkeypatch.setattr(serving, "_keep_what_is_loaded", lambda: None)
        monkeypatch.setattr(serving.signal, "signal", lambda number, handler: None)
        yield
        listener.close()

    def said(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], **options: object) -> str:
        url = f"sqlite:///{tmp_path}/steptune.db"
        settings = Settings(
            _env_file=None, database_url=url, data_directory=tmp_path / "data", embedded_worker=False, **options
        )
        serving.run(settings)
        return capsys.readouterr().err

    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7"])
    def test_at_an_address_that_others_reach_is_warned_of(self, tmp_path: Path, capsys, host: str) -> None:
        said = self.said(tmp_path, capsys, host=host)
        assert f"warning: other machines can reach {host}, and http sends tokens as plain text" in said
        assert "STEPTUNE_PUBLIC_URL" in said

    @pytest.mark.parametrize(
        "options",
        [
            {"host": "127.0.0.1"},
            {"host": "::1"},
            {"host": "0.0.0.0", "public_url": "https://tune.example.org"},
            {"host": "0.0.0.0", "unix_socket": "/run/steptune.sock"},
        ],
        ids=str,
    )
    def test_at_others_is_not(self, tmp_path: Path, capsys, options: dict[str, str]) -> None:
        assert "plain text" not in self.said(tmp_path, capsys, **options)
