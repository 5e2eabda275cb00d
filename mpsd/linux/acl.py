"""Directories that one user may enter and nobody else but root: a POSIX ACL, acl(5).

Not by making it the user's: root's control daemon writes files there by name, and the owner of a directory
can put links in its way. Nor by group: a user's group may have other members.
"""

from __future__ import annotations

import os
import struct

_XATTR = "system.posix_acl_access"
# linux/posix_acl_xattr.h: a version, then (tag, permissions, id) in this order.
_VERSION = 2
_ENTRY = struct.Struct("<HHI")
_USER_OBJ, _USER, _GROUP_OBJ, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_NO_ID = 0xFFFFFFFF
_ENTER = 5


def only_for(path: str, uid: int) -> None:
    """Let the owner do everything in this directory, `uid` enter and list it, and others nothing.

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
