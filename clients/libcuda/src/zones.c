// SPDX-License-Identifier: MIT
/*
 * Policy, in this order: managed zones as long as the daemon's budget for them lasts, far zones and then what
 * is in quarantine making room for what lives, furthest and oldest first; then sparse zones; then none. Far
 * zones have half of what is left after that.
 *
 * New pieces get their zones in the allocating thread: that is two system calls or three each, and only so
 * is it certain that no kernel of the program meets the allocation without them.
 */
#include "zones.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "clock.h"
#include "far.h"
#include "hostguard.h"
#include "limits.h"
#include "notes.h"
#include "pieces.h"
#include "proxy.h"
#include "uvmrange.h"
#include "vault.h"

/* A grid that runs wild in a zone lasts as long as its faults, so no more of a freed piece reports. */
#define REPORTED ((size_t)16 << 20)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t entry = PTHREAD_MUTEX_INITIALIZER;	/* who covers piece after piece lets others in between */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static atomic_bool off_in_child;

static struct mpsd_limits limits;	/* read once */

/* Under the lock. */
static bool granted, far_granted;	/* before that, pieces are noted and not covered */
static uint64_t budget_bytes, budget_zones;
static unsigned int step_bucket = MPSD_LIVING_BUCKETS;
static struct mpsd_zone null_page;
static bool null_tried;
static bool lifted;		/* nothing is laid for a while */

static void in_child(void)
{
	atomic_store(&off_in_child, true);
}

static void start(void)
{
	limits = mpsd_limits_read(mpsd_vault_offered());
	if (limits.own_budget) {
		budget_bytes = limits.own_budget;
		budget_zones = limits.zones;
		granted = far_granted = true;
	}
	if (limits.zone_bytes)
		pthread_atfork(NULL, NULL, in_child);
}

size_t mpsd_zones_size(void)
{
	pthread_once(&once, start);
	return atomic_load(&off_in_child) ? 0 : limits.zone_bytes;
}

size_t mpsd_zones_far(void)
{
	return mpsd_zones_size() ? limits.far_bytes : 0;
}

bool mpsd_zones_enter(void)
{
	if (!mpsd_zones_size())
		return false;
	pthread_mutex_lock(&entry);
	pthread_mutex_lock(&lock);
	pthread_mutex_unlock(&entry);
	return true;
}

void mpsd_zones_leave(void)
{
	pthread_mutex_unlock(&lock);
}

static void let_out_old(void)
{
	uint64_t now = mpsd_quarantine.kept.first ? mpsd_now_ns() : 0;

	while (mpsd_quarantine.kept.first && now - mpsd_quarantine.kept.first->freed_ns >= limits.quarantine_ns)
		mpsd_quarantine_let_out();
}

/* Laying */

static uint64_t laid_zones(void)
{
	return mpsd_ledger->managed_zones + mpsd_ledger->sparse_zones - mpsd_hostguard_ranges();
}

static bool is_room_for_managed(size_t size, uint64_t spare_bytes, uint64_t spare_zones)
{
	return mpsd_ledger->managed_bytes - spare_bytes + size <= budget_bytes &&
	       mpsd_ledger->managed_zones - spare_zones < budget_zones && laid_zones() - spare_zones < limits.zones;
}

/* Only what makes the room that is wanted goes. */
static bool make_room(size_t size)
{
	if (!is_room_for_managed(size, mpsd_quarantine.managed_bytes + mpsd_ledger->far_bytes,
				 mpsd_quarantine.managed_zones + mpsd_ledger->far_zones))
		return false;
	while (!is_room_for_managed(size, 0, 0) && mpsd_far_drop())
		;
	while (!is_room_for_managed(size, 0, 0) && mpsd_quarantine.kept.first)
		mpsd_quarantine_let_out();
	return is_room_for_managed(size, 0, 0);
}

static bool lay(struct piece *piece, enum side side, uint64_t base, size_t size)
{
	struct mpsd_zone *zone = &piece->zones[side];

	*zone = (struct mpsd_zone){
		.base = base,
		.size = size,
		.role = side == ITSELF || side == REST ? MPSD_ZONE_QUARANTINE : MPSD_ZONE_GUARD,
	};
	if (side != REST && make_room(size) && mpsd_cover_managed(zone))
		return true;
	while (laid_zones() >= limits.zones && mpsd_far_drop())
		;
	return laid_zones() < limits.zones && mpsd_cover_sparse(zone, (const uint8_t *)piece->gpu.bytes);
}

