"""`token`: bearer tokens, created, listed and revoked directly in the database."""

from __future__ import annotations

from typing import Annotated

import typer

from steptune.service.access.tokens import Token, utc_now
from steptune.service.cli.access import opened_access, record, shown_time
from steptune.service.cli.console import output, print_json, say
from steptune.service.cli.options import AsJson, Database
from steptune.service.settings.scopes import Scope, implied, parse_scopes
from steptune.service.tables import plain_table
from steptune.tuner.errors import ChoiceError

app = typer.Typer(help="Manage tokens for the service.", no_args_is_help=True)

USUAL_SCOPES = frozenset({Scope.READ, Scope.SUBMIT})


@app.command()
def create(
    user: Annotated[str, typer.Option("--user", help="Owner of the token, a user made with `steptune user create`.")],
    name: Annotated[str, typer.Option("--name", help="Purpose of the token.")] = "",
    scopes: Annotated[
        str | None,
        typer.Option(
            "--scopes",
            help="Scopes, separated by spaces or commas: read, submit, worker, admin; default read and submit, if the "
            "owner has them.",
            show_default=False,
        ),
    ] = None,
    days: Annotated[
        float | None, typer.Option("--days", help="Lifetime in days (default: the setting token_days).")
    ] = None,
    never_expires: Annotated[
        bool, typer.Option("--never-expires", help="Keep the token valid until it is revoked.")
    ] = False,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Create a token and print it. It cannot be shown again: only its hash is stored."""
    if never_expires and days is not None:
        raise ChoiceError(f"--days {days:g} and --never-expires contradict each other: give one of them")
    with opened_access(database) as access:
        lifetime = None if never_expires else access.settings.token_days if days is None else days
        owner = access.users.named(user)
        asked = parse_scopes(scopes) if scopes else implied(map(Scope, owner.scopes)) & USUAL_SCOPES
        token, bearer = access.tokens.issue(owner.user_id, name=name, scopes=asked, days=lifetime)
        record(access, "create_token", token.token_id, user_id=owner.user_id, scopes=" ".join(token.scopes))
    if as_json:
        print_json({"token": bearer.text, "info": token})
        return
    output.print(bearer.text, soft_wrap=True)
    say(f"store this token now: it cannot be shown again. Expires: {shown_time(token.expires_at)}")


@app.command("list")
def list_tokens(
    user: Annotated[str | None, typer.Option("--user", help="Only this user's.", show_default=False)] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of tokens, newest first.")] = 50,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """List tokens, the newest first."""
    with opened_access(database) as access:
        owner_id = None if user is None else access.users.named(user).user_id
        tokens = access.tokens.page(limit=limit, owner_id=owner_id)
        owners = {token.user_id: access.users.get(token.user_id).name for token in tokens}
    if as_json:
        print_json(tokens)
        return
    table = plain_table("id", "user", "name", "scopes", "state", "last used")
    for token in tokens:
        table.add_row(
            token.token_id,
            owners[token.user_id],
            token.name,
            " ".join(token.scopes),
            _state(token),
            shown_time(token.last_used_at),
        )
    output.print(table)


@app.command()
def revoke(
    token_id: Annotated[str, typer.Argument(help="Id of the token, as `token list` shows it.", metavar="TOKEN_ID")],
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Revoke a token, and all tokens that were made with it."""
    with opened_access(database) as access:
        token = access.tokens.revoke(token_id)
        record(access, "revoke_token", token.token_id, user_id=token.user_id)
    if as_json:
        print_json(token)
    else:
        output.print(f"revoked: {token.token_id}", markup=False)


def _state(token: Token) -> str:
    if token.revoked_at is not None:
        return "revoked"
    if token.expires_at is not None and token.expires_at <= utc_now():
        return "expired"
    return f"ends {shown_time(token.expires_at)}" if token.expires_at else "valid"
