// SPDX-License-Identifier: MIT
/* What was submitted since all was last proven to have ended. */
#include <stdlib.h>

#include "clock.h"
#include "exact/exposure.h"
#include "exact/hostfunc.h"
#include "exact/leave.h"
#include "exact/limit.h"
#include "exact/pace.h"
#include "exact/relay.h"
#include "exact/saver.h"
#include "exact/shelf.h"
#include "exact/spending.h"
#include "exact/submit.h"
#include "exact/undo.h"
#include "exact/validate.h"
#include "failover/graph.h"
#include "failover/line.h"
#include "memory.h"

#define MOST_WITHIN ((size_t)4 << 30)	/* bytes of copies in flight: some ms */
#define LONG_OPERATIONS 256
#define SOON_NS 50000
#define FETCHED ((ptrdiff_t)1024)	/* most launches lie one behind the other, each on some hundred bytes */

MPSD_WRITTEN_OFTEN struct mpsd_word mpsd_exact_lock;
MPSD_WRITTEN_OFTEN struct mpsd_epoch mpsd_epoch = { .number = 1, .last = &mpsd_epoch.first, .long_from = LONG_OPERATIONS };

void mpsd_epoch_unsure_for_now(const char *why)
{
	if (mpsd_exact())
		mpsd_exposure_begin(why);
	mpsd_word_take(&mpsd_exact_lock);
	if (!mpsd_epoch.unsure)
		__atomic_store_n(&mpsd_epoch.unsure, why, __ATOMIC_RELAXED);
	mpsd_word_give(&mpsd_exact_lock);
}

void mpsd_epoch_unsure(const char *why)
{
	mpsd_epoch_unsure_for_now(why);
	if (mpsd_exact())
		mpsd_line_unsure(why);
}

/* Its number stays taken: what comes later proves that too. Who gives it to the driver frees it. */
void mpsd_epoch_strike(struct mpsd_op *op)
{
	struct mpsd_op **link = &mpsd_epoch.first;

	while (*link && *link != op)
		link = &(*link)->next;
	if (!*link)
		return;
	*link = op->next;
	if (!op->next)
		mpsd_epoch.last = link;
	mpsd_epoch.operations--;
	atomic_store(&op->state, MPSD_OP_IS_FORGOTTEN);
}

/* Whoever is last frees it: the driver may have kept a thread for longer than the epoch lasted. */
static void forget(struct mpsd_op *op)
{
	__builtin_prefetch((const char *)op + FETCHED, 1);
	if (atomic_load(&op->state) == MPSD_OP_RESTS ||
	    atomic_fetch_or(&op->state, MPSD_OP_IS_FORGOTTEN) == MPSD_OP_RESTS)
		mpsd_op_forget(op);
}

void mpsd_epoch_forget(void)
{
	struct mpsd_op *op, *next;

	mpsd_relay_drop();
	for (op = mpsd_epoch.first; op; op = next) {
		next = op->next;
		forget(op);
	}
	mpsd_shelf_rest();
	mpsd_epoch.first = NULL;
	mpsd_epoch.last = &mpsd_epoch.first;
	mpsd_epoch.operations = mpsd_epoch.kept_bytes = 0;
	mpsd_epoch.long_from = LONG_OPERATIONS;
	mpsd_epoch.has_borrowed = false;
	mpsd_epoch.is_waiting = false;
	/* This, and its number, are looked at without the lock, by who will find that a move has come between. */
	__atomic_store_n(&mpsd_epoch.unsure, NULL, __ATOMIC_RELAXED);
}

static void end(void (*end_of_spending)(uint64_t operations))
{
	uint64_t operations = mpsd_epoch.operations;

	mpsd_pace_end(operations);
	mpsd_epoch_forget();
	mpsd_epoch.is_given_up = false;
	__atomic_store_n(&mpsd_epoch.number, mpsd_epoch.number + 1, __ATOMIC_RELAXED);
	mpsd_undo_forget();
	/* Last: the program may leave. */
	mpsd_leave_end();
	mpsd_limit_end();
	end_of_spending(operations);
}

void mpsd_epoch_end(void)
{
	end(mpsd_spending_end);
}

static bool has_ended(const struct mpsd_op *op)
{
	return mpsd_lane_look(op->lane) >= op->number;
}

/* Copy engines have channels of their own, which the loss of the kernels' need not end. */
bool mpsd_copy_is_with_host(const struct mpsd_op *op)
{
	return op->kind == MPSD_OP_COPY && (op->copy.is_from_host || op->copy.is_for_host);
}

