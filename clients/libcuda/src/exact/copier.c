// SPDX-License-Identifier: MIT
/*
 * Small copies: within the GPU, and out of it to pages of this library's. Of all that a program calls a launch takes the
 * driver least, for its way there is the one that the processor remembers; a copy takes half as much again, and the memset that
 * says that it has ended comes on top of that. So kernels make them, and say so themselves.
 *
 * A copy engine would make a copy while kernels of other streams have all of the GPU, and wait for it: where another stream
 * has anything open it is the driver's.
 */
#include "exact/copier.h"

#include <stdlib.h>

#include "exact/readers.h"
#include "exact/saver.h"
#include "exact/stamps.h"
#include "exact/submit.h"
#include "exact/undo.h"
#include "exact/validate.h"
#include "failover/graph.h"
#include "memory.h"
#include "stats.h"

#define THREADS 256
#define BLOCKS 64		/* of one thread for each unit */
#define TIMES 8			/* units for a thread where there is one block alone, which can say that it has ended */

/* What the kernel is given. */
struct given {
	CUdeviceptr to, from;
	CUdeviceptr word;	/* 0: nothing is written */
	uint32_t size, number;
};

_Static_assert(sizeof(struct given) == 32, "the kernel has that in its code");

/* Units of 16 bytes, of 4, or bytes: the largest that both addresses and the size are multiples of. */
#define UNITS(name, shift, registers, type)                                                                                  \
	name ":\n"                                                                                                          \
	"	shr.u32 %size, %size, " shift ";\n"                                                                         \
	name "_more:\n"                                                                                                     \
	"	setp.ge.u32 %is, %unit, %size;\n"                                                                           \
	"	@%is bra copied;\n"                                                                                         \
	"	cvt.u64.u32 %at, %unit;\n"                                                                                  \
	"	shl.b64 %at, %at, " shift ";\n"                                                                             \
	"	add.u64 %a, %from, %at;\n"                                                                                  \
	"	ld.global." type " " registers ", [%a];\n"                                                                  \
	"	add.u64 %a, %to, %at;\n"                                                                                    \
	"	st.global." type " [%a], " registers ";\n"                                                                  \
	"	add.u32 %unit, %unit, %units;\n"                                                                            \
	"	bra " name "_more;\n"

/* mpsd_copy(given) */
static const char code[] =
	".version 6.0\n"
	".target sm_70\n"
	".address_size 64\n"
	".visible .entry mpsd_copy(.param .align 8 .b8 given[32])\n"
	"{\n"
	"	.reg .pred %is;\n"
	"	.reg .b32 %unit, %units, %size, %bits, %thread, %rest, %word;\n"
	"	.reg .b64 %to, %from, %at, %a, %one, %two;\n"
	"	ld.param.u64 %to, [given];\n"
	"	ld.param.u64 %from, [given+8];\n"
	"	ld.param.u32 %size, [given+24];\n"
	"	mov.u32 %thread, %tid.x;\n"
	"	mov.u32 %units, %ntid.x;\n"
	"	mov.u32 %unit, %ctaid.x;\n"
	"	mad.lo.u32 %unit, %unit, %units, %thread;\n"
	"	mov.u32 %rest, %nctaid.x;\n"
	"	mul.lo.u32 %units, %units, %rest;\n"
	"	or.b64 %a, %to, %from;\n"
	"	cvt.u32.u64 %bits, %a;\n"
	"	or.b32 %bits, %bits, %size;\n"
	"	and.b32 %rest, %bits, 15;\n"
	"	setp.eq.u32 %is, %rest, 0;\n"
	"	@%is bra sixteens;\n"
	"	and.b32 %rest, %bits, 3;\n"
	"	setp.eq.u32 %is, %rest, 0;\n"
	"	@%is bra fours;\n"
	UNITS("bytes", "0", "%word", "u8")
	UNITS("fours", "2", "%word", "u32")
	UNITS("sixteens", "4", "{%one, %two}", "v2.u64")
	"copied:\n"
	"	ld.param.u64 %a, [given+16];\n"
	"	setp.eq.u64 %is, %a, 0;\n"
	"	@%is bra out;\n"
	"	bar.sync 0;\n"
	"	setp.ne.u32 %is, %thread, 0;\n"
	"	@%is bra out;\n"
	"	membar.sys;\n"
	"	ld.param.u32 %word, [given+28];\n"
	"	st.volatile.global.u32 [%a], %word;\n"
	"out:\n"
	"	ret;\n"
	"}\n";

static struct mpsd_own own;

static size_t units_of(const struct mpsd_op *op)
{
	uint64_t bits = op->copy.to | op->copy.from | op->copy.size;

	return op->copy.size / (bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 1);
}

