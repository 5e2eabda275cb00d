// SPDX-License-Identifier: MIT
/* pace.c by a simulated clock. Prints "ok". */
#include "exact/pace.h"

#include "checking.h"
#include "clock.h"

#define US 1000ull
#define MS (1000 * US)
#define GIVEN (15 * US)		/* as in pace.c */

static uint64_t now = 1;

uint64_t mpsd_now_ns(void)
{
	return now;
}

/* `asleep`: the program's own time before it waits. */
static void epoch(uint64_t operations, uint64_t asleep, uint64_t waited)
{
	mpsd_pace_begin();
	now += asleep + waited;
	if (waited)
		mpsd_pace_waited(waited);
	mpsd_pace_end(operations);
}

int main(void)
{
	uint64_t before;

	CHECK(mpsd_pace_of(7) == 0);
	/* The program's own time is not the GPU's. */
	epoch(100, 30 * MS, 1 * MS);
	CHECK(mpsd_pace_of(200) == 2 * (1 * MS + 100 * GIVEN));
	/* An epoch in which the GPU stood still counts little, and one that a move interrupted not at all. */
	for (int i = 0; i < 60; i++)
		epoch(100, 0, 1 * MS);
	before = mpsd_pace_of(100);
	epoch(100, 0, 500 * MS);
	CHECK(mpsd_pace_of(100) > before && mpsd_pace_of(100) <= before * 115 / 100);
	before = mpsd_pace_of(100);
	mpsd_pace_begin();
	mpsd_pace_leave();
	now += 70 * MS;
	mpsd_pace_end(100);
	mpsd_pace_end(100);
	CHECK(mpsd_pace_of(100) == before);
	/* A lasting change is learned in a while, and forgotten again. */
	for (int i = 0; i < 60; i++)
		epoch(10, 0, 50 * MS);
	CHECK(mpsd_pace_of(10) > 45 * MS && mpsd_pace_of(10) < 51 * MS);
	for (int i = 0; i < 60; i++)
		epoch(10, 90 * MS, 1 * US);
	CHECK(mpsd_pace_of(10) < 12 * GIVEN);
	/* By operations, not by epochs: a single operation that is waited for says little about hundreds. */
	for (int i = 0; i < 60; i++) {
		epoch(1, 0, 200 * US);
		epoch(99, 0, 100 * US);
	}
	CHECK(mpsd_pace_of(100) > 100 * GIVEN && mpsd_pace_of(100) < 100 * GIVEN + 400 * US);
	/* A program that only polls may have worked that long. */
	for (int i = 0; i < 60; i++)
		epoch(10, 20 * MS, 0);
	CHECK(mpsd_pace_of(10) > 18 * MS && mpsd_pace_of(10) < 21 * MS);
	puts("ok");
	return 0;
}
