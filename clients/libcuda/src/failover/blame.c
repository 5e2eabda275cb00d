// SPDX-License-Identifier: MIT
/*
 * An exception of a kernel names nobody: the kernel's log says on which SM it was, and the server's channels are reset. But
 * an SM keeps where the warp was that had it until somebody clears that (autopsy.c keeps the programs' own copies from it),
 * as an address in the warp's own address space, and any program of the lost domain may read it. Each looks whether that
 * is code of its own: code lies where the process was given addresses, which are others in each process. Two that were
 * forked from one may have the same; then both say that it is theirs.
 *
 * After a trap or a breakpoint nothing is kept. But who made it has its error before the driver resets the channels, and
 * its copy does not look at the SMs at all, as those of all others do before they say what they have met.
 *
 * Both were seen on an H200 (mpsd/docs/mechanisms-failover.md).
 */
#include "failover/blame.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#include "clock.h"
#include "failover/autopsy.h"
#include "failover/carry.h"
#include "failover/copy.h"
#include "failover/descriptors.h"
#include "failover/graph.h"
#include "failover/made.h"
#include "failover/manager.h"
#include "failover/owned.h"
#include "thread.h"

#define GO_ON_MS 10		/* before what the resource manager is asked for next keeps it busy, and takes memory away */
#define WAIT_MS 20

static pthread_mutex_t look_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t look_ended = PTHREAD_COND_INITIALIZER;

/* What a look needs of the copy that is about to be left. */
struct subject {
	unsigned int number, serial;
	uint64_t moves;
	const struct mpsd_tables *tables;
	CUcontext context;		/* NULL: it is not asked how it is */
	bool was_logged;
};

static struct {
	unsigned int serial;
	bool is_on;
	bool is_late;			/* the move takes memory away by now, and the context may be lost for that */
	enum mpsd_failover_whose whose;
} look;

static atomic_uint may_tell;	/* 0: nothing; 1: not NO_SIGN, which the daemon does not know */
static atomic_int sm_count;		/* of a GPU */

/* Of so many SMs; `whose` stays what it is where none of them had anything. */
static bool read_some(unsigned int number, const struct mpsd_owned *device, uint32_t first, uint32_t count,
		      enum mpsd_failover_whose *whose)
{
	struct mpsd_rm_sm_states states = { .channel = device->channel, .count = count, .first = first };
	struct mpsd_rm_control control = {
		.client = device->root,
		.object = device->debugger,
		.command = MPSD_RM_READ_ALL_SM_ERROR_STATES,
		.parameters = (uint64_t)&states,
		.size = sizeof(states),
	};

	if (mpsd_autopsy_ask(number, device->fd, MPSD_RM_CONTROL, &control) || control.status)
		return false;
	for (uint32_t i = 0; i < count && *whose != MPSD_FAILOVER_WHOSE_OWN; i++)
		if (states.states[i].pc)
			*whose = mpsd_owned_whose(number, states.states[i].pc);
	return true;
}

/* The copy is not unloaded meanwhile. */
static void enter(uint64_t moves)
{
	if (moves)
		atomic_fetch_add(mpsd_inside_of(moves), 1);
}

static void leave(uint64_t moves)
{
	if (moves)
		atomic_fetch_sub(mpsd_inside_of(moves), 1);
}

static bool look_at_one(unsigned int number, const struct mpsd_owned *device, enum mpsd_failover_whose *whose)
{
	uint32_t count = (uint32_t)atomic_load(&sm_count);

	if (!count || !device->channel || !mpsd_descriptors_is(number, device->fd))
		return false;
	for (uint32_t at = 0; at < count && *whose != MPSD_FAILOVER_WHOSE_OWN; at += MPSD_RM_MOST_SMS) {
		uint32_t left = count - at;

		if (!read_some(number, device, at, left < MPSD_RM_MOST_SMS ? left : MPSD_RM_MOST_SMS, whose))
			return false;
	}
	return true;
}

/* Somebody else's, or nobody's, it is where all were seen: of several GPUs, all of their SMs. */
static enum mpsd_failover_whose look_at(unsigned int number)
{
	enum mpsd_failover_whose whose = MPSD_FAILOVER_WHOSE_UNKNOWN;
	struct mpsd_owned devices[MPSD_OWNED_MOST];
	unsigned int known = mpsd_owned_devices(number, devices);
	bool are_all = true;

	for (unsigned int i = 0; i < known && whose != MPSD_FAILOVER_WHOSE_OWN; i++)
		are_all = look_at_one(number, &devices[i], &whose) && are_all;
	if (!are_all && whose != MPSD_FAILOVER_WHOSE_OWN)
		return MPSD_FAILOVER_WHOSE_UNKNOWN;
	return whose ? whose : MPSD_FAILOVER_WHOSE_NO_SIGN;
}

