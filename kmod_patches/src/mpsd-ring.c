// SPDX-License-Identifier: GPL-2.0 OR MIT
#include "mpsd-ring.h"

_Static_assert(!(MPSD_RING_RECORDS & (MPSD_RING_RECORDS - 1)), "slots are told by the low bits of seq");

/* The slot of a record stays the same for ever; slot 0 waits for the record MPSD_RING_RECORDS. */
static __u32 slot_of(__u64 seq)
{
	return (__u32)seq & (MPSD_RING_RECORDS - 1);
}

void *mpsd_ring_put(struct mpsd_ring *ring, const struct mpsd_record *record, void *owner)
{
	struct mpsd_ring_entry *entry = &ring->entries[slot_of(++ring->written)];
	void *before = entry->owner;

	entry->record = *record;
	entry->record.seq = ring->written;
	entry->owner = owner;
	return before;
}

bool mpsd_ring_has(const struct mpsd_ring *ring, __u64 position)
{
	return position < ring->written;
}

bool mpsd_ring_take(const struct mpsd_ring *ring, __u64 *position, struct mpsd_ring_entry *entry)
{
	__u64 oldest = ring->written < MPSD_RING_RECORDS ? 1 : ring->written - MPSD_RING_RECORDS + 1;
	__u64 next = *position < oldest ? oldest : *position + 1;

	if (!mpsd_ring_has(ring, *position))
		return false;
	*entry = ring->entries[slot_of(next)];
	*position = next;
	return true;
}

bool mpsd_ring_drain(struct mpsd_ring *ring, void **owner)
{
	__u32 slot;

	for (slot = 0; slot < MPSD_RING_RECORDS; slot++) {
		*owner = ring->entries[slot].owner;
		ring->entries[slot].owner = (void *)0;
		if (*owner)
			return true;
	}
	ring->written = 0;
	return false;
}
