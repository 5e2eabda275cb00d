// SPDX-License-Identifier: MIT
/* Functions of the host: given to a copy of the driver, and called by it. */
#include <stdlib.h>
#include <unistd.h>

#include "clock.h"
#include "exact/hostfunc.h"
#include "failover/line.h"

#define LONG_NS 1000000000ull
#define LOOK_US 50

enum turn {
	NEVER,		/* not in this copy */
	NOW,
	SOON,		/* what is before it is not proven */
	AFTER,		/* it runs, where it was before a move */
};

/* The driver says that its context is lost. A callback is told so, unless the program goes on elsewhere. */
static enum turn told_turn(struct mpsd_given *given, CUresult status)
{
	struct mpsd_host *host = given->host;

	if (!mpsd_is_loss(status) || (!mpsd_line_ready() && atomic_load(&mpsd_moves) == given->moves) ||
	    !mpsd_hosts_tell())
		return NOW;
	if (host->lane)
		mpsd_lane_stop(host->lane, host->number, given->moves);
	host->status = status;
	host->said_in = given->moves;
	return NEVER;
}

/* With both locks. `is_late`: it is not waited for what is before it any more. */
static enum turn turn_of(struct mpsd_given *given, CUresult *status, bool is_late)
{
	struct mpsd_host *host = given->host;
	bool left = atomic_load(&mpsd_tables_now)->moves != given->moves;

	if (host->state == OWED) {
		*status = host->status;
		return NOW;
	}
	if (host->state != WAITS && host->state != RUNS)
		return NEVER;
	if (left && host->lane)
		mpsd_lane_stop(host->lane, host->number, given->moves);
	if (left) {
		host->is_passed = true;
		return NEVER;
	}
	if (host->state == RUNS)
		return AFTER;
	if (*status != CUDA_SUCCESS)
		return told_turn(given, *status);
	return !is_late && host->lane && mpsd_lane_look(host->lane) + 1 < host->number ? SOON : NOW;
}

/* With the lock, before the callback runs. In a context that was left, the move decides about the epoch. */
static void end_epoch(const struct mpsd_given *given, CUresult status)
{
	struct mpsd_host *host = given->host;

	if (host->lane && status == CUDA_SUCCESS && atomic_load(&mpsd_tables_now)->moves == given->moves)
		mpsd_epoch_end_before(host, (struct mpsd_point){ host->lane, host->number });
}

/* Whether it is to run, with the lock. The program knows what is before it then, and may change it on the host. */
static bool has_turn(struct mpsd_given *given, CUresult *status)
{
	uint64_t until = mpsd_now_ns() + LONG_NS;
	bool is_late = false;
	enum turn turn;

	for (;;) {
		mpsd_word_take(&mpsd_exact_lock);
		end_epoch(given, *status);
		pthread_mutex_lock(&mpsd_hosts_lock);
		turn = turn_of(given, status, is_late);
		if (turn == NOW && given->host->lane)
			mpsd_epoch_seen((struct mpsd_point){ given->host->lane, given->host->number });
		mpsd_word_give(&mpsd_exact_lock);
		if (turn == AFTER)
			pthread_cond_wait(&mpsd_hosts_changed, &mpsd_hosts_lock);
		if (turn == NEVER || turn == NOW)
			return turn == NOW;
		pthread_mutex_unlock(&mpsd_hosts_lock);
		if (turn == AFTER)
			continue;
		usleep(LOOK_US);
		is_late = mpsd_now_ns() > until;
		if (is_late)
			mpsd_epoch_unsure("a host callback that ran before earlier work was complete");
	}
}

static void come(struct mpsd_given *given, CUresult status)
{
	/* The copy is not unloaded meanwhile. */
	atomic_uint *inside = given->moves ? mpsd_inside_of(given->moves) : NULL;

	if (inside)
		atomic_fetch_add(inside, 1);
	if (has_turn(given, &status))
		mpsd_host_run(given->host, status);
	mpsd_given_end(given);
	pthread_mutex_unlock(&mpsd_hosts_lock);
	if (inside)
		atomic_fetch_sub(inside, 1);
}

static void CUDA_CB come_function(void *given)
{
	come(given, CUDA_SUCCESS);
}

static void CUDA_CB come_callback(CUstream stream, CUresult status, void *given)
{
	(void)stream;
	come(given, status);
}

/* Giving it to the driver */

void mpsd_host_noted(const struct mpsd_op *op)
{
	pthread_mutex_lock(&mpsd_hosts_lock);
	op->host->lane = op->lane;
	op->host->number = op->number;
	mpsd_host_open(op->host);
	pthread_mutex_unlock(&mpsd_hosts_lock);
}

/* False: this call's copy was left. */
static bool give(struct mpsd_host *host, struct mpsd_given *given)
{
	bool left;

	pthread_mutex_lock(&mpsd_hosts_lock);
	left = mpsd_is_left();
	if (!left) {
		if (host->state == WAITS && !mpsd_host_is_open(host))
			mpsd_host_open(host);
		*given = (struct mpsd_given){ .host = host, .moves = mpsd_tables()->moves };
		mpsd_given_begin(given);
		host->is_passed = false;
		if (host->state == WAITS)
			host->status = CUDA_SUCCESS;
		pthread_cond_broadcast(&mpsd_hosts_changed);
	}
	pthread_mutex_unlock(&mpsd_hosts_lock);
	return !left;
}

/* What is noted stays, for a move may do it, but for who gave it. */
static CUresult refused(struct mpsd_given *given, CUresult result)
{
	struct mpsd_host *host = given->host;

	pthread_mutex_lock(&mpsd_hosts_lock);
	/* It was lost in a move, and said, before the driver refused it. */
	if (!host->lane && host->kind == CALLBACK && host->state != WAITS)
		result = CUDA_SUCCESS;
	if (!host->lane && host->state == WAITS)
		mpsd_host_close(host, LOST);
	/* An error of work before it may come with what was taken. */
	if (!mpsd_is_loss(result))
		mpsd_given_end(given);
	pthread_mutex_unlock(&mpsd_hosts_lock);
	return result;
}

CUresult mpsd_host_issue(struct mpsd_host *host, CUstream stream)
{
	struct mpsd_given *given = malloc(sizeof(*given));
	CUresult result;

	if (!given)
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (!give(host, given)) {
		free(given);
		return MPSD_AGAIN;
	}
	result = mpsd_host_hand_over(host, stream, come_function, come_callback, given);
	return result == CUDA_SUCCESS ? result : refused(given, result);
}
