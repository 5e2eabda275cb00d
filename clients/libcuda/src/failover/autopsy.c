// SPDX-License-Identifier: MIT
/*
 * After an SM exception every libcuda of the domain looks at all SMs for what happened, and clears that: again and
 * again, for long where a program is a large one, under the locks that every other process's context, allocation and
 * unmapping needs, and the programs' own way out of there too (mpsd/docs/mechanisms-failover.md). A program that is
 * moved does not want to know. So its copy is told that this is not supported, at once if the program is on its way, and
 * otherwise when it is; who is not moved in time is let through, and learns what happened, who is left behind for having
 * made the fault later than the others. So is who still asks when those have long gone on: a thread of the program's may
 * sit in that copy until it knows.
 */
#include "failover/autopsy.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/ioctl.h>

#include "clock.h"
#include "debug.h"
#include "elfview.h"
#include "failover/cut.h"
#include "failover/descriptors.h"
#include "failover/line.h"
#include "failover/manager.h"
#include "failover/move.h"
#include "failover/owned.h"
#include "failover/remains.h"
#include "uvm.h"

#define NOT_SUPPORTED 0x56u
#define WAIT_MS 150
#define BEHIND 4		/* times that */
#define REFUSE_NS 2000000000ull

static struct {
	atomic_uint_least64_t left_ns;		/* 0: it is in use, or not loaded */
	atomic_uint_least64_t since_ns;		/* the first look of this copy */
} copies[MPSD_COPY_NUMBERS];

static atomic_uint_least64_t wait_ns;
static atomic_uint line_calls;	/* nested */

/* What a driver that has no resource manager has in place of it. */
static int (*imitated[MPSD_COPY_NUMBERS])(int fd, unsigned long request, void *argument);

void mpsd_autopsy_left(unsigned int number, bool is)
{
	if (!is)
		atomic_store(&copies[number].since_ns, 0);
	atomic_store(&copies[number].left_ns, is ? mpsd_now_ns() : 0);
}

bool mpsd_autopsy_has_looked(unsigned int number)
{
	return atomic_load(&copies[number].since_ns) != 0;
}

void mpsd_autopsy_know(unsigned int number, void *library)
{
	imitated[number] = (__typeof__(imitated[number]))mpsd_elfview_symbol(library, "standinManager");
}

int mpsd_autopsy_ask(unsigned int number, int fd, unsigned long request, void *argument)
{
	return imitated[number] ? imitated[number](fd, request, argument) : ioctl(fd, request, argument);
}

static bool is_autopsy(unsigned long request, const struct mpsd_rm_control *control)
{
	return request == MPSD_RM_CONTROL && (control->command == MPSD_RM_READ_ALL_SM_ERROR_STATES ||
					      control->command == MPSD_RM_CLEAR_ALL_SM_ERROR_STATES);
}

void mpsd_autopsy_line_calls(bool is)
{
	atomic_fetch_add(&line_calls, is ? 1 : -1u);
}

/*
 * The daemon's message may come later than the driver instance's first look. A program that is left behind lets the others
 * go first. Nothing waits while the thread that hears the daemon is in the driver: it makes a standby context, or calls the
 * instance in use, where another thread's look may hold a lock that this call needs.
 */
static bool may_wait(unsigned int number)
{
	uint64_t waited = mpsd_now_ns() - atomic_load(&copies[number].since_ns);

	if (number != mpsd_in_use_number() || atomic_load(&line_calls))
		return false;
	if (mpsd_line_is_behind())
		return waited < BEHIND * atomic_load(&wait_ns);
	return mpsd_line_word_ms() && (!mpsd_line_ready() || waited < atomic_load(&wait_ns));
}

static bool is_refused(unsigned int number)
{
	uint64_t none = 0, left;

	atomic_compare_exchange_strong(&copies[number].since_ns, &none, mpsd_now_ns());
	while (!(left = atomic_load(&copies[number].left_ns)) && may_wait(number))
		mpsd_pause(1);
	return left && mpsd_now_ns() - left < REFUSE_NS;
}

static int own_ioctl(unsigned int number, int fd, unsigned long request, void *argument)
{
	unsigned int ends = atomic_load(&mpsd_copy_ends[number]);
	struct mpsd_rm_control *control = argument;
	int result = 0;

	mpsd_descriptors_used(number, fd);
	if (request == MPSD_UVM_MAP_EXTERNAL)
		mpsd_cut_space(number, fd);
	if (__builtin_expect(!is_autopsy(request, control), 1) || !is_refused(number))
		result = mpsd_autopsy_ask(number, fd, request, argument);
	else
		control->status = NOT_SUPPORTED;
	if (!number && !result)
		mpsd_remains_note(fd, request, argument);
	mpsd_copy_come_back(number, ends);
	if (!result)
		mpsd_owned_note(number, fd, request, argument);
	return result;
}

#define OWN_IOCTL(number)								\
	static int own_ioctl_##number(int fd, unsigned long request, ...)		\
	{										\
		va_list more;								\
		void *argument;								\
											\
		va_start(more, request);						\
		argument = va_arg(more, void *);					\
		va_end(more);								\
		return own_ioctl(number, fd, request, argument);			\
	}

OWN_IOCTL(0)
OWN_IOCTL(1)
OWN_IOCTL(2)
OWN_IOCTL(3)

void *mpsd_autopsy_ioctl(unsigned int number)
{
	static int (*const own[])(int fd, unsigned long request, ...) = {
		own_ioctl_0, own_ioctl_1, own_ioctl_2, own_ioctl_3,
	};

	_Static_assert(sizeof(own) / sizeof(*own) == MPSD_COPY_NUMBERS, "each copy has its own");
	atomic_store(&wait_ns, mpsd_debug_number(MPSD_DEBUG_AUTOPSY_MS, WAIT_MS, 1, 0, 60000) * 1000000);
	return (void *)own[number];
}
