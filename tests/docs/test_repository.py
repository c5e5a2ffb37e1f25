"""The link from the site to the repository that it is built from."""

import pathlib
import runpy
import subprocess

import pytest

REPOSITORY = runpy.run_path(
    str(pathlib.Path(__file__).parents[2] / "docs" / "_ext" / "repository.py")
)


@pytest.mark.parametrize(
    ("origin", "address"),
    [
        ("https://codeberg.org/owner/project.git", "https://codeberg.org/owner/project"),
        ("https://name:token@github.com/owner/project", "https://github.com/owner/project"),
        ("git@gitlab.com:group/part/project.git", "https://gitlab.com/group/part/project"),
        ("ssh://git@forge.org:2222/owner/project.git", "https://forge.org/owner/project"),
        ("https://host.org:8443/owner/project", "https://host.org:8443/owner/project"),
        ("https://host.org/owner/project?private_token=abc", "https://host.org/owner/project"),
        ("https://host.org/owner/project#abc", "https://host.org/owner/project"),
        ("https://name:to@ken@host.org/owner/project", "https://host.org/owner/project"),
        ("https://name:to/k@en@host.org/owner/project", None),
        ("http://localhost:8080/owner/project", None),
        ("name@build.local:/srv/secret/project.git", None),
        ("name@build.local:~/project.git", None),
        ("https://host.org/", None),
        ("C:\\\\home\\\\project", None),
        ("/home/name/project", None),
        ("file:///home/name/project", None),
        ("../project", None),
        ("", None),
    ],
)
def test_the_address_is_that_of_the_origin_without_its_user(origin, address):
    assert REPOSITORY["web_address"](origin) == address


def git(folder, *words):
    subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)


def test_only_the_top_of_a_repository_with_an_origin_has_an_address(tmp_path):
    assert REPOSITORY["address"](tmp_path) is None
    git(tmp_path, "init")
    assert REPOSITORY["address"](tmp_path) is None
    git(tmp_path, "remote", "add", "origin", "git@forge.org:owner/project.git")
    assert REPOSITORY["address"](tmp_path) == "https://forge.org/owner/project"
    (tmp_path / "copy").mkdir()
    assert REPOSITORY["address"](tmp_path / "copy") is None
