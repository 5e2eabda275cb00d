"""Generated sources stubs.S, names.c and functions.h. The same input gives the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from libcuda_build import carry, thunks
from libcuda_build.table import Plan

SPARE = 128
"""Stubs without a name. At load time they get names that a newer driver exports."""

SPARE_NAME_ROOM = 96
"""Bytes of such a name, with its final zero."""

_MADE = "made by libcuda_build from cuda.h, functions.toml and names.txt"

# A stub is one jump through the table. It takes 16 bytes, so that its address follows from its index.
# Before the jump stand whole instructions of 5 bytes that run at any address. UCX and other tools overwrite
# the first bytes of a function by a jump, and run what stood there elsewhere. They refuse endbr64 and a jump.
_STUBS = """\
/* {made} */
#define SLOT(index) (mpsd_table + 8 * (index))

#if defined(__x86_64__)
.macro stub name, index
	.balign 16
	.globl \\name
	.type \\name, %function
\\name:
	.cfi_startproc
	push %rbp
	.cfi_adjust_cfa_offset 8
	.cfi_rel_offset %rbp, 0
	mov %rsp, %rbp
	pop %rbp
	.cfi_adjust_cfa_offset -8
	.cfi_restore %rbp
	jmp *SLOT(\\index)(%rip)
	.cfi_endproc
	.size \\name, . - \\name
.endm
#elif defined(__aarch64__)
.macro stub name, index
	.balign 16
	.globl \\name
	.type \\name, %function
\\name:
	.cfi_startproc
	hint #34			/* bti c */
	adrp x16, SLOT(\\index)
	ldr x16, [x16, #:lo12:SLOT(\\index)]
	br x16
	.cfi_endproc
	.size \\name, . - \\name
.endm
#else
#error "the proxy has stubs for x86-64 and aarch64 only"
#endif

	.hidden mpsd_table
	.hidden mpsd_stubs
	.globl mpsd_stubs
	.text
	.balign 64
mpsd_stubs:
"""

# The stubs suit a shadow stack (CET), but no check of branch targets: they begin without endbr64, see above.
_NOTES = """\
	.section .note.GNU-stack, "", %progbits
#if defined(__x86_64__) && defined(__CET__)
	.section .note.gnu.property, "a"
	.balign 8
	.long 4, 16, 5
	.asciz "GNU"
	.long 0xc0000002, 4, 2, 0
#endif
"""


def write_sources(plan: Plan, folder: Path) -> None:
    """Write the generated sources into `folder`, which exists."""
    (folder / "stubs.S").write_text("\n".join(_stubs(plan)) + "\n" + _NOTES)
    (folder / "names.c").write_text("\n".join(_names(plan)) + "\n")
    (folder / "functions.h").write_text("\n".join(_functions(plan)) + "\n")
    (folder / "carry.c").write_text(
        f"/* {_MADE} */\n" + "\n".join(carry.source(plan.carried, plan.per_thread)) + "\n"
    )
    refused = "\n".join(thunks.thunks(len(plan.names) + SPARE))
    (folder / "thunks.S").write_text(f"/* {_MADE} */\n{refused}\n{_NOTES}")


def spare_name(number: int) -> str:
    """Return a placeholder that is as long as the longest name that may replace it."""
    return f"cu__mpsd_spare_{number:03d}_".ljust(SPARE_NAME_ROOM - 1, "x")


def _stubs(plan: Plan) -> Iterator[str]:
    yield _STUBS.format(made=_MADE)
    for index, name in enumerate([*plan.names, *map(spare_name, range(SPARE))]):
        yield f"\tstub {name}, {index}"


def _names(plan: Plan) -> Iterator[str]:
    yield f"/* {_MADE} */"
    yield '#include "proxy.h"'
    yield "const char *const mpsd_names[MPSD_NAMES] = {"
    yield from (f'\t"{name}",' for name in plan.names)
    yield "};"
    yield "const struct mpsd_wrapper mpsd_wrappers[MPSD_WRAPPERS] = {"
    for name, when in plan.wrapped.items():
        yield f"\t{{ MPSD_{name}, MPSD_WHEN_{when.upper()}, (void *)wrap_{name} }},"
    yield "};"


def _functions(plan: Plan) -> Iterator[str]:
    yield f"/* {_MADE} */"
    yield "#pragma once"
    yield "#include <cuda.h>"
    yield f"#define MPSD_NAMES {len(plan.names)}"
    yield f"#define MPSD_SPARE {SPARE}"
    yield f"#define MPSD_SPARE_NAME_ROOM {SPARE_NAME_ROOM}"
    yield '#define MPSD_SPARE_PREFIX "cu__mpsd_spare_"'
    yield f"#define MPSD_WRAPPERS {len(plan.wrapped)}"
    carried = {one.function.name for one in plan.carried} | {own.function.name for own in plan.per_thread}
    for name in sorted({*plan.called, *carried}):
        parameters = ", ".join(plan.functions[name].parameters) or "void"
        yield ""
        yield f"#define MPSD_{name} {plan.names.index(name)}"
        if name in plan.wrapped:
            yield f"CUresult wrap_{name}({parameters});"
        for table, where in (
            ("real", "mpsd_tables()->real"),
            ("inner", "mpsd_tables()->inner"),
            ("other", "mpsd_other"),
        ):
            yield f"#define {table}_{name} ((CUresult (*)({parameters})){where}[MPSD_{name}])"
    yield ""
    yield from carry.declarations(plan.carried, plan.per_thread)