/* Only with zones: without a report of hits nobody would learn that a null pointer was followed. */
static void cover_null_page(void)
{
	if (null_tried)
		return;
	null_tried = true;
	null_page = (struct mpsd_zone){ .size = MPSD_RANGE_NULL_PAGE, .role = MPSD_ZONE_NULL_PAGE };
	mpsd_ledger->null_page = make_room(null_page.size) && mpsd_cover_managed(&null_page);
}

static void uncover_null_page(void)
{
	null_tried = !mpsd_cover_take_away(&null_page);
	mpsd_ledger->null_page = null_tried;
}

static void cover(struct piece *piece)
{
	bool before, behind;

	cover_null_page();
	before = lay(piece, BEFORE, piece->base - limits.zone_bytes, limits.zone_bytes);
	behind = lay(piece, BEHIND, piece->base + piece->size, limits.zone_bytes);
	piece->laid = true;
	piece->bare = !before || !behind;
	mpsd_ledger->uncovered += piece->bare;
}

/* Far zones */

static uint64_t half_left(uint64_t all, uint64_t used)
{
	return all > used ? (all - used) / 2 : 0;
}

static struct mpsd_far_share far_share(void)
{
	uint64_t most = budget_zones < limits.zones ? budget_zones : limits.zones;

	if (!far_granted || lifted)
		return (struct mpsd_far_share){ 0, 0 };
	return (struct mpsd_far_share){
		half_left(budget_bytes, mpsd_ledger->managed_bytes - mpsd_ledger->far_bytes),
		half_left(most, laid_zones() - mpsd_ledger->far_zones),
	};
}

static void fit_far(void)
{
	while (mpsd_far_step(far_share()))
		;
}

/* What memory.c says */

void mpsd_zones_window(CUdevice device, uint64_t base, size_t lead, size_t size)
{
	if (!mpsd_zones_enter())
		return;
	mpsd_far_window(device, base, lead, size, limits.far_bytes);
	mpsd_zones_leave();
}

bool mpsd_zones_tail(CUdevice device, uint64_t tail)
{
	bool is;

	if (!mpsd_zones_enter())
		return true;
	is = mpsd_far_tail(device, tail);
	fit_far();
	mpsd_zones_leave();
	return is;
}

void mpsd_zones_born(uint64_t base, size_t size, CUdevice device)
{
	struct piece *piece;

	if (!mpsd_zones_enter())
		return;
	let_out_old();
	piece = malloc(sizeof(*piece));
	if (piece) {
		*piece = (struct piece){ .base = base, .size = size, .device = device };
		mpsd_living_add(piece);
		/* Here, for the channel's thread calls nothing of the driver's for a zone. */
		real_cuDeviceGetUuid_v2(&piece->gpu, device);
		mpsd_hostguard_begin(device, &piece->gpu);
		if (granted && !lifted)
			cover(piece);
	} else {
		mpsd_ledger->uncovered++;
	}
	fit_far();
	mpsd_zones_leave();
}

static bool cover_itself(struct piece *piece)
{
	size_t reported = piece->size < REPORTED ? piece->size : REPORTED;

	return lay(piece, ITSELF, piece->base, reported) &&
	       (reported == piece->size || lay(piece, REST, piece->base + reported, piece->size - reported));
}

/* Newer ones than what is too much for the quarantine are not sacrificed to it. */
static bool put_into_quarantine(struct piece *piece)
{
	if (piece->size > limits.quarantine_bytes || !piece->laid || !cover_itself(piece))
		return false;
	piece->freed_ns = mpsd_now_ns();
	mpsd_quarantine_add(piece);
	while (mpsd_ledger->quarantine_bytes > limits.quarantine_bytes)
		mpsd_quarantine_let_out();
	return true;
}

