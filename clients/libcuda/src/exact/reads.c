// SPDX-License-Identifier: MIT
/* A copy out into memory of the host from which earlier copies are still to read. */
#include <unistd.h>

#include "clock.h"
#include "exact/state.h"

#define READ_NS 1000000000ull
#define READ_US 50

static size_t span_of(const struct mpsd_op *op, bool reads)
{
	const struct mpsd_rows *rows = op->copy.rows;

	return !rows ? op->copy.size : reads ? rows->from_span : rows->to_span;
}

/* The last one that reads there what this one writes, and is not known to have done so. */
static bool find_reader(const struct mpsd_op *writer, struct mpsd_lane **lane, uint64_t *number)
{
	bool is = false, may;

	mpsd_word_take(&mpsd_exact_lock);
	may = mpsd_epoch.has_borrowed && !mpsd_epoch.unsure && !mpsd_is_left();
	for (struct mpsd_op *op = may ? mpsd_epoch.first : NULL; op; op = op->next) {
		if (op->kind != MPSD_OP_COPY || !op->copy.is_borrowed ||
		    op->copy.from >= writer->copy.to + span_of(writer, false) ||
		    writer->copy.to >= op->copy.from + span_of(op, true))
			continue;
		is = true;
		*lane = op->lane;
		*number = op->number;
	}
	mpsd_word_give(&mpsd_exact_lock);
	return is;
}

/* NOT_READY: not in time. What is to be read may wait for what this thread does next. */
static CUresult come_soon(struct mpsd_lane *lane, uint64_t number)
{
	uint64_t until = mpsd_now_ns() + READ_NS;
	CUresult result;

	while ((result = mpsd_lane_seen(lane, number)) == CUDA_ERROR_NOT_READY && mpsd_now_ns() < until)
		usleep(READ_US);
	return result;
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
			result = come_soon(lane, number);
		if (result == CUDA_SUCCESS)
			result = mpsd_epoch_observed();
	}
	if (result == CUDA_ERROR_NOT_READY) {
		mpsd_epoch_unsure("a copy into memory that an earlier operation still reads");
		result = CUDA_SUCCESS;
	}
	return result;
}
