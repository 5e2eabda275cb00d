/* SPDX-License-Identifier: MIT */
/*
 * How a call goes where a fail-over may come (MPSD_FAILOVER_SOCKET):
 *
 *	program --> stub --> carry_NAME() --> mpsd_inner[i]: wrap_NAME(), or the driver's own
 *
 * carry_NAME() is made from carry.toml. Until the first move it costs a look at one word. While the program
 * is moved, calls wait here; after it, the names that the program has (what the first copy of the driver
 * answered) become what the copy in use calls the same things. An error that the loss of a context gives is
 * not the program's until it is known that nothing is moved.
 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "proxy.h"

struct mpsd_carried {
	unsigned int index;
	void *function;
};

/* Generated. */
extern const struct mpsd_carried mpsd_carried[MPSD_CARRIED];
extern const struct mpsd_carried mpsd_plain[];	/* the short way (plain.h) of some of them */
extern const char mpsd_thunks[];

extern void *mpsd_inner[MPSD_SLOTS];	/* what carry_NAME() calls */
extern void *mpsd_other[MPSD_SLOTS];	/* of the standby's copy, for the thread of line.c alone */

/* 2 * moves that were, + 1 while there is one. */
extern atomic_uint_least64_t mpsd_moves;

static inline uint64_t mpsd_moves_done(void)
{
	return atomic_load(&mpsd_moves) & ~(uint64_t)1;
}

#define MPSD_AGAIN ((CUresult)-2)	/* of a make_NAME() that a move overtook */

/*
 * Whether the copy that this thread's call is in has been left. It comes into that only while the locks of made.h
 * and of the windows are held.
 */
static inline bool mpsd_is_left(void)
{
	const struct mpsd_tables *own = mpsd_thread.tables;

	return __builtin_expect(own != NULL, 1) && __builtin_expect(own != atomic_load(&mpsd_tables_now), 0);
}

/*
 * An answer that changes nothing, of a copy that was left meanwhile: its handle may have been translated to none by
 * then, and none is the legacy stream.
 */
static inline CUresult mpsd_answered(CUresult result)
{
	return result == CUDA_SUCCESS && __builtin_expect(mpsd_is_left(), 0) ? MPSD_AGAIN : result;
}

/* After wrappers are installed, and before the program has a context. Once. */
void mpsd_carry_install(void);

/* The program has a context, and will not be exact, or has ceased to be: launches may go the short way. */
void mpsd_carry_plainly(void);

static inline bool mpsd_is_forbidden(void)
{
	return __builtin_expect(mpsd_thread.in_host_function, 0);
}

/* phase.c */

/* A move that lasts longer than that has failed: the program has its error. */
#define MPSD_MOVE_MS 12000

/* A loss was met: the daemon hears of it. Whether it has moved the program since, or tried to; after that. */
bool mpsd_phase_word(CUresult result, uint64_t moves);

extern const struct mpsd_tables *mpsd_first_tables;
uint64_t mpsd_carry_wait(void);
bool mpsd_carry_again(CUresult result, uint64_t moves);

/* Calls inside each of the copies that came after the first one, which alone may be unloaded. */
#define MPSD_COPIES_KNOWN 8
extern atomic_uint mpsd_inside[MPSD_COPIES_KNOWN];

/* Where tables of so many have what is of the copy after `moves`. */
static inline unsigned int mpsd_copy_index(uint64_t moves)
{
	return (moves >> 1) % MPSD_COPIES_KNOWN;
}

static inline atomic_uint *mpsd_inside_of(uint64_t moves)
{
	return &mpsd_inside[mpsd_copy_index(moves)];
}

/*
 * The number of the moves that were; waits for the end of one, and sees to the thread's context after it. Until
 * mpsd_carry_leave() the thread's calls are those of that copy.
 */
static inline uint64_t mpsd_carry_enter(void)
{
	uint64_t moves = atomic_load(&mpsd_moves);

	if (__builtin_expect(moves != 0, 0))
		return mpsd_carry_wait();
	mpsd_thread.tables = mpsd_first_tables;
	return 0;
}

static inline void mpsd_carry_leave(uint64_t moves)
{
	mpsd_thread.tables = NULL;
	if (__builtin_expect(moves != 0, 0))
		atomic_fetch_sub(mpsd_inside_of(moves), 1);
}

/* What the loss of a context, or of the MPS server, gives to each later call. */
static inline bool mpsd_is_loss(CUresult result)
{
	switch ((int)result) {
	case 700: case 702: case 710: case 714: case 715: case 716: case 717: case 718: case 719:
	case 805: case 806: case 807:
		return true;
	default:
		return false;
	}
}

/*
 * names.c: a handle in the copy of this call, of what the program calls `name`; and the reverse. NULL where another
 * copy is in use by now: what fails with that is tried again.
 */
void *mpsd_native_of(const void *name);
void *mpsd_name_of(const void *native);

