/* SPDX-License-Identifier: MIT */
/*
 * What is said on RUN/failover.sock (SOCK_SEQPACKET), in both directions: one structure of fixed size per
 * message, in the machine's own byte order. mpsd/failover/messages.py reads the same, and a test compares the
 * two by what the compiler says. Neither side answers a message; each goes on as it can.
 *
 * A standby is a context in a second domain on the same GPU, made by a second copy of the driver in the
 * program's own process. Its generation names it: what is said of another generation is of no account.
 *
 * The program says
 *	HELLO		mode; generation: where it lives now, 0: in its first context; values: the sum of 1: it may be
 *			told FENCED, 2: and GIVE, 4: and LIMIT, 8: and GUARD; once, first
 *	READY		generation; values: ns since STANDBY came, bytes of GPU memory that it takes (0: unknown)
 *	UNREADY		generation; values: 1: for lack of memory, so maybe later; text: why there will be none
 *	SHORT		values: bytes that it could not allocate, bytes that are free, the number of that allocation
 *			among those for which it says so. It waits for ROOM. Only where WELCOME says so
 *	GAVE		values: bytes that it has given of what it was asked for; 0: it had nothing of the kind; as GIVE has it
 *	OPAQUE		text: the driver's function that made what cannot be carried over; each name once
 *	UNSURE		text: what it did that cannot be undone or done again; each once
 *	OWN_ERROR	values: a CUresult that its own context gave. A claim, which moves nobody else
 *	MOVED		generation; values: ns since MOVE came until its calls were held, until the old
 *			context could write no more, until the first call went on; bytes restored; launches
 *			done again; not 0: it waits for its TURN to do that, or does it now: those are to come, and in place of bytes is what
 *			as many took before, in ns (0: unknown); 1: no more, else 2 and for how many ms its calls had not been held when it
 *			launched a kernel, not by a graph, for the first time (the last one that was new). text: why something may be missing.
 *			A program that waits says it again, after LOOKED, on each new connection: to a daemon that knows 4 there
 *	LOOKED		generation, moved to in this moment; values: whose code had the exception from which its domain was
 *			lost, by what its old context has left: 1: its own, 2: somebody else's, 3: nothing tells, but it met its own error as
 *			only who made a trap does; 4: nothing tells, and it has not met its own error like that. A claim about
 *			itself. Where it is 1 the program waits for its TURN in any case. 1: it goes on at once, as MOVE has it. Only
 *			where WELCOME says so
 *	LEFT		values: 1: in place of what was said before, 0: beside that; where pages lie, from and to, that a copy of the
 *			driver which was left shared with the GPU: nothing in them tells of work any more. 0 and 0: none. Only
 *			where WELCOME says so
 *	HOLDS		values: bytes of GPU memory that its snapshot buffers take; bytes that it wants to hold in all, where that is
 *			more than its limit, else 0. When the former changes, and when a save does not fit under the limit
 *	COST		values: bytes saved per epoch; ns that saving added to the last period's epochs; ns of those epochs without that.
 *			Once a second at most, and only while there is work
 *	LEAVES		the program has left fail-over for good and needs no standby; after each WELCOME again. values: 1: time,
 *			2: memory, 3: the daemon said GUARD (where WELCOME knows that). Of time: ns added; ns of the epochs that added
 *			them; the budget in thousandths. Of memory: bytes that one operation needs; bytes of the limit. The fifth value: 1
 *			if a list of read-only parameters may bring it under the budget. text: one sentence. HOLDS, COST, LEAVES: only
 *			where WELCOME says so
 *	EXPOSED		values: 1: work is in flight that cannot be rolled back, so a fault now would lose it, or was a moment ago; text:
 *			why. 0: no more. After each WELCOME again. Only where WELCOME says so
 *	DONE		generation; values: bytes restored, launches done again; 1: what was done again has not ended
 *			yet, and is said to when it has; text: why something may be missing. It has had its turn, and else that has
 *	STAYED		generation; text: why it did not move. It has the old context, and the old error
 * and the daemon
 *	WELCOME		mode: the one granted; MPSD_FAILOVER_OFF: it is told no more; values: 1: standbys are to be
 *			lazy, made when a move comes, where the program's environment says nothing; 1: it may say SHORT, with 2: and
 *			LEAVES after GUARD; 1: and LOOKED, but not with 4, 2: with 4, too; 1: and LEFT;
 *			the sum of 1: and HOLDS, COST, LEAVES, and LIMIT comes, 2: and EXPOSED; the time budget in thousandths of an epoch, 0: none
 *	STANDBY		generation; path: CUDA_MPS_PIPE_DIRECTORY of the second domain; text: the folder with
 *			copies of the driver (libcuda-0.so.1 and so on)
 *	STAND_DOWN	generation; text: why. Its context goes, if the program is not in it; values: 1: no other
 *			standby comes
 *	TURN		generation: where it has moved to, and waits to do again what was in flight. It does now
 *	FENCED		generation, told to move to: no kernel in the domain that is left writes any more, by the
 *			driver's word
 *	GIVE		values: what another program needs the memory of: 0: room for copies, 1: the standby
 *	ROOM		values: bytes that another program has given, so the allocation may be tried again; 0: nobody does;
 *			the number of that allocation
 *	LIMIT		values: bytes that its snapshot buffers may take from now on; the wish of HOLDS that this answers, 0: none, the
 *			limit has changed or the connection is new. Each wish has one answer. If the program holds more than its
 *			limit, it releases that when an epoch ends
 *	GUARD		the program leaves fail-over for good, because a user said so. Its guard zones stay
 *	MOVE		generation: go on there now; values: 0: its domain is lost, 1: it is to be left, and the
 *			program ends its work there first; what was in flight is 0: lost, 1: done again, 2: done
 *			again when it has its turn, 3: the same, but no TURN comes: it has that as soon as it has
 *			moved, maybe beside others (mode exact); 1: the driver logged no SM exception, so no SM keeps an
 *			address of one (a program of an earlier release reads them all the same); 1: who denies the exception in
 *			LOOKED goes on as soon as it has moved, and no TURN comes then; 1: who made the exception has ended, it seems,
 *			so a look that is still under way is not waited for; text: why
 */
