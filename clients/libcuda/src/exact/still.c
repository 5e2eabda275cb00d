// SPDX-License-Identifier: MIT
/*
 * A kernel that was only seen to read may write all the same, or write and put back what was there (a semaphore): so
 * what is not saved is compared with its sums, when all that was saved is put back and before anything is done again;
 * where it is not as it was that is told. A sum is taken when nothing has written there for some epochs, behind a save,
 * and counts until something may.
 */
#include "exact/still.h"

#include <sched.h>
#include <stdlib.h>

#include "clock.h"
#include "exact/sums.h"
#include "failover/wish.h"
#include "hold.h"

#define LEAST_PAGES 2		/* what is smaller is saved: it costs little, and flags lie there */
#define QUIET 8			/* epochs */
#define MOST 8192u
#define ASK_NS 50000000ull

static struct still {
	struct mpsd_pages pages;
	atomic_ullong first;		/* of these pages, for who has no lock */
	uint64_t written, relied;	/* epochs */
	bool is_summed;			/* and nothing may have written there since */
	atomic_bool is_gone;
	const struct mpsd_lane *lane;	/* from this operation of it on the sums are there */
	uint64_t number;
} stills[MOST];
static unsigned int used;
static bool is_wrong;			/* nothing is relied on any more */

/* For each page of the window: 1 + which it belongs to. */
static MPSD_READ_OFTEN atomic_ushort *of_pages;

_Static_assert(MOST < UINT16_MAX, "that is enough for it");

/* Once: it may be another one's by now. */
static struct still *once_at(CUdeviceptr address)
{
	atomic_ushort *all = __atomic_load_n(&of_pages, __ATOMIC_ACQUIRE);
	uint16_t which = 0;

	if (all && mpsd_stamps_hold(address))
		which = atomic_load_explicit(&all[mpsd_stamps_pages(address, 1).first], memory_order_relaxed);
	return which ? &stills[which - 1] : NULL;
}

/* With the lock. */
static struct still *still_at(CUdeviceptr address)
{
	struct still *still = once_at(address);

	return still && address - mpsd_stamps_address(still->pages.first) <
				(still->pages.end - still->pages.first) * MPSD_EXACT_PAGE
		       ? still
		       : NULL;
}

static bool is_proven(const struct still *still)
{
	return mpsd_lane_look((struct mpsd_lane *)still->lane) >= still->number;
}

static bool may_be_relied_on(const struct still *still)
{
	return still && !is_wrong && still->is_summed && !atomic_load_explicit(&still->is_gone, memory_order_relaxed) &&
	       is_proven(still);
}

bool mpsd_still_rely(CUdeviceptr address)
{
	struct still *still = still_at(address);

	if (!may_be_relied_on(still))
		return false;
	still->relied = mpsd_epoch.number;
	return true;
}

bool mpsd_still_is(CUdeviceptr address)
{
	bool is;

	mpsd_word_take(&mpsd_exact_lock);
	is = may_be_relied_on(still_at(address));
	mpsd_word_give(&mpsd_exact_lock);
	return is;
}

/* Its sums are what they were: what has relied on them in this epoch is looked at all the same. */
static void write_it(struct still *still)
{
	still->written = mpsd_epoch.number;
	still->is_summed = false;
}

void mpsd_still_written_now(CUdeviceptr address)
{
	/* What ends there may be meant, too. */
	struct still *still = still_at(address), *before = address % MPSD_EXACT_PAGE ? NULL : still_at(address - 1);

	if (still)
		write_it(still);
	if (before)
		write_it(before);
}

void mpsd_still_written(CUdeviceptr address, uint64_t size)
{
	struct mpsd_pages pages;

	if (!__atomic_load_n(&of_pages, __ATOMIC_ACQUIRE) || !mpsd_stamps_hold(address))
		return;
	pages = mpsd_stamps_pages(address, size ? size : 1);
	mpsd_word_take(&mpsd_exact_lock);
	if (!mpsd_is_left())
		mpsd_still_written_now(address);
	for (uint64_t page = pages.first; page < pages.end && !mpsd_is_left(); page++) {
		struct still *still = still_at(mpsd_stamps_address(page));

		if (still) {
			write_it(still);
			page = still->pages.end - 1;
		}
	}
	mpsd_word_give(&mpsd_exact_lock);
}

void mpsd_still_unsure(void)
{
	for (unsigned int i = 0; i < used; i++) {
		write_it(&stills[i]);
		stills[i].relied = 0;
	}
}

void mpsd_still_gone(CUdeviceptr address)
{
	struct still *still = once_at(address);

	if (still && atomic_load(&still->first) == mpsd_stamps_pages(address, 1).first)
		atomic_store(&still->is_gone, true);
}

/* With the lock. NULL: there is no room for more. */
static struct still *know(struct mpsd_pages pages)
{
	static uint64_t full_in;	/* this epoch */
	struct still *still = still_at(mpsd_stamps_address(pages.first));

