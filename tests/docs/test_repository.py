"""The link from the site to the repository that it is built from."""

import pathlib
import runpy

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
        ("/home/name/project", None),
        ("file:///home/name/project", None),
        ("../project", None),
        ("", None),
    ],
)
def test_the_address_is_that_of_the_origin_without_its_user(origin, address):
    assert REPOSITORY["web_address"](origin) == address


def test_a_folder_without_a_repository_has_no_address(tmp_path):
    assert REPOSITORY["address"](tmp_path) is None
