"""Command that starts a trial server with two restrictions: new files are private, and user namespaces are forbidden.

In a user namespace of its own an ordinary process has every capability over what it makes there, and reaches much
of the kernel that is closed to it otherwise. Bubblewrap can forbid further ones only where it made one
itself, which it does not under root (CUDA would not start). So a filter on system calls does, for every level. Keys of
the kernel's keyrings, which are inherited from whoever started the worker, are closed by the same filter; so are
System V's shared memory, semaphores and messages, which are no process's memory and outlast all of them; and so are the
means to hide memory from the process that counts it: rings of io_uring and threads with descriptors of their own, whose
open files are in no list of the kernel, and memory that is secret to it.

It is a program of its own, handed over as text: in a sandbox this package cannot be imported.

https://www.kernel.org/doc/html/latest/userspace-api/seccomp_filter.html
"""

from __future__ import annotations

import platform

_SOURCE = """
import ctypes, errno, os, struct, sys
(arch, clone, unshare, close_range, clone3, *refused) = map(int, sys.argv[1].split(","))
ALLOW, REFUSE, ABSENT = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
USERS, FILES, THREAD = 0x10000000, 0x400, 0x10000
# (code, lines to skip where it holds, and where not, value). Offsets: 0 number, 4 architecture, 16 and 32 first and
# third argument.
code = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, arch), (RETURN, 0, 0, REFUSE), (LOAD, 0, 0, 0)]
code += [(AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, REFUSE)]
code += [(EQUAL, 0, 1, clone3), (RETURN, 0, 0, ABSENT)]  # its flags cannot be seen; libraries then use clone
for number in refused:
    code += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
code += [(EQUAL, 0, 4, close_range), (LOAD, 0, 0, 32), (ANY_BIT, 0, 1, 2), (RETURN, 0, 0, REFUSE)]
code += [(RETURN, 0, 0, ALLOW), (EQUAL, 0, 4, unshare), (LOAD, 0, 0, 16), (ANY_BIT, 0, 1, USERS | FILES)]
code += [(RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW), (EQUAL, 1, 0, clone), (RETURN, 0, 0, ALLOW)]
code += [(LOAD, 0, 0, 16), (ANY_BIT, 2, 0, USERS), (ANY_BIT, 0, 2, THREAD), (ANY_BIT, 1, 0, FILES)]
code += [(RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
program = b"".join(struct.pack("HBBI", *line) for line in code)
buffer = ctypes.create_string_buffer(program, len(program))
filter = ctypes.create_string_buffer(struct.pack("HP", len(code), ctypes.addressof(buffer)))
prctl = ctypes.CDLL(None, use_errno=True).prctl
prctl.argtypes = [ctypes.c_int] + [ctypes.c_void_p] * 4
for request in ((38, 1, 0, 0, 0), (22, 2, ctypes.addressof(filter), 0, 0)):  # no new privileges; the filter
    if prctl(*request):
        sys.exit(f"prctl({request[0]}) failed: {os.strerror(ctypes.get_errno())}")
os.umask(0o027)
os.execvp(sys.argv[2], sys.argv[2:])
"""
_NUMBERS = {
    "x86_64": (0xC000003E, 56, 272, 436, 435, 308, 248, 249, 250, 29, 64, 68, 425, 447),
    "aarch64": (0xC00000B7, 220, 97, 436, 435, 268, 217, 218, 219, 194, 190, 186, 425, 447),
}
"""Numbers that the system-call filter needs, by architecture, in this order: the audit number of the architecture; the
system calls clone, unshare, close_range and clone3; the system calls to refuse (setns, add_key, request_key, keyctl,
shmget, semget, msgget, io_uring_setup, memfd_secret).
"""


def confined(python: str) -> tuple[str, ...]:
    """Return a command prefix that forbids user namespaces, and lets only the command's own user and group read its new
    files.

    Args:
        python: An interpreter that its user can run.
    """
    numbers = ",".join(map(str, _NUMBERS[platform.machine()]))
    return (python, "-ISc", _SOURCE, numbers)


def lacks() -> str | None:
    """Return the reason why no process can be confined on this machine; None where one can."""
    known = " and ".join(_NUMBERS)
    return None if platform.machine() in _NUMBERS else f"system calls can be filtered on {known} only"
