// SPDX-License-Identifier: MIT
/*
 * Behind the last piece the chunks keep to a grid of addresses, but for the first one, which begins where the
 * window's free part does: a window that grows cuts that one, and lays another at the far end now and then.
 */
#include "far.h"

#include "cover.h"
#include "limits.h"
#include "notes.h"
#include "physical.h"

#define CHUNK ((size_t)1 << 30)
#define SLOTS 40	/* both sides of the largest there can be, and a few */

struct far {
	uint64_t begin, first, tail, end;	/* of the window; of its pieces; of what nobody has; of the window */
	size_t size, chunk;
	bool open;
	struct mpsd_zone zones[SLOTS];
};

_Static_assert(2 * (MPSD_FAR_MOST / CHUNK + 1) <= SLOTS, "each chunk has its slot");

static struct far windows[MPSD_DEVICES];
static bool is_refused;		/* the driver has refused one: it is not asked again for a while */

static uint64_t end_of(const struct mpsd_zone *zone)
{
	return zone->base + zone->size;
}

static uint64_t least(uint64_t one, uint64_t other)
{
	return one < other ? one : other;
}

void mpsd_far_window(CUdevice device, uint64_t base, size_t lead, size_t whole, size_t size)
{
	windows[device].begin = base;
	windows[device].first = base + lead;
	windows[device].end = base + whole;
	windows[device].size = size;
	windows[device].chunk = least(size, CHUNK);
}

/* What is wanted. The i-th chunk of a side; of no size where there is none. */

static struct mpsd_zone behind(const struct far *far, uint64_t i)
{
	uint64_t from = far->tail / far->chunk + i, base = i ? from * far->chunk : far->tail;
	uint64_t end = least((from + 1) * far->chunk, far->end);
	bool is = base < end && base - far->tail < far->size;

	return (struct mpsd_zone){ .base = base, .size = is ? end - base : 0, .role = MPSD_ZONE_FAR };
}

static struct mpsd_zone below(const struct far *far, uint64_t i)
{
	uint64_t room = far->first - far->begin, skipped = least(i * far->chunk, room);
	size_t size = least(far->chunk, room - skipped);

	return (struct mpsd_zone){ .base = far->first - skipped - size, .size = size, .role = MPSD_ZONE_FAR };
}

static uint64_t distance(const struct far *far, const struct mpsd_zone *zone)
{
	if (zone->base < far->first)
		return far->first - end_of(zone);
	return zone->base > far->tail ? zone->base - far->tail : 0;
}

/* It, or what lies in its way: what cannot be taken away is not laid over. */
static bool is_laid(const struct far *far, const struct mpsd_zone *wanted)
{
	for (int i = 0; i < SLOTS; i++)
		if (far->zones[i].kind != MPSD_ZONE_NONE && far->zones[i].base < end_of(wanted) &&
		    end_of(&far->zones[i]) > wanted->base)
			return true;
	return false;
}

static bool is_wanted(const struct far *far, const struct mpsd_zone *zone)
{
	for (uint64_t i = 0; i <= far->size / far->chunk; i++) {
		struct mpsd_zone one = behind(far, i), other = below(far, i);

		if ((one.base == zone->base && one.size == zone->size) ||
		    (other.base == zone->base && other.size == zone->size))
			return true;
	}
	return false;
}

/* The nearest of this window that is not there. */
static struct mpsd_zone missing(const struct far *far)
{
	for (uint64_t i = 0; i <= far->size / far->chunk; i++) {
		struct mpsd_zone one = behind(far, i), other = below(far, i);

		if (one.size && !is_laid(far, &one))
			return one;
		if (other.size && !is_laid(far, &other))
			return other;
	}
	return (struct mpsd_zone){ .size = 0 };
}

/* What goes */

static bool drop_beyond(uint64_t near, bool at_least)
{
	struct mpsd_zone *furthest = NULL;

	for (int i = 0; i < MPSD_DEVICES; i++) {
		for (int slot = 0; windows[i].open && slot < SLOTS; slot++) {
			struct mpsd_zone *zone = &windows[i].zones[slot];
			uint64_t far = distance(&windows[i], zone);

			if (zone->kind == MPSD_ZONE_NONE || (at_least ? far < near : far <= near))
				continue;
			near = far;
			at_least = true;
			furthest = zone;
		}
	}
	return furthest && mpsd_cover_take_away(furthest);
}

