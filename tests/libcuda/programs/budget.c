// SPDX-License-Identifier: MIT
/* budget.c: what saving adds, and when that is too much. Prints "ok". */
#include "exact/budget.h"

#include "checking.h"

#define US 1000ull
#define MS (1000 * US)
#define GIB ((uint64_t)1 << 30)
#define SPEED 1000000ull	/* bytes per microsecond: a GiB takes 1.07 ms */
#define BUDGET 30		/* thousandths */

static uint64_t added(struct mpsd_period period)
{
	return mpsd_budget_added(&period, SPEED);
}

static void know_the_speed(void)
{
	/* An H200: 4.9 TB/s, of which a copy has 80 %, for each byte twice. */
	CHECK(mpsd_budget_speed(3201000, 6144) == 1966694);
	CHECK(mpsd_budget_speed(0, 6144) == 0 && mpsd_budget_speed(3201000, 0) == 0 && mpsd_budget_speed(-1, -1) == 0);
	CHECK(mpsd_budget_added(&(struct mpsd_period){ .length_ns = MS, .bytes = GIB, .waited_ns = MS }, 0) == 0);
}

static void add_what_idle_time_does_not_hide(void)
{
	struct mpsd_period period = { .length_ns = 20 * MS, .bytes = GIB };
	uint64_t copies = GIB * 1000 / SPEED;

	CHECK(added(period) == 0);
	period.waited_ns = 500 * US;
	CHECK(added(period) == 500 * US);
	period.waited_ns = 10 * MS;
	CHECK(added(period) == copies);
	period.length_ns = MS;
	CHECK(added(period) == MS);
}

static void count_copies_of_a_program_that_only_looks(void)
{
	struct mpsd_period period = { .length_ns = 20 * MS, .bytes = GIB, .looked_ns = 10 * MS };

	CHECK(added(period) == GIB * 1000 / SPEED);
	/* The wait at the end of its looks is for the mark alone. */
	period.waited_ns = 5 * US;
	CHECK(added(period) == GIB * 1000 / SPEED);
	/* A wait says more than a look. */
	period.waited_ns = 1050 * US;
	CHECK(added(period) == 1050 * US);
}

static void count_forced_waits(void)
{
	struct mpsd_period period = { .length_ns = 50 * MS, .bytes = GIB, .forced_ns = 8 * MS, .forced = 3 };

	/* The GPU had ended when the program came to wait: the program was the slower side, and was held. */
	CHECK(added(period) == 8 * MS);
	CHECK(mpsd_budget_added(&period, 0) == 8 * MS);
	/* The GPU was the slower side: it stood idle three times, and made the copies. */
	period.waited_ns = 8 * MS;
	CHECK(added(period) > GIB * 1000 / SPEED && added(period) < GIB * 1000 / SPEED + MS);
}

/* Many small operations: the program is the slower side, and prepares snapshots and marks itself. */
static void count_preparation_unless_the_gpu_hides_it(void)
{
	struct mpsd_period period = { .length_ns = MS, .bytes = GIB / 10, .prepared_ns = 200 * US };

	CHECK(added(period) == 200 * US);
	CHECK(mpsd_budget_added(&period, 0) == 0);
	/* The relay takes launches off the program. */
	period.relayed = 10;
	CHECK(added(period) == 175 * US);
	period.relayed = 400;
	CHECK(added(period) == 0);
	period.relayed = 0;
	/* Waits for a last small kernel are a small part of a long period. */
	period.length_ns = 4 * MS;
	period.waited_ns = 190 * US;
	CHECK(added(period) == GIB / 10 * 1000 / SPEED + 200 * US);
	period.length_ns = MS;
	period.waited_ns = 500 * US;
	CHECK(added(period) == GIB / 10 * 1000 / SPEED);
}

