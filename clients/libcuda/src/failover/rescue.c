// SPDX-License-Identifier: MIT
/*
 * A living daemon reads messages at once. So a daemon is silent while it has not read what this program has said,
 * and a program that hears nothing of a silent or dead one moves into the standby that it holds. A daemon that has read
 * of the loss and says nothing moves nobody: the error is the program's own, and it gets it.
 */
#include "failover/rescue.h"

#include <stdint.h>
#include <sys/ioctl.h>

#include "clock.h"
#include "debug.h"
#include "failover/line.h"

#define RESCUE_MS 3000
#define WORD_MS 2000		/* of a daemon that has heard */
#define LOOK_MS 50		/* whether it has */
#define NS_PER_MS 1000000ull

static uint64_t lost_ns, connected_ns, heard_ns;	/* 0: not yet */

static uint64_t rescue_ms(void)
{
	return mpsd_debug_number(MPSD_DEBUG_RESCUE_MS, RESCUE_MS, 1, 100, 60000);
}

int mpsd_rescue_hold_ms(void)
{
	/* It may be heard at the last moment. */
	return (int)rescue_ms() + WORD_MS + 2 * LOOK_MS;
}

void mpsd_rescue_connected(void)
{
	connected_ns = mpsd_now_ns();
	heard_ns = 0;
}

static bool has_read(int line)
{
	int unread = 0;

	return line >= 0 && !ioctl(line, TIOCOUTQ, &unread) && !unread;
}

static bool is_lost(void)
{
	if (!mpsd_own_error_met() || !mpsd_line_ready()) {
		lost_ns = heard_ns = 0;
		return false;
	}
	if (!lost_ns)
		lost_ns = mpsd_now_ns();
	return true;
}

/* Once the daemon has read of the loss its time runs, whatever the program says later. */
static void look(int line)
{
	if (line < 0)
		heard_ns = 0;
	else if (!heard_ns && has_read(line))
		heard_ns = mpsd_now_ns();
}

static uint64_t due_ns(int line)
{
	uint64_t since = line >= 0 && connected_ns > lost_ns ? connected_ns : lost_ns;

	return heard_ns ? heard_ns + WORD_MS * NS_PER_MS : since + rescue_ms() * NS_PER_MS;
}

enum mpsd_rescue mpsd_rescue_now(int line)
{
	if (!is_lost())
		return MPSD_RESCUE_WAIT;
	look(line);
	if (mpsd_now_ns() < due_ns(line))
		return MPSD_RESCUE_WAIT;
	/* What it was told last may lie unread since it stopped. */
	return heard_ns && has_read(line) ? MPSD_RESCUE_GIVE_UP : MPSD_RESCUE_MOVE;
}

int mpsd_rescue_due_ms(int line)
{
	uint64_t now = mpsd_now_ns(), due;
	int ms;

	if (!is_lost())
		return -1;
	due = due_ns(line);
	ms = now < due ? (int)((due - now) / NS_PER_MS) + 1 : 0;
	return !heard_ns && line >= 0 && ms > LOOK_MS ? LOOK_MS : ms;
}