/* By its size, and where it goes; and not where another process may wait for it, with kernels that have all of the GPU. */
static bool may_be(const struct mpsd_op *op)
{
	size_t most = op->copy.is_staged ? THREADS * TIMES : THREADS * BLOCKS;
	bool is = op->copy.way == MPSD_COPY_WITHIN || (op->copy.way == MPSD_COPY_OUT && op->copy.is_staged);

	return is && !op->waits && !op->copy.rows && !op->copy.peer && units_of(op) <= most && !mpsd_work_is_several() &&
	       !mpsd_stats->ipc_shared && !mpsd_stats->ipc_opened;
}

/* All of it in one allocation of the program's in the window. What it has mapped itself kernels need not reach. */
static bool is_within(CUdeviceptr address, size_t size)
{
	struct mpsd_allocation in;

	return mpsd_stamps_hold(address) && mpsd_memory_find(address, &in) && !in.is_imported &&
	       size <= in.base + in.size - address;
}

/* With the order: nobody frees any of it meanwhile. */
static bool are_within(const struct mpsd_op *op)
{
	return is_within(op->copy.from, op->copy.size) &&
	       (op->copy.is_staged || is_within(op->copy.to, op->copy.size));
}

bool mpsd_copier_makes(const struct mpsd_op *op)
{
	bool others;

	if (op->kind != MPSD_OP_COPY || mpsd_capturing() || !may_be(op) || !are_within(op))
		return false;
	mpsd_word_take(&mpsd_exact_lock);
	others = mpsd_is_left() || mpsd_lanes_others_are_open(op->lane);
	mpsd_word_give(&mpsd_exact_lock);
	return !others && mpsd_own_if_any(&own, code, "mpsd_copy");
}

static CUresult launch(const struct mpsd_op *op, struct given *given)
{
	size_t blocks = op->copy.is_staged ? 1 : (units_of(op) + THREADS - 1) / THREADS;
	void *parameters[] = { given };

	return real_cuLaunchKernel(mpsd_native(own.function), (unsigned int)blocks, 1, 1, THREADS, 1, 1, 0,
				   mpsd_native(op->stream), parameters, NULL);
}

CUresult mpsd_copier_issue(const struct mpsd_op *op)
{
	struct given given = { op->copy.to, op->copy.from, 0, (uint32_t)op->copy.size, 0 };
	uint64_t number = 0, before = 0;
	CUresult result;

	if (op->copy.is_staged) {
		given.word = (CUdeviceptr)mpsd_lane_mark_ahead(op->lane, &number, &before);
		given.number = (uint32_t)number;
		if (!given.word)
			return MPSD_AGAIN;
	}
	result = launch(op, &given);
	if (result == CUDA_SUCCESS || mpsd_is_loss(result))
		return result;
	if (op->copy.is_staged)
		mpsd_lane_unmark(op->lane, before);
	return mpsd_op_issue_on(op, mpsd_native(op->stream), NULL);
}

/* With the lock and the order */
static bool note(struct mpsd_op *op)
{
	struct mpsd_lane *lane = mpsd_is_left() ? NULL : mpsd_lane_find(op->stream);

	if (!lane || !mpsd_lane_is_free(lane) || mpsd_readers_any || mpsd_lanes_others_are_open(lane) ||
	    !mpsd_undo_is_saved(op->copy.to) || !mpsd_undo_is_saved(op->copy.to + op->copy.size - 1))
		return false;
	op->lane = lane;
	mpsd_note(op, mpsd_tables()->moves);
	return true;
}

/* With the order. The operation is freed where it is not submitted. */
static bool submit(struct mpsd_op *op, CUresult *result, struct mpsd_ahead *ahead)
{
	bool is = are_within(op);

	mpsd_word_take(&mpsd_exact_lock);
	is = is && note(op);
	if (is)
		*ahead = mpsd_look_ahead(op->lane);
	mpsd_word_give(&mpsd_exact_lock);
	if (!is) {
		free(op);
		return false;
	}
	*result = mpsd_finish_marked(op, mpsd_copier_issue(op), ahead);
	return true;
}

bool mpsd_copier_at_once(const struct mpsd_op *given, CUresult *result)
{
	uint64_t moves = mpsd_tables()->moves;
	struct mpsd_ahead ahead = { NULL, false, 0 };
	struct mpsd_op *op;
	bool is;

	if (!mpsd_exact() || mpsd_thread.noted_in || mpsd_capturing() || mpsd_validates() || !may_be(given) ||
	    !__atomic_load_n(&own.function, __ATOMIC_ACQUIRE))
		return false;
	op = malloc(sizeof(*op));
	if (!op)
		return false;
	*op = *given;
	op->copy.is_by_kernel = true;
	if (!mpsd_order_take(moves)) {
		free(op);
		return false;
	}
	is = submit(op, result, &ahead);
	mpsd_order_give(moves);
	if (is && *result == CUDA_SUCCESS)
		mpsd_come_near(&ahead);
	return is;
}
