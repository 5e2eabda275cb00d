// SPDX-License-Identifier: MIT
/*
 * All is under the lock of zones.c, taken for one range at a time, so that a registration waits for one at most. A
 * range whose mapping has gone meanwhile harms nobody: the driver maps elsewhere (place.h), and what the program
 * registers there is taken out first.
 */
#include "hostguard.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "cover.h"
#include "debug.h"
#include "failover/copy.h"
#include "hostplan.h"
#include "notes.h"
#include "place.h"
#include "proxy.h"
#include "stats.h"
#include "thread.h"
#include "window.h"
#include "zones.h"

#define MOST_RANGES 1024
#define FOLLOW_MS 1000
#define LARGEST ((uint64_t)1 << 40)

static uint64_t most_bytes;	/* 0: there is no guard */
static atomic_bool is_over;

/* Under the lock of zones.c. */
static bool has_begun, is_lifted, is_forgetful;
static bool has_context;	/* what is laid is so on the GPU too */
static CUuuid guarded_gpu;
static struct mpsd_zone laid[MOST_RANGES];
static size_t laid_count;
static struct mpsd_spared {
	struct mpsd_spared *next;
	uint64_t base, size;
	bool is_registered;	/* for certain; otherwise the driver is being asked */
} *spared;

void mpsd_hostguard_prepare(void)
{
	most_bytes = mpsd_debug_number(MPSD_DEBUG_HOST_GUARD_BYTES, 0, HOSTPLAN_GRANULE, 0, LARGEST);
	if (most_bytes && !mpsd_zones_size()) {
		mpsd_say("no guard over host memory: guard zones are off in this process");
		most_bytes = 0;
	}
	if (!most_bytes)
		return;
	mpsd_place_begin();
	mpsd_copy_watch_first();
}

/* Laying and taking away; under the lock */

static bool is_spared(uint64_t base, uint64_t size)
{
	for (const struct mpsd_spared *each = spared; each; each = each->next)
		if (each->base < base + size && each->base + each->size > base)
			return true;
	return false;
}

static bool is_over_range(const struct mpsd_zone *zone, const struct host_range *range)
{
	return zone->base == range->base && zone->size == range->size;
}

static bool is_laid(const struct host_range *range)
{
	for (size_t i = 0; i < laid_count; i++)
		if (is_over_range(&laid[i], range))
			return true;
	return false;
}

static void lay(const struct host_range *range)
{
	struct mpsd_zone zone = { .base = range->base, .size = range->size, .role = MPSD_ZONE_GUARD };

	if (atomic_load(&is_over) || !has_context || is_lifted || is_forgetful || laid_count == MOST_RANGES ||
	    is_laid(range) || is_spared(range->base, range->size) ||
	    !mpsd_cover_sparse(&zone, (const uint8_t *)guarded_gpu.bytes))
		return;
	laid[laid_count++] = zone;
	mpsd_stats->host_guard += zone.size;
}

/* One that cannot be taken away stays: it is asked again the next time. */
static bool take_away(size_t i)
{
	if (!mpsd_cover_take_away(&laid[i]))
		return false;
	mpsd_stats->host_guard -= laid[i].size;
	laid[i] = laid[--laid_count];
	return true;
}

static void take_away_all(void)
{
	for (size_t i = laid_count; i-- > 0;)
		take_away(i);
}

static void take_away_from(uint64_t base, uint64_t size)
{
	for (size_t i = laid_count; i-- > 0;)
		if (laid[i].base < base + size && laid[i].base + laid[i].size > base)
			take_away(i);
}

/* Following */

/* All of /proc/self/maps, which has no byte 0, to be freed; NULL where it cannot be read. */
static char *read_maps(void)
{
	FILE *file = fopen("/proc/self/maps", "re");
	char *text = NULL;
	size_t room = 0;
	bool is;

	if (!file)
		return NULL;
	is = getdelim(&text, &room, 0, file) > 0;
	fclose(file);
	if (is)
		return text;
	free(text);
	return NULL;
}

static bool is_off(uint64_t base, size_t size)
{
	return mpsd_window_covers(base, size) || mpsd_place_covers(base, size);
}

/* What was spared as the plan was made; what is spared since is seen as a range is laid. */
static size_t plan(const char *maps, struct host_range *ranges)
{
	struct host_range holes[MOST_RANGES];
	size_t count = 0;
	bool is;

	if (!mpsd_zones_enter())
		return 0;
	is = has_context;
	for (const struct mpsd_spared *each = spared; each && count < MOST_RANGES; each = each->next)
		holes[count++] = (struct host_range){ each->base, each->size };
	mpsd_zones_leave();
	return is ? mpsd_hostplan(maps, is_off, holes, count, most_bytes, ranges, MOST_RANGES) : 0;
}

static bool is_among(const struct mpsd_zone *zone, const struct host_range *ranges, size_t count)
{
	for (size_t i = 0; i < count; i++)
		if (is_over_range(zone, &ranges[i]))
			return true;
	return false;
}

/* What is no longer wanted goes first: the new ones may overlap it. */
static void take_away_others(const struct host_range *ranges, size_t count)
{
	for (size_t i = MOST_RANGES; i-- > 0 && mpsd_zones_enter();) {
		if (!atomic_load(&is_over) && i < laid_count && !is_among(&laid[i], ranges, count))
			take_away(i);
		mpsd_zones_leave();
	}
}