/* The same of what the standby calls it: this thread makes something there. */
extern _Thread_local bool mpsd_thread_is_ahead __attribute__((tls_model("initial-exec")));

static inline void *mpsd_native_pointer(const void *name)
{
	return __builtin_expect(mpsd_tables()->moves != 0, 0) ? mpsd_native_of(name) : (void *)name;
}

/* variable.c: how many variables of modules the program knows the addresses of. */
extern atomic_uint mpsd_variables;

/* Around all of them, by the addresses that the program knows. */
extern struct mpsd_span mpsd_variables_span;

/* An address of the program's in the copy of this call; 0 where another copy is in use by now. */
CUdeviceptr mpsd_variable_address(CUdeviceptr address);

bool mpsd_variable_is(CUdeviceptr address);

/* The program puts something there: with bytes of the host's, which are kept. */
void mpsd_variable_written(CUdeviceptr address);
bool mpsd_variable_read(CUdeviceptr address);
void mpsd_variables_child(void);
CUresult mpsd_variable_put(CUdeviceptr address, const void *bytes, size_t size, CUstream stream);

/* Whether there is one, of the module that the function, or kernel, is of; or nobody knows which that is. */
bool mpsd_variable_is_of(CUdeviceptr address, const void *function);

static inline bool mpsd_knows_variables(void)
{
	return __builtin_expect(atomic_load_explicit(&mpsd_variables, memory_order_relaxed) != 0, 0);
}

static inline bool mpsd_is_variable(CUdeviceptr address)
{
	return mpsd_knows_variables() && mpsd_variable_is(address);
}

static inline CUdeviceptr mpsd_address(CUdeviceptr address)
{
	return mpsd_knows_variables() && mpsd_tables()->moves ? mpsd_variable_address(address) : address;
}

/* False: what is to be read there was lost in a move. */
static inline bool mpsd_read(CUdeviceptr address)
{
	return !mpsd_knows_variables() || mpsd_variable_read(address);
}

/* Of a copy of rows; 0: the host's. */
#define mpsd_rows_source(rows) ((rows) && (rows)->srcMemoryType != CU_MEMORYTYPE_HOST ? (rows)->srcDevice : 0)

static inline void mpsd_written(CUdeviceptr address)
{
	if (mpsd_knows_variables())
		mpsd_variable_written(address);
}

#define mpsd_native(name) ((__typeof__(name))mpsd_native_pointer(name))
#define mpsd_name(native) ((__typeof__(native))mpsd_name_of(native))

/* config.c: a launch attribute with handles of the copy of this call. */
void mpsd_attribute_native(CUlaunchAttribute *attribute);

/* ownstream.c: of this thread, in its context; CU_STREAM_PER_THREAD: there is none. */
CUstream mpsd_own_stream(void);
void mpsd_own_context_ended(void);
void mpsd_own_child(void);

/* times.c: what the driver, and then the program, was told of an event; `moves`: before the copy of that call. */
void mpsd_event_recorded(CUevent event, CUstream stream, uint64_t moves);
void mpsd_event_reached(CUevent event);

/* work.c: what may be in flight. */
#define MPSD_SEVERAL_STREAMS UINT64_MAX

struct mpsd_work_counts {
	atomic_uint_least64_t begun, given;	/* to the driver */
	atomic_uint_least64_t only;		/* the key of the stream that all of it went into; 0: none yet */
};
extern struct mpsd_work_counts mpsd_work_counts;

static inline uint64_t mpsd_work_key(CUstream stream)
{
	return (uint64_t)(uintptr_t)(stream == CU_STREAM_LEGACY ? NULL : stream) + 1;
}

uint64_t mpsd_work_count(void);
void mpsd_work(CUstream stream);
void mpsd_work_that_waits(CUstream stream);	/* of a wait for an event, in place of that */
void mpsd_work_given(void);	/* after each of those */
void mpsd_work_captured(void);	/* in place of that: the stream has joined a capture by it, and nothing was given */
void mpsd_work_given_late(void);	/* after one that its thread has left to another (relay.c) */
void mpsd_work_held(bool is);	/* the thread waits for the end of a move */
bool mpsd_work_is_over(void);	/* all that was given has ended, as far as is known */
bool mpsd_work_rests(void);	/* in a move: nobody is about to give the driver something */
void mpsd_work_several(void);	/* there is more than one context: a wait proves nothing of the other */
bool mpsd_work_is_several(void);
void mpsd_waited_for_all(CUresult result, uint64_t moves, uint64_t work);
void mpsd_waited(CUresult result, uint64_t moves, CUstream stream, uint64_t work);

/* Once after work was lost, in place of success. */
CUresult mpsd_work_told(CUresult result);

/* All that was given has ended. */
void mpsd_work_ended(void);

/* Whether something may be in flight; from now on it is lost, and the program will be told. */
bool mpsd_work_lost(void);
void mpsd_work_missing(void);	/* something was, and the program will be told */
void mpsd_work_lose(void);	/* for good: each wait says so from then on */

void *mpsd_opaque(unsigned int index);