#pragma once

#include <stdint.h>

#define MPSD_FAILOVER_MAGIC 0x726f6c66u		/* "flor" */
#define MPSD_FAILOVER_VERSION 1
#define MPSD_FAILOVER_PATH_ROOM 112
#define MPSD_FAILOVER_TEXT_ROOM 128
#define MPSD_FAILOVER_VALUES 6

enum mpsd_failover_kind {
	MPSD_FAILOVER_HELLO = 1,
	MPSD_FAILOVER_READY = 2,
	MPSD_FAILOVER_UNREADY = 3,
	MPSD_FAILOVER_OPAQUE = 4,
	MPSD_FAILOVER_OWN_ERROR = 5,
	MPSD_FAILOVER_MOVED = 6,
	MPSD_FAILOVER_STAYED = 7,
	MPSD_FAILOVER_DONE = 8,
	MPSD_FAILOVER_UNSURE = 9,
	MPSD_FAILOVER_SHORT = 10,
	MPSD_FAILOVER_GAVE = 11,
	MPSD_FAILOVER_LOOKED = 12,
	MPSD_FAILOVER_LEFT = 13,
	MPSD_FAILOVER_HOLDS = 14,
	MPSD_FAILOVER_COST = 15,
	MPSD_FAILOVER_LEAVES = 16,
	MPSD_FAILOVER_EXPOSED = 17,
	MPSD_FAILOVER_WELCOME = 65,
	MPSD_FAILOVER_STANDBY = 66,
	MPSD_FAILOVER_STAND_DOWN = 67,
	MPSD_FAILOVER_MOVE = 68,
	MPSD_FAILOVER_TURN = 69,
	MPSD_FAILOVER_FENCED = 70,
	MPSD_FAILOVER_GIVE = 71,
	MPSD_FAILOVER_ROOM = 72,
	MPSD_FAILOVER_LIMIT = 73,
	MPSD_FAILOVER_GUARD = 74,
};

#define MPSD_FAILOVER_TAKES_FENCED 1	/* in HELLO */
#define MPSD_FAILOVER_GIVES 2
#define MPSD_FAILOVER_BUDGETS 4
#define MPSD_FAILOVER_SWITCHES 8

#define MPSD_FAILOVER_SWITCH_KNOWN 2	/* in WELCOME */

#define MPSD_FAILOVER_HEARS_BUDGETS 1	/* in WELCOME */
#define MPSD_FAILOVER_HEARS_EXPOSED 2

enum mpsd_failover_spared {
	MPSD_FAILOVER_SPARED_ROOM = 0,
	MPSD_FAILOVER_SPARED_STANDBY = 1,
};

enum mpsd_failover_budget {
	MPSD_FAILOVER_BUDGET_TIME = 1,
	MPSD_FAILOVER_BUDGET_MEMORY = 2,
	MPSD_FAILOVER_BUDGET_BY_HAND = 3,	/* no budget: the daemon said GUARD */
};

enum mpsd_failover_again {
	MPSD_FAILOVER_LOST = 0,
	MPSD_FAILOVER_AGAIN = 1,
	MPSD_FAILOVER_IN_TURN = 2,
	MPSD_FAILOVER_AT_ONCE = 3,
};

enum mpsd_failover_whose {
	MPSD_FAILOVER_WHOSE_UNKNOWN = 0,
	MPSD_FAILOVER_WHOSE_OWN = 1,
	MPSD_FAILOVER_WHOSE_OTHERS = 2,
	MPSD_FAILOVER_WHOSE_FIRST = 3,
	MPSD_FAILOVER_WHOSE_NO_SIGN = 4,
};

enum mpsd_failover_mode {
	MPSD_FAILOVER_OFF = 0,
	MPSD_FAILOVER_KEEP = 1,		/* memory is kept; what was in flight may be half done, and it is said */
	MPSD_FAILOVER_EXACT = 2,	/* undone and done again */
};

struct mpsd_failover_message {
	uint32_t magic;
	uint16_t version;
	uint16_t kind;
	uint32_t mode;
	uint32_t reserved;		/* 0 */
	uint64_t generation;
	uint64_t values[MPSD_FAILOVER_VALUES];
	char path[MPSD_FAILOVER_PATH_ROOM];	/* these two with a final zero, zeros after it */
	char text[MPSD_FAILOVER_TEXT_ROOM];
};

_Static_assert(sizeof(struct mpsd_failover_message) == 312, "the layout is an interface");
