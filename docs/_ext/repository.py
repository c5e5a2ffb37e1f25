"""Address of the repository that the site is built from."""

import pathlib
import re
import subprocess


def address(root: pathlib.Path) -> str | None:
    """Return the web address of a clone's origin, or None if it has no origin on the web."""
    command = ["git", "-C", str(root), "remote", "get-url", "origin"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        # The site can be built where git is not installed.
        return None
    return web_address(found.stdout.strip())


def web_address(origin: str) -> str | None:
    """Return the address of a repository's page, or None if the origin is a folder.

    What identifies a user is left out, because a token would be published with the site.

    >>> web_address("git@github.com:owner/project.git")
    'https://github.com/owner/project'
    >>> web_address("https://name:token@codeberg.org/owner/project")
    'https://codeberg.org/owner/project'
    >>> web_address("/home/name/project") is None
    True
    """
    scheme = r"(?:https?://|ssh://|(?=[\w.-]+@[\w.-]+:))"
    user = r"(?:[^@/]+@)?"
    match = re.fullmatch(rf"{scheme}{user}([\w.-]+)(?::\d+)?[:/]/*(.+?)(?:\.git)?/?", origin)
    return f"https://{match[1]}/{match[2]}" if match else None