/*
 * Whether its context is lost, and the copy knows that without having looked at the SMs: it has no reason to look any
 * more that it had not before. Beside the mover, for who is in the driver may keep its locks.
 */
static bool is_first(const struct subject *of)
{
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	CUresult result;

	if (mpsd_autopsy_has_looked(of->number))
		return false;
	mpsd_thread.tables = of->tables;
	real_cuThreadExchangeStreamCaptureMode(&mode);
	result = real_cuCtxSetCurrent(of->context);
	if (result == CUDA_SUCCESS)
		result = real_cuStreamQuery(CU_STREAM_LEGACY);
	real_cuCtxSetCurrent(NULL);
	mpsd_thread.tables = NULL;
	return mpsd_is_loss(result) && !mpsd_autopsy_has_looked(of->number);
}

/* Where no SM has an address; `whose` as look_at() has it. */
static enum mpsd_failover_whose ask_context(const struct subject *of, enum mpsd_failover_whose whose)
{
	if (!of->context)
		return MPSD_FAILOVER_WHOSE_UNKNOWN;
	return is_first(of) ? MPSD_FAILOVER_WHOSE_FIRST : whose;
}

static void *run(void *argument)
{
	struct subject *of = argument;
	enum mpsd_failover_whose whose = of->was_logged ? look_at(of->number) : MPSD_FAILOVER_WHOSE_NO_SIGN;

	if (!whose || whose == MPSD_FAILOVER_WHOSE_NO_SIGN)
		whose = ask_context(of, whose);
	leave(of->moves);
	pthread_mutex_lock(&look_lock);
	if (look.serial == of->serial) {
		look.whose = look.is_late && whose == MPSD_FAILOVER_WHOSE_FIRST ? MPSD_FAILOVER_WHOSE_UNKNOWN : whose;
		look.is_on = false;
		pthread_cond_signal(&look_ended);
	}
	pthread_mutex_unlock(&look_lock);
	free(of);
	return NULL;
}

void mpsd_blame_prepare(void)
{
	int count = 0;

	/* Once: later the context may be lost, and the driver may keep the thread that asks. */
	if (atomic_load(&sm_count))
		return;
	if (real_cuDeviceGetAttribute(&count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0) == CUDA_SUCCESS && count > 0)
		atomic_store(&sm_count, count);
}

/* A context of the program's in the copy in use. NULL where what is asked of one would disturb a capture. */
static CUcontext find_context(void)
{
	struct mpsd_made *context;

	if (mpsd_capturing())
		return NULL;
	mpsd_made_lock();
	context = mpsd_made_first_context();
	mpsd_made_unlock();
	return context ? context->native : NULL;
}

/* With its lock. */
static void await_look(int milliseconds)
{
	struct timespec until = mpsd_in(milliseconds);

	while (look.is_on && !pthread_cond_timedwait(&look_ended, &look_lock, &until))
		;
}

void mpsd_blame_begin(unsigned int number, bool was_logged)
{
	struct mpsd_owned devices[MPSD_OWNED_MOST];
	struct subject *of = mpsd_owned_devices(number, devices) ? malloc(sizeof(*of)) : NULL;
	uint64_t moves = mpsd_moves_done();

	if (!of)
		return;
	pthread_mutex_lock(&look_lock);
	*of = (struct subject){ number, ++look.serial, moves, mpsd_tables(), find_context(), was_logged };
	look.whose = MPSD_FAILOVER_WHOSE_UNKNOWN;
	look.is_late = false;
	enter(moves);
	look.is_on = mpsd_thread_start(run, of);
	if (look.is_on) {
		await_look(GO_ON_MS);
		look.is_late = look.is_on;
	} else {
		leave(moves);
		free(of);
	}
	pthread_mutex_unlock(&look_lock);
}

enum mpsd_failover_whose mpsd_blame_end(bool hurries)
{
	enum mpsd_failover_whose whose;

	pthread_mutex_lock(&look_lock);
	if (!hurries)
		await_look(WAIT_MS);
	whose = look.whose;
	if (whose == MPSD_FAILOVER_WHOSE_NO_SIGN && atomic_load(&may_tell) < 2)
		whose = MPSD_FAILOVER_WHOSE_UNKNOWN;
	look.whose = MPSD_FAILOVER_WHOSE_UNKNOWN;
	look.is_on = false;
	look.serial++;
	pthread_mutex_unlock(&look_lock);
	return whose;
}

void mpsd_blame_child(void)
{
	look_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	look_ended = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
	look.is_on = false;
}

void mpsd_blame_may_tell(unsigned int what)
{
	atomic_store(&may_tell, what);
}

bool mpsd_blame_is_told(void)
{
	return atomic_load(&may_tell) != 0;
}
