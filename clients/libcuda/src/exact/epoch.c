// SPDX-License-Identifier: MIT
/* What was submitted since all was last proven to have ended. */
#include <stdlib.h>

#include "exact/state.h"
#include "failover/line.h"

pthread_mutex_t mpsd_exact_lock = PTHREAD_MUTEX_INITIALIZER;
struct mpsd_epoch mpsd_epoch = { .number = 1, .last = &mpsd_epoch.first };

void mpsd_epoch_unsure(const char *why)
{
	pthread_mutex_lock(&mpsd_exact_lock);
	if (!mpsd_epoch.unsure)
		__atomic_store_n(&mpsd_epoch.unsure, why, __ATOMIC_RELAXED);
	pthread_mutex_unlock(&mpsd_exact_lock);
	if (mpsd_exact())
		mpsd_line_unsure(why);
}

void mpsd_epoch_append(struct mpsd_op *op)
{
	op->number = ++op->lane->given;
	mpsd_lane_follows(op->lane);
	op->next = NULL;
	*mpsd_epoch.last = op;
	mpsd_epoch.last = &op->next;
	mpsd_epoch.operations++;
	if (op->kind == MPSD_OP_COPY) {
		mpsd_epoch.has_borrowed |= op->copy.is_borrowed;
		mpsd_epoch.kept_bytes += op->copy.kept ? op->copy.size : 0;
	}
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
	op->is_orphan = true;
}

void mpsd_epoch_end(void)
{
	struct mpsd_op *op, *next;

	for (op = mpsd_epoch.first; op; op = next) {
		next = op->next;
		op->is_orphan = true;
		if (!op->is_busy)
			mpsd_op_free(op);
	}
	mpsd_epoch.first = NULL;
	mpsd_epoch.last = &mpsd_epoch.first;
	mpsd_epoch.operations = mpsd_epoch.kept_bytes = 0;
	mpsd_epoch.has_borrowed = false;
	/* These two are looked at without the lock, by who will find that a move has come between. */
	__atomic_store_n(&mpsd_epoch.number, mpsd_epoch.number + 1, __ATOMIC_RELAXED);
	__atomic_store_n(&mpsd_epoch.unsure, NULL, __ATOMIC_RELAXED);
	mpsd_undo_forget();
}

/* What was the program's is its own again, as soon as it may know that it was read. */
static void take_borrowed(void)
{
	bool has = false;

	for (struct mpsd_op *op = mpsd_epoch.first; op; op = op->next) {
		if (op->kind != MPSD_OP_COPY || !op->copy.is_borrowed)
			continue;
		if (mpsd_lane_look(op->lane) < op->number) {
			has = true;
			continue;
		}
		op->copy.is_borrowed = false;
		if (!mpsd_copy_keep(op))
			__atomic_store_n(&mpsd_epoch.unsure, "no host memory", __ATOMIC_RELAXED);
	}
	mpsd_epoch.has_borrowed = has;
}

void mpsd_epoch_seen(void)
{
	if (mpsd_epoch.has_borrowed)
		take_borrowed();
}

/* In a move nothing ends: what is proven by then the mover sees itself. */
void mpsd_epoch_observed(void)
{
	pthread_mutex_lock(&mpsd_exact_lock);
	if (!mpsd_is_left()) {
		if (mpsd_lanes_all_proven() && !mpsd_epoch.is_awaited)
			mpsd_epoch_end();
		else
			mpsd_epoch_seen();
	}
	pthread_mutex_unlock(&mpsd_exact_lock);
}

/* By a function of the host, which may wait for a thread that waits for this one: nothing of it is done again. */
static bool is_kept(CUresult result)
{
	if (result == CUDA_ERROR_NOT_READY)
		mpsd_epoch_unsure("a host function that waits");
	return result == CUDA_ERROR_NOT_READY;
}

/* The last one that reads there what this one writes, and is not known to have done so. */
static bool find_reader(const struct mpsd_op *writer, struct mpsd_lane **lane, uint64_t *number)
{
	bool is = false, may;

	pthread_mutex_lock(&mpsd_exact_lock);
	may = mpsd_epoch.has_borrowed && !mpsd_is_left();
	for (struct mpsd_op *op = may ? mpsd_epoch.first : NULL; op; op = op->next) {
		if (op->kind != MPSD_OP_COPY || !op->copy.is_borrowed ||
		    op->copy.from >= writer->copy.to + writer->copy.size ||
		    writer->copy.to >= op->copy.from + op->copy.size)
			continue;
		is = true;
		*lane = op->lane;
		*number = op->number;
	}
	pthread_mutex_unlock(&mpsd_exact_lock);
	return is;
}

CUresult mpsd_epoch_come_after_reads(const struct mpsd_op *op)
{
	uint64_t moves = mpsd_tables()->moves, number;
	CUresult result = CUDA_SUCCESS;
	struct mpsd_lane *lane;

	while (result == CUDA_SUCCESS && find_reader(op, &lane, &number)) {
		if (!mpsd_order_take(moves))
			return MPSD_AGAIN;
		result = mpsd_lane_mark(lane);
		mpsd_order_give(moves);
		if (result == CUDA_SUCCESS)
			result = mpsd_lane_come(lane, number);
		if (result == CUDA_SUCCESS)
			mpsd_epoch_observed();
	}
	return is_kept(result) ? CUDA_SUCCESS : result;
}

CUresult mpsd_epoch_settle(void)
{
	CUresult result = mpsd_lanes_mark();

	if (result == CUDA_SUCCESS)
		result = mpsd_lanes_wait();
	if (result == CUDA_SUCCESS)
		mpsd_epoch_observed();
	return is_kept(result) ? CUDA_SUCCESS : result;
}

void mpsd_exact_child(void)
{
	atomic_store(&mpsd_exact_on, false);
	mpsd_exact_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	mpsd_stage_child();
	mpsd_hosts_child();
}