/* Within the GPU they are over soon, and the driver's word comes 20 ms after a fault at the earliest. */
static size_t copied_within(const struct mpsd_op *op);

static CUresult add_copied(const struct mpsd_op *op, void *bytes)
{
	*(size_t *)bytes += copied_within(op);
	return CUDA_SUCCESS;
}

static size_t copied_within(const struct mpsd_op *op)
{
	size_t bytes = 0;

	if (op->kind == MPSD_OP_GRAPH)
		mpsd_graph_each(op->graph.graph, add_copied, &bytes);
	if (op->kind == MPSD_OP_COPY)
		return op->copy.size;
	if (op->kind != MPSD_OP_SET)
		return bytes;
	return op->set.has_rows ? op->set.pitch * op->set.rows : op->set.width * op->set.count;
}

static void add_open(const struct mpsd_saved *copy, void *bytes)
{
	*(size_t *)bytes += copy->size;
}

bool mpsd_epoch_ends_with_kernels(void)
{
	size_t within = 0;
	bool is;

	/* Saves are copies, too. */
	mpsd_undo_each_open(add_open, &within);
	is = !mpsd_epoch.unsure && !mpsd_epoch.is_given_up && within <= MOST_WITHIN;
	for (struct mpsd_op *op = mpsd_epoch.first; op && is; op = op->next) {
		if (has_ended(op))
			continue;
		within += copied_within(op);
		is = !mpsd_copy_is_with_host(op) && within <= MOST_WITHIN;
	}
	return is;
}

bool mpsd_exact_close(void)
{
	bool is;

	if (!mpsd_exact() || !mpsd_exact_lock_soon())
		return false;
	is = mpsd_epoch_ends_with_kernels();
	mpsd_epoch.is_closed = is;
	mpsd_word_give(&mpsd_exact_lock);
	return is;
}

bool mpsd_exact_is_over(void)
{
	uint64_t moves = mpsd_moves_done();
	bool is = false;

	if (!mpsd_exact() || !mpsd_order_try(moves))
		return false;
	if (mpsd_exact_lock_soon()) {
		is = mpsd_work_rests() && mpsd_lanes_all_proven();
		mpsd_epoch.is_closed = is;
		mpsd_word_give(&mpsd_exact_lock);
	}
	mpsd_order_give(moves);
	return is;
}

/*
 * An event whose stream has come to it is reached. Where streams wait for each other through the legacy stream that is not so:
 * the event comes after work of the other streams too.
 */
static bool is_reached(const struct mpsd_op *op)
{
	return op->kind == MPSD_OP_RECORD && !mpsd_op_is_event_node(op) && mpsd_lane_look(op->lane) + 1 == op->number &&
	       !mpsd_lane_is_ordered(op->lane);
}

/* Nothing else marks an event that is the last operation of its stream. */
static void conclude_reached(void)
{
	for (struct mpsd_op *op = mpsd_epoch.first; op; op = op->next)
		if (is_reached(op))
			mpsd_lane_conclude(op->lane, op->number);
}

/* Whether at most one operation of each stream is open, which may be an event, and this one is the last of its stream. */
static bool may_be_last(struct mpsd_point at)
{
	if (at.lane->given != at.number)
		return false;
	for (unsigned int i = 0; i < mpsd_lanes_used; i++)
		if (mpsd_lane_look(&mpsd_lanes[i]) + 1 < mpsd_lanes[i].given)
			return false;
	return true;
}

/* Whether everything has ended but this operation. */
static bool is_last(struct mpsd_point at)
{
	for (unsigned int i = 0; i < mpsd_lanes_used; i++) {
		struct mpsd_lane *lane = &mpsd_lanes[i];

		if (mpsd_lane_look(lane) + (lane == at.lane) != lane->given)
			return false;
	}
	return true;
}

/* The operation of this callback, taken out of the epoch. An unsure epoch has none, so it is made. NULL: no memory. */
static struct mpsd_op *take_callback(struct mpsd_host *host, struct mpsd_point at)
{
	struct mpsd_op **link = &mpsd_epoch.first, *op;

	while (*link && ((*link)->kind != MPSD_OP_HOST || (*link)->host != host))
		link = &(*link)->next;
	op = *link;
	if (op) {
		*link = op->next;
		if (!op->next)
			mpsd_epoch.last = link;
		return op;
	}
	op = calloc(1, sizeof(*op));
	if (!op)
		return NULL;
	*op = (struct mpsd_op){ .kind = MPSD_OP_HOST, .stream = host->stream, .lane = at.lane, .number = at.number, .host = host };
	mpsd_host_hold(host);
	return op;
}

