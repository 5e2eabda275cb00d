// SPDX-License-Identifier: MIT
/*
 * What memory was before the epoch: copies of it, made by the GPU before whatever may write there first, in pages of
 * 2 MiB, which no two of a window's allocations share unless they are small. They have a stream of this library's own:
 * when the epoch began nothing was open, so they need not wait for anything, and only who may write there waits for them.
 * The first ones of an epoch, if they are small, go where the operation goes, which is nothing's but theirs then.
 *
 * A save is worth something once its lane is proven to have come behind it. Before that its page is as it was, for
 * what writes there comes after the save: in its own lane by order, in another by waiting for the word of the lane.
 */
#include "exact/undo.h"

#include <stdlib.h>

#include "exact/chunks.h"
#include "exact/saver.h"
#include "exact/spending.h"
#include "exact/still.h"
#include "failover/graph.h"
#include "hold.h"

#define MOST_ALONG ((uint64_t)64 << 20)	/* bytes, copied before an operation in its own lane */

struct save {
	struct save *next;
	struct mpsd_saved copy;
	struct mpsd_lane *lane;
	uint64_t number;		/* of the lane, from which on it is there */
};

static struct save *saves;		/* of the epoch */
MPSD_READ_OFTEN uint64_t mpsd_undo_batches;

CUresult make_cuStreamCreate(CUstream *phStream, unsigned int Flags);

static struct mpsd_lane *saver;		/* the lane of the copies */

/* NULL: the copies go where the operation does. Where a move came between, it is tried again. */
static struct mpsd_lane *own_lane(void)
{
	static atomic_bool is_refused;
	struct mpsd_lane *lane = __atomic_load_n(&saver, __ATOMIC_ACQUIRE);
	CUstream stream;

	if (lane || atomic_load(&is_refused) || make_cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS)
		return lane;
	mpsd_word_take(&mpsd_exact_lock);
	if (!mpsd_is_left()) {
		lane = mpsd_lane_of(stream);
		__atomic_store_n(&saver, lane, __ATOMIC_RELEASE);
		atomic_store(&is_refused, !lane);
	}
	mpsd_word_give(&mpsd_exact_lock);
	return lane;
}

static CUresult save_run(struct mpsd_plan *plan, CUdeviceptr address, uint64_t size, bool is_mapped)
{
	while (size) {
		struct save *save = malloc(sizeof(*save));
		uint64_t got = 0;
		CUdeviceptr undo;
		CUresult result;

		if (!save)
			return CUDA_ERROR_OUT_OF_MEMORY;
		mpsd_word_take(&mpsd_exact_lock);
		undo = mpsd_chunk_take(size, &got);
		mpsd_word_give(&mpsd_exact_lock);
		if (!undo) {
			free(save);
			result = mpsd_chunk_more(size);
			if (result != CUDA_SUCCESS)
				return result;
			continue;
		}
		*save = (struct save){ plan->saves, { undo, address, got, is_mapped }, NULL, 0 };
		plan->saves = save;
		address += got;
		size -= got;
	}
	return CUDA_SUCCESS;
}

/* Count saved pages too: at this point of the epoch only the same operation has saved any. */
static void count_pages(struct mpsd_plan *plan, struct mpsd_pages pages)
{
	for (uint64_t page = pages.first; page < pages.end; page++)
		if (!mpsd_stamps_is_planned(plan, page))
			plan->bytes += MPSD_EXACT_PAGE;
	mpsd_stamps_plan(plan, pages);
}

static CUresult save_pages(struct mpsd_plan *plan, struct mpsd_pages pages, bool is_mapped)
{
	CUresult result = CUDA_SUCCESS;
	uint64_t first = pages.first;

	while (first < pages.end && result == CUDA_SUCCESS) {
		uint64_t behind = first;

		while (behind < pages.end && !mpsd_stamps_is_saved(plan, behind))
			behind++;
		plan->bytes += (behind - first) * MPSD_EXACT_PAGE;
		if (behind > first)
			result = save_run(plan, mpsd_stamps_address(first), (behind - first) * MPSD_EXACT_PAGE,
					  is_mapped);
		if (result == CUDA_SUCCESS)
			mpsd_stamps_plan(plan, (struct mpsd_pages){ first, behind });
		first = behind + 1;
	}
	return result;
}

/* What nothing may write there the driver refuses: to copy it could lose the context. */
static uint64_t open_size(CUdeviceptr address, uint64_t size)
{
	struct mpsd_allocation run;

	if (!mpsd_memory_is_held(address))
		return size;
	if (!mpsd_memory_find_mapped(address, &run))
		return 0;
	return size < run.base + run.size - address ? size : run.base + run.size - address;
}

