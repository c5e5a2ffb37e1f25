"""One run at a time in a folder."""

import contextlib
import logging
import os
import pathlib
import socket

import jax

from jaxfl.engine import processes

try:
    import fcntl
except ImportError:  # Windows, where folders are not locked
    fcntl = None

_LOG = logging.getLogger("jaxfl")
_NAME = ".lock"


class Lock:
    """The lock of a folder that a run uses; the system releases it however the process ends.

    Of several processes of one run, the first holds the lock for all. The file stays, so that its name is safe to
    reuse; while the folder is in use, it names the process. A read-only folder, or a file system without locks, is not
    locked.

    Args:
        folder: None: nothing is locked.
    """

    def __init__(self, folder: pathlib.Path | None) -> None:
        self.folder = folder
        self._file: int | None = None

    def take(self, *, shared: bool) -> None:
        """Lock the folder, or change the lock: shared with other readers, or exclusive.

        Raises:
            ValueError: it is in use; or it cannot be written, which only a shared lock allows.
        """
        problem = None
        if jax.process_index() == 0:
            try:
                self._take(shared)
            except ValueError as error:
                problem = error
        if processes.largest(problem is not None)[0]:
            raise problem or ValueError(f"folder={str(self.folder)!r}: process 0 of this run could not lock it")

    def close(self) -> None:
        """Release the folder."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)
        self._release()

    def _take(self, shared: bool) -> None:
        if self.folder is None:
            return
        if not os.access(self.folder, os.W_OK):
            if shared:
                return
            raise ValueError(f"folder={str(self.folder)!r} cannot be written: choose another folder")
        if fcntl is None:
            return
        self.close()
        try:
            self._file = os.open(self.folder / _NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(self._file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            user = (self.folder / _NAME).read_text(errors="replace").strip()
            self._release()
            raise ValueError(
                f"folder={str(self.folder)!r} is in use by {user or 'another process'}: wait for it, end it, or choose "
                "another folder"
            ) from None
        except OSError as error:
            self._release()
            _LOG.warning("%s cannot be locked (%s): let no other run use it meanwhile", self.folder, error.strerror)
            return
        (self.folder / _NAME).write_text("" if shared else f"process {os.getpid()} on {socket.gethostname()}\n")

    def _release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
