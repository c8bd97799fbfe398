"""Context in which an HTML page is rendered: at the service below its base path, or as one self-contained file."""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
from dataclasses import dataclass
from importlib import resources

from markupsafe import Markup
from plotly.offline import get_plotlyjs, get_plotlyjs_version

PLOTLY = f"plotly-{get_plotlyjs_version()}.min.js"
"""File name under which plotly.js is served; each version has its own, so that browsers may cache it forever."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """Context in which an HTML page is rendered, as its templates see it.

    Attributes:
        base_path: Path below which a proxy serves the service; empty without one.
        standalone: Whether the page is one file: styles, scripts and downloads are in it, and nothing links to the
            service.
        user: Name of the user who is logged in; empty where no login is needed.
        csrf_token: Token that the page's scripts send with a change; empty where none is required.
        may_submit: Whether the user may submit, pause and cancel studies.
        trials: Trials whose pages are in the file, where the page is a file.
        reader_opening: Placeholder for `reader` in a page that is rendered once for several readers.
    """

    base_path: str = ""
    standalone: bool = False
    user: str = ""
    csrf_token: str = ""
    may_submit: bool = False
    trials: frozenset[str] = frozenset()
    reader_opening: Markup | None = None

    @property
    def reader(self) -> Markup:
        """Return the HTML that names the logged-in user, for the head of a page. No other part of the page names the
        user.
        """
        if self.reader_opening is not None or not self.user:
            return self.reader_opening or Markup()
        csrf = Markup(' data-csrf="{}"').format(self.csrf_token) if self.csrf_token else ""
        return Markup('<a class="user" href="{}"{}>{}</a>').format(self.url("/login"), csrf, self.user)

    def url(self, path: str) -> str:
        """Return the URL of a page or resource of the service, from its path."""
        return f"{self.base_path}{path}"

    def asset(self, name: str) -> str:
        """Return the URL of a file of `dashboards/static`, which includes a hash of its content."""
        return self.url(f"/static/{asset_file(name)}")

    @property
    def plotly(self) -> str:
        return self.url(f"/static/{PLOTLY}")

    def study_url(self, study_id: str) -> str:
        """Return the URL of a study's page; empty in a self-contained file, which has only one study."""
        return "" if self.standalone else self.url(f"/studies/{study_id}")

    def trial_url(self, trial_id: str) -> str:
        """Return the URL of a trial's page; empty where a self-contained file does not include it."""
        if self.standalone:
            return f"#trial-{trial_id}" if trial_id in self.trials else ""
        return self.url(f"/trials/{trial_id}")


STANDALONE = Site(standalone=True)


@functools.cache
def asset_text(name: str) -> str:
    """Return the content of a file of `dashboards/static`."""
    return resources.files("steptune.dashboards").joinpath("static", name).read_text(encoding="utf-8")


@functools.cache
def asset_names() -> tuple[str, ...]:
    files = resources.files("steptune.dashboards").joinpath("static").iterdir()
    return tuple(sorted(file.name for file in files if file.is_file()))


@functools.cache
def asset_file(name: str) -> str:
    """Return the file name with the hash of its content: `page.css` as `page-0123456789ab.css`."""
    stem, _, suffix = name.rpartition(".")
    return f"{stem}-{hashlib.sha256(asset_text(name).encode()).hexdigest()[:12]}.{suffix}"


@functools.cache
def packed_plotly() -> bytes:
    """Return plotly.js of the installed package, compressed with gzip: the same bytes in every process."""
    return gzip.compress(get_plotlyjs().encode(), 9, mtime=0)


def data_url(content: bytes, media_type: str = "application/octet-stream") -> str:
    """Return the content as a data URL, for a download inside the page."""
    return f"data:{media_type};base64,{base64.b64encode(content).decode('ascii')}"