static CUresult save_at(struct mpsd_plan *plan, CUdeviceptr address, uint64_t size, bool is_mapped)
{
	if (!plan->reads)
		mpsd_still_written(address, size);
	if (plan->part == MPSD_PLAN_NOTES)
		return CUDA_SUCCESS;
	size = open_size(address, size);
	if (!size || (!mpsd_stamps_hold(address) && !mpsd_stamps_know(address)))
		return CUDA_SUCCESS;
	if (!mpsd_stamps_hold(address)) {
		mpsd_epoch_unsure("memory of more than one GPU");
		return CUDA_SUCCESS;
	}
	if (plan->part == MPSD_PLAN_COUNTS) {
		count_pages(plan, mpsd_stamps_pages(address, size));
		return CUDA_SUCCESS;
	}
	return save_pages(plan, mpsd_stamps_pages(address, size), is_mapped);
}

/* What goes past the end of memory the driver refuses to copy, as it would refuse what is to write there. */
CUresult mpsd_undo_save(struct mpsd_plan *plan, CUdeviceptr address, uint64_t size)
{
	return save_at(plan, address, size, false);
}

CUresult mpsd_undo_save_all(struct mpsd_plan *plan, const struct mpsd_allocation *allocation)
{
	return save_at(plan, allocation->base, allocation->size, true);
}

/* What ends there may be meant, too. (Without zones between pieces it may be what begins there.) */
bool mpsd_undo_find_around(CUdeviceptr address, struct mpsd_allocation *allocation)
{
	return mpsd_memory_is_in_window(address) && (mpsd_memory_find_mapped(address, allocation) ||
						     mpsd_memory_find_mapped(address - 1, allocation));
}

static CUresult count_around(struct mpsd_plan *plan, CUdeviceptr address)
{
	uint64_t bytes = plan->bytes;
	struct mpsd_allocation allocation;

	if (mpsd_undo_find_around(address, &allocation))
		mpsd_undo_save_all(plan, &allocation);
	plan->by_leads += plan->bytes - bytes;
	return CUDA_SUCCESS;
}

CUresult mpsd_undo_save_around(struct mpsd_plan *plan, CUdeviceptr address)
{
	uint64_t bytes = plan->bytes;
	struct mpsd_allocation allocation;
	CUresult result;

	if (plan->part == MPSD_PLAN_COUNTS)
		return count_around(plan, address);
	/* Of what is whole too. */
	if (!plan->reads)
		mpsd_still_written(address, 1);
	if (plan->part == MPSD_PLAN_NOTES || mpsd_stamps_is_whole(plan, address))
		return CUDA_SUCCESS;
	if (!mpsd_undo_find_around(address, &allocation))
		return CUDA_SUCCESS;
	if (allocation.is_imported)
		mpsd_epoch_unsure("memory of another process");
	if (mpsd_stamps_hold(allocation.base) && mpsd_stamps_found_whole(&allocation))
		return CUDA_SUCCESS;
	result = mpsd_usual_save(plan);
	if (plan->reads)
		mpsd_still_read(plan, &allocation);
	else if (mpsd_stamps_hold(allocation.base))
		mpsd_usual_note(allocation.base);
	if (result == CUDA_SUCCESS)
		result = mpsd_undo_save_all(plan, &allocation);
	plan->by_leads += plan->bytes - bytes;
	if (result == CUDA_ERROR_OUT_OF_MEMORY && plan->part == MPSD_PLAN_READS) {
		plan->is_short = true;
		return CUDA_SUCCESS;
	}
	if (result == CUDA_SUCCESS && mpsd_stamps_hold(allocation.base))
		mpsd_stamps_note_whole(plan, &allocation);
	/* It comes anew, and then has all the room. */
	if (result == CUDA_ERROR_OUT_OF_MEMORY)
		mpsd_usual_forget();
	return result;
}

static void free_all(struct save *save)
{
	while (save) {
		struct save *next = save->next;

		free(save);
		save = next;
	}
}

void mpsd_undo_drop(struct mpsd_plan *plan)
{
	free_all(plan->saves);
	plan->saves = NULL;
}

/* The kernel that copies the last of them says that they are there; but it comes before the sums, and is of one context. */
static CUresult copy_all(const struct mpsd_plan *plan, struct mpsd_saver_mark *mark)
{
	struct mpsd_saved saved[MPSD_SAVED_AT_ONCE];
	CUresult result = CUDA_SUCCESS;
	unsigned int count = 0;

	if (plan->summed || mpsd_work_is_several())
		mark = NULL;
	for (const struct save *save = plan->saves; save && result == CUDA_SUCCESS; save = save->next) {
		saved[count++] = save->copy;
		if (count < MPSD_SAVED_AT_ONCE && save->next)
			continue;
		result = mpsd_saver_copy(saved, count, mpsd_native(plan->saver->stream), save->next ? NULL : mark);
		count = 0;
	}
	return result;
}

/* With the lock. `number`: of the lane, with which they are there. */
static void commit(struct mpsd_plan *plan, uint64_t number)
{
	struct mpsd_lane *lane = plan->saver;

	lane->saved = number;
	mpsd_spending_saved(plan->bytes, plan->by_leads);
	__atomic_store_n(&mpsd_undo_batches, mpsd_undo_batches + 1, __ATOMIC_RELAXED);
	while (plan->saves) {
		struct save *save = plan->saves;

		plan->saves = save->next;
		save->lane = lane;
		save->number = lane->saved;
		mpsd_stamps_save(plan, mpsd_stamps_pages(save->copy.from, save->copy.size));
		save->next = saves;
		saves = save;
	}
	mpsd_still_summed(plan, lane->saved);
}

