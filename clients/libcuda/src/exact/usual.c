// SPDX-License-Identifier: MIT
/*
 * What kernels wanted saved in the last epochs they mostly want saved in the next one. Some MiB of it are copied all at
 * once, with the first copy of an epoch: each one by itself would be marked and waited for by itself.
 */
#include "exact/readers.h"
#include "exact/stamps.h"
#include "exact/still.h"
#include "exact/undo.h"
#include "exact/validate.h"
#include "failover/undoroom.h"
#include "hold.h"
#include "memory.h"

#define USUAL 16
#define MOST_BYTES ((uint64_t)64 << 20)
#define EPOCHS 64

static struct usual {
	CUdeviceptr bases[USUAL];
	unsigned int count;
	uint64_t epoch;		/* in which that was done last */
} usual;

void mpsd_usual_note(CUdeviceptr base)
{
	bool is_known = false;

	pthread_mutex_lock(&mpsd_exact_lock);
	for (unsigned int i = 0; i < usual.count; i++)
		is_known |= usual.bases[i] == base;
	if (!is_known && usual.count < USUAL && !mpsd_is_left())
		usual.bases[usual.count++] = base;
	pthread_mutex_unlock(&mpsd_exact_lock);
}

void mpsd_usual_forget(void)
{
	pthread_mutex_lock(&mpsd_exact_lock);
	usual.count = 0;
	pthread_mutex_unlock(&mpsd_exact_lock);
}

/* Nothing where it was done in this epoch. Now and then it is learned anew. */
static struct usual take(void)
{
	struct usual taken = { .count = 0 };

	/* For this nobody is to wait. */
	if (!mpsd_undoroom_is_open())
		return taken;

	pthread_mutex_lock(&mpsd_exact_lock);
	/* Validation wants to see what each operation has saved for itself. */
	if (!mpsd_validates() && !mpsd_is_left() && usual.epoch != mpsd_epoch.number) {
		usual.epoch = mpsd_epoch.number;
		if (usual.epoch % EPOCHS == 0)
			usual.count = 0;
		taken = usual;
	}
	pthread_mutex_unlock(&mpsd_exact_lock);
	return taken;
}

/* Nobody has asked for it, or is about to write there: where there is no room for it, it is not saved. */
CUresult mpsd_usual_save(struct mpsd_plan *plan)
{
	struct usual taken = take();
	CUresult result = CUDA_SUCCESS;
	uint64_t left = MOST_BYTES;
	bool reads = plan->reads;

	plan->reads = true;
	for (unsigned int i = 0; i < taken.count && result == CUDA_SUCCESS; i++) {
		struct mpsd_allocation allocation;

		if (!mpsd_memory_find_mapped(taken.bases[i], &allocation) || allocation.base != taken.bases[i] ||
		    allocation.is_imported || allocation.size > left || mpsd_still_is(taken.bases[i]))
			continue;
		left -= allocation.size;
		result = mpsd_undo_save_all(plan, &allocation);
		/* Of what is read alone, as far as is known, a sum is to be taken when it is come to. */
		if (result == CUDA_SUCCESS && !mpsd_readers_any && mpsd_stamps_hold(allocation.base) &&
		    !mpsd_stamps_found_whole(&allocation))
			mpsd_stamps_note_whole(plan, &allocation);
	}
	plan->reads = reads;
	return result == CUDA_ERROR_OUT_OF_MEMORY ? CUDA_SUCCESS : result;
}
