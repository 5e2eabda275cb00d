/* SPDX-License-Identifier: MIT */
/*
 * Functions of the host in streams. The driver gets a function of this library's, which looks whether the
 * program's may run: all that is before it is proven, and the copy of the driver that calls is the one in use.
 *
 *	WAITS --> RUNS --> DONE		once, in whichever copy
 *	  +--> LOST			what was in flight in a move is lost: a function does not run then
 *	  +--> OWED --> RUNS --> DONE	and a callback is told, by a thread of this library's
 *
 * One that runs while the program is moved goes on: in the next copy what comes after it waits for its end. The mover
 * does not, for it may wait itself for a thread that the move holds.
 */
#pragma once

#include "exact/state.h"

enum mpsd_host_kind {
	PLAIN,
	WITH_MODE,		/* cuLaunchHostFunc_v2 */
	CALLBACK,
};

enum mpsd_host_state {
	WAITS,
	RUNS,
	DONE,
	LOST,
	OWED,
};

struct mpsd_host {
	struct mpsd_host *older, *newer;	/* of those that are open, as long as this one is */
	enum mpsd_host_state state;
	unsigned int holders;		/* operations, and the thread that gives it to the driver */
	bool is_passed;			/* a copy that was left has come to it: what becomes of it the mover says */
	unsigned int givens;
	enum mpsd_host_kind kind;
	CUhostFn function;
	CUstreamCallback callback;	/* in place of that */
	void *data;
	CUstream stream;		/* what the program calls it */
	unsigned int flags;
	struct mpsd_lane *lane;		/* NULL: the driver's word is enough */
	uint64_t number;
	CUresult status;		/* what the driver has said; once it has, it says no more in that copy */
	uint64_t said_in;		/* the moves before that copy */
	uint64_t since_ns;		/* it runs */
};

/* What one copy has been given. Where the context is lost it may never come back. */
struct mpsd_given {
	struct mpsd_given *older, *newer;
	struct mpsd_host *host;
	uint64_t moves;			/* before that copy */
};

/* Of all that follows. Taken after mpsd_exact_lock, and given back by nobody but mpsd_host_run() meanwhile. */
extern pthread_mutex_t mpsd_hosts_lock;
extern pthread_cond_t mpsd_hosts_changed;

void mpsd_host_open(struct mpsd_host *host);
bool mpsd_host_is_open(const struct mpsd_host *host);
void mpsd_host_close(struct mpsd_host *host, enum mpsd_host_state state);
void mpsd_host_run(struct mpsd_host *host, CUresult status);
void mpsd_given_begin(struct mpsd_given *given);
void mpsd_given_end(struct mpsd_given *given);	/* frees it, and what nobody else needs */

/* What is OWED, or may come to be, is told. False: by nobody. */
bool mpsd_hosts_tell(void);

/* hostcalls.c: a function of this kind, as the driver's call has it. */
CUresult mpsd_host_hand_over(const struct mpsd_host *host, CUstream stream, CUhostFn function,
			     CUstreamCallback callback, void *data);
