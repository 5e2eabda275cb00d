/* SPDX-License-Identifier: MIT */
/*
 * Guard zones before and behind each piece of memory, far zones around all of them (far.h), and quarantine of
 * what was freed: which addresses are covered, with what, and for how long. How a range is covered is
 * uvmrange.h's business.
 *
 * Nothing here ever fails an allocation: what cannot be covered is not, and counted in the ledger. Called
 * under the lock of memory.c, but for granted and refused, which are the channel's thread's, and step, which is
 * the mover's too.
 */
#pragma once

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "arena.h"
#include "uvmrange.h"

/* The lock of all that is laid, for hostguard.c. False: there are no zones in this process, and no lock is taken. */
bool mpsd_zones_enter(void);
void mpsd_zones_leave(void);

/* Bytes on each side of a piece; 0: there are no zones in this process. The first call reads the environment. */
size_t mpsd_zones_size(void);

/* Bytes of the far zone on each side of a window's pieces; 0: there is none. */
size_t mpsd_zones_far(void);

/* A window was opened: `lead` bytes of it nobody gets. */
void mpsd_zones_window(CUdevice device, uint64_t base, size_t lead, size_t size);

/*
 * Nobody has the addresses of that window from `tail` on. To be said before anything is mapped below it. False:
 * a far zone that lies in the way cannot be taken away.
 */
bool mpsd_zones_tail(CUdevice device, uint64_t tail);

/* A piece has its memory now: it gets its zones before this returns, if it is known how many there may be. */
void mpsd_zones_born(uint64_t base, size_t size, CUdevice device);

/*
 * The memory of a piece has gone. True: its addresses are kept until mpsd_zones_out says otherwise. False: they
 * are free at once, which they always are without `keep`.
 */
bool mpsd_zones_freed(uint64_t base, bool keep);

/* The next piece whose addresses are free again. False: there is none. */
bool mpsd_zones_out(CUdevice *device, struct arena_range *range);

/* All of the quarantine is to come out: addresses have run out. */
void mpsd_zones_empty(void);

/* So it is, and nothing of the host's is under guard any more: a primary context has ended. */
void mpsd_zones_ended(CUdevice device);

/*
 * The daemon's word: `bytes` of managed zones, `count` of them; more are sparse. `far`: it reads of far ones too.
 * Pieces that are there: step.
 */
void mpsd_zones_granted(uint64_t bytes, uint64_t count, bool far);

/*
 * The daemon knows of no zones, or refuses them. There are none if it is the first word; after a grant by
 * another daemon the managed ones do not become more.
 */
void mpsd_zones_refused(void);

/* Cover some of what was there before the daemon's word came. False: nothing is left to be covered. */
bool mpsd_zones_step(void);

/*
 * For fail-over: what was covered was so in the address space of a copy that is used no more. Nothing is between
 * lift and lay; then what is there is covered by step.
 */
void mpsd_zones_lift(void);
void mpsd_zones_lay(void);
void mpsd_zones_copy(enum mpsd_range_copy what);
