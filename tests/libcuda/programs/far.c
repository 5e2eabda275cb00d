// SPDX-License-Identifier: MIT
/*
 * Random operations on far zones (far.c) of two windows, with a driver that refuses some ranges and fails to release
 * others: far zones never overlap each other or occupied ranges, and never exceed their budget.
 */
#include "far.h"

#include <stdio.h>
#include <stdlib.h>

#include "checking.h"
#include "cover.h"
#include "notes.h"

#define GIB ((uint64_t)1 << 30)
#define MIB ((uint64_t)1 << 20)
#define FIRST ((uint64_t)0x200000000000)
#define STEP (1024 * GIB)
#define WINDOW (64 * GIB)
#define DEVICES 2
#define MOST 200
#define STEPS 3000

static struct mpsd_ledger book;
struct mpsd_ledger *mpsd_ledger = &book;

static struct {
	uint64_t base, end, since;
	bool there, stuck;
} rows[MOST];
static uint64_t state, now, side, tails[DEVICES];
static bool refuses, holds;

/* The driver */

bool mpsd_cover_managed(struct mpsd_zone *zone)
{
	int row = 0;

	if (refuses && !random_below(&state, 3))
		return false;
	while (rows[row].there)
		row++;
	CHECK(row < MOST && zone->size && zone->role == MPSD_ZONE_FAR);
	rows[row].base = zone->base;
	rows[row].end = zone->base + zone->size;
	rows[row].since = ++now;
	rows[row].there = true;
	rows[row].stuck = holds && !random_below(&state, 20);
	zone->kind = MPSD_ZONE_MANAGED;
	zone->row = row;
	book.far_bytes += zone->size;
	book.far_zones++;
	return true;
}

bool mpsd_cover_take_away(struct mpsd_zone *zone)
{
	if (zone->kind == MPSD_ZONE_NONE)
		return true;
	CHECK(rows[zone->row].there && rows[zone->row].base == zone->base);
	if (rows[zone->row].stuck)
		return false;
	rows[zone->row].there = false;
	zone->kind = MPSD_ZONE_NONE;
	book.far_bytes -= zone->size;
	book.far_zones--;
	return true;
}

uint64_t mpsd_ledger_zone_born(int row)
{
	return rows[row].since;
}

void mpsd_ledger_zone_since(int row, uint64_t born_ns)
{
	CHECK(born_ns < rows[row].since);
	rows[row].since = born_ns;
}

/* Invariants */

static bool meets(uint64_t base, uint64_t end)
{
	for (int i = 0; i < MOST; i++)
		if (rows[i].there && rows[i].base < end && rows[i].end > base)
			return true;
	return false;
}

static void look(struct mpsd_far_share share)
{
	bool any_stuck = false;

	for (int i = 0; i < MOST; i++) {
		any_stuck |= rows[i].there && rows[i].stuck;
		for (int j = 0; rows[i].there && j < i; j++)
			CHECK(!rows[j].there || rows[i].base >= rows[j].end || rows[j].base >= rows[i].end);
	}
	CHECK(any_stuck || (book.far_bytes <= share.bytes && book.far_zones <= share.zones));
	for (int device = 0; device < DEVICES && !any_stuck; device++)
		CHECK(!meets(FIRST + (uint64_t)device * STEP, tails[device]));
}

static void move_tail(void)
{
	CUdevice device = (CUdevice)random_below(&state, DEVICES);
	uint64_t before = tails[device], tail = before + random_below(&state, 3) * random_below(&state, 900) * 2 * MIB;
	uint64_t end = FIRST + (uint64_t)device * STEP + WINDOW;

	if (!random_below(&state, 4))
		tail = FIRST + (uint64_t)device * STEP +
		       random_below(&state, (before - FIRST) % STEP / MIB + 1) / 2 * 2 * MIB;
	tails[device] = tail < end ? tail : end;
	if (mpsd_far_tail(device, tails[device]))
		CHECK(tails[device] <= before || !meets(before, tails[device]));
}

static void settle(struct mpsd_far_share share)
{
	while (mpsd_far_step(share))
		;
	look(share);
}

/* With an unlimited budget, each side is covered completely. */
static void look_at_whole(void)
{
	struct mpsd_far_share share = { UINT64_MAX, UINT64_MAX };

	mpsd_far_drop_all();
	for (CUdevice device = 0; device < DEVICES; device++)
		CHECK(mpsd_far_tail(device, tails[device]));
	settle(share);
	for (int device = 0; device < DEVICES; device++) {
		uint64_t first = FIRST + (uint64_t)device * STEP, end = first + WINDOW, at = tails[device];

		for (uint64_t step = 0; step < side; step += 2 * MIB)
			CHECK(meets(first - step - 2 * MIB, first - step));
		for (; at < tails[device] + side && at < end; at += 2 * MIB)
			CHECK(meets(at, at + 2 * MIB));
		mpsd_far_close(device);
	}
	CHECK(!book.far_bytes && !book.far_zones);
}

int main(int count, char **given)
{
	state = count > 1 ? strtoull(given[1], NULL, 0) : 1;
	side = (count > 2 ? strtoull(given[2], NULL, 0) : 8192) * MIB;
	holds = count > 3;
	for (CUdevice device = 0; device < DEVICES; device++) {
		tails[device] = FIRST + (uint64_t)device * STEP;
		mpsd_far_window(device, tails[device] - side, side, side + WINDOW, side);
	}
	for (int step = 0; step < STEPS; step++) {
		struct mpsd_far_share share = { random_below(&state, 40) * GIB, random_below(&state, 50) };

		refuses = step % 100 > 90;
		move_tail();
		settle(share);
		if (!random_below(&state, 50) && book.far_zones && !holds)
			CHECK(mpsd_far_drop());
		if (!random_below(&state, 100))
			mpsd_far_drop_all();
	}
	refuses = false;
	if (!holds)
		look_at_whole();
	puts("ok");
	return 0;
}