static void begin_with(struct mpsd_op *op)
{
	op->next = NULL;
	*mpsd_epoch.last = op;
	mpsd_epoch.last = &op->next;
	mpsd_epoch.operations = 1;
	mpsd_pace_begin();
	mpsd_spending_begin();
}

void mpsd_epoch_end_before(struct mpsd_host *host, struct mpsd_point at)
{
	struct mpsd_op *op;

	if (!mpsd_exact() || mpsd_epoch.is_awaited || mpsd_epoch.is_closed || mpsd_epoch.is_given_up || mpsd_validates())
		return;
	/* The callback is the only operation of the epoch already: it has come here before. */
	if (mpsd_epoch.operations == 1 && !mpsd_epoch.unsure)
		return;
	/* A callback that waits for its turn asks again and again, and the walk over a long epoch takes time. */
	if (!may_be_last(at) || (!mpsd_epoch.unsure && !mpsd_spending_is_little()))
		return;
	conclude_reached();
	op = is_last(at) ? take_callback(host, at) : NULL;
	if (!op)
		return;
	/* A program that leaves now does so with nothing in flight: the driver ends the callback. */
	mpsd_lane_conclude(at.lane, at.number);
	end(mpsd_spending_end_before_callback);
	if (!mpsd_exact()) {
		forget(op);
		return;
	}
	at.lane->proven = at.number - 1;
	begin_with(op);
}

/* What it came after has ended, if not the operation itself. */
static bool has_come(const struct mpsd_op *op, struct mpsd_point at)
{
	return (op->lane == at.lane && op->number == at.number) || has_ended(op) ||
	       (op->is_marked && mpsd_lane_look(op->lane) + 1 >= op->number);
}

static CUresult find_barrier(const struct mpsd_op *op, void *unused);

/* What has nothing to do never comes to the GPU: nobody waits for it. */
static bool is_barrier(const struct mpsd_op *op)
{
	switch (op->kind) {
	case MPSD_OP_COPY:
		return op->copy.size != 0;
	case MPSD_OP_SET:
		return op->set.count != 0;
	case MPSD_OP_WAIT:
		return false;
	case MPSD_OP_GRAPH:
		return mpsd_graph_each(op->graph.graph, find_barrier, NULL) == MPSD_AGAIN;
	default:
		return true;
	}
}

static CUresult find_barrier(const struct mpsd_op *op, void *unused)
{
	(void)unused;
	return op->kind != MPSD_OP_RECORD && is_barrier(op) ? MPSD_AGAIN : CUDA_SUCCESS;
}

/*
 * The legacy stream and those that block with it wait for each other: what was submitted before an operation of the
 * legacy stream has ended when something has that came after it.
 */
static void conclude(struct mpsd_point at)
{
	const struct mpsd_op *legacy = NULL, *before = NULL, *last = NULL;

	for (struct mpsd_op *op = mpsd_epoch.first; op; op = op->next) {
		bool is_legacy = op->lane->stream == CU_STREAM_LEGACY;

		if (op->lane->is_apart)
			continue;
		if (has_come(op, at))
			last = !is_legacy ? legacy : has_ended(op) ? op : before;
		before = op;
		legacy = is_legacy && is_barrier(op) ? op : legacy;
	}
	for (struct mpsd_op *op = last ? mpsd_epoch.first : NULL; op; op = op == last ? NULL : op->next)
		if (!op->lane->is_apart)
			mpsd_lane_conclude(op->lane, op->number);
}

/* What was the program's is its own again, as soon as it may know that it was read. */
static void take_borrowed(void)
{
	bool has = false;

	/* Of one that is not done again nobody needs it, and who was not made to wait for it may have given it back. */
	if (!mpsd_epoch.has_borrowed || mpsd_epoch.unsure)
		return;
	for (struct mpsd_op *op = mpsd_epoch.first; op; op = op->next) {
		if (op->kind != MPSD_OP_COPY || !op->copy.is_borrowed)
			continue;
		if (mpsd_lane_look(op->lane) < op->number) {
			has = true;
			continue;
		}
		op->copy.is_borrowed = false;
		if (mpsd_copy_keep(op)) {
			mpsd_epoch.kept_bytes += op->copy.size;
		} else {
			__atomic_store_n(&mpsd_epoch.unsure, "out of host memory", __ATOMIC_RELAXED);
			mpsd_exposure_begin("out of host memory");
		}
	}
	mpsd_epoch.has_borrowed = has;
}

void mpsd_epoch_seen(struct mpsd_point at)
{
	if (at.lane || mpsd_epoch.has_borrowed)
		conclude(at);
	take_borrowed();
}

