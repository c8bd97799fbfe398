"""Shared parts of all pages: access, sending, and the display of refusals in a browser."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable, Coroutine, Hashable, Mapping
from dataclasses import replace
from typing import Annotated, Any
from urllib.parse import urlencode

import msgspec
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException as StarletteHTTPException

from steptune.dashboards.site import Site
from steptune.dashboards.templating import render
from steptune.service.access.authentication import Access
from steptune.service.access.cookies import session_cookie
from steptune.service.access.errors import AccessError, NotAuthenticatedError
from steptune.service.access.principal import Method, Principal
from steptune.service.access.secrets import csrf_token_for
from steptune.service.api.answers import is_known
from steptune.service.api.context import services
from steptune.service.api.problems import KNOWN_ERRORS, known_error
from steptune.service.api.security import Requires
from steptune.service.page_copies import LEVEL, Copy, Fragment, opening
from steptune.service.settings.scopes import Scope

Reader = Annotated[Principal, Requires(Scope.READ)]
Submitter = Annotated[Principal, Requires(Scope.SUBMIT)]
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class PageRoute(APIRoute):
    """A route that answers refusals with HTML pages; a reader who is not logged in gets the login page, which leads
    back to the requested page.
    """

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()

        async def handle_or_explain(request: Request) -> Response:
            try:
                return await handle(request)
            except NotAuthenticatedError:
                return _login(request)
            except AccessError as error:
                return _problem(request, error.status, error.detail, error.headers)
            except RequestValidationError as error:
                mistakes = "; ".join(f"{mistake['loc'][-1]}: {mistake['msg']}" for mistake in error.errors())
                return _problem(
                    request, 404, f"there is no page at {request.url.path} with these parameters ({mistakes})"
                )
            except KNOWN_ERRORS as error:
                told = await known_error(request, error)
                detail = msgspec.json.decode(told.body)["detail"]
                return _problem(
                    request, told.status_code, detail, {"Retry-After": "5"} if told.status_code > 500 else {}
                )
            except StarletteHTTPException as error:
                return _problem(request, error.status_code, str(error.detail), dict(error.headers or {}))

        return handle_or_explain


def site_of(request: Request, principal: Principal | None = None) -> Site:
    """Return the context in which this request's page is rendered: base path, user, CSRF token, and permission to
    submit studies.
    """
    access: Access = request.app.state.access
    cookie = session_cookie(request, access.proxies)
    with_session = principal is not None and principal.method is Method.SESSION and cookie is not None
    return Site(
        base_path=request.scope.get("root_path", ""),
        user="" if principal is None or principal.method is Method.OPEN else principal.name,
        csrf_token=csrf_token_for(cookie) if with_session and cookie else "",
        may_submit=principal is not None and Scope.SUBMIT in principal.scopes,
    )


def page(request: Request, site: Site, template: str, **context: Any) -> Response:
    """Send a page to one reader, compressed if the browser accepts that; send no body if the browser has the page
    already.
    """
    body = render(template, site, **context).encode()
    tag = hashlib.sha256(body).hexdigest()[:16]
    headers = {"ETag": f'"{tag}"', "Cache-Control": "private, no-cache", "Vary": "Cookie, Accept-Encoding"}
    if is_known(request, tag):
        return Response(status_code=304, headers=headers)
    if accepts_gzip(request):
        body, headers["Content-Encoding"] = gzip.compress(body, LEVEL, mtime=0), "gzip"
    return HTMLResponse(body, headers=headers)


def shared_page(
    request: Request,
    site: Site,
    template: str,
    *,
    key: Hashable,
    version: Hashable,
    context: Callable[[Site], Mapping[str, Any]],
    last_event: int = 0,
) -> Response:
    """Send a page that all readers share; it is rendered again only when the version of its content has changed.

    Args:
        key: Identity of the page; the reader's rights from `site` are added to it.
        version: Version of the content, read before the context.
        context: Returns the template's variables; called only if there is no copy of this version.
        last_event: Number of the event after which the page follows events.
    """
    shared = replace(site, user="", csrf_token="", reader_opening=opening("reader"))

    def make() -> Copy:
        shown = {**context(shared), "last_event": opening("last_event")}
        fragments = [value for value in shown.values() if isinstance(value, Fragment)]
        return Copy.of(render(template, shared, **shown), fragments)

    copy = services(request).copies.get((template, key, shared), version, make)
    fillings = {"reader": site.reader, "last_event": str(last_event)}
    tag = copy.tag(fillings)
    headers = {"ETag": f'"{tag}"', "Cache-Control": "private, no-cache", "Vary": "Cookie, Accept-Encoding"}
    if is_known(request, tag):
        return Response(status_code=304, headers=headers)
    if accepts_gzip(request):
        return HTMLResponse(copy.packed(fillings), headers={**headers, "Content-Encoding": "gzip"})
    return HTMLResponse(copy.plain(fillings), headers=headers)


def accepts_gzip(request: Request) -> bool:
    return "gzip" in request.headers.get("accept-encoding", "")


def _login(request: Request) -> Response:
    base = request.scope.get("root_path", "")
    wanted = base + request.url.path.removeprefix(base)
    if request.url.query:
        wanted += f"?{request.url.query}"
    return RedirectResponse(f"{base}/login?{urlencode({'next': wanted})}", 303, {"Cache-Control": "no-store"})


def _problem(request: Request, status: int, detail: str, headers: dict[str, str] | None = None) -> Response:
    title = {403: "The request is not allowed", 404: "Not found"}.get(status, "The request failed")
    sentence = f"{detail[:1].upper()}{detail[1:]}."
    text = render(
        "problem.html", site_of(request, getattr(request.state, "principal", None)), title=title, detail=sentence
    )
    return HTMLResponse(text, status, {**(headers or {}), "Cache-Control": "no-store"})
