"""Directories that only root and one user may enter: a POSIX ACL, acl(5).

The directory does not belong to the user: root's control daemon writes files there by name, and the owner of
a directory can plant links in its way. A group does not fit either: a user's group may include other users.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Collection

_XATTR = "system.posix_acl_access"
# linux/posix_acl_xattr.h: a version, then (tag, permissions, id) in this order.
_VERSION = 2
_ENTRY = struct.Struct("<HHI")
_USER_OBJ, _USER, _GROUP_OBJ, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_NO_ID = 0xFFFFFFFF
_ENTER = 5
_GROUP, _SEARCH = 0x08, 1
UNSUPPORTED = frozenset({errno.ENOTSUP, errno.EOPNOTSUPP})
"""Errors of a file system without ACLs. Linux has one number for both names."""


def user_of(path: str) -> int | None:
    """Return the one user that a directory's ACL admits besides its owner; None if there is no such ACL.

    Raises OSError.
    """
    try:
        raw = os.getxattr(path, _XATTR)
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            return None
        raise
    users = [uid for tag, _, uid in _ENTRY.iter_unpack(raw[struct.calcsize("<I") :]) if tag == _USER]
    return users[0] if len(users) == 1 else None


def only_for(path: str, uid: int) -> None:
    """Let the owner do everything in this directory, `uid` enter and list it, and other users nothing.

    Raises OSError, with ENOTSUP where the file system has no ACLs.
    """
    os.chmod(path, 0o700)
    if uid == os.stat(path).st_uid:
        return
    rows = (
        (_USER_OBJ, 7, _NO_ID),
        (_USER, _ENTER, uid),
        (_GROUP_OBJ, 0, _NO_ID),
        (_MASK, _ENTER, _NO_ID),
        (_OTHER, 0, _NO_ID),
    )
    os.setxattr(path, _XATTR, struct.pack("<I", _VERSION) + b"".join(_ENTRY.pack(*row) for row in rows))


def is_only_for(path: str, uid: int) -> bool:
    """Return whether root, this process's user and `uid` are the only users that may enter this directory.

    False if that cannot be read. Whether `uid` itself gets in is not part of the answer.
    """
    try:
        status = os.lstat(path)
        rows = _entries(path)
    except OSError:
        return False
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (0, os.geteuid(), uid):
        return False
    if rows is None:
        return status.st_mode & 0o077 == 0
    # The owner is not bound by the mask. A group can have any members.
    mask = next((permissions for tag, permissions, _ in rows if tag == _MASK), 7)
    for tag, permissions, who in rows:
        trusted = tag in (_USER_OBJ, _MASK) or (tag == _USER and who in (0, uid))
        granted = permissions if tag == _OTHER else permissions & mask
        if granted and not trusted:
            return False
    return True


def _entries(path: str) -> list[tuple[int, int, int]] | None:
    """Return the rows of the directory's ACL, None if it has none. Raises OSError."""
    try:
        value = os.getxattr(path, _XATTR, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            return None
        raise
    head = struct.calcsize("<I")
    if (
        len(value) < head
        or (len(value) - head) % _ENTRY.size
        or struct.unpack_from("<I", value)[0] != _VERSION
    ):
        raise OSError(errno.EINVAL, f"the ACL of {path} has an unknown form")
    return list(_ENTRY.iter_unpack(value[head:]))


def supported(path: str) -> bool:
    """Return whether the file system of this path has ACLs. Raises OSError."""
    try:
        os.getxattr(path, _XATTR)
    except OSError as error:
        if error.errno in UNSUPPORTED:
            return False
        if error.errno != errno.ENODATA:
            raise
    return True


def may_enter(path: str, uid: int, groups: Collection[int]) -> bool:
    """Return whether a process with this uid and these groups may search a directory. Raises OSError.

    Root may search every directory.
    """
    status = os.stat(path)
    mode = status.st_mode
    if uid in (0, status.st_uid):
        return uid == 0 or bool(mode >> 6 & _SEARCH)
    rows = _entries(path) or [(_GROUP_OBJ, mode >> 3 & 7, _NO_ID)]
    # An ACL without named entries may lack a mask.
    mask = next((permissions for tag, permissions, _ in rows if tag == _MASK), 7)
    for tag, permissions, who in rows:
        if tag == _USER and who == uid:
            return bool(permissions & mask & _SEARCH)
    granted = [
        permissions & mask
        for tag, permissions, who in rows
        if (tag == _GROUP_OBJ and status.st_gid in groups) or (tag == _GROUP and who in groups)
    ]
    return any(each & _SEARCH for each in granted) if granted else bool(mode & _SEARCH)
