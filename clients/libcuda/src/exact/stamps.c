// SPDX-License-Identifier: MIT
/*
 * A page is stamped with the epoch in which it was saved, so that nothing has to be cleared when one ends. What shares a
 * page (small allocations) shares it wholly.
 */
#include "exact/stamps.h"

#include <stdlib.h>

#include "hold.h"
#include "windows.h"

MPSD_READ_OFTEN struct mpsd_stamped mpsd_stamped;

/* For each page: in which epoch it was saved; */
static uint64_t *stamps;
/* and for who has the order, of which a copy that was left has its own: in which plan it is, */
static atomic_ullong *planned;

_Static_assert(MPSD_EXACT_PAGE == ARENA_GRANULE, "a page of the window is what memory is mapped by");

bool mpsd_stamps_hold(CUdeviceptr address)
{
	return __atomic_load_n(&stamps, __ATOMIC_ACQUIRE) &&
	       address - mpsd_stamped.base < mpsd_stamped.pages * MPSD_EXACT_PAGE;
}

/* Windows open with the first allocation, and stay. */
bool mpsd_stamps_know(CUdeviceptr address)
{
	struct mpsd_allocation allocation;
	CUdeviceptr base;
	uint64_t pages;
	atomic_ullong *more, *most;
	uint64_t *fresh;

	if (!mpsd_memory_is_in_window(address) || !mpsd_memory_find_mapped(address, &allocation))
		return false;
	pthread_mutex_lock(&mpsd_windows_lock);
	base = mpsd_windows[allocation.device].arena.base;
	pages = mpsd_windows[allocation.device].arena.granules;
	pthread_mutex_unlock(&mpsd_windows_lock);
	fresh = calloc(pages, sizeof(*fresh));
	more = calloc(pages, sizeof(*more));
	most = calloc(pages, sizeof(*most));
	mpsd_word_take(&mpsd_exact_lock);
	if (!stamps && fresh && more && most) {
		mpsd_stamped.base = base;
		mpsd_stamped.pages = pages;
		planned = more;
		mpsd_stamped.wholes = most;
		__atomic_store_n(&stamps, fresh, __ATOMIC_RELEASE);
		fresh = NULL;
		more = most = NULL;
	}
	mpsd_word_give(&mpsd_exact_lock);
	free(fresh);
	free(more);
	free(most);
	return true;
}

static uint64_t page_of(CUdeviceptr address)
{
	return (address - mpsd_stamped.base) / MPSD_EXACT_PAGE;
}

struct mpsd_pages mpsd_stamps_pages(CUdeviceptr address, uint64_t size)
{
	uint64_t offset = address - mpsd_stamped.base;
	uint64_t most = mpsd_stamped.pages * MPSD_EXACT_PAGE - offset;

	if (size > most)
		size = most;
	return (struct mpsd_pages){ offset / MPSD_EXACT_PAGE, (offset + size + MPSD_EXACT_PAGE - 1) / MPSD_EXACT_PAGE };
}

CUdeviceptr mpsd_stamps_address(uint64_t page)
{
	return mpsd_stamped.base + page * MPSD_EXACT_PAGE;
}

uint64_t mpsd_stamps_count(void)
{
	return mpsd_stamped.pages;
}

static uint64_t epoch_now(void)
{
	return __atomic_load_n(&mpsd_epoch.number, __ATOMIC_RELAXED);
}

static bool is_stamped(uint64_t page, uint64_t epoch)
{
	return __atomic_load_n(&stamps[page], __ATOMIC_RELAXED) == epoch;
}

bool mpsd_stamps_is_planned(const struct mpsd_plan *plan, uint64_t page)
{
	return atomic_load_explicit(&planned[page], memory_order_relaxed) == plan->number;
}

bool mpsd_stamps_is_saved(const struct mpsd_plan *plan, uint64_t page)
{
	return is_stamped(page, epoch_now()) || mpsd_stamps_is_planned(plan, page);
}

void mpsd_stamps_plan(const struct mpsd_plan *plan, struct mpsd_pages pages)
{
	for (uint64_t page = pages.first; page < pages.end; page++)
		atomic_store_explicit(&planned[page], plan->number, memory_order_relaxed);
}

/* In which epoch what kernels may write of what the program has mapped itself has changed last. */
static MPSD_READ_OFTEN atomic_ullong runs_changed;

void mpsd_undo_runs_changed(void)
{
	atomic_store(&runs_changed, epoch_now());
}

/* Such a run may have grown since all of it was saved. */
static bool may_have_grown(CUdeviceptr address)
{
	return atomic_load(&runs_changed) == epoch_now() && mpsd_memory_is_held(address);
}

static uint64_t of_epoch(uint64_t epoch)
{
	return 2 * epoch;
}

static uint64_t of_plan(const struct mpsd_plan *plan)
{
	return 2 * plan->number + 1;
}

void mpsd_stamps_save(const struct mpsd_plan *plan, struct mpsd_pages pages)
{
	for (uint64_t page = pages.first; page < pages.end; page++) {
		unsigned long long planned_whole = of_plan(plan);

		__atomic_store_n(&stamps[page], mpsd_epoch.number, __ATOMIC_RELAXED);
		atomic_compare_exchange_strong(&mpsd_stamped.wholes[page], &planned_whole, of_epoch(mpsd_epoch.number));
	}
}

bool mpsd_stamps_is_whole(const struct mpsd_plan *plan, CUdeviceptr address)
{
	uint64_t when = 0;

	if (mpsd_stamps_hold(address))
		when = atomic_load_explicit(&mpsd_stamped.wholes[page_of(address)], memory_order_relaxed);
	return (when == of_epoch(epoch_now()) || when == of_plan(plan)) && !may_have_grown(address);
}

static void note(struct mpsd_pages pages, uint64_t when)
{
	for (uint64_t page = pages.first; page < pages.end; page++)
		atomic_store_explicit(&mpsd_stamped.wholes[page], when, memory_order_relaxed);
}

bool mpsd_stamps_found_whole(const struct mpsd_allocation *whole)
{
	struct mpsd_pages pages = mpsd_stamps_pages(whole->base, whole->size);
	uint64_t epoch = epoch_now();

	for (uint64_t page = pages.first; page < pages.end; page++)
		if (!is_stamped(page, epoch))
			return false;
	note(pages, of_epoch(epoch));
	return true;
}

void mpsd_stamps_note_whole(const struct mpsd_plan *plan, const struct mpsd_allocation *whole)
{
	note(mpsd_stamps_pages(whole->base, whole->size), of_plan(plan));
}

bool mpsd_stamps_is_whole_now(CUdeviceptr address)
{
	const uint64_t page = page_of(address);

	return page < mpsd_stamped.pages &&
	       atomic_load_explicit(&mpsd_stamped.wholes[page], memory_order_relaxed) == of_epoch(mpsd_epoch.number) &&
	       atomic_load_explicit(&runs_changed, memory_order_relaxed) != mpsd_epoch.number;
}

MPSD_OF_A_LAUNCH struct mpsd_wholes mpsd_stamps_wholes(void)
{
	bool is = atomic_load_explicit(&runs_changed, memory_order_relaxed) != mpsd_epoch.number;

	return (struct mpsd_wholes){ mpsd_stamped.base, is ? mpsd_stamped.pages : 0, of_epoch(mpsd_epoch.number),
				     mpsd_stamped.wholes };
}