	if (still && still->pages.first == pages.first && still->pages.end == pages.end &&
	    !atomic_load(&still->is_gone))
		return still;
	if (full_in == mpsd_epoch.number)
		return NULL;
	if (!of_pages) {
		atomic_ushort *fresh = calloc(mpsd_stamps_count(), sizeof(*fresh));

		__atomic_store_n(&of_pages, fresh, __ATOMIC_RELEASE);
	}
	if (!of_pages)
		return NULL;
	for (still = stills; still < stills + used && !atomic_load(&still->is_gone); still++)
		;
	if (still == stills + MOST) {
		full_in = mpsd_epoch.number;
		return NULL;
	}
	used += still == stills + used;
	still->pages = pages;
	atomic_store(&still->first, pages.first);
	still->relied = 0;
	write_it(still);
	atomic_store(&still->is_gone, false);
	for (uint64_t page = pages.first; page < pages.end; page++)
		atomic_store(&of_pages[page], (uint16_t)(still - stills + 1));
	return still;
}

void mpsd_still_read(struct mpsd_plan *plan, const struct mpsd_allocation *allocation)
{
	struct mpsd_pages pages;
	struct still *still;

	if (allocation->is_imported || allocation->piece != allocation->base || !mpsd_stamps_hold(allocation->base) ||
	    mpsd_memory_is_held(allocation->base))
		return;
	pages = mpsd_stamps_pages(allocation->base, allocation->size);
	if (pages.end - pages.first < LEAST_PAGES)
		return;
	mpsd_word_take(&mpsd_exact_lock);
	still = mpsd_is_left() || is_wrong ? NULL : know(pages);
	if (still && mpsd_sums_may() && !still->is_summed && mpsd_epoch.number - still->written >= QUIET &&
	    plan->summed < sizeof(plan->sums) / sizeof(*plan->sums))
		plan->sums[plan->summed++] = pages;
	mpsd_word_give(&mpsd_exact_lock);
}

CUresult mpsd_still_sum(struct mpsd_plan *plan)
{
	CUresult result = CUDA_SUCCESS;

	if (plan->summed)
		result = mpsd_sums_take(plan->sums, plan->summed, mpsd_native(plan->saver->stream));
	if (result == CUDA_SUCCESS || result == MPSD_AGAIN || mpsd_is_loss(result))
		return result;
	plan->summed = 0;
	return CUDA_SUCCESS;
}

void mpsd_still_summed(const struct mpsd_plan *plan, uint64_t number)
{
	for (unsigned int i = 0; i < plan->summed; i++) {
		struct still *still = still_at(mpsd_stamps_address(plan->sums[i].first));

		/* The same operation may write there by another parameter. */
		if (!still || still->pages.first != plan->sums[i].first || still->written == mpsd_epoch.number)
			continue;
		still->is_summed = true;
		still->lane = plan->saver;
		still->number = number;
	}
}

void mpsd_still_moved(void)
{
	for (unsigned int i = 0; i < used; i++)
		if (stills[i].is_summed && !is_proven(&stills[i]))
			write_it(&stills[i]);
}

/* With no lock: the driver may keep who asks it. */
static CUresult come(uint64_t number, const char **why)
{
	uint64_t began = mpsd_now_ns(), asked = began;
	CUresult result = CUDA_SUCCESS;

	for (;;) {
		uint64_t now = mpsd_now_ns();
		bool is;

		mpsd_word_take(&mpsd_exact_lock);
		is = mpsd_lane_look(&mpsd_lanes[0]) >= number;
		mpsd_word_give(&mpsd_exact_lock);
		if (is)
			return CUDA_SUCCESS;
		if (now - asked > ASK_NS) {
			result = real_cuStreamQuery(CU_STREAM_LEGACY);
			asked = mpsd_now_ns();
		}
		if (result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_READY)
			return result;
		if (now - began > mpsd_wish()->patience_ns) {
			*why = "memory without a snapshot could not be checked in time";
			return CUDA_SUCCESS;
		}
		sched_yield();
	}
}

static bool is_relied(unsigned int number)
{
	return stills[number].relied == mpsd_epoch.number && !atomic_load(&stills[number].is_gone);
}

bool mpsd_still_is_relied(void)
{
	for (unsigned int i = 0; i < used; i++)
		if (is_relied(i))
			return true;
	return false;
}

CUresult mpsd_still_check(const char **why)
{
	static struct mpsd_pages relied[MOST];
	struct mpsd_lane *own = &mpsd_lanes[0];
	unsigned int count = 0;
	uint64_t number;
	CUresult result;

	for (unsigned int i = 0; i < used; i++)
		if (is_relied(i))
			relied[count++] = stills[i].pages;
	if (!count)
		return CUDA_SUCCESS;
	number = ++own->given;
	mpsd_word_give(&mpsd_exact_lock);
	result = mpsd_sums_compare(relied, count);
	mpsd_word_take(&mpsd_exact_lock);
	if (result == CUDA_SUCCESS)
		result = mpsd_lane_mark_now(own, number);
	mpsd_word_give(&mpsd_exact_lock);
	if (result == CUDA_SUCCESS)
		result = come(number, why);
	mpsd_word_take(&mpsd_exact_lock);
	if (result != CUDA_SUCCESS || *why || !mpsd_sums_differ())
		return result;
	is_wrong = true;
	*why = "a kernel wrote memory that it only read during validation (MPSD_FAILOVER_READS)";
	return CUDA_SUCCESS;
}