bool mpsd_far_drop(void)
{
	return drop_beyond(0, true);
}

static void drop_window(struct far *far)
{
	for (int i = 0; i < SLOTS; i++)
		mpsd_cover_take_away(&far->zones[i]);
}

void mpsd_far_close(CUdevice device)
{
	drop_window(&windows[device]);
	windows[device].open = false;
	is_refused = false;
}

void mpsd_far_drop_all(void)
{
	for (int i = 0; i < MPSD_DEVICES; i++)
		if (windows[i].open)
			drop_window(&windows[i]);
	is_refused = false;
}

/* The rest of one lies there as long as all of it did: what it has met and nobody has read yet is a hit. */
static bool cut(struct mpsd_zone *zone, uint64_t tail)
{
	uint64_t end = end_of(zone), since = mpsd_ledger_zone_born(zone->row);

	if (!mpsd_cover_take_away(zone))
		return false;
	if (end <= tail)
		return true;
	zone->base = tail;
	zone->size = end - tail;
	if (mpsd_cover_managed(zone))
		mpsd_ledger_zone_since(zone->row, since);
	return true;
}

bool mpsd_far_tail(CUdevice device, uint64_t tail)
{
	struct far *far = &windows[device];
	uint64_t before = far->open ? far->tail : far->first;
	bool all = true;

	if (!far->size)
		return true;
	far->open = true;
	far->tail = tail;
	for (int i = 0; i < SLOTS; i++) {
		struct mpsd_zone *zone = &far->zones[i];

		/* One that stays there is in nobody's way once the window has grown past it. */
		if (zone->kind != MPSD_ZONE_NONE && zone->base >= far->first && zone->base < tail && !cut(zone, tail))
			all &= end_of(zone) <= before;
	}
	return all;
}

/* What comes */

static void drop_unwanted(struct far *far)
{
	for (int i = 0; i < SLOTS; i++)
		if (far->zones[i].kind != MPSD_ZONE_NONE && !is_wanted(far, &far->zones[i]))
			mpsd_cover_take_away(&far->zones[i]);
}

static bool fits(struct mpsd_far_share share, uint64_t bytes, uint64_t zones)
{
	return mpsd_ledger->far_bytes + bytes <= share.bytes && mpsd_ledger->far_zones + zones <= share.zones;
}

static struct far *nearest_missing(struct mpsd_zone *wanted)
{
	struct far *nearest = NULL;

	for (int i = 0; i < MPSD_DEVICES; i++) {
		struct mpsd_zone zone;

		if (!windows[i].open)
			continue;
		zone = missing(&windows[i]);
		if (!zone.size || (nearest && distance(nearest, wanted) <= distance(&windows[i], &zone)))
			continue;
		nearest = &windows[i];
		*wanted = zone;
	}
	return nearest;
}

static struct mpsd_zone *free_slot(struct far *far)
{
	for (int i = 0; i < SLOTS; i++)
		if (far->zones[i].kind == MPSD_ZONE_NONE)
			return &far->zones[i];
	return NULL;
}

bool mpsd_far_step(struct mpsd_far_share share)
{
	struct mpsd_zone wanted, *slot;
	struct far *far;

	for (int i = 0; i < MPSD_DEVICES; i++)
		if (windows[i].open)
			drop_unwanted(&windows[i]);
	while (!fits(share, 0, 0))
		if (!mpsd_far_drop())
			return false;
	far = share.bytes && !is_refused ? nearest_missing(&wanted) : NULL;
	if (!far)
		return false;
	while (!fits(share, wanted.size, 1))
		if (!drop_beyond(distance(far, &wanted), false))
			return false;
	slot = free_slot(far);
	if (!slot)
		return false;
	*slot = wanted;
	is_refused = !mpsd_cover_managed(slot);
	return !is_refused;
}
