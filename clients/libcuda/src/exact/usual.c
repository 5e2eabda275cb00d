// SPDX-License-Identifier: MIT
/*
 * What kernels wanted saved in the last epochs that began as this one did they mostly want saved in it. Some MiB of it are
 * copied all at once, with the first copy of an epoch: each one by itself would be marked and waited for by itself. What
 * an epoch is, is known by the kernel that wants something saved first: between two waits a program does one of a few
 * things, over and over (a step of a model; whether to go on), and what the long one writes a short one need not save.
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
#define BEGINNINGS 64
#define NEAR 4			/* places where one may be */

_Static_assert(BEGINNINGS == 1 << 6, "so many places the hash leads to");

static struct usual {
	const void *first;	/* what such epochs begin with */
	uint64_t epoch;		/* the last one of them; 0: none was */
	unsigned int count, times;
	CUdeviceptr bases[USUAL];
} usuals[BEGINNINGS], *usual = usuals;	/* and that of this epoch, if it is */

static bool is_of_now(void)
{
	return usual->epoch == mpsd_epoch.number;
}

void mpsd_usual_note(CUdeviceptr base)
{
	bool is_known = false;

	mpsd_word_take(&mpsd_exact_lock);
	for (unsigned int i = 0; i < usual->count; i++)
		is_known |= usual->bases[i] == base;
	if (!is_known && usual->count < USUAL && is_of_now() && !mpsd_is_left())
		usual->bases[usual->count++] = base;
	mpsd_word_give(&mpsd_exact_lock);
}

void mpsd_usual_forget(void)
{
	mpsd_word_take(&mpsd_exact_lock);
	for (unsigned int i = 0; i < BEGINNINGS; i++)
		usuals[i].count = 0;
	mpsd_word_give(&mpsd_exact_lock);
}

/* That of epochs which begin so; where there is none, in place of the one that has not been needed for longest. */
static struct usual *usual_of(const void *first)
{
	unsigned int at = (unsigned int)((uintptr_t)first * 0x9e3779b97f4a7c15ull >> 58), oldest = at;

	for (unsigned int i = 0; i < NEAR; i++) {
		unsigned int place = (at + i) % BEGINNINGS;

		if (usuals[place].epoch && usuals[place].first == first)
			return &usuals[place];
		if (usuals[place].epoch < usuals[oldest].epoch)
			oldest = place;
	}
	usuals[oldest] = (struct usual){ .first = first };
	return &usuals[oldest];
}

/* Nothing where it was done in this epoch. Now and then it is learned anew. */
static struct usual take(const void *first)
{
	struct usual taken = { .count = 0 };

	/* For this nobody is to wait. */
	if (!mpsd_undoroom_is_open())
		return taken;

	mpsd_word_take(&mpsd_exact_lock);
	/* Validation wants to see what each operation has saved for itself. */
	if (!mpsd_validates() && !mpsd_is_left() && !is_of_now()) {
		usual = usual_of(first);
		usual->epoch = mpsd_epoch.number;
		if (++usual->times % EPOCHS == 0)
			usual->count = 0;
		taken = *usual;
	}
	mpsd_word_give(&mpsd_exact_lock);
	return taken;
}

/* Nobody has asked for it, or is about to write there: where there is no room for it, it is not saved. */
CUresult mpsd_usual_save(struct mpsd_plan *plan)
{
	struct usual taken = take(plan->first);
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
