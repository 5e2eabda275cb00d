/* SPDX-License-Identifier: MIT */
/* Which pages of the window are saved, in an epoch, or in the plan of one operation. */
#pragma once

#include "exact/undo.h"
#include "memory.h"

/* Whether it lies in the window whose pages are known; know() where that is to be the one around it. */
bool mpsd_stamps_hold(CUdeviceptr address);
bool mpsd_stamps_know(CUdeviceptr address);

/* Of what lies in that window, as far as that goes. */
struct mpsd_pages mpsd_stamps_pages(CUdeviceptr address, uint64_t size);
CUdeviceptr mpsd_stamps_address(uint64_t page);
uint64_t mpsd_stamps_count(void);	/* of its pages */

/* Saved in this epoch, or about to be in this plan. */
bool mpsd_stamps_is_saved(const struct mpsd_plan *plan, uint64_t page);
bool mpsd_stamps_is_planned(const struct mpsd_plan *plan, uint64_t page);	/* the latter alone */
void mpsd_stamps_plan(const struct mpsd_plan *plan, struct mpsd_pages pages);

/* With the lock: such pages were saved, and what is whole in that plan is so in this epoch. */
void mpsd_stamps_save(const struct mpsd_plan *plan, struct mpsd_pages pages);

/*
 * Whether all that a pointer to there leads to is saved. That its page is says nothing of the rest: a copy, or a memset,
 * of a part may have been the first to write. found(): each page of it is, by now; note(): in that plan.
 */
bool mpsd_stamps_is_whole(const struct mpsd_plan *plan, CUdeviceptr address);
bool mpsd_stamps_found_whole(const struct mpsd_allocation *whole);
void mpsd_stamps_note_whole(const struct mpsd_plan *plan, const struct mpsd_allocation *whole);

/* With the lock: the same of this epoch alone. Where a run may have grown it is false: that is looked at elsewhere. */
bool mpsd_stamps_is_whole_now(CUdeviceptr address);

extern struct mpsd_stamped {
	CUdeviceptr base;
	uint64_t pages;
	atomic_ullong *wholes;	/* for each page all that a pointer into it leads to: saved in which epoch (even), or plan (odd) */
} mpsd_stamped;

/* With the lock: what is looked at for a word that may be an address. (Nothing may be read there while there are no pages.) */
static inline const atomic_ullong *mpsd_stamps_of(uint64_t word)
{
	uint64_t page = (word - mpsd_stamped.base) / MPSD_EXACT_PAGE;

	return &mpsd_stamped.wholes[page < mpsd_stamped.pages ? page : 0];
}

/*
 * With the lock: what is_whole_now() looks at, for as long as that is held; the pages of what is whole have `now` in
 * `wholes`. No pages: each address is to be asked for.
 */
struct mpsd_wholes {
	CUdeviceptr base;
	uint64_t pages, now;
	const atomic_ullong *wholes;
};

struct mpsd_wholes mpsd_stamps_wholes(void);
