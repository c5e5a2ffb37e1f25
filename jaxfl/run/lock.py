"""One run at a time in a folder."""

import contextlib
import logging
import os
import pathlib
import re
import socket

from jaxfl.engine import processes
from jaxfl.files import IrregularError, open_regular

try:
    import fcntl
except ImportError:  # Windows, where folders are not locked
    fcntl = None

_LOG = logging.getLogger("jaxfl")
_NAME = ".lock"
_SIGNED = re.compile(rb"process [0-9]+ on [^\n]*\n")
"""What a run writes into the file while it holds the lock."""


class Lock:
    """The lock of a folder that a run uses; the system releases it however the process ends.

    Of several processes of one run, the first holds the lock for all. The file stays, so that its name is safe to
    reuse. While the folder is in use, the file names the process. A shared lock writes nothing: without a file to
    open, nothing is locked. A file system without locks is not locked either.

    Args:
        folder: None: nothing is locked.
    """

    def __init__(self, folder: pathlib.Path | None) -> None:
        self.folder = folder
        self._file: int | None = None
        self._signed = False

    def take(self, *, shared: bool) -> None:
        """Lock the folder, or change the lock: shared with other readers, or exclusive.

        Raises:
            ValueError: the folder is in use. An exclusive lock is also not to be had where the folder cannot be
                written, or where a link, or a file of another program, has the name of the lock.
        """
        processes.by_first(lambda: self._take(shared))

    def close(self) -> None:
        """Release the folder."""
        if self._file is None:
            return
        if self._signed:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)
        os.close(self._file)
        self._file, self._signed = None, False

    def _take(self, shared: bool) -> None:
        self.close()
        if self.folder is None:
            return
        if not shared and not os.access(self.folder, os.W_OK):
            raise ValueError(
                f"folder={str(self.folder)!r} cannot be written: choose another folder"
            )
        if fcntl is None:
            return
        try:
            self._file = open_regular(
                self.folder / _NAME, os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT
            )
            fcntl.flock(self._file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            user = self._text().decode(errors="replace").strip()
            self.close()
            raise ValueError(
                f"folder={str(self.folder)!r} is in use by {user or 'another process'}: wait for it, end it, or choose "
                "another folder"
            ) from None
        except OSError as error:
            self.close()
            if isinstance(error, IrregularError) and not shared:
                raise ValueError(f"{error}. Remove it, or choose another folder.") from None
            log = _LOG.debug if shared else _LOG.warning
            log(
                "%s cannot be locked (%s): let no other run use it meanwhile",
                self.folder,
                error.strerror or error,
            )
            return
        if not shared:
            self._sign()

    def _sign(self) -> None:
        """Write who holds the lock into the file, unless another program wrote the file."""
        assert self._file is not None
        found = self._text()
        linked = os.fstat(self._file).st_nlink > 1
        if linked or (found and not _SIGNED.fullmatch(found)):
            self.close()
            reason = "has further names (hard links)" if linked else "was written by no run"
            text = f"folder={str(self.folder)!r} holds a file {_NAME!r} that {reason}"
            raise ValueError(f"{text}. Remove it, or choose another folder.")
        content = f"process {os.getpid()} on {socket.gethostname()}\n".encode()
        with contextlib.suppress(OSError):  # a full disk
            os.ftruncate(self._file, 0)
            if os.pwrite(self._file, content, 0) < len(content):
                os.ftruncate(self._file, 0)
        self._signed = True

    def _text(self) -> bytes:
        """The beginning of the file."""
        assert self._file is not None
        return os.pread(self._file, 1000, 0)