/* Of which copies are made in no time. */
static bool is_small(const struct mpsd_plan *plan)
{
	uint64_t bytes = 0;

	for (const struct save *save = plan->saves; save; save = save->next)
		bytes += save->copy.size;
	return bytes <= MOST_ALONG && !plan->summed;
}

/* Its own lane is made with the first save: later another context may be current. */
static struct mpsd_lane *saver_for(const struct mpsd_plan *plan)
{
	struct mpsd_lane *own = own_lane();
	bool is_first = false;

	/* A kernel is of one context, and so are the streams that it may go into. */
	if (is_small(plan) && !mpsd_capturing() && !mpsd_work_is_several()) {
		mpsd_word_take(&mpsd_exact_lock);
		is_first = !mpsd_is_left() && mpsd_lanes_all_proven();
		mpsd_word_give(&mpsd_exact_lock);
	}
	return own && !is_first ? own : plan->lane;
}

/* All of them, and what follows from them; then the GPU says that they are there. */
static CUresult save_all(struct mpsd_plan *plan)
{
	struct mpsd_lane *lane = plan->saver;
	struct mpsd_saver_mark mark = { .counter = (unsigned int)(lane - mpsd_lanes) };
	uint64_t number = 0, before = 0;
	CUresult result;
	bool left;

	mark.word = mpsd_lane_mark_ahead(lane, &number, &before);
	if (!mark.word)
		return MPSD_AGAIN;
	mark.number = (uint32_t)number;
	result = copy_all(plan, &mark);
	if (!mark.is_made || result != CUDA_SUCCESS)
		mpsd_lane_unmark(lane, before);
	if (result == CUDA_SUCCESS)
		result = mpsd_still_sum(plan);
	/* Refused: what has the number, some copies or nothing, is proven all the same, or no epoch would end. */
	if (result != CUDA_SUCCESS && !mpsd_is_loss(result))
		mpsd_lane_mark(lane);
	if (result != CUDA_SUCCESS)
		return result;
	mpsd_word_take(&mpsd_exact_lock);
	left = mpsd_is_left();
	if (!left)
		commit(plan, number);
	mpsd_word_give(&mpsd_exact_lock);
	if (left)
		return MPSD_AGAIN;
	return mark.is_made ? CUDA_SUCCESS : mpsd_lane_mark(lane);
}

CUresult mpsd_undo_done(struct mpsd_plan *plan)
{
	CUresult result;

	if (!plan->saves && !plan->summed)
		return mpsd_undo_come_behind(plan->lane);
	plan->saver = saver_for(plan);
	result = save_all(plan);
	return result == CUDA_SUCCESS ? mpsd_undo_come_behind(plan->lane) : result;
}

void mpsd_undo_each_open(void (*each)(const struct mpsd_saved *copy, void *what), void *what)
{
	for (const struct save *save = saves; save; save = save->next)
		if (save->number > mpsd_lane_look(save->lane))
			each(&save->copy, what);
}

void mpsd_undo_forget(void)
{
	free_all(saves);
	saves = NULL;
	mpsd_chunks_empty();
}

/*
 * In the legacy stream, like all that is done again. What is put back can be put back once more; what is saved anew is
 * proven in the mover's own lane. Nobody waits: this context may be the next that is lost.
 */
CUresult mpsd_undo_restore(uint64_t *bytes)
{
	struct mpsd_lane *own = &mpsd_lanes[0];
	struct mpsd_saved saved[MPSD_SAVED_AT_ONCE];
	CUresult result = CUDA_SUCCESS;
	unsigned int count = 0;

	own->given++;
	for (struct save *save = saves; save && result == CUDA_SUCCESS; save = save->next) {
		const struct mpsd_saved back = { save->copy.from, save->copy.to, save->copy.size, save->copy.is_mapped };
		bool is_there = save->number <= mpsd_lane_look(save->lane);

		*bytes += is_there ? save->copy.size : 0;
		save->lane->saved = 0;
		save->lane = own;
		save->number = is_there ? 0 : own->given;
		saved[count++] = is_there ? back : save->copy;
		if (count < MPSD_SAVED_AT_ONCE && save->next)
			continue;
		result = mpsd_saver_put_back(saved, count, CU_STREAM_LEGACY);
		count = 0;
	}
	return result == CUDA_SUCCESS ? mpsd_lane_mark_now(own, own->given) : result;
}

bool mpsd_undo_is_saver(const struct mpsd_lane *lane)
{
	return lane == __atomic_load_n(&saver, __ATOMIC_ACQUIRE);
}

bool mpsd_undo_is_saved(CUdeviceptr address)
{
	const struct mpsd_plan none = { .number = UINT64_MAX };

	return mpsd_chunk_is(address) || (mpsd_stamps_hold(address) &&
					  mpsd_stamps_is_saved(&none, mpsd_stamps_pages(address, 1).first));
}
