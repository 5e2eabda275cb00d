/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * The records that are kept for readers, the last MPSD_RING_RECORDS of them. No kernel headers, no locks: the
 * caller serializes. Each record has an owner of the caller's kind (who made the space), which the ring
 * hands back when the record is overwritten.
 *
 * A reader is a position: the `seq` of the last record it has taken, 0 for none.
 */
#ifndef MPSD_RING_H
#define MPSD_RING_H

#include "mpsd-abi.h"

#ifndef __KERNEL__
#include <stdbool.h>
#endif

struct mpsd_ring_entry {
	struct mpsd_record record;
	void *owner;
};

/* Zeroes are an empty one. */
struct mpsd_ring {
	__u64 written;
	struct mpsd_ring_entry entries[MPSD_RING_RECORDS];
};

/* Append a record, give it its `seq`. Returns the owner of the record that it overwrites, or NULL. */
void *mpsd_ring_put(struct mpsd_ring *ring, const struct mpsd_record *record, void *owner);

/*
 * Copy the oldest record that is kept and lies after `*position`, and move on to it; false if there is none.
 * The ring still owns the owner: who wants it past the caller's lock takes a reference.
 */
bool mpsd_ring_take(const struct mpsd_ring *ring, __u64 *position, struct mpsd_ring_entry *entry);

bool mpsd_ring_has(const struct mpsd_ring *ring, __u64 position);

/* At the end: hands one owner after the other back; false when there are no more, and the ring is empty. */
bool mpsd_ring_drain(struct mpsd_ring *ring, void **owner);

#endif
