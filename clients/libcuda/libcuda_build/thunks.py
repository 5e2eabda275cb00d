"""Thunks for functions that fail-over does not preserve: noted once, and refused after a fail-over."""

from __future__ import annotations

from collections.abc import Iterator

_THUNKS = """\
#if defined(__x86_64__)
.macro thunk index
	.balign 16
	endbr64
	pushq $\\index
	jmp mpsd_thunk_common
.endm

	.hidden mpsd_thunks
	.globl mpsd_thunks
	.hidden mpsd_opaque
	.text
mpsd_thunk_common:
	.cfi_startproc
	.cfi_def_cfa_offset 16
	push %rbp
	.cfi_def_cfa_offset 24
	mov %rsp, %rbp
	sub $48, %rsp
	mov %rdi, 0(%rsp)
	mov %rsi, 8(%rsp)
	mov %rdx, 16(%rsp)
	mov %rcx, 24(%rsp)
	mov %r8, 32(%rsp)
	mov %r9, 40(%rsp)
	mov 8(%rbp), %rdi
	and $-16, %rsp
	call mpsd_opaque
	lea -48(%rbp), %rsp
	mov %rax, %r11
	mov 0(%rsp), %rdi
	mov 8(%rsp), %rsi
	mov 16(%rsp), %rdx
	mov 24(%rsp), %rcx
	mov 32(%rsp), %r8
	mov 40(%rsp), %r9
	mov %rbp, %rsp
	pop %rbp
	.cfi_def_cfa_offset 16
	add $8, %rsp
	.cfi_def_cfa_offset 8
	jmp *%r11
	.cfi_endproc
	.balign 64
mpsd_thunks:
"""


def thunks(slots: int) -> Iterator[str]:
    """Yield the body of thunks.S, between the head and the notes of stubs.S."""
    yield _THUNKS
    yield from (f"\tthunk {index}" for index in range(slots))
    yield "#endif"