/* The turn of a piece to be covered again may not have come yet. */
static void cover_late(struct piece *piece)
{
	if (granted && !lifted && !piece->laid && piece->size <= limits.quarantine_bytes)
		cover(piece);
}

bool mpsd_zones_freed(uint64_t base, bool keep)
{
	struct piece *piece;
	bool kept = false;

	if (!mpsd_zones_enter())
		return false;
	let_out_old();
	piece = mpsd_living_take(base);
	if (piece) {
		if (keep)
			cover_late(piece);
		mpsd_ledger->uncovered -= piece->bare;
		kept = keep && granted && put_into_quarantine(piece);
		if (!kept) {
			/* Addresses under a zone that cannot be taken away are never given out again. */
			kept = !mpsd_piece_unlay(piece);
			free(piece);
		}
	}
	mpsd_zones_leave();
	return kept;
}

bool mpsd_zones_out(CUdevice *device, struct arena_range *range)
{
	struct piece *piece = NULL;

	if (!mpsd_zones_enter())
		return false;
	let_out_old();
	if (mpsd_quarantine.out.first) {
		piece = mpsd_queue_take(&mpsd_quarantine.out);
		*device = piece->device;
		*range = (struct arena_range){ piece->base, piece->size };
		free(piece);
	}
	mpsd_zones_leave();
	return piece != NULL;
}

void mpsd_zones_empty(void)
{
	if (!mpsd_zones_enter())
		return;
	while (mpsd_quarantine.kept.first)
		mpsd_quarantine_let_out();
	if (!mpsd_living_is_any())
		uncover_null_page();
	mpsd_zones_leave();
}

void mpsd_zones_ended(CUdevice device)
{
	mpsd_zones_empty();
	if (!mpsd_zones_enter())
		return;
	mpsd_far_close(device);
	mpsd_hostguard_end();
	mpsd_zones_leave();
}

/* What the channel says */

void mpsd_zones_granted(uint64_t bytes, uint64_t count, bool far)
{
	if (!mpsd_zones_enter())
		return;
	budget_bytes = bytes;
	budget_zones = count;
	granted = true;
	far_granted = far;
	step_bucket = 0;
	mpsd_zones_leave();
}

void mpsd_zones_refused(void)
{
	if (!mpsd_zones_enter())
		return;
	budget_bytes = budget_zones = 0;
	/* Nobody hears of what they absorb. */
	fit_far();
	mpsd_zones_leave();
}

bool mpsd_zones_step(void)
{
	struct piece *piece = NULL;
	bool is;

	if (!mpsd_zones_enter())
		return false;
	while (!lifted && !piece && step_bucket < MPSD_LIVING_BUCKETS) {
		for (piece = mpsd_living[step_bucket]; piece && piece->laid; piece = piece->next)
			;
		step_bucket += !piece;
	}
	if (piece)
		cover(piece);
	is = piece || mpsd_far_step(far_share());
	mpsd_zones_leave();
	return is;
}

/* What fail-over says */

void mpsd_zones_lift(void)
{
	if (!mpsd_zones_enter())
		return;
	mpsd_range_gone(true);
	while (mpsd_quarantine.kept.first)
		mpsd_quarantine_let_out();
	for (unsigned int i = 0; i < MPSD_LIVING_BUCKETS; i++) {
		for (struct piece *piece = mpsd_living[i]; piece; piece = piece->next) {
			mpsd_ledger->uncovered -= piece->bare;
			mpsd_piece_unlay(piece);
			piece->laid = piece->bare = false;
		}
	}
	mpsd_far_drop_all();
	uncover_null_page();
	mpsd_hostguard_lift();
	mpsd_range_gone(false);
	lifted = true;
	mpsd_zones_leave();
}

void mpsd_zones_lay(void)
{
	if (!mpsd_zones_enter())
		return;
	lifted = false;
	mpsd_hostguard_lay();
	if (granted)
		step_bucket = 0;
	mpsd_zones_leave();
}

void mpsd_zones_copy(enum mpsd_range_copy what)
{
	if (!mpsd_zones_enter())
		return;
	mpsd_range_copy(what);
	if (what == MPSD_RANGE_COPY_TAKES_OVER)
		mpsd_hostguard_hold();
	mpsd_zones_leave();
}
