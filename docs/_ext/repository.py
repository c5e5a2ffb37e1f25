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
    try:
        top, origin = (
            subprocess.run(
                ["git", "-C", str(root), *words], capture_output=True, text=True, check=False
            ).stdout.strip()
            for words in (("rev-parse", "--show-toplevel"), ("remote", "get-url", "origin"))
        )
    except FileNotFoundError:
        # The site can be built where git is not installed.
        return None
    # A copy without history may lie inside another repository, which git would find.
    ours = bool(top) and pathlib.Path(top).resolve() == root.resolve()
    return web_address(origin) if ours else None


def web_address(origin: str) -> str | None:
    """Return the address of a repository's page, or None if the origin is no public address.

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
