/* SPDX-License-Identifier: GPL-2.0 OR MIT */
#ifndef MPSD_STUB_H
#define MPSD_STUB_H

#include <linux/module.h>

/*
 * A module named "nvidia" for a machine without a GPU. The generator (stub.py) asks a built
 * nvidia-uvm.ko which functions it imports; those named in MPSD_STUB_ANSWERS() are written here,
 * for every other one it writes MPSD_STUB_REFUSES(). So the stub follows the driver's version, and
 * nothing succeeds that nobody thought about.
 *
 * stub-calls.h is generated: enum mpsd_stub_call, one CALL_<function> for each import.
 */
#include "stub-calls.h"

/* The driver's status NV_ERR_NOT_SUPPORTED. */
#define MPSD_STUB_NOT_SUPPORTED 0x56u

/* Counts a call, to be read in /proc/mpsd-stub. */
void mpsd_stub_answered(enum mpsd_stub_call call);
unsigned int mpsd_stub_refused(enum mpsd_stub_call call);

int mpsd_stub_journal_open(void);
void mpsd_stub_journal_close(void);

/* The software GPU, in gpu/; a stub built without it has neither. */
#ifdef MPSD_STUB_GPU
int mpsd_gpu_open(void);
void mpsd_gpu_close(void);
#else
static inline int mpsd_gpu_open(void)
{
	return 0;
}

static inline void mpsd_gpu_close(void)
{
}
#endif

#define MPSD_STUB_ANSWERS(function) EXPORT_SYMBOL(function)

/* The caller's parameters are left alone: what a refused call says in them means nothing. */
#define MPSD_STUB_REFUSES(function)					\
	unsigned int function(void);					\
	unsigned int function(void)					\
	{								\
		return mpsd_stub_refused(CALL_##function);		\
	}								\
	EXPORT_SYMBOL(function)

#endif