static void lay_all(const struct host_range *ranges, size_t count)
{
	for (size_t i = 0; i < count && mpsd_zones_enter(); i++) {
		lay(&ranges[i]);
		mpsd_zones_leave();
	}
}

/* Once: it is lost quietly otherwise, and the fault that it was to absorb is fatal for many. */
static void say_loss(bool has_maps, size_t wanted)
{
	static bool is_said;
	const char *why = NULL;

	if (mpsd_place_has_missed())
		why = "no address range is left for the driver's mappings";
	else if (!has_maps)
		why = "/proc/self/maps cannot be read";
	else if (is_forgetful)
		why = "out of host memory for the list of registered memory";
	else if (wanted && !laid_count && has_context && !is_lifted)
		why = "the driver refuses ranges over host memory";
	if (why && !is_said)
		mpsd_say("no guard over host memory: %s", why);
	is_said |= why != NULL;
}

static void follow_once(void)
{
	struct host_range ranges[MOST_RANGES];
	char *maps = read_maps();
	bool has_maps = maps != NULL;
	size_t count = has_maps && !mpsd_place_has_missed() ? plan(maps, ranges) : 0;

	free(maps);
	take_away_others(ranges, count);
	lay_all(ranges, count);
	if (mpsd_zones_enter()) {
		say_loss(has_maps, count);
		mpsd_zones_leave();
	}
}

static void *follow(void *unused)
{
	(void)unused;
	while (!atomic_load(&is_over)) {
		follow_once();
		mpsd_pause(FOLLOW_MS);
	}
	return NULL;
}

/* What the others say */

uint64_t mpsd_hostguard_ranges(void)
{
	return laid_count;
}

static void at_end(void)
{
	atomic_store(&is_over, true);
	/* Who is at it looks under the lock: nothing is laid or taken away any more once this has been had. */
	if (mpsd_zones_enter())
		mpsd_zones_leave();
}

/* Why there can be no guard; NULL: there can. */
static const char *obstacle(CUdevice device)
{
	int pageable = 0, count = 0;

	if (real_cuDeviceGetCount(&count) || count != 1)
		return "the program has several GPUs";
	if (real_cuDeviceGetAttribute(&pageable, CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, device) || pageable)
		return "the GPU uses the host's page tables, so every host pointer is valid";
	return mpsd_place_is_used() ? NULL : "this driver's mappings cannot be redirected";
}

void mpsd_hostguard_begin(CUdevice device, const CUuuid *gpu)
{
	const char *why;

	has_context = true;
	if (!most_bytes || has_begun)
		return;
	has_begun = true;
	guarded_gpu = *gpu;
	why = obstacle(device);
	if (!why && !mpsd_thread_start(follow, NULL))
		why = "cannot create a thread";
	if (why)
		mpsd_say("no guard over host memory: %s", why);
	else
		atexit(at_end);
}

/* On the GPU nothing is mapped there any more, whatever becomes of the ranges. */
void mpsd_hostguard_end(void)
{
	has_context = false;
	take_away_all();
	if (!laid_count)
		return;
	mpsd_range_gone(true);
	take_away_all();
	mpsd_range_gone(false);
}

void mpsd_hostguard_hold(void)
{
	is_lifted = true;
}

void mpsd_hostguard_lift(void)
{
	take_away_all();
}

void mpsd_hostguard_lay(void)
{
	is_lifted = false;
}

struct mpsd_spared *mpsd_hostguard_spare(const void *base, size_t size)
{
	struct mpsd_spared *made;

	if (!most_bytes || !mpsd_zones_enter())
		return NULL;
	made = malloc(sizeof(*made));
	if (made) {
		*made = (struct mpsd_spared){ spared, (uint64_t)base, size, false };
		spared = made;
	} else {
		/* For good: who registered this is not known. */
		is_forgetful = true;
		take_away_all();
	}
	take_away_from((uint64_t)base, size);
	mpsd_zones_leave();
	return made;
}

struct mpsd_spared *mpsd_hostguard_spared(const void *base)
{
	struct mpsd_spared *found;

	if (!most_bytes || !mpsd_zones_enter())
		return NULL;
	found = spared;
	while (found && !(found->is_registered && found->base == (uint64_t)base))
		found = found->next;
	/* Whoever registers the same again before this is settled has a row of his own. */
	if (found)
		found->is_registered = false;
	mpsd_zones_leave();
	return found;
}

/* The driver registers nothing twice: what overlaps it was so in a context that has gone. */
static bool is_past(const struct mpsd_spared *each, const struct mpsd_spared *now)
{
	return each->is_registered && each->base < now->base + now->size && each->base + each->size > now->base;
}

void mpsd_hostguard_settle(struct mpsd_spared *settled, bool is_registered)
{
	struct mpsd_spared **link = &spared, *each;

	if (!settled || !mpsd_zones_enter())
		return;
	settled->is_registered = false;
	while ((each = *link)) {
		if (is_registered ? is_past(each, settled) : each == settled) {
			*link = each->next;
			free(each);
		} else {
			link = &each->next;
		}
	}
	if (is_registered)
		settled->is_registered = true;
	mpsd_zones_leave();
}
