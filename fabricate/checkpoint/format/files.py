"""All access of checkpoints to the file system.

Owns every system call that reads or changes a checkpoint directory, one method each, so that a subclass can count them, let one fail, cut a
write short or stop the process there. Must not know what the bytes mean. Failures are raised as `OSError`, which `explained` turns into a
`StorageError` with a remedy.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fabricate.errors import CheckpointError

__all__ = ["LOCAL", "Files", "Source", "StorageError", "Writer", "explained"]


class StorageError(CheckpointError):
    """Raised if the file system refuses: a full disk, a missing permission, a failing device. A later attempt may succeed."""


class Files:
    """The local file system. Changes are visible immediately, but only the `fsync` methods make them durable.

    Subclass it to observe or disturb system calls: `Writer` and `Source` hold only a descriptor and call these methods.
    """

    def create(self, path: Path) -> Writer:
        """Create the file `path`, which must not exist (not even as a dangling link), and return it open for writing."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return Writer(self, path, os.open(path, flags, 0o666))

    def write(self, writer: Writer, data: bytes | bytearray | memoryview) -> None:
        """Append all of `data`."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(writer.descriptor, rest) :]

    def start_writeback(self, writer: Writer, start: int, count: int) -> None:
        """Ask the system to begin writing bytes ``[start, start + count)`` to the disk. This is a hint; the call does not wait."""
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(writer.descriptor, start, count, os.POSIX_FADV_DONTNEED)

    def fsync(self, writer: Writer) -> None:
        """Make the written bytes durable. Never retry it: after a failure the kernel may have dropped the pages."""
        os.fsync(writer.descriptor)

    def close_writer(self, writer: Writer) -> None:
        os.close(writer.descriptor)

    def open(self, path: Path) -> Source:
        """Open the regular file `path` for reading.

        Raises OSError for a link, a FIFO or a device, without waiting for it.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise _not_regular(path)
        return Source(self, path, descriptor)

    def read(self, source: Source, start: int, count: int) -> bytes:
        """Return bytes ``[start, start + count)``; fewer only at the end of the file."""
        parts = []
        while count:
            part = os.pread(source.descriptor, count, start)
            if not part:
                break
            parts.append(part)
            start, count = start + len(part), count - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, source: Source, start: int, buffer: memoryview) -> int:
        """Fill `buffer` with the bytes from `start` on; returns their number, which is less than the buffer holds only at the end of the
        file."""
        filled = 0
        while filled < len(buffer):
            count = os.preadv(source.descriptor, [buffer[filled:]], start + filled)
            if not count:
                break
            filled += count
        return filled

    def close_source(self, source: Source) -> None:
        os.close(source.descriptor)

    def size(self, path: Path) -> int:
        """Return the size in bytes of the regular file `path`; raises `OSError` for a link, directory or device."""
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            raise _not_regular(path)
        return status.st_size

    def listdir(self, path: Path) -> list[str]:
        """Return the names in a directory, sorted."""
        return sorted(os.listdir(path))

    def make_directory(self, path: Path) -> None:
        """Make one directory, unless it exists: several ranks call this at the same time."""
        try:
            os.mkdir(path)
        except FileExistsError:
            if not path.is_dir():
                raise

    def make_directories(self, path: Path) -> None:
        """Make `path` and its missing parents, and make each new directory durable in its parent."""
        if not path.is_dir():
            self.make_directories(path.parent)
            self.make_directory(path)
            self.fsync_directory(path.parent)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def remove_directory(self, path: Path) -> None:
        os.rmdir(path)

    def remove_tree(self, path: Path) -> None:
        """Remove `path` and everything below it, if it exists. Links are removed, not followed."""
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(status.st_mode):
            self.unlink(path)
            return
        for name in self.listdir(path):
            self.remove_tree(path / name)
        self.remove_directory(path)

    def fsync_directory(self, path: Path) -> None:
        """Make the creations, renames and removals inside a directory durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def fsync_path(self, path: Path) -> None:
        """Make the content of a file durable that other code writes."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def free_bytes(self, path: Path) -> int:
        """Return how many bytes this user may still write on the file system of `path`."""
        return shutil.disk_usage(path).free


class Writer:
    """A file open for writing, from `Files.create`. Use it in a ``with`` block, which closes it."""

    def __init__(self, files: Files, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self._files = files

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._files.write(self, data)

    def start_writeback(self, start: int, count: int) -> None:
        self._files.start_writeback(self, start, count)

    def fsync(self) -> None:
        self._files.fsync(self)

    def close(self) -> None:
        self._files.close_writer(self)


class Source:
    """A regular file open for reading at any offset, from `Files.open`. Close it, or use it in a ``with`` block."""

    def __init__(self, files: Files, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self._files = files

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def read(self, start: int, count: int) -> bytes:
        return self._files.read(self, start, count)

    def read_into(self, start: int, buffer: memoryview) -> int:
        return self._files.read_into(self, start, buffer)

    def close(self) -> None:
        self._files.close_source(self)


@contextmanager
def explained(doing: str, path: Path) -> Iterator[None]:
    """A context that turns an `OSError` into a `StorageError` with a remedy."""
    try:
        yield
    except OSError as exc:
        remedy = "check the file system and the disk"
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "free space there, keep fewer checkpoints, or point run_dir at another disk"
        elif exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            remedy = "give this user write permission, or point run_dir elsewhere"
        raise StorageError(f"cannot {doing} {path}: {exc.strerror or exc}; {remedy}") from exc


def _not_regular(path: Path) -> OSError:
    return OSError(errno.EINVAL, "not a regular file", str(path))


LOCAL = Files()
