"""Address of the repository that the site is built from."""

import pathlib
import re
import subprocess
import urllib.parse


def address(root: pathlib.Path) -> str | None:
    """Return the web address of a repository's origin, or None if it has none on the web.

    Args:
        root: Folder at the top of the repository.
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    # A copy without history may lie inside another repository, which git would find.
    if not top or pathlib.Path(top).resolve() != root.resolve():
        return None
    return web_address(_git(root, "remote", "get-url", "origin"))


def _git(root: pathlib.Path, *words: str) -> str:
    """Return what git prints in a folder, and an empty text if it fails or is not installed."""
    command = ["git", "-C", str(root), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def web_address(origin: str) -> str | None:
    """Return the https address of an origin's page, or None if the origin is no public address.

    Users, tokens and queries are left out, because they would be published with the site.
    """
    # Git's short form has no scheme. A path from the root of the host is on no page.
    short = re.fullmatch(r"[^@/:\s]+@([\w.-]+):([^/~][^?#@\s]*)", origin)
    if short:
        host, path = short.groups()
    else:
        parts = urllib.parse.urlsplit(origin)
        host = parts.hostname or ""
        path = parts.path.strip("/")
        if parts.scheme not in ("http", "https", "ssh") or "@" in path:
            return None
        if parts.scheme != "ssh" and parts.port:
            host = f"{host}:{parts.port}"
    if "." not in host or not path:
        return None
    return f"https://{host}/{path.removesuffix('.git')}"
