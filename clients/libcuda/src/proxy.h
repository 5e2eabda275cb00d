/* SPDX-License-Identifier: MIT */
/*
 * The proxy in one picture:
 *
 *	program --> stub i: jmp *mpsd_table[i] --+--> the real driver's function
 *	                                         +--> wrap_NAME(), which calls mpsd_real[i]
 *
 * Both tables are filled before anybody can call (constructor in load.c). mpsd_real never changes
 * after that; entries of mpsd_table change when the first cuInit switches wrappers on, or the proxy
 * steps aside. A stub reads one aligned word, so it needs no lock at any time.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "functions.h"

#define MPSD_SLOTS (MPSD_NAMES + MPSD_SPARE)
#define MPSD_STUB_BYTES 16

enum mpsd_when {
	MPSD_WHEN_ALWAYS,
	MPSD_WHEN_MEMORY,
};

struct mpsd_wrapper {
	unsigned int index;
	enum mpsd_when when;
	void *function;
};

/* Generated. */
extern const char *const mpsd_names[MPSD_NAMES];	/* in the order of strcmp */
extern const struct mpsd_wrapper mpsd_wrappers[MPSD_WRAPPERS];
extern const char mpsd_stubs[];

/* load.c */
extern void *mpsd_table[MPSD_SLOTS];
extern void *mpsd_real[MPSD_SLOTS];
extern void *mpsd_real_handle;		/* of dlopen; NULL: there is no driver */

static inline void *mpsd_stub(unsigned int index)
{
	return (void *)(mpsd_stubs + (size_t)MPSD_STUB_BYTES * index);
}

void mpsd_install(enum mpsd_when when);

/* find.c: the handle of the real driver, NULL if there is none; path gets where it came from. */
void *mpsd_find_real(char *path, size_t size, bool *was_there);

/* map.c: from addresses in the real driver to stubs; immutable once the proxy is loaded. */
void mpsd_map_add(void *real, unsigned int index);
void *mpsd_map_find(void *real);

/* exports.c: makes the names that this library exports those of the real driver. */
void mpsd_match_exports(void *real_handle);

/* aside.c */
void mpsd_step_aside(const char *reason);
void mpsd_say(const char *format, ...) __attribute__((format(printf, 1, 2)));
const char *mpsd_reason_to_step_aside(void);
