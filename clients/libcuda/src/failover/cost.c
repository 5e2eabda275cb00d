// SPDX-License-Identifier: MIT
/*
 * A context in the standby takes what the GPU has less of when it was made. Others take and give back meanwhile, and the
 * program does: of the last three times the one in the middle is believed, of two the smaller.
 */
#include "failover/cost.h"

#include "failover/autopsy.h"
#include "failover/line.h"
#include "windows.h"

#define SPARE_PART 20	/* of the GPU's memory, that is left free beside a standby that is made once more */
#define TIMES 3

/* By the thread of line.c. */
static struct {
	uint64_t took[TIMES];	/* 0: not yet */
	unsigned int next;
} costs[DEVICES];

/* As gift.c and tell.c read it. */
static atomic_uint_least64_t known[DEVICES];

atomic_bool mpsd_cost_was_short;

static uint64_t free_here(uint64_t *total)
{
	size_t left = 0, all = 0;

	if (real_cuMemGetInfo_v2(&left, &all) != CUDA_SUCCESS)
		left = all = 0;
	real_cuCtxSetCurrent(NULL);
	*total = all;
	return left;
}

/* Who asks in a context that was lost may be kept there. */
static bool may_look(void)
{
	return !(atomic_load(&mpsd_moves) & 1) && !mpsd_own_error_met();
}

uint64_t mpsd_cost_free(const struct mpsd_made *context)
{
	uint64_t total, left = 0;

	if (!may_look())
		return 0;
	mpsd_autopsy_line_calls(true);
	if (real_cuCtxSetCurrent(context->native) == CUDA_SUCCESS)
		left = free_here(&total);
	mpsd_autopsy_line_calls(false);
	return left;
}

static uint64_t middle(const uint64_t *took)
{
	uint64_t least = UINT64_MAX, most = 0, sum = 0;
	unsigned int count = 0;

	for (unsigned int i = 0; i < TIMES; i++) {
		if (!took[i])
			continue;
		least = took[i] < least ? took[i] : least;
		most = took[i] > most ? took[i] : most;
		sum += took[i];
		count++;
	}
	return count == TIMES ? sum - least - most : least;
}

void mpsd_cost_took(const struct mpsd_made *context, uint64_t before)
{
	uint64_t now = before ? mpsd_cost_free(context) : 0;
	CUdevice device = context->device;

	if (!now || now >= before)
		return;
	costs[device].took[costs[device].next++ % TIMES] = before - now;
	atomic_store(&known[device], middle(costs[device].took));
}

uint64_t mpsd_cost_bytes(void)
{
	uint64_t bytes = 0;

	for (int device = 0; device < DEVICES; device++)
		bytes += atomic_load(&known[device]);
	return bytes;
}

static bool is_there(CUdevice device)
{
	struct mpsd_made *context;
	uint64_t left, total;
	bool is;

	mpsd_made_lock();
	context = mpsd_made_context(device);
	is = context && real_cuCtxSetCurrent(context->native) == CUDA_SUCCESS;
	mpsd_made_unlock();
	if (!is)
		return true;
	left = free_here(&total);
	return !total || left >= atomic_load(&known[device]) + total / SPARE_PART;
}

bool mpsd_cost_is_there(void)
{
	bool is = true;

	mpsd_autopsy_line_calls(true);
	for (CUdevice device = 0; is && may_look() && device < DEVICES; device++)
		is = is_there(device);
	mpsd_autopsy_line_calls(false);
	return is;
}
