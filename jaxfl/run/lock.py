"""Locks that allow one run at a time in a folder.

The package filelock cannot replace this module. Its file locks are exclusive only, and its locks
with readers write files even for readers. A reader here must write nothing.
"""

import contextlib
import logging
import os
import pathlib
import re
import socket

from jaxfl._support.files import IrregularError, open_regular
from jaxfl.engine import processes
from jaxfl.report.layout import LOCK

try:
    import fcntl
except ImportError:
    # On Windows folders are not locked.
    fcntl = None

_LOG = logging.getLogger("jaxfl")
_SIGNED = re.compile(rb"process [0-9]+ on [^\n]*\n")
"""Line that a run writes into the file while it holds the lock."""


class Lock:
    """Lock of a folder that a run uses, which the system releases however the process ends.

    The first of several processes of one run holds the lock for all of them. The lock file (`LOCK`)
    stays in the folder, so that its name is safe to reuse. While a run holds the exclusive lock,
    the file names its process. A shared lock writes nothing, so nothing is locked if there is no
    file to open. On Windows, and on a file system without locks, nothing is locked either.

    Args:
        folder: Folder of the run. None locks nothing.
    """

    def __init__(self, folder: pathlib.Path | None) -> None:
        self.folder = folder
        self._file: int | None = None
        self._signed = False

    def take(self, *, shared: bool) -> None:
        """Lock the folder, or replace the lock that this object holds.

        Args:
            shared: Whether other readers may lock the folder too. Otherwise the lock is exclusive.

        Raises:
            ValueError: The folder is in use. Or the lock is exclusive, and the folder cannot be
                written, or its lock file is a link, has hard links or is another program's.
        """
        processes.by_first(lambda: self._take(shared))

    def close(self) -> None:
        """Release the lock, if this object holds it, and empty the file of an exclusive lock."""
        if self._file is None:
            return
        # The lock is still held here, so that the file cannot have the next owner's name yet.
        if self._signed:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)
        # Closing the descriptor releases the lock, so no call unlocks it.
        os.close(self._file)
        self._file = None
        self._signed = False

    def _take(self, shared: bool) -> None:
        # A second descriptor would conflict with the lock that this object holds.
        self.close()
        if self.folder is None:
            return
        # An earlier lock file may be writable even if its folder is not.
        if not shared and not os.access(self.folder, os.W_OK):
            raise ValueError(
                f"folder must be a folder that can be written, got {str(self.folder)!r}. "
                "Choose another folder."
            )
        if fcntl is None:
            return
        if shared:
            mode = os.O_RDONLY
            kind = fcntl.LOCK_SH
        else:
            mode = os.O_RDWR | os.O_CREAT
            kind = fcntl.LOCK_EX
        try:
            self._file = open_regular(self.folder / LOCK, mode)
            # Without this flag, the call would wait until the other run ends.
            fcntl.flock(self._file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            # Only an exclusive lock has a name in the file. Readers leave no trace.
            user = self._text().decode(errors="replace").strip() or "another process"
            self.close()
            raise ValueError(
                f"folder must be free, got {str(self.folder)!r}, which is in use by {user}. "
                "Wait for that process, end it, or choose another folder."
            ) from None
        except OSError as error:
            self.close()
            self._report(error, shared)
            return
        if not shared:
            self._sign()

    def _report(self, error: OSError, shared: bool) -> None:
        """Log that the folder cannot be locked, or raise a ValueError about its lock file."""
        if isinstance(error, IrregularError) and not shared:
            raise ValueError(
                f"folder must hold a usable lock file, got {str(self.folder)!r}: {error}. "
                "Remove it, or choose another folder."
            ) from None
        # A reader often finds no file to lock, which is no reason for a warning.
        log = _LOG.debug if shared else _LOG.warning
        log(
            "%s cannot be locked (%s). Let no other run use it meanwhile.",
            self.folder,
            error.strerror or error,
        )

    def _sign(self) -> None:
        """Write the number and the machine of this process into the lock file.

        Raises:
            ValueError: Another program wrote the file, or it has hard links.
        """
        assert self._file is not None
        found = self._text()
        # Truncation would empty the file under its other names too.
        linked = os.fstat(self._file).st_nlink > 1
        if linked or (found and not _SIGNED.fullmatch(found)):
            self.close()
            reason = "was written by no run"
            if linked:
                reason = "has further names (hard links)"
            raise ValueError(
                f"folder must hold a file {LOCK!r} of a run, or none, got "
                f"{str(self.folder)!r}, whose file {reason}. "
                "Remove it, or choose another folder."
            )
        content = f"process {os.getpid()} on {socket.gethostname()}\n".encode()
        # The disk may be full.
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, 0)
            # A later run would take a part of the line for a file of another program.
            if os.pwrite(self._file, content, 0) < len(content):
                os.ftruncate(self._file, 0)
        self._signed = True

    def _text(self) -> bytes:
        """Return the first 1000 bytes of the lock file."""
        assert self._file is not None
        return os.pread(self._file, 1000, 0)