/* Periods until the program leaves; 0: it does not. */
static int periods(uint64_t length_ns, uint64_t added_ns, int most)
{
	struct mpsd_debt debt = { 0 };
	struct mpsd_period period = { .length_ns = length_ns, .bytes = 10, .by_leads = 10 };

	for (int i = 1; i <= most; i++)
		if (mpsd_budget_charge(&debt, &period, added_ns, BUDGET)) {
			CHECK(debt.added_ns == (uint64_t)i * added_ns);
			CHECK(debt.rest_ns == (uint64_t)i * (length_ns - added_ns));
			CHECK(debt.bytes == (uint64_t)i * 10 && debt.by_leads == debt.bytes);
			return i;
		}
	return 0;
}

static void let_debt_leak(void)
{
	struct mpsd_debt debt = { 0 };
	struct mpsd_period warm_up = { .length_ns = 200 * MS }, usual = { .length_ns = 50 * MS };

	/* 61 times slower; 58 %; a little beyond; within. */
	CHECK(periods(61 * MS, 60 * MS, 1000) == 2);
	CHECK(periods(158 * MS, 58 * MS, 1000) == 2);
	CHECK(periods(104 * MS, 4 * MS, 1000) == 101);
	CHECK(periods(103 * MS, 3 * MS, 100000) == 0);
	/* A warm-up passes, again and again if enough is between. */
	for (int times = 0; times < 10; times++) {
		CHECK(!mpsd_budget_charge(&debt, &warm_up, 90 * MS, BUDGET));
		CHECK(debt.added_ns == 90 * MS);
		for (int i = 0; i < 60; i++)
			CHECK(!mpsd_budget_charge(&debt, &usual, 0, BUDGET));
		CHECK(debt.debt_ns == 0 && debt.added_ns == 0 && debt.rest_ns == 0);
	}
	/* Without a budget nothing is owed. */
	CHECK(!mpsd_budget_charge(&debt, &warm_up, 190 * MS, 0) && !debt.debt_ns);
}

static void end_epochs_that_copies_are_little_of(void)
{
	/* Without a budget a tenth, of which a fifth is left for what else saving takes. */
	CHECK(mpsd_budget_is_little(8 * MS, 100 * MS, 0) && !mpsd_budget_is_little(8 * MS, 99 * MS, 0));
	CHECK(mpsd_budget_is_little(2 * MS, 100 * MS, 25) && !mpsd_budget_is_little(2 * MS, 99 * MS, 25));
	CHECK(mpsd_budget_is_little(0, 0, 25) && !mpsd_budget_is_little(1, 0, 0));
}

static void miss_now_and_then(void)
{
	struct mpsd_misses misses = { 0 };
	uint64_t now = 1000000 * MS;

	for (int i = 0; i < 3; i++)
		CHECK(!mpsd_budget_miss(&misses, now += MS));
	CHECK(mpsd_budget_miss(&misses, now += MS));
	/* Each is forgotten after a minute. */
	misses = (struct mpsd_misses){ 0 };
	for (int i = 0; i < 3; i++)
		CHECK(!mpsd_budget_miss(&misses, now += MS));
	CHECK(!mpsd_budget_miss(&misses, now += 60000 * MS) && mpsd_budget_miss(&misses, now += MS));
	misses = (struct mpsd_misses){ 0 };
	for (int i = 0; i < 1000; i++)
		CHECK(!mpsd_budget_miss(&misses, now += 60000 * MS));
}

int main(void)
{
	know_the_speed();
	add_what_idle_time_does_not_hide();
	count_copies_of_a_program_that_only_looks();
	count_forced_waits();
	count_preparation_unless_the_gpu_hides_it();
	let_debt_leak();
	end_epochs_that_copies_are_little_of();
	miss_now_and_then();
	CHECK(mpsd_budget_is_by_leads(1000, 900) && !mpsd_budget_is_by_leads(1000, 899) && !mpsd_budget_is_by_leads(0, 0));
	puts("ok");
	return 0;
}
