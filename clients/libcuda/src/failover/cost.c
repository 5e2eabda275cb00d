// SPDX-License-Identifier: MIT
/*
 * A context in the standby takes what the GPU has less of when it was made. Others take and give back meanwhile, and the
 * program does: the least that was seen is the nearest.
 */
#include "failover/cost.h"

#include "windows.h"

#define SPARE_PART 20	/* of the GPU's memory, that is left free beside a standby that is made once more */

static atomic_uint_least64_t least[DEVICES];

atomic_bool mpsd_cost_was_short;

uint64_t mpsd_cost_free(const struct mpsd_made *context, uint64_t *total)
{
	size_t left = 0, all = 0;

	if (real_cuCtxSetCurrent(context->native) != CUDA_SUCCESS || real_cuMemGetInfo_v2(&left, &all) != CUDA_SUCCESS)
		left = all = 0;
	real_cuCtxSetCurrent(NULL);
	if (total)
		*total = all;
	return left;
}

void mpsd_cost_took(const struct mpsd_made *context, uint64_t before)
{
	uint64_t now = mpsd_cost_free(context, NULL), known = atomic_load(&least[context->device]);

	if (now && now < before && (!known || before - now < known))
		atomic_store(&least[context->device], before - now);
}

uint64_t mpsd_cost_bytes(void)
{
	uint64_t bytes = 0;

	for (int device = 0; device < DEVICES; device++)
		bytes += atomic_load(&least[device]);
	return bytes;
}

static bool is_there(CUdevice device)
{
	struct mpsd_made *context, one;
	uint64_t left, total;

	mpsd_made_lock();
	context = mpsd_made_context(device);
	if (context)
		one = *context;
	mpsd_made_unlock();
	if (!context)
		return true;
	left = mpsd_cost_free(&one, &total);
	return left >= atomic_load(&least[device]) + total / SPARE_PART;
}

bool mpsd_cost_is_there(void)
{
	bool is = true;

	for (CUdevice device = 0; is && device < DEVICES; device++)
		is = is_there(device);
	return is;
}
