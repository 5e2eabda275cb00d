// SPDX-License-Identifier: MIT
/*
 * cut.c on an imitated UVM: ranges are freed under a lock, and the freeing thread then waits while the resource
 * manager is busy. Prints "ok".
 */
#include "failover/cut.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "checking.h"
#include "debug.h"
#include "clock.h"
#include "failover/copy.h"
#include "failover/descriptors.h"

#define GRANULE ((uint64_t)2 << 20)
#define BASE ((uint64_t)1 << 40)
#define MOST 400
#define PATIENCE_MS 20000

enum { NOTHING, MAPPED, EMPTY };

void *mpsd_real_handle;		/* none: so there is no stand-in */
static bool is_known = true;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int there[MOST];
static bool is_busy, is_since_610;
static int refused = -1;
static int waiting;
static int policy;		/* of the last thread that freed a range */

/* Several threads from the beginning, as if the program's environment asked for that. */
static uint64_t cutters;

uint64_t mpsd_debug_number(enum mpsd_debug field, uint64_t otherwise, uint64_t unit, uint64_t least, uint64_t most)
{
	CHECK(field == MPSD_DEBUG_CUTTERS && unit == 1 && otherwise >= least && otherwise <= 8 && most >= 8);
	return cutters;
}

uint64_t __real_mpsd_now_ns(void);

/* On this clock a thread starts so much later than it was created; 0: the real clock. */
static atomic_uint_least64_t late_ns;
static pthread_t starter;

uint64_t __wrap_mpsd_now_ns(void)
{
	uint64_t late = atomic_load(&late_ns);

	if (!late)
		return __real_mpsd_now_ns();
	return pthread_equal(pthread_self(), starter) ? 1000 : 1000 + late;
}

bool mpsd_descriptors_is(unsigned int number, int fd)
{
	return is_known && number == 1 && fd >= 0;
}

static uint32_t free_range(unsigned int at)
{
	policy = sched_getscheduler(0);
	if (there[at] == NOTHING || (int)at == refused)
		return 0x1f;
	there[at] = NOTHING;
	waiting++;
	while (is_busy)
		pthread_cond_wait(&changed, &lock);
	waiting--;
	return 0;
}

static uint32_t external_range(unsigned int at)
{
	if (there[at] != NOTHING)
		return 0x61;
	there[at] = EMPTY;
	return 0;
}

int __wrap_ioctl(int fd, unsigned long request, ...)
{
	uint64_t *given;
	uint32_t status;
	va_list more;
	unsigned int at;

	va_start(more, request);
	given = va_arg(more, uint64_t *);
	va_end(more);
	CHECK(fcntl(fd, F_GETFD) == FD_CLOEXEC);
	at = (unsigned int)((given[0] - BASE) / GRANULE);
	CHECK(at < MOST && given[1] == GRANULE);
	pthread_mutex_lock(&lock);
	status = request == 34 ? free_range(at) : external_range(at);
	CHECK(request == 34 || request == 73);
	pthread_mutex_unlock(&lock);
	memcpy((char *)given + (is_since_610 && request == 34 ? 8 : 16), &status, sizeof(status));
	return 0;
}

static void be_busy(bool is)
{
	pthread_mutex_lock(&lock);
	is_busy = is;
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
}

static struct mpsd_cut *begin_first(unsigned int count, unsigned int first)
{
	struct arena_range pieces[MOST];

	for (unsigned int i = 0; i < count; i++) {
		pieces[i] = (struct arena_range){ BASE + i * GRANULE, GRANULE };
		there[i] = MAPPED;
	}
	return mpsd_cut_begin(1, pieces, count, first);
}

static struct mpsd_cut *begin(unsigned int count)
{
	return begin_first(count, count);
}

static enum mpsd_cut_state come_to_its_end(struct mpsd_cut *cut)
{
	enum mpsd_cut_state state = MPSD_CUT_GOES_ON;
	uint64_t until = __real_mpsd_now_ns() + PATIENCE_MS * 1000000ull;

