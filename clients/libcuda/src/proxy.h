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

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "functions.h"

#define MPSD_SLOTS (MPSD_NAMES + MPSD_SPARE)
#define MPSD_STUB_BYTES 16

/*
 * Between two launches a program has used the processor's nearer memory for something else. So what each launch looks
 * at lies together, and what each one writes, whichever file it is of.
 */
#define MPSD_READ_OFTEN __attribute__((section("mpsd_read_often")))
#define MPSD_WRITTEN_OFTEN __attribute__((section("mpsd_written_often")))

/* And so does its way through this library. */
#define MPSD_OF_A_LAUNCH __attribute__((hot))
#define MPSD_SELDOM __attribute__((noinline, cold))

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

/*
 * What calls lead to: the real driver's functions, and the wrappers or those. There is one of these, but for a
 * fail-over (failover/carry.h): each copy of the driver that was ever in use has its own, which never changes,
 * and a call keeps to the one with which it began, whatever happens meanwhile.
 */
struct mpsd_tables {
	void **real, **inner;
	uint64_t moves;		/* that were before it was in use; an even number */
};

extern _Atomic(const struct mpsd_tables *) mpsd_tables_now;

/* More, and older C libraries do not load, for a program that opens it, what has such thread-locals. */
#if defined(__x86_64__)
#define MPSD_THREAD_ALIGNMENT 32
#else
#define MPSD_THREAD_ALIGNMENT 16
#endif

/* What each call of a thread looks at and sets, in one line of the processor's memory. */
struct mpsd_thread {
	const struct mpsd_tables *tables;	/* those of the call that it makes; NULL: it is in none */
	/* 1 + the moves before the copy in which its operation was noted and may not have been taken; 0: none was. (submit.c) */
	uint64_t noted_in;
	/* It is in a function of the program's that runs in a stream, where a call of the driver's would wait for itself. */
	bool in_host_function;
	bool works;				/* it has begun to give the driver something (work.c) */
	uint8_t inside;				/* enum mpsd_inside: where what it allocates may lie (memory.h) */
	bool is_forced;				/* it waits to end an epoch early (exact/submit.c) */
	bool is_in_context;			/* the driver has taken a launch of its, and its context is the same since */
	uint8_t launches;			/* that it gave the driver itself, and when it was looked at how many (relaythread.c) */
	uint32_t launched_us;
} __attribute__((aligned(MPSD_THREAD_ALIGNMENT)));

extern _Thread_local struct mpsd_thread mpsd_thread __attribute__((tls_model("initial-exec")));

/* Those of the call that this thread makes; outside of any, those in use. */
static inline const struct mpsd_tables *mpsd_tables(void)
{
	const struct mpsd_tables *own = mpsd_thread.tables;

	return own ? own : atomic_load_explicit(&mpsd_tables_now, memory_order_acquire);
}

void mpsd_install(enum mpsd_when when);

/* find.c: the handle of the real driver, NULL if there is none; path gets where it came from. */
void *mpsd_find_real(char *path, size_t size, bool *was_there);

/* map.c: from addresses in the real driver to stubs; immutable once the proxy is loaded. */
void mpsd_map_add(void *real, unsigned int index);
void *mpsd_map_find(void *real);

/* exports.c: makes the names that this library exports those of the real driver. */
struct elfview;
void mpsd_match_exports(const struct elfview *real);

/* aside.c */
void mpsd_aside_prepare(const struct elfview *driver);
void mpsd_step_aside(const char *reason);
void mpsd_say(const char *format, ...) __attribute__((format(printf, 1, 2)));
const char *mpsd_reason_to_step_aside(void);
