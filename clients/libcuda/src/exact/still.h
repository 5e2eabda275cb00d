/* SPDX-License-Identifier: MIT */
/*
 * Memory that is still: large allocations that nothing has written for some epochs, as far as is known. Those that
 * kernels read alone, by what validation has seen of them (readers.h), are not saved; sums of their pages say in a move
 * whether they are as they were.
 */
#pragma once

#include "exact/stamps.h"

/* With the lock: whether it is relied on, in this epoch, that what is around the address is as its sums say. */
bool mpsd_still_rely(CUdeviceptr address);

/* Without the lock: whether it could be. */
bool mpsd_still_is(CUdeviceptr address);

/* Something may write there now. */
void mpsd_still_written(CUdeviceptr address, uint64_t size);
void mpsd_still_written_now(CUdeviceptr address);	/* the same with the lock */
void mpsd_still_unsure(void);				/* the same of anything */

/* What a kernel reads is about to be saved in the plan: it may be summed, too. */
void mpsd_still_read(struct mpsd_plan *plan, const struct mpsd_allocation *allocation);

/* Behind the saves of the plan, in its lane; and with the lock, when they have got that number there. */
CUresult mpsd_still_sum(struct mpsd_plan *plan);
void mpsd_still_summed(const struct mpsd_plan *plan, uint64_t number);

/* In a move, with the lock, before what was done is taken for proven: sums that are not there never will be. */
void mpsd_still_moved(void);

/* With the lock: whether anything is relied on in this epoch. */
bool mpsd_still_is_relied(void);

/*
 * In a move, with the lock, which it gives back meanwhile, in the context in use, where what was saved is put back: `why`
 * not all that was relied on in this epoch is known to be as it was. Or an error of the driver's.
 */
CUresult mpsd_still_check(const char **why);