void mpsd_epoch_left(void)
{
	mpsd_pace_leave();
	mpsd_spending_moved();
	mpsd_relay_left();
	conclude((struct mpsd_point){ NULL, 0 });
	take_borrowed();
}

/*
 * With the lock. In a move nothing ends: what is proven by then the mover sees itself. Who is overtaken waits once more:
 * what it borrowed of the program the program must not have back before the mover has kept it.
 */
static CUresult observe(void)
{
	if (mpsd_is_left())
		return MPSD_AGAIN;
	if (mpsd_lanes_all_proven() && !mpsd_epoch.is_awaited)
		mpsd_epoch_end();
	else
		mpsd_epoch_seen((struct mpsd_point){ NULL, 0 });
	return CUDA_SUCCESS;
}

CUresult mpsd_epoch_observed(void)
{
	CUresult result;

	mpsd_word_take(&mpsd_exact_lock);
	result = observe();
	mpsd_word_give(&mpsd_exact_lock);
	return result;
}

/* With the lock */
static bool is_long(void)
{
	return !mpsd_is_left() && mpsd_epoch.operations >= mpsd_epoch.long_from;
}

bool mpsd_epoch_is_long(void)
{
	bool is;

	mpsd_word_take(&mpsd_exact_lock);
	is = is_long();
	mpsd_word_give(&mpsd_exact_lock);
	return is;
}

void mpsd_epoch_hastened(void)
{
	mpsd_word_take(&mpsd_exact_lock);
	mpsd_epoch.long_from = mpsd_epoch.operations + LONG_OPERATIONS;
	mpsd_word_give(&mpsd_exact_lock);
}

void mpsd_epoch_hasten(void)
{
	/*
	 * The legacy stream's mark would end another thread's capture in a stream that blocks with it. What goes wrong
	 * with the marks the wait will find.
	 */
	if (!mpsd_capturing())
		mpsd_lanes_mark();
}

CUresult mpsd_epoch_finish(void)
{
	uint64_t until = 0;
	CUresult result;
	bool is_soon;

	do {
		mpsd_word_take(&mpsd_exact_lock);
		result = observe();
		is_soon = is_long() && mpsd_lanes_all_marked();
		if (is_soon && !until)
			until = mpsd_now_ns() + SOON_NS;
		/* Where another stream is long at work that would be for nothing, each time. */
		if (is_soon && mpsd_now_ns() >= until) {
			mpsd_epoch.long_from = mpsd_epoch.operations + LONG_OPERATIONS;
			is_soon = false;
		}
		mpsd_word_give(&mpsd_exact_lock);
	} while (is_soon);
	return result;
}

/* By something that may wait for a thread that waits for this one: nothing of it is done again. */
static bool is_kept(CUresult result)
{
	if (result == CUDA_ERROR_NOT_READY)
		mpsd_epoch_unsure(mpsd_hosts_keep() ? "a pending host callback" : "work that does not complete");
	return result == CUDA_ERROR_NOT_READY;
}

/* What a capture keeps from being marked may still use what is taken away now. */
static void be_unsure_of_captured(void)
{
	bool is;

	mpsd_word_take(&mpsd_exact_lock);
	is = !mpsd_is_left() && !mpsd_lanes_all_marked();
	mpsd_word_give(&mpsd_exact_lock);
	if (is)
		mpsd_epoch_unsure("an object destroyed during a capture");
}

/* What is waited for may be what this thread writes next: nothing of the epoch is done again. */
bool mpsd_epoch_is_waiting(void)
{
	bool is;

	mpsd_word_take(&mpsd_exact_lock);
	/* Where a move has come between, who asks finds that by what it does next. */
	observe();
	is = mpsd_epoch.is_waiting;
	mpsd_word_give(&mpsd_exact_lock);
	return is;
}

CUresult mpsd_epoch_settle(void)
{
	CUresult result = mpsd_lanes_mark();

	if (result == CUDA_SUCCESS && mpsd_epoch_is_waiting())
		return CUDA_SUCCESS;
	if (result == CUDA_SUCCESS)
		result = mpsd_lanes_wait();
	if (result == CUDA_SUCCESS)
		result = mpsd_epoch_observed();
	if (result == CUDA_SUCCESS)
		be_unsure_of_captured();
	return is_kept(result) ? CUDA_SUCCESS : result;
}

CUresult mpsd_epoch_make_room(void)
{
	CUresult result = mpsd_epoch_settle();

	if (result == CUDA_SUCCESS && !mpsd_hosts_are_open() && !mpsd_epoch_is_waiting())
		mpsd_memory_free_put_off();
	return result;
}
