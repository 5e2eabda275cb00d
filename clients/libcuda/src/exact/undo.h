/* SPDX-License-Identifier: MIT */
/* What memory was before the epoch: saved, and put back (undo.c); what is mostly saved (usual.c); the room (chunks.c). */
#pragma once

#include "exact/state.h"

struct save;

/* Of the window whose memory is saved, by their numbers in it. */
struct mpsd_pages {
	uint64_t first, end;
};

#define MPSD_SUMS_AT_ONCE 32

/* What one operation, in that lane, wants saved; and the lane of the copies, when there are any. */
struct mpsd_plan {
	struct mpsd_lane *lane, *saver;
	const void *first;	/* the kernel or graph that it is for, by which epochs that begin with it are known (usual.c) */
	struct save *saves;
	uint64_t number;	/* from 1 on, each another one */
	enum {
		MPSD_PLAN_ALL,
		MPSD_PLAN_WRITES,	/* first what may be written; */
		MPSD_PLAN_READS,	/* then what is only read, as far as there is room: is_short */
		MPSD_PLAN_NOTES,	/* nothing is saved: what may be written is noted */
		MPSD_PLAN_COUNTS,	/* nothing is saved: its bytes are counted */
	} part;
	bool reads;		/* what is saved now is not about to be written, as far as is known (still.h) */
	bool is_short;
	uint64_t bytes;		/* to be saved, by now; */
	uint64_t by_leads;	/* of them, in allocations that parameters of kernels lead to */
	unsigned int summed;
	struct mpsd_pages sums[MPSD_SUMS_AT_ONCE];	/* of which sums are taken behind the saves */
};

/*
 * plan.c, without the lock, with the order: what the operation may write is saved. OUT_OF_MEMORY: there is no room; the
 * epoch has to end first. what_fits(): after that. `is_short`: there was no room for all that is only read, so the epoch is
 * unsure. note(): nothing is saved, for it is unsure anyway, but what may be written is known.
 */
CUresult mpsd_plan_save(const struct mpsd_op *op);
CUresult mpsd_plan_save_what_fits(const struct mpsd_op *op, bool *is_short);
CUresult mpsd_plan_note(const struct mpsd_op *op);

/* The bytes that have to be saved for the operation alone; of them those that parameters of kernels lead to. */
CUresult mpsd_plan_count(const struct mpsd_op *op, uint64_t *bytes, uint64_t *by_leads);

/* Why there is no room. */
const char *mpsd_undo_why_not(void);

/*
 * Without the lock, with the order: what may be written there is copied, if it was not in this epoch.
 * OUT_OF_MEMORY: there is no room; the epoch has to end first, and then all of the plan comes anew.
 */
CUresult mpsd_undo_save(struct mpsd_plan *plan, CUdeviceptr address, uint64_t size);

/* The same, of an allocation that is mapped. */
CUresult mpsd_undo_save_all(struct mpsd_plan *plan, const struct mpsd_allocation *allocation);

/* The same, of the one around the address; nothing where there is none. */
CUresult mpsd_undo_save_around(struct mpsd_plan *plan, CUdeviceptr address);
bool mpsd_undo_find_around(CUdeviceptr address, struct mpsd_allocation *allocation);

/* usual.c, with the order: allocations that are mostly wanted saved in such an epoch; they are, once in it. */
void mpsd_usual_note(CUdeviceptr base);
void mpsd_usual_forget(void);
CUresult mpsd_usual_save(struct mpsd_plan *plan);

/* From here on the copies count, and what is submitted to the lane comes after them and those of other lanes. */
CUresult mpsd_undo_done(struct mpsd_plan *plan);

extern uint64_t mpsd_undo_batches;	/* of saves, ever */

/* behind.c, with the order: what comes next into the lane comes after all that others have saved. */
CUresult mpsd_undo_come_behind(struct mpsd_lane *lane);

/* Whether it does. */
static inline bool mpsd_undo_is_behind(const struct mpsd_lane *lane)
{
	return __atomic_load_n(&lane->after_saves, __ATOMIC_RELAXED) ==
	       __atomic_load_n(&mpsd_undo_batches, __ATOMIC_RELAXED);
}

/* In place of that: nothing was saved. */
void mpsd_undo_drop(struct mpsd_plan *plan);

/* With the lock: the epoch has ended. */
void mpsd_undo_forget(void);

/* With the lock: of the saves those that are not proven to be there. */
struct mpsd_saved;
void mpsd_undo_each_open(void (*each)(const struct mpsd_saved *copy, void *what), void *what);

/* In a move, with the lock: put back what is proven to have been saved, save the rest anew. */
CUresult mpsd_undo_restore(uint64_t *bytes);

/* Whether such copies alone come into it. */
bool mpsd_undo_is_saver(const struct mpsd_lane *lane);

/* With the order: whether the page at that address was saved in this epoch, or is room for such copies. */
bool mpsd_undo_is_saved(CUdeviceptr address);

/* chunks.c, without the lock, with the order: all the room for such copies, for the program. */
CUresult mpsd_undo_give_back(void);
bool mpsd_undo_has(void);
uint64_t mpsd_undo_bytes(void);	/* of that room */
CUresult mpsd_undo_release(uint64_t most);	/* without the order: what is beyond so many bytes, and unused in this epoch */
void mpsd_undo_rest(void);	/* it was given to another program: for a moment none is taken again */