	while (state == MPSD_CUT_GOES_ON && __real_mpsd_now_ns() < until) {
		state = mpsd_cut_look(cut);
		usleep(20);
	}
	return state;
}

static void end(struct mpsd_cut *cut)
{
	be_busy(false);
	mpsd_cut_end(cut);
	mpsd_cut_discard(cut);
	CHECK(waiting == 0);
}

static void all_is_cut_off(unsigned int count, bool busy)
{
	struct mpsd_cut *cut;

	be_busy(busy);
	cut = begin(count);
	CHECK(cut && come_to_its_end(cut) == MPSD_CUT_DONE);
	for (unsigned int i = 0; i < count; i++)
		CHECK(mpsd_cut_is_gone(cut, i) && there[i] != MAPPED);
	/* All threads were blocked meanwhile. */
	CHECK(!busy || waiting == (int)count);
	end(cut);
	for (unsigned int i = 0; i < count; i++)
		CHECK(there[i] == EMPTY);
}

static void what_uvm_refuses_is_not(void)
{
	struct mpsd_cut *cut;

	refused = 3;
	cut = begin(8);
	CHECK(cut && come_to_its_end(cut) == MPSD_CUT_FAILED);
	CHECK(!mpsd_cut_is_gone(cut, 3) && there[3] == MAPPED);
	end(cut);
	refused = -1;
}

static void the_first_ones_are_enough(void)
{
	struct mpsd_cut *cut;

	refused = 3;
	/* The cut ranges are reported later than the refused range. */
	be_busy(true);
	cut = begin_first(8, 3);
	CHECK(cut && come_to_its_end(cut) == MPSD_CUT_FAILED);
	CHECK(mpsd_cut_is_enough(cut) && !mpsd_cut_is_gone(cut, 3));
	end(cut);
	cut = begin_first(8, 4);
	CHECK(cut && come_to_its_end(cut) == MPSD_CUT_FAILED);
	CHECK(!mpsd_cut_is_enough(cut));
	end(cut);
	refused = -1;
}

/* More ranges than threads: returning threads do the rest. */
static void there_are_not_too_many_threads(void)
{
	struct mpsd_cut *cut;
	uint64_t until = mpsd_now_ns() + PATIENCE_MS * 1000000ull;
	int kept = 0;

	be_busy(true);
	cut = begin(MOST);
	while (kept < 256 && mpsd_now_ns() < until) {
		CHECK(mpsd_cut_look(cut) == MPSD_CUT_GOES_ON);
		pthread_mutex_lock(&lock);
		kept = waiting;
		pthread_mutex_unlock(&lock);
		usleep(20);
	}
	CHECK(kept == 256 && mpsd_cut_look(cut) == MPSD_CUT_GOES_ON);
	be_busy(false);
	CHECK(come_to_its_end(cut) == MPSD_CUT_DONE);
	end(cut);
}

/* A thread that got its CPU late does not yield it. */
static void who_has_a_processor_at_once_gives_way(uint64_t late, int expected)
{
	struct mpsd_cut *cut;

	starter = pthread_self();
	atomic_store(&late_ns, late);
	cut = begin(1);
	CHECK(cut && come_to_its_end(cut) == MPSD_CUT_DONE);
	end(cut);
	atomic_store(&late_ns, 0);
	CHECK(policy == expected);
}

static void cut_off_by(uint64_t threads)
{
	cutters = threads;
	all_is_cut_off(1, false);
	all_is_cut_off(40, false);
	all_is_cut_off(40, true);
	is_since_610 = true;
	all_is_cut_off(40, true);
	what_uvm_refuses_is_not();
	the_first_ones_are_enough();
	is_since_610 = false;
	what_uvm_refuses_is_not();
	there_are_not_too_many_threads();
}

int main(void)
{
	int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);

	CHECK(!begin(1));
	mpsd_cut_space(1, fd);
	cut_off_by(1);
	cut_off_by(8);
	who_has_a_processor_at_once_gives_way(1, SCHED_IDLE);
	who_has_a_processor_at_once_gives_way(1000000, SCHED_OTHER);
	is_known = false;
	CHECK(!begin(1));
	puts("ok");
	return 0;
}
