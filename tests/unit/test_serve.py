"""`steptune serve`: its options are the settings."""

import typer

from steptune.service.cli.main import app
from steptune.service.settings import Settings


def _options() -> dict[str, str]:
    command = typer.main.get_command(app).commands["serve"]
    return {parameter.name: parameter.help or "" for parameter in command.params if parameter.name != "help"}


def test_every_setting_is_an_option_but_secrets_which_a_list_of_processes_would_show() -> None:
    secret = {name for name, field in Settings.model_fields.items() if "SecretStr" in str(field.annotation)}
    assert secret
    assert _options().keys() == Settings.model_fields.keys() - secret


def test_every_option_says_what_the_setting_means() -> None:
    for name, help_text in _options().items():
        assert Settings.model_fields[name].description in help_text
